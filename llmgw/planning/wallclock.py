"""The wall clock was set, by a person or by NTP, while a server leads.

Ends of drains are wall times, since they have to outlive servers. Somebody who sets a clock has not ordered that streams be cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import Wanted

# Seconds. Less than this is a clock that is being brought right bit by bit.
JUMP = 1.0


def moved(nodes: Mapping[str, NodeRecord], shards: Mapping[str, ShardRecord], by: float) -> list[NodeRecord | ShardRecord]:
    """The records whose drains have as much time left as before, after the clock was set C{by} seconds ahead."""
    return [
        *(
            evolve(node, drain_deadline=node.drain_deadline + by)
            for node in nodes.values()
            if node.draining and node.drain_deadline is not None
        ),
        *(evolve(shard, since=shard.since + by) for shard in shards.values() if shard.wanted is Wanted.DRAIN),
    ]
