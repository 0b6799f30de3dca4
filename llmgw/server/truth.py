"""What the leader holds in memory: the store's records as last committed, and the live inventories over them.

Only L{Truth.take} changes it, and only after the store has taken the same changes. The live parts of an inventory (memory in
use, processes) are never committed: they change with every report and are worth nothing after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from llmgw.config.catalog import load_catalog
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Catalog
from llmgw.fleet.node import Device, NodeFacts
from llmgw.fleet.records import NodeRecord, RolloutRecord, ShardRecord
from llmgw.store.records import CatalogRevision, Change, Drop, KeyRecord, Snapshot


class Truth:
    """The store's content."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.shards: dict[str, ShardRecord] = {}
        self.rollouts: dict[str, RolloutRecord] = {}
        self.keys: dict[str, KeyRecord] = {}
        self.catalog = Catalog()
        self.catalog_revision = 0
        self.revision = 0

    def load(self, snapshot: Snapshot) -> None:
        """Begin with what the store has."""
        self.nodes = {record.name: record for record in snapshot.nodes}
        self.shards = {record.shard: record for record in snapshot.shards}
        self.rollouts = {record.model: record for record in snapshot.rollouts}
        self.keys = {record.id: record for record in snapshot.keys}
        self.revision = snapshot.revision
        self.catalog, self.catalog_revision = Catalog(), 0
        if snapshot.catalog is not None:
            self._take(snapshot.catalog)

    def take(self, changes: Iterable[Change], revision: int) -> None:
        """Follow a commit."""
        for change in changes:
            self._take(change)
        self.revision = revision

    def _take(self, change: Change) -> None:
        if isinstance(change, NodeRecord):
            self.nodes[change.name] = change
        elif isinstance(change, ShardRecord):
            self.shards[change.shard] = change
        elif isinstance(change, RolloutRecord):
            self.rollouts[change.model] = change
        elif isinstance(change, KeyRecord):
            self.keys[change.id] = change
        elif isinstance(change, CatalogRevision):
            self.catalog, self.catalog_revision = load_catalog(change.text), change.number
        elif isinstance(change, Drop):
            kinds: dict[str, dict[str, Any]] = {
                "node": self.nodes, "shard": self.shards, "rollout": self.rollouts, "key": self.keys,
            }  # fmt: skip
            kinds[change.kind].pop(change.name, None)


def differences(
    truth: Truth,
    nodes: Mapping[str, NodeRecord],
    shards: Mapping[str, ShardRecord],
    events: Iterable[FleetEvent] = (),
    rollouts: Mapping[str, RolloutRecord] | None = None,
) -> list[Change]:
    """What has to be committed to get from the truth to these records."""
    changes: list[Change] = [record for name, record in nodes.items() if _news(truth.nodes.get(name), record)]
    changes += [record for name, record in shards.items() if (old := truth.shards.get(name)) is not record and old != record]
    changes += [record for name, record in (rollouts or {}).items() if truth.rollouts.get(name) != record]
    changes += [Drop("node", name) for name in truth.nodes if name not in nodes]
    changes += [Drop("shard", name) for name in truth.shards if name not in shards]
    return [*changes, *events]


def _news(old: NodeRecord | None, new: NodeRecord) -> bool:
    if old is None or old is new:
        return old is not new
    return evolve(old, facts=_steady(old.facts)) != evolve(new, facts=_steady(new.facts))


def _steady(facts: NodeFacts | None) -> NodeFacts | None:
    """The facts without what changes by itself."""
    if facts is None:
        return None
    devices = tuple(_still(device) for device in facts.inventory.devices)
    still = evolve(facts.inventory, memory_available=None, shm_free=None, disk_free=None, devices=devices)
    return evolve(facts, inventory=still)


def _still(device: Device) -> Device:
    return evolve(device, memory_used=None, processes=())
