"""The wall clock was set, by a person or by NTP, while a server leads; or one takes over whose clock is not that of the last one.

Records hold wall times, since they have to outlive servers. Somebody who sets a clock has not ordered that streams be cut, nor
that a retry come sooner or a failure be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from llmgw.fleet.records import NodeRecord, RolloutRecord, ShardRecord

# Seconds. Less than this is a clock that is being brought right bit by bit.
JUMP = 1.0


def moved(
    nodes: Mapping[str, NodeRecord], shards: Mapping[str, ShardRecord], rollouts: Mapping[str, RolloutRecord], by: float
) -> list[NodeRecord | ShardRecord | RolloutRecord]:
    """The records as a clock C{by} seconds ahead would have written them, so that what is timed takes as long as before."""
    return [
        *(_node(node, by) for node in nodes.values() if node.drain_deadline or node.quarantined_until or node.failures),
        *(_shard(shard, by) for shard in shards.values() if shard.allocation is not None or shard.remembered),
        *(evolve(rollout, since=rollout.since + by) for rollout in rollouts.values()),
    ]


def _node(node: NodeRecord, by: float) -> NodeRecord:
    return evolve(
        node,
        drain_deadline=_at(node.drain_deadline, by),
        quarantined_until=_at(node.quarantined_until, by),
        failures=tuple(evolve(failure, at=failure.at + by) for failure in node.failures),
    )


def _shard(shard: ShardRecord, by: float) -> ShardRecord:
    return evolve(
        shard,
        since=shard.since + by,
        served_since=_at(shard.served_since, by) or 0.0,
        next_at=_at(shard.next_at, by),
        crashes=tuple(at + by for at in shard.crashes),
        node_failures=tuple(at + by for at in shard.node_failures),
        excluded={node: until + by for node, until in shard.excluded.items()},
    )


def _at(instant: float | None, by: float) -> float | None:
    """Moved, if it is one: no instant is None or 0."""
    return instant + by if instant else instant
