"""The routers of all servers, as the leader's table sees them: its own workers, and through the store those of the others.

Our own workers get a table at once; the store gets it as soon as it takes it, always the newest, never two at a time. A drain
that waits for "all routers" waits for both. The keys of upstreams that somebody else runs are not written into the store: each
server reads them from its own files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define
from msgspec.structs import replace
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.errors import LlmgwError
from llmgw.interfaces import ILeadership
from llmgw.router.table import Table, table_text
from llmgw.server.peers import Peers
from llmgw.server.routing import Routers, ServersBehind
from llmgw.store.errors import StoreError
from llmgw.store.servers import share
from llmgw.store.sql import SqlStore


@define(eq=False)
class _Wait:
    """C{local} is the version of our own workers, C{shared} the store's, None while that table is not there yet."""

    local: int
    done: Deferred[None]
    shared: int | None = None


class SharedRouters:
    """See L{llmgw.server.routing.Routers}; for one leadership.

    @param above: the highest version of the shared table that this server has seen.
    @ivar version: of the shared table as we wrote it last, 0 before.
    """

    log = Logger()

    def __init__(
        self, workers: Routers, store: SqlStore, leadership: ILeadership, peers: Peers, reactor: Any, above: Callable[[], int]
    ) -> None:
        self._workers, self._store, self._leadership = workers, store, leadership
        self._peers, self._reactor, self._above = peers, reactor, above
        self._table: Table | None = None
        self._local = 0
        self._text = ""
        self._sharing = False
        self._waits: list[_Wait] = []
        self._over = False
        self.version = 0
        self.local = 0

    def publish(self, table: Table) -> int:
        """Give it to our own workers and, soon, to the other servers. A server that may not act gives nothing to anybody."""
        if self._over or not self._leadership.may_act():
            return self._local
        self._local = self._workers.publish(table)
        self._table = table
        self._share()
        return self._local

    def when_routing(self, version: int, timeout: float) -> Deferred[Any]:
        """Fires when all our workers and all live servers route by it, or a later one.

        @raise ServersBehind: live servers do not, within C{timeout} seconds.
        """
        return Deferred.fromCoroutine(self._when_routing(version, timeout))

    async def _when_routing(self, version: int, timeout: float) -> None:
        ours: LlmgwError | None = None
        try:
            await self._workers.when_routing(version, timeout)
        except LlmgwError as error:
            ours = error  # what is done about our own workers does not make the others' any faster
        await self._when_shared(version, timeout)
        if ours is not None:
            raise ours

    async def _when_shared(self, version: int, timeout: float) -> None:
        wait = _Wait(version, Deferred(), self.version if self.local >= version else None)
        self._waits.append(wait)
        wait.done.addTimeout(timeout, self._reactor)
        self.look()
        try:
            await wait.done
        except (CancelledError, TimeoutError):
            raise ServersBehind(self._who_is_behind(wait, timeout)) from None
        finally:
            self._waits.remove(wait)

    def _who_is_behind(self, wait: _Wait, timeout: float) -> str:
        if wait.shared is None:
            return f"the store has not taken the routing table within {timeout:g} s ({self._peers.problem or 'it is slow'})"
        names = ", ".join(self._peers.behind(wait.shared)) or "nobody"
        return f"{names}: routers do not route by table {wait.shared} yet after {timeout:g} s"

    def in_flight(self, endpoint_id: str) -> int:
        """Over all servers."""
        return self._workers.in_flight(endpoint_id) + self._peers.in_flight(endpoint_id)

    def load(self, endpoint_id: str) -> int:
        """What its engine says includes what other servers sent there, but is older than their word."""
        return max(self._workers.load(endpoint_id), self.in_flight(endpoint_id))

    def waiting(self, model: str) -> int | None:
        """Over all servers; None while those that are there are not heard."""
        own = self._workers.waiting(model)
        return None if own is None or self._peers.problem else own + self._peers.waiting(model)

    def reported(self, endpoint_id: str, requests: int | None) -> None:
        """What an engine says goes to our own workers."""
        self._workers.reported(endpoint_id, requests)

    def look(self) -> None:
        """The other servers were looked at: share what they lack, and tell who waits for them."""
        self._share()
        for wait in [one for one in self._waits if one.shared is not None]:
            if any(True for _ in self._peers.behind(wait.shared or 0)):
                self._peers.look_soon()
            elif not wait.done.called:
                wait.done.callback(None)

    def end(self) -> None:
        """The leadership is over: share nothing more."""
        self._over = True
        for wait in list(self._waits):
            if not wait.done.called:
                wait.done.cancel()

    def _share(self) -> None:
        if self._sharing or self._over or self._table is None or self.local == self._local:
            return
        text, local = table_text(bare(self._table)), self._local
        if text == self._text:
            self._shared(self.version, local, text)
            return
        self._sharing = True
        writing = Deferred.fromCoroutine(self._write(text, local))
        writing.addErrback(self._surprised)

    async def _write(self, text: str, local: int) -> None:
        store, epoch, above = self._store, self._leadership.epoch, max(self.version, self._above())

        def job(connection: Any) -> int:
            store.take_fence(connection, epoch, 0)
            return share(connection, text, above)

        try:
            version = await store.write("share the routing table", job)
        except StoreError as error:
            self._sharing = False
            self.log.warn("the other servers' routers keep the table they have for now: {error}", error=str(error))
            return
        self._sharing = False
        self._shared(version, local, text)
        self._share()

    def _shared(self, version: int, local: int, text: str) -> None:
        self.version, self.local, self._text = version, local, text
        for wait in self._waits:
            if wait.shared is None and wait.local <= local:
                wait.shared = version
        self.look()

    def _surprised(self, failure: Failure) -> None:
        self._sharing = False
        self.log.failure("while sharing the routing table", failure)


def bare(table: Table) -> Table:
    """The table without what each server fills in for itself: rows, and keys of upstreams that nobody here started."""
    endpoints = tuple(replace(one, row=0, key="") if one.static else replace(one, row=0) for one in table.endpoints)
    return Table(epoch=table.epoch, models=table.models, endpoints=endpoints, keys=table.keys)
