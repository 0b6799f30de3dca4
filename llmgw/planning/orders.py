"""From records to what an agent is sent: the whole of what is wanted on its node, in one fixed order.

A shard in backoff or failed is not listed: absence is never an order, and an agent that had lost its memory would start it. An
order to drain or stop goes out only when no router sends requests there any more; until then the shard is listed as running,
unless it has ended: what is ordered away is never started for that.

Ranks end in their order. Rank 0 works for its last callers with the others, and tells them to end (SGLang) or does not (vLLM), so
they are left alone while it ends, and then have nothing left to do that would need a long grace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from attrs import evolve

from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardOrder, ShardState, Wanted, replica_of
from llmgw.fleet.timing import Timing
from llmgw.planning.loras import ordered

_RESTING = (ShardState.BACKOFF, ShardState.FAILED)
# Beyond the grace of rank 0: what killing it takes, and the news of it.
PATIENCE = 10.0
FOLLOWER_GRACE = 5.0


def operation(record: ShardRecord, wanted: Wanted) -> str:
    """The id of an effect: equal for the same effect under whichever leader, different for every other one.

    C{record.operation} names the attempt uniquely, also after a store was lost and numbers begin anew.
    """
    return f"{wanted}:{record.operation}"


def attempt_id(shard: str, attempt: int, epoch: int, revision: int) -> str:
    """A name for an attempt that no other one of its node ever had: an agent hears of no epoch from two leaders.

    A server that has lost its store begins with the first one anew, and is raised above those that agents know as they come in.
    """
    return f"{shard}:{attempt}:{epoch}.{revision}"


def orders(
    shards: Iterable[ShardRecord],
    nodes: Mapping[str, NodeRecord],
    unrouted: Collection[str],
    timing: Timing,
    doubted: Collection[str] = (),
) -> dict[str, tuple[ShardOrder, ...]]:
    """What each node is to be told, by node; C{doubted} are endpoints whose requests fail."""
    found: dict[str, list[ShardOrder]] = defaultdict(list)
    listed = sorted(shards, key=lambda record: record.shard)
    heads = {replica_of(record.shard): record for record in listed if record.rank == 0}
    for record in listed:
        follows = record.rank and record.profile is not None and record.profile.parallel.balance != "hybrid"
        head = heads.get(replica_of(record.shard)) if follows else None
        order = _order(record, head, nodes, unrouted, timing)
        if order is not None and follows:
            order = evolve(order, grace=min(order.grace, FOLLOWER_GRACE), patience=_patience(head, timing))
        if order is not None and (record.shard if record.rank else replica_of(record.shard)) in doubted:
            order = evolve(order, doubted=True)
        if order is not None:
            found[order.allocation.node].append(order)
    return {node: tuple(there) for node, there in found.items()}


def routed(record: ShardRecord) -> bool:
    """Whether routers may have been told of this shard."""
    return record.url != ""


def _patience(head: ShardRecord | None, timing: Timing) -> float:
    """How long a rank is left alone for the sake of its rank 0; not at all where that is gone, is away or goes on."""
    ending = head is not None and head.wanted is Wanted.STOP and head.state.live and head.state is not ShardState.UNKNOWN
    return timing.stop_grace + PATIENCE if ending else 0.0


def _order(
    record: ShardRecord,
    head: ShardRecord | None,
    nodes: Mapping[str, NodeRecord],
    unrouted: Collection[str],
    timing: Timing,
) -> ShardOrder | None:
    if record.allocation is None or (record.wanted is Wanted.RUN and record.state in _RESTING):
        return None
    wanted = record.wanted
    held = record.state.live and routed(head or record) and replica_of(record.shard) not in unrouted
    if held:
        wanted = Wanted.RUN
    return ShardOrder(
        record.shard,
        record.model,
        record.generation,
        record.attempt,
        wanted,
        operation(record, wanted),
        ordered(record, unrouted),
        record.allocation,
        record.served,
        deadline=drain_limit(record, nodes, timing),
        grace=timing.stop_grace,
    )


def drain_limit(record: ShardRecord, nodes: Mapping[str, NodeRecord], timing: Timing) -> float:
    """How many seconds from C{record.since} a drain of this shard may take: its node's deadline where the node drains, else as
    its model says, else C{timing.drain}: at scale-in, a change of its profile, a restart and a removal alike."""
    node = nodes.get(record.allocation.node) if record.allocation else None
    if node and node.draining and node.drain_deadline is not None:
        return max(0.0, node.drain_deadline - record.since)
    return timing.drain if record.drain is None else record.drain
