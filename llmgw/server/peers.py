"""The other servers of the store: again and again this one tells them of itself, and reads what they tell.

One short transaction does both, and brings a new routing table, too. A server counts as alive while its row is seen to change,
by our own clock; one whose row stands still is no longer waited for, but what its routers had in flight counts on: they outlive
their server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve, frozen
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.fleet.timing import Timing
from llmgw.fleet.units import show_duration
from llmgw.store.errors import StoreError
from llmgw.store.servers import Meeting, ServerRecord, forget, meet, tell
from llmgw.store.sql import SqlStore

FORGOTTEN_AFTER = 3600.0
LEADER, STANDBY, STOPPED = "leader", "standby", "stopped"


@frozen
class Peer:
    """Another server: what it said last, and since when it has said nothing new (steady clock)."""

    record: ServerRecord
    since: float


class Peers:
    """The servers of one store.

    @param own: what this server says of itself; C{beat} is filled in here.
    @param known: the version of the shared table that this server has.
    @param met: called after each look, in the reactor's thread.
    @ivar problem: why the store could not be asked, empty while it can.
    """

    log = Logger()

    def __init__(
        self,
        store: SqlStore,
        reactor: Any,
        timing: Timing,
        wall: Callable[[], float],
        steady: Callable[[], float],
        own: Callable[[], ServerRecord],
        known: Callable[[], int],
        met: Callable[[Meeting], None],
    ) -> None:
        self._store, self._wall, self._steady = store, wall, steady
        self._own, self._known, self._met = own, known, met
        self._every = timing.poll
        self._patience, self._finishing = timing.peer_silence, timing.drain
        self._loop = LoopingCall(self.look)
        self._loop.clock = reactor
        self._reactor = reactor
        self._soon: IDelayedCall | None = None
        self._beat = 0
        self._looking = False
        self._waiting: list[Deferred[None]] = []
        self._silent: set[str] = set()
        self._twins: set[str] = set()
        self._all: dict[str, Peer] = {}
        self.problem = ""

    def start(self) -> None:
        """Begin to look, at once."""
        self._loop.start(self._every).addErrback(lambda failure: self.log.failure("looking at the other servers", failure))

    def stop(self) -> Deferred[None]:
        """Take leave: nobody waits for us any more, but what our routers finish now is not to be cut."""
        if not self._loop.running:
            return succeed(None)
        self._loop.stop()
        if self._soon is not None:
            self._soon.cancel()
        own, at = evolve(self._own(), beat=self._beat + 1, role=STOPPED), self._wall()
        return self._store.write("take leave of the other servers", lambda connection: tell(connection, own, at))

    def look(self) -> Deferred[None]:
        """Tell and read once; one look at a time."""
        waiting: Deferred[None] = Deferred()
        self._waiting.append(waiting)
        if not self._looking:
            self._looking = True
            Deferred.fromCoroutine(self._look()).addBoth(self._looked)
        return waiting

    def look_soon(self) -> None:
        """Look before the next turn: somebody waits for what we have to tell, or to hear."""
        if self._soon is None and self._loop.running:
            self._soon = self._reactor.callLater(self._every / 5, self._look_now)

    def _look_now(self) -> None:
        self._soon = None
        self.look()

    def _looked(self, result: object) -> None:
        self._looking = False
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(None)
        if isinstance(result, Failure):
            self.log.failure("looking at the other servers", result)

    async def _look(self) -> None:
        self._beat += 1
        own, known, at = evolve(self._own(), beat=self._beat), self._known(), self._wall()
        try:
            met = await self._store.write("meet the other servers", lambda connection: meet(connection, own, known, at))
        except StoreError as error:
            if not self.problem and error.code != "closed":
                self.log.warn("the other servers are out of sight: {error}", error=str(error))
            self.problem = str(error)
            return
        if self.problem:
            self.log.info("the store answers again")
            # Nobody could be heard meanwhile, so nobody was silent.
            self._all = {name: evolve(peer, since=self._steady()) for name, peer in self._all.items()}
        self.problem = ""
        self._take(own, met)
        self._met(met)

    def _take(self, own: ServerRecord, met: Meeting) -> None:
        now, before = self._steady(), self._all
        self._all = {}
        for record in met.servers:
            if record.name == own.name:
                self._look_for_twin(record, own)
                continue
            old = before.get(record.name)
            still = old is not None and (old.record.holder, old.record.beat) == (record.holder, record.beat)
            self._all[record.name] = old if old is not None and still else Peer(record, now)
        self._say_who_is_silent()

    def _look_for_twin(self, record: ServerRecord, own: ServerRecord) -> None:
        """F18: of two servers of one name neither would be waited for rightly. A row that a dead process left is no twin."""
        if record.holder != own.holder and self._beat > 1 and record.holder not in self._twins:
            self._twins.add(record.holder)
            self.log.error(
                "another llmgw-server ({holder}, {address}) calls itself {name}, too: give each a certificate of its own",
                holder=record.holder, address=record.address, name=own.name,
            )  # fmt: skip

    def _say_who_is_silent(self) -> None:
        silent = {name for name, peer in self._all.items() if not self._alive(peer) and peer.record.role != STOPPED}
        for name in silent - self._silent:
            why = f"nothing was heard of it for {show_duration(self._patience)}"
            self.log.warn("{name}: {why}; it is no longer waited for", name=name, why=why)
        for name in self._silent - silent:
            self.log.info("{name} is heard again, or has left", name=name)
        self._silent = silent

    def _alive(self, peer: Peer) -> bool:
        return peer.record.role != STOPPED and self._steady() - peer.since < self._patience

    def all(self) -> list[ServerRecord]:
        """The other servers, those that are silent included, by name."""
        return [peer.record for _, peer in sorted(self._all.items())]

    def live(self) -> list[ServerRecord]:
        """The other servers that are heard."""
        return [peer.record for _, peer in sorted(self._all.items()) if self._alive(peer)]

    def silent(self, leader: str) -> dict[str, float]:
        """By name, for how long nothing has been heard of those that are not.

        @param leader: the holder of the lease: another one whose last word is that it leads is dead or hangs.
        """
        return {
            name: self._steady() - peer.since
            for name, peer in self._all.items()
            if not self._alive(peer) or (peer.record.role == LEADER and peer.record.holder != leader)
        }

    def find(self, holder: str) -> ServerRecord | None:
        """The server whose process this is."""
        return next((peer.record for peer in self._all.values() if peer.record.holder == holder), None)

    def in_flight(self, endpoint: str) -> int:
        """What the other servers' routers have running there, as last told; for as long as a drain may take."""
        lately = [peer.record for peer in self._all.values() if self._steady() - peer.since < self._finishing]
        return sum(record.in_flight.get(endpoint, 0) for record in lately)

    def waiting(self, model: str) -> int:
        """How many requests wait for a model in the lines of the other servers that are heard."""
        return sum(record.waiting.get(model, 0) for record in self.live())

    def behind(self, version: int) -> Iterator[str]:
        """The live servers whose routers do not all route by this version of the shared table yet."""
        return (record.name for record in self.live() if record.routed < version)

    def forget_gone(self) -> Deferred[None]:
        """Take away the rows of servers that have long been silent. For the leader."""
        gone = [peer.record for peer in self._all.values() if self._steady() - peer.since > FORGOTTEN_AFTER]
        if not gone:
            return succeed(None)
        return self._store.write("forget servers that are gone", lambda connection: forget(connection, gone))
