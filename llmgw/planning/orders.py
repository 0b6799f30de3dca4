"""From records to what an agent is sent: the whole of what is wanted on its node, in one fixed order.

A shard in backoff or failed is not listed: absence is never an order, and an agent that had lost its memory would start it. An
order to drain or stop goes out only when no router sends requests there any more; until then the shard is listed as running.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from llmgw.fleet.model import Profile
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardOrder, ShardState, Wanted, replica_of
from llmgw.fleet.timing import Timing

_RESTING = (ShardState.BACKOFF, ShardState.FAILED)


def operation(record: ShardRecord, wanted: Wanted) -> str:
    """The id of an effect: equal for the same effect under whichever leader, different for every other one.

    C{record.operation} names the attempt uniquely, also after a store was lost and numbers begin anew.
    """
    return f"{wanted}:{record.operation}"


def attempt_id(shard: str, attempt: int, epoch: int, revision: int) -> str:
    """A name for an attempt that no other one ever had: an epoch that an agent has seen is never used again."""
    return f"{shard}:{attempt}:{epoch}.{revision}"


def orders(
    shards: Iterable[ShardRecord], nodes: Mapping[str, NodeRecord], unrouted: Collection[str], timing: Timing
) -> dict[str, tuple[ShardOrder, ...]]:
    """What each node is to be told, by node."""
    found: dict[str, list[ShardOrder]] = defaultdict(list)
    for record in sorted(shards, key=lambda record: record.shard):
        order = _order(record, nodes, unrouted, timing)
        if order is not None:
            found[order.allocation.node].append(order)
    return {node: tuple(listed) for node, listed in found.items()}


def routed(record: ShardRecord) -> bool:
    """Whether routers may have been told of this shard."""
    return record.url != ""


def _order(record: ShardRecord, nodes: Mapping[str, NodeRecord], unrouted: Collection[str], timing: Timing) -> ShardOrder | None:
    if record.allocation is None or (record.wanted is Wanted.RUN and record.state in _RESTING):
        return None
    wanted = record.wanted
    if wanted is not Wanted.RUN and routed(record) and replica_of(record.shard) not in unrouted:
        wanted = Wanted.RUN
    return ShardOrder(
        record.shard,
        record.model,
        record.generation,
        record.attempt,
        wanted,
        operation(record, wanted),
        record.profile or Profile(""),
        record.allocation,
        record.served,
        deadline=drain_limit(record, nodes, timing),
        grace=timing.stop_grace,
    )


def drain_limit(record: ShardRecord, nodes: Mapping[str, NodeRecord], timing: Timing) -> float:
    """How many seconds from C{record.since} a drain of this shard may take: its node's deadline where the node drains."""
    node = nodes.get(record.allocation.node) if record.allocation else None
    if node and node.draining and node.drain_deadline is not None:
        return max(0.0, node.drain_deadline - record.since)
    return timing.drain
