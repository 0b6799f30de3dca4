"""The store: SQLAlchemy Core over SQLite or PostgreSQL, in a thread of its own.

Every leader's write takes the fence's row with its epoch and its holder in the same transaction, so that a server that was
taken over from changes nothing, however late its write comes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, select, update
from sqlalchemy.exc import SQLAlchemyError
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import implementer

from llmgw.fleet.events import FleetEvent
from llmgw.interfaces import IStore
from llmgw.store import rows
from llmgw.store.backend import make_backend
from llmgw.store.errors import NotLeader, StoreError
from llmgw.store.records import Change, Opened, Snapshot, UsageRow
from llmgw.store.schema import FENCE, fence, lease
from llmgw.store.thread import StoreThread

T = TypeVar("T")


@implementer(IStore)
class SqlStore:
    """See L{llmgw.interfaces.IStore}.

    @param url: C{sqlite:////FILE} or C{postgresql://...}, as C{config.server} makes it.
    @param fleet: the fleet id of our certificate; a store of another one is refused. Empty: not asked.
    @param name: this server's name, which holder and leader begin with.
    @ivar holder: names this process, unlike any other one before or after it.
    @ivar timeout: seconds that one call may take, waiting in the queue included.
    """

    log = Logger()
    timeout = 10.0
    close_timeout = 3.0

    def __init__(self, url: str, reactor: Any, fleet: str = "", name: str = "server") -> None:
        self.url = url
        self.backend = make_backend(url)
        self.holder = f"{name}@{os.urandom(6).hex()}"
        self._fleet = fleet
        self._thread = StoreThread(reactor)

    @property
    def place(self) -> str:
        """The file, or the database's address without secrets."""
        return self.backend.place

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or begun to."""
        return self._thread.closing

    def open(self) -> Deferred[Opened]:
        """Lock, check and migrate.

        @raise StoreError: it cannot be used; the sentence says why and what to do.
        """
        return self._thread.run("open", self._open, self.timeout * 6)

    def _open(self) -> Opened:
        fresh = self.backend.open()
        for warning in self.backend.warnings:
            self.log.warn("store: {warning}", warning=warning)
        try:
            return Opened(self._try(self.backend.writing, self._claim, self.timeout), fresh, self.place)
        except BaseException:
            self.backend.close()
            raise

    def _claim(self, connection: Connection) -> str:
        found = rows.fleet_of(connection) or (rows.claim(connection, self._fleet) if self._fleet else "")
        if found and self._fleet and found != self._fleet:
            text = f"{self.place} belongs to fleet {found}, our certificate to fleet {self._fleet}"
            raise StoreError(f"{text}: use the store and the certificate of one fleet", "foreign")
        return found

    def load(self) -> Deferred[Snapshot]:
        """All that a new leader needs, of one moment."""
        return self.read("load", rows.snapshot)

    def commit(self, epoch: int, changes: Iterable[Change]) -> Deferred[int]:
        """Write all of these or none; returns the new state revision.

        @raise NotLeader: this process does not hold C{epoch} any more.
        """
        listed = list(changes)

        def job(connection: Connection) -> int:
            revision = self.take_fence(connection, epoch)
            for change in listed:
                rows.write(connection, change)
            return revision

        return self.write("commit", job)

    def take_fence(self, connection: Connection, epoch: int, step: int = 1) -> int:
        """Hold the fence's row until this transaction ends; returns the state revision, raised by C{step}.

        @raise NotLeader: it is another's.
        """
        mine = (fence.c.name == FENCE) & (fence.c.holder == self.holder) & (fence.c.epoch == epoch)
        if connection.execute(update(fence).where(mine).values(revision=fence.c.revision + step)).rowcount != 1:
            row = connection.execute(select(lease.c.epoch, lease.c.holder)).one()
            leader = row.holder or "nobody"
            raise NotLeader(f"not leader: {leader} leads with epoch {row.epoch}, this was epoch {epoch}", row.epoch, leader)
        revision: int = connection.execute(select(fence.c.revision)).scalar_one()
        return revision

    def events(self, after: int | None = 0, limit: int = 1000) -> Deferred[list[FleetEvent]]:
        """Events with numbers above C{after}, or the last ones where it is None; the oldest first, at most C{limit}."""
        return self.read("read events", lambda connection: rows.events(connection, after, limit))

    def add_usage(self, batch: str, usage: Sequence[UsageRow]) -> Deferred[bool]:
        """Add a batch up. Under the same id it is added once, so ask again until it worked; False says that it was there."""
        listed = list(usage)
        return self.write("add usage", lambda connection: rows.add_usage(connection, batch, listed, time.time()))

    def usage(self, since: float, until: float, by: Sequence[str] = ("key", "model")) -> Deferred[list[UsageRow]]:
        """Usage of the hours that begin in the span, summed; C{by} names what is kept apart (of hour, key, model)."""
        return self.read("read usage", lambda connection: rows.usage(connection, since, until, tuple(by)))

    def read(self, what: str, job: Callable[[Connection], T]) -> Deferred[T]:
        """Run C{job} in the store's thread within a transaction that reads."""
        return self._run(what, self.backend.reading, job)

    def write(self, what: str, job: Callable[[Connection], T]) -> Deferred[T]:
        """Run C{job} in the store's thread within a transaction that writes; it may be run again if it cannot have happened."""
        return self._run(what, self.backend.writing, job)

    def _run(self, what: str, begin: Callable[[], Any], job: Callable[[Connection], T]) -> Deferred[T]:
        until = time.monotonic() + self.timeout
        return self._thread.run(what, lambda: self._try(begin, job, until - time.monotonic()), self.timeout)

    def _try(self, begin: Callable[[], Any], job: Callable[[Connection], T], seconds: float) -> T:
        until = time.monotonic() + seconds
        while True:
            try:
                with begin() as connection:
                    return job(connection)
            except (SQLAlchemyError, OSError, ValueError, OverflowError) as error:
                if not (self.backend.again(error) and time.monotonic() < until):
                    raise self.backend.explain(error) from error
                self.log.warn("store: {error}; trying again", error=self.backend.explain(error))

    def close(self) -> Deferred[None]:
        """Finish what waits, bounded in time, and let go of the lock."""
        return self._thread.close(self.backend.close, self.close_timeout)
