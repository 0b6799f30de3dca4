"""Engines that sleep: what a model at zero replicas keeps, so that the next request need not wait for a whole start.

A replica that is drained since nobody wants it is put to sleep instead of stopped, where its engine can give its memory back. It
is ordered away like any other that leaves, so nothing counts it as there; it holds what it is still seen to hold. The first one
that is wanted again is woken, if what it had is still free on its devices, before another is started.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from llmgw.fleet.model import Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.shard import ShardState, Wanted
from llmgw.planning.fleetroom import ledger
from llmgw.planning.lifecycle import in_quarantine
from llmgw.planning.orders import attempt_id
from llmgw.planning.placement import claim_of
from llmgw.planning.replicas import Replica, group
from llmgw.planning.world import Draft


def asleep(replica: Replica) -> bool:
    """Whether it sleeps, and is to."""
    return all(shard.wanted is Wanted.SLEEP and shard.state is ShardState.SLEEPING for shard in replica.shards)


def can_sleep(draft: Draft, replica: Replica) -> bool:
    """Whether its engine is there, serves, and says that it can. One of several shards cannot: they would have to at once."""
    return len(replica.shards) == 1 and _willing(draft, replica)


def stays_awake(draft: Draft, replica: Replica) -> str:
    """What is to be said of a replica that is stopped although its engine says that it can sleep; empty for any other."""
    count = len(replica.shards)
    return f"; stopped, since an engine over {count} nodes is not put to sleep" if count > 1 and _willing(draft, replica) else ""


def _willing(draft: Draft, replica: Replica) -> bool:
    head = replica.shards[0]
    told = draft.world.told.get(head.allocation.node) if head.allocation else None
    report = told.shards.get(head.shard) if told else None
    return head.state is ShardState.READY and report is not None and report.sleeps


def lull(draft: Draft, replica: Replica, reason: str) -> None:
    """Order a replica to be drained and then put to sleep."""
    for shard in replica.shards:
        draft.move(evolve(shard, wanted=Wanted.DRAIN, next_at=None, to_sleep=True), ShardState.DRAINING, f"{reason}; to sleep")


def follow_sleepers(draft: Draft) -> None:
    """Stop those that nobody could wake any more."""
    for replica in _sleepers(draft):
        if reason := _useless(draft, replica):
            _stop(draft, replica, reason)


def wake(draft: Draft, model: Model) -> bool:
    """Wake one replica of C{model}, if one sleeps and can be woken where it is; one that has lost its room is stopped."""
    for replica in _sleepers(draft, model.name):
        (shard,) = replica.shards
        node = draft.nodes[shard.allocation.node] if shard.allocation else None
        if node is None or shard.allocation is None or node.name not in draft.world.told or node.state is not NodeState.READY:
            continue
        share = bool(shard.profile and shard.profile.resources.share)
        before = claim_of(shard.shard, shard.allocation, share)
        if in_quarantine(node, draft.world.now) or not ledger(draft, frozenset({shard.shard})).holds(before, node.name):
            _stop(draft, replica, "what it gave back is not free any more")
            continue
        operation = attempt_id(shard.shard, shard.attempt, draft.world.epoch, draft.world.revision)
        draft.move(evolve(shard, wanted=Wanted.RUN, operation=operation), ShardState.LOADING, "it is woken")
        return True
    return False


def _sleepers(draft: Draft, model: str = "") -> Iterator[Replica]:
    sleeping = [shard for shard in draft.shards.values() if shard.state is ShardState.SLEEPING and model in ("", shard.model)]
    for replicas in group(sleeping).values():
        yield from (replica for replica in replicas if asleep(replica))


def _useless(draft: Draft, replica: Replica) -> str:
    model = draft.catalog.get(replica.model)
    if model is None or model.profile is None:
        return f"{replica.model} is not in the catalog any more"
    if model.generation != replica.generation:
        return f"its profile changed ({replica.generation} -> {model.generation})"
    if model.replicas.max == 0:
        return f"{replica.model} is to have no replicas"
    draining = [name for name in replica.nodes if name in draft.nodes and draft.nodes[name].draining]
    return f"{draining[0]} is drained" if draining else ""


def _stop(draft: Draft, replica: Replica, reason: str) -> None:
    for shard in replica.shards:
        draft.move(evolve(shard, wanted=Wanted.STOP), ShardState.STOPPING, reason)
