"""A store in memory, for simulations: it survives its controllers and fails when told to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from llmgw.fleet.events import FleetEvent
from llmgw.interfaces import IStore
from llmgw.store.errors import StoreError
from llmgw.store.records import (
    CatalogRevision,
    Drop,
    KeyRecord,
    NodeRecord,
    Opened,
    RolloutRecord,
    ShardRecord,
    Snapshot,
)


@implementer(IStore)
class MemoryStore:
    """A store that survives its controllers and can be made to fail, to hang or to forget."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], Any] = {}
        self.catalog: CatalogRevision | None = None
        self.events: list[FleetEvent] = []
        self.revision = 0
        self.failing = ""

    def open(self) -> Deferred[object]:
        """See L{IStore}."""
        return succeed(Opened("sim", not self.records, "memory"))

    def load(self) -> Deferred[object]:
        """See L{IStore}."""
        return succeed(self.snapshot(0))

    def snapshot(self, epoch: int) -> Snapshot:
        """Everything."""
        kinds: dict[str, list[Any]] = {"node": [], "shard": [], "key": [], "rollout": []}
        for (kind, _), record in sorted(self.records.items(), key=lambda item: item[0]):
            kinds[kind].append(record)
        found = (tuple(kinds["node"]), tuple(kinds["shard"]), tuple(kinds["key"]), tuple(kinds["rollout"]))
        return Snapshot("sim", epoch, self.revision, self.catalog, *found)

    def commit(self, epoch: int, changes: Iterable[object]) -> Deferred[int]:
        """See L{IStore}."""
        if self.failing:
            return fail(StoreError(self.failing, "full"))
        self.revision += 1
        for change in changes:
            self._take(change)
        return succeed(self.revision)

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
