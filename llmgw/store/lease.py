"""Leadership over a SQLite store: there is one server, so it leads. The lock on the file holds others off.

The epoch still grows with each start: an agent tells a command of a server that has died from one of its successor by that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Connection
from twisted.internet.defer import Deferred
from zope.interface import implementer

from llmgw.interfaces import ILeadership
from llmgw.store import leaserow
from llmgw.store.errors import StoreError
from llmgw.store.sql import SqlStore


@implementer(ILeadership)
class SqliteLeadership:
    """See L{llmgw.interfaces.ILeadership}. Start it when the store is open.

    @ivar leader: the holder's name as agents get it, unlike any before: C{cp1@8f3a...}.
    @ivar addresses: where the leader is reached.
    """

    problem = ""

    def __init__(self, store: SqlStore, addresses: Sequence[str] = ()) -> None:
        self.epoch = 0
        self.leader = store.holder
        self.addresses = tuple(addresses)
        self._store = store
        self._held = False
        self._watchers: list[Callable[[], None]] = []

    def may_act(self) -> bool:
        """Whether this process may send a command right now."""
        return self._held

    def watch(self, changed: Callable[[], None]) -> None:
        """Have C{changed} called, in the reactor's thread, each time leadership was won, lost, raised or seen to move."""
        self._watchers.append(changed)

    def start(self) -> Deferred[None]:
        """Take the next epoch."""
        return Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        holder, addresses = self._store.holder, self.addresses
        epoch = await self._store.write("take the lead", lambda connection: _take(connection, holder, addresses))
        self.epoch = epoch
        self._set(True)

    def outrank(self, epoch: int) -> Deferred[int]:
        """See L{ILeadership.outrank}."""
        return Deferred.fromCoroutine(self._outrank(epoch))

    async def _outrank(self, epoch: int) -> int:
        mine, holder = self.epoch, self._store.holder
        self.epoch = await self._store.write("raise the epoch", lambda connection: _outrank(connection, holder, mine, epoch))
        self._tell()
        return self.epoch

    def release(self) -> Deferred[None]:
        """Let go. The epoch stays: it is never lowered."""
        return Deferred.fromCoroutine(self._release())

    async def _release(self) -> None:
        self._set(False)
        statements = leaserow.releasing(self._store.holder, self.epoch)
        await self._store.write("release the lead", lambda connection: leaserow.run(connection, statements))

    def _set(self, held: bool) -> None:
        self._held = held
        self._tell()

    def _tell(self) -> None:
        for changed in list(self._watchers):
            changed()


def _take(connection: Connection, holder: str, addresses: Sequence[str]) -> int:
    seen = leaserow.made(connection.execute(leaserow.reading()).one())
    if not leaserow.run(connection, leaserow.taking(seen, holder, addresses)):
        raise StoreError("the lease changed within a transaction: the store's file has two writers", "conflict")
    return seen.epoch + 1


def _outrank(connection: Connection, holder: str, mine: int, seen: int) -> int:
    epoch, statements = leaserow.outranking(holder, mine, seen)
    if not leaserow.run(connection, statements):
        raise leaserow.not_held(holder, mine)
    return epoch
