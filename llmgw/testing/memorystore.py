"""A store in memory, for simulations: it survives its controllers and fails when told to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from llmgw.fleet.events import FleetEvent
from llmgw.interfaces import IStore
from llmgw.store.errors import NotLeader, StoreError
from llmgw.store.records import (
    CatalogRevision,
    Drop,
    KeyRecord,
    NodeRecord,
    Opened,
    RolloutRecord,
    ShardRecord,
    Snapshot,
    ToldBy,
)


@implementer(IStore)
class MemoryStore:
    """A store that survives its controllers and can be made to fail, to hang or to forget.

    @ivar leads: the epoch of the leadership in force; writes of an earlier one are refused.
    @ivar failing: why it takes nothing; empty while it works.
    @ivar lossy: it takes what it is given, and its answer is lost.
    @ivar stalled: it answers nothing until L{resume}.
    """

    def __init__(self) -> None:
        self.leads = 0
        self.lossy = self.stalled = False
        self._held: list[tuple[int, list[object], Deferred[int]]] = []
        self.records: dict[tuple[str, str], Any] = {}
        self.catalog: CatalogRevision | None = None
        self.events: list[FleetEvent] = []
        self.revision = 0
        self.failing = ""
        self.ahead: float | None = None

    def open(self) -> Deferred[object]:
        """See L{IStore}."""
        return succeed(Opened("sim", not self.records, "memory"))

    def load(self) -> Deferred[object]:
        """See L{IStore}."""
        return succeed(self.snapshot(0))

    def snapshot(self, epoch: int) -> Snapshot:
        """Everything, for a leadership that begins now."""
        self.leads = max(self.leads, epoch)
        kinds: dict[str, list[Any]] = {"node": [], "shard": [], "key": [], "rollout": []}
        for (kind, _), record in sorted(self.records.items(), key=lambda item: item[0]):
            kinds[kind].append(record)
        found = (tuple(kinds["node"]), tuple(kinds["shard"]), tuple(kinds["key"]), tuple(kinds["rollout"]))
        return Snapshot("sim", epoch, self.revision, self.catalog, *found, self.ahead)

    def outranked(self, epoch: int) -> None:
        """The leader has raised its epoch."""
        self.leads = max(self.leads, epoch)

    def commit(self, epoch: int, changes: Iterable[object]) -> Deferred[int]:
        """See L{IStore}."""
        if self.stalled:
            answer: Deferred[int] = Deferred()
            self._held.append((epoch, list(changes), answer))
            return answer
        if self.failing:
            return fail(StoreError(self.failing, "full"))
        if epoch < self.leads:
            return fail(NotLeader(f"epoch {epoch} is over, {self.leads} leads", self.leads, "another"))
        self.leads = epoch
        self.revision += 1
        for change in changes:
            self._take(change)
        return fail(StoreError("no answer in 2 s", "timeout")) if self.lossy else succeed(self.revision)

    def resume(self) -> None:
        """Work again, and do first what was asked meanwhile."""
        self.stalled = False
        held, self._held = self._held, []
        for epoch, changes, answer in held:
            self.commit(epoch, changes).chainDeferred(answer)

    def _take(self, change: object) -> None:
        if isinstance(change, NodeRecord):
            self.records["node", change.name] = change
        elif isinstance(change, ShardRecord):
            self.records["shard", change.shard] = change
        elif isinstance(change, RolloutRecord):
            self.records["rollout", change.model] = change
        elif isinstance(change, KeyRecord):
            self.records["key", change.id] = change
        elif isinstance(change, Drop):
            self.records.pop((change.kind, change.name), None)
        elif isinstance(change, ToldBy):
            self.ahead = change.ahead
        elif isinstance(change, CatalogRevision):
            self.catalog = change
        elif isinstance(change, FleetEvent):
            self.events.append(change)

    def add_usage(self, batch: str, usage: Sequence[object]) -> Deferred[bool]:
        """See L{IStore}."""
        return succeed(True)

    def usage(self, since: float, until: float, by: Sequence[str] = ()) -> Deferred[list[Any]]:
        """See L{IStore}."""
        return succeed([])

    def close(self) -> Deferred[None]:
        """See L{IStore}."""
        return succeed(None)
