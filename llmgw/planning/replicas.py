"""Shards seen as replicas."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardState, Wanted, replica_id, worst

_SERVING = (ShardState.READY, ShardState.UNKNOWN)


@frozen
class Replica:
    """All shards of one serving copy, by rank."""

    model: str
    number: int
    shards: tuple[ShardRecord, ...]

    @property
    def id(self) -> str:
        """C{llama-70b/2}."""
        return replica_id(self.model, self.number)

    @property
    def state(self) -> ShardState:
        """As its worst shard."""
        return worst([shard.state for shard in self.shards])

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where its shards are, by rank."""
        return tuple(shard.allocation.node for shard in self.shards if shard.allocation)

    @property
    def generation(self) -> str:
        """What its engines were started as."""
        return self.shards[0].generation

    @property
    def leaving(self) -> bool:
        """Whether it has been ordered away for good; one that is stopped only to be started again is not leaving."""
        return any(shard.wanted is not Wanted.RUN and shard.next_at is None for shard in self.shards)

    @property
    def serving(self) -> bool:
        """Whether requests may be running on it, as far as anybody knows."""
        return all(shard.state in _SERVING for shard in self.shards)

    @property
    def ready(self) -> bool:
        """Whether it serves for sure."""
        return self.state is ShardState.READY and not self.leaving

    @property
    def crashes(self) -> tuple[float, ...]:
        """When it crashed; ranks that fell together count once."""
        return max((shard.crashes for shard in self.shards), key=len)


def group(shards: Iterable[ShardRecord]) -> dict[str, list[Replica]]:
    """The replicas of each model by number; husks that only remember a number are left out."""
    found: dict[tuple[str, int], list[ShardRecord]] = {}
    for shard in shards:
        if shard.allocation is not None:
            found.setdefault((shard.model, shard.number), []).append(shard)
    models: dict[str, list[Replica]] = {}
    for model, number in sorted(found):
        members = found[model, number]
        ranked = tuple(members) if len(members) == 1 else tuple(sorted(members, key=lambda shard: shard.rank))
        models.setdefault(model, []).append(Replica(model, number, ranked))
    return models
