"""Shards seen as replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import frozen

from llmgw.fleet.causes import NODE
from llmgw.fleet.model import Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardState, Wanted, replica_id, worst

_SERVING = (ShardState.READY, ShardState.UNKNOWN)
_RESTING = (ShardState.BACKOFF, ShardState.FAILED)
_LATER = 1e12
_GONE = (NodeState.LOST, NodeState.REMOVED)
_BEST = (
    ShardState.READY, ShardState.UNKNOWN, ShardState.LOADING, ShardState.STARTING, ShardState.PLACED, ShardState.DRAINING,
    ShardState.SLEEPING,
    ShardState.STOPPING, ShardState.BACKOFF, ShardState.PENDING, ShardState.STOPPED, ShardState.FAILED,
)  # fmt: skip


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
    def given_up(self) -> bool:
        """Whether a node of it was lost since it was last one of the wanted ones."""
        return any(shard.given_up for shard in self.shards)

    @property
    def served_since(self) -> float:
        """Since when it has served; 0 if it never has."""
        return self.shards[0].served_since

    def load(self, counts: Callable[[str], int]) -> int:
        """How many requests run on it; C{counts} says it of an endpoint: of the replica, or of a further shard that serves."""
        return sum(map(counts, [self.id, *(shard.shard for shard in self.shards if shard.rank and shard.url)]))

    @property
    def crashes(self) -> tuple[float, ...]:
        """When it crashed; ranks that fell together count once."""
        return max((shard.crashes for shard in self.shards), key=len)

    @property
    def last_failed(self) -> tuple[ShardRecord, str]:
        """The shard that failed last, of those that fell together the one whose node is to blame; and the class of the cause,
        empty where that is not what the replica rests for."""
        last = max(self.shards, key=lambda shard: (shard.failed_at, shard.cause == NODE))
        return last, last.cause if last.failed_at >= last.since else ""

    @property
    def failures_here(self) -> int:
        """How often it has failed lately where it is; what another one has handed on to it happened elsewhere."""
        attempt = max(shard.attempt for shard in self.shards)
        return min(attempt, max(len(shard.crashes) + len(shard.node_failures) for shard in self.shards))


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


def wanted(model: Model, demand: Mapping[str, int]) -> int:
    """How many replicas there should be: what the load asks for, within the catalog's bounds."""
    scale = model.replicas
    return min(scale.max, max(scale.min, demand.get(model.name, scale.min)))


def given_up(replica: Replica, nodes: Mapping[str, NodeRecord]) -> bool:
    """Whether a node of it is lost or removed, so that it does not count as there."""
    return any(name not in nodes or nodes[name].state in _GONE for name in replica.nodes)


def worst_first(replicas: Iterable[Replica], counts: Callable[[str], int] = lambda endpoint: 0) -> list[Replica]:
    """Those that are missed least first; of equals the one with the fewest requests, and then the newest."""
    return sorted(replicas, key=lambda replica: (-_BEST.index(replica.state), replica.load(counts), -replica.number))


def surplus(model: Model, replicas: list[Replica], count: int, counts: Callable[[str], int]) -> list[Replica]:
    """Which of C{replicas} leave so that C{count} stay.

    The one with the fewest requests goes first: its drain is the shortest, and the least likely to cut a stream at its end. Where
    one of them is back from a lost node, C{model.reconcile} says which copy stays; none that serves leaves before the
    one that stays instead of it serves, too.
    """
    extra = max(0, len(replicas) - count)
    ordered = worst_first(replicas, counts)
    if not any(replica.given_up for replica in replicas) or model.reconcile == "keep_original":
        return ordered[:extra]
    oldest = model.reconcile == "longest_running"

    def key(replica: Replica) -> tuple[bool, float, int]:
        first = -(replica.served_since or _LATER) if oldest else -float(replica.given_up)
        return replica.state not in _RESTING, first, ordered.index(replica)

    going = sorted(replicas, key=key)[:extra]
    staying = sum(replica.ready for replica in replicas if replica not in going)
    return [replica for replica in going if not replica.ready or staying >= count]


def turns(models: Mapping[str, list[Replica]]) -> frozenset[str]:
    """The replicas whose ordered restart has its turn: one per node, so that a node's replicas are restarted one by one, also
    those of different models, and what is wrong with a new installation meets the first of them only."""
    busy: set[str] = set()
    found: set[str] = set()
    for replica in (replica for name in sorted(models) for replica in models[name]):
        if not replica.leaving and any(shard.replace for shard in replica.shards) and busy.isdisjoint(replica.nodes):
            busy.update(replica.nodes)
            found.add(replica.id)
    return frozenset(found)
