"""Replicas of several shards: their engines can only start together, so what ends one of them ends all."""

from __future__ import annotations

from attrs import evolve

from llmgw.fleet.shard import ShardState, Wanted
from llmgw.planning.replicas import Replica, group
from llmgw.planning.world import Draft


def follow_gangs(draft: Draft) -> None:
    """Where one shard of a replica has ended, the others are stopped, too: they can only start again together."""
    ganged = {(record.model, record.number) for record in draft.shards.values() if record.rank}
    members = [record for record in draft.shards.values() if (record.model, record.number) in ganged]
    for replicas in group(members).values():
        for replica in replicas:
            if not replica.leaving:
                _follow_gang(draft, replica)


def _follow_gang(draft: Draft, replica: Replica) -> None:
    resting = [shard for shard in replica.shards if shard.state in (ShardState.BACKOFF, ShardState.FAILED)]
    if not resting:
        return
    due = max((shard.next_at or 0.0 for shard in resting), default=0.0)
    for shard in replica.shards:
        if shard not in resting and shard.wanted is Wanted.RUN:
            reason = f"{resting[0].shard} ended, and they run together"
            draft.move(evolve(shard, wanted=Wanted.STOP, next_at=due or draft.world.now), ShardState.STOPPING, reason)
