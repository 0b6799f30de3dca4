"""What happens to the replicas of one model: more, fewer, or others.

Replicas are changed one at a time and the new one is ready before an old one drains, where there is room for both; where there
is none it is said, and one old replica makes room only if the new one would really fit there. A new replica that does not get
ready stops the change: what still serves is not touched. Of two good copies the one with the lower number stays, which is how
a node that comes back keeps its original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from llmgw.fleet.model import Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardState, Wanted, replica_id, shard_id
from llmgw.planning.checks import SEARCHING, Want
from llmgw.planning.explanation import Explanation
from llmgw.planning.fleetroom import ledger, want
from llmgw.planning.lifecycle import in_quarantine
from llmgw.planning.orders import attempt_id
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.replicas import Replica, group
from llmgw.planning.world import Draft

MOVE_AFTER = 3
EXCLUDE_FOR = 300.0
_GONE = (NodeState.LOST, NodeState.REMOVED)
_BEST = (
    ShardState.READY, ShardState.UNKNOWN, ShardState.LOADING, ShardState.STARTING, ShardState.PLACED, ShardState.DRAINING,
    ShardState.STOPPING, ShardState.BACKOFF, ShardState.PENDING, ShardState.STOPPED, ShardState.FAILED,
)  # fmt: skip


@frozen
class Pending:
    """A replica that could not be placed, kept so that hints can be looked for when somebody asks."""

    want: Want
    explanation: Explanation


@frozen
class Work:
    """One model's part of a plan. C{room} is made when first needed: most plans place nothing."""

    draft: Draft
    pending: dict[str, Pending] = field(factory=dict)
    notes: dict[str, str] = field(factory=dict)
    _room: list[Ledger] = field(factory=list)

    @property
    def room(self) -> Ledger:
        """What is free while this plan is made."""
        if not self._room:
            self._room.append(ledger(self.draft))
        return self._room[0]

    def forget_room(self) -> None:
        """A claim ended in this plan; look anew."""
        self._room.clear()


def wanted(model: Model, demand: Mapping[str, int]) -> int:
    """How many replicas there should be: what the load asks for, within the catalog's bounds."""
    scale = model.replicas
    return min(scale.max, max(scale.min, demand.get(model.name, scale.min)))


def follow_model(work: Work, model: Model, replicas: Iterable[Replica]) -> None:
    """Take the next steps for one model that llmgw runs."""
    draft = work.draft
    target, generation = wanted(model, draft.world.demand), model.generation
    here = [replica for replica in replicas if not replica.leaving and not _lost(draft, replica)]
    _forced(draft, here)
    here = [replica for replica in here if not _is_forced(draft, replica)]
    reasons = {replica.number: _why_old(draft, generation, replica) for replica in here}
    good = [replica for replica in here if not reasons[replica.number]]
    old = [replica for replica in here if reasons[replica.number]]
    for replica in [replica for replica in old if not replica.serving]:
        leave(draft, replica, reasons[replica.number])
        old.remove(replica)
        work.forget_room()
    _retry(work, model, good)
    if old:
        victim = _worst_first(old)[0]
        _replace(work, model, target, good, old, victim, reasons[victim.number])
    else:
        for replica in _worst_first(good)[: max(0, len(good) - target)]:
            leave(draft, replica, f"{model.name} wants {target}")
        for _ in range(target - len(good)):
            if not start(work, model):
                break


def _lost(draft: Draft, replica: Replica) -> bool:
    return any(name not in draft.nodes or draft.nodes[name].state in _GONE for name in replica.nodes)


def _why_old(draft: Draft, generation: str, replica: Replica) -> str:
    """Why this replica is to be replaced; empty for a good one."""
    if replica.generation != generation:
        return f"its profile changed ({replica.generation} -> {generation})"
    draining = [name for name in replica.nodes if draft.nodes[name].draining]
    if draining:
        return f"{draining[0]} is drained"
    return next((shard.replace for shard in replica.shards if shard.replace), "")


def _is_forced(draft: Draft, replica: Replica) -> bool:
    deadlines = [draft.nodes[name].drain_deadline for name in replica.nodes if draft.nodes[name].draining]
    return any(deadline is not None and deadline <= draft.world.now for deadline in deadlines)


def _forced(draft: Draft, replicas: list[Replica]) -> None:
    for replica in replicas:
        if _is_forced(draft, replica):
            leave(draft, replica, "the drain's deadline has passed", at_once=True)


def _worst_first(replicas: list[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda replica: (-_BEST.index(replica.state), -replica.number))


def leave(draft: Draft, replica: Replica, reason: str, at_once: bool = False) -> None:
    """Order a replica away for good: drained while it serves, else stopped."""
    drain = replica.serving and not at_once
    for shard in replica.shards:
        order = Wanted.DRAIN if drain else Wanted.STOP
        changed = evolve(shard, wanted=order, next_at=None)
        if shard.state in (ShardState.BACKOFF, ShardState.FAILED, ShardState.UNKNOWN, ShardState.STOPPING):
            draft.put(evolve(changed, reason=reason))
            draft.say("leaving", shard.shard, f"{shard.shard}: to be stopped: {reason}")
        else:
            draft.move(changed, ShardState.DRAINING if drain else ShardState.STOPPING, reason)


def _replace(work: Work, model: Model, target: int, good: list[Replica], old: list[Replica], victim: Replica, why: str) -> None:
    draft = work.draft
    ready = sum(replica.ready for replica in good)
    if len(good) + len(old) > target:
        if ready + len(old) > target:
            leave(draft, victim, why)
        else:
            _stalled(work, model, good)
    elif len(good) + len(old) < target:
        start(work, model)
    elif ready < len(good):
        _stalled(work, model, good)
    elif not start(work, model):
        _make_room(work, model, victim, why)


def _stalled(work: Work, model: Model, good: list[Replica]) -> None:
    """A change in progress waits for its newest replica; a failed one holds it for good."""
    waiting = next((replica for replica in _worst_first(good) if not replica.ready), None)
    if waiting is None:
        return
    reason = next((shard.reason for shard in waiting.shards if shard.reason), "")
    if waiting.state in (ShardState.FAILED, ShardState.BACKOFF):
        work.notes[model.name] = f"the change is held: {waiting.id} is {waiting.state}: {reason}; what serves is not touched"
    else:
        work.notes[model.name] = f"changing: waiting for {waiting.id} ({waiting.state})"


def _make_room(work: Work, model: Model, victim: Replica, why: str) -> None:
    """No room beside the old replicas: would the new one fit in the place of one of them?"""
    draft = work.draft
    pending = work.pending[model.name]
    if any(verdict.checks[0].text == SEARCHING for verdict in pending.explanation.verdicts):
        return
    freed = frozenset(shard.shard for shard in victim.shards)
    if isinstance(ledger(draft, freed).place(pending.want), Placement):
        del work.pending[model.name]
        leave(draft, victim, f"{why}; no room for its successor beside it, so it goes first")
    elif any(draft.nodes[name].draining and draft.nodes[name].outage for name in victim.nodes):
        leave(draft, victim, f"{why}; no other node can run it")
    else:
        work.notes[model.name] = f"{victim.id} should be replaced ({why}) but its successor fits nowhere; it goes on serving"


def _retry(work: Work, model: Model, good: list[Replica]) -> None:
    """Start again what failed and is due; after some failures on one node rather on another."""
    draft = work.draft
    cap = draft.world.timing.backoff_max * 2
    for replica in list(good):
        if any(shard.state is not ShardState.BACKOFF for shard in replica.shards):
            continue
        due = max(shard.next_at or 0.0 for shard in replica.shards)
        # A clock that was set back must not make it wait for hours.
        if due > draft.world.now and due - draft.world.now <= cap:
            continue
        often = replica.crashes and len(replica.crashes) % MOVE_AFTER == 0
        barred = any(in_quarantine(draft.nodes[name], draft.world.now) for name in replica.nodes)
        if (often or barred) and _move(work, model, replica):
            continue
        _again(work, model, replica)


def _move(work: Work, model: Model, replica: Replica) -> bool:
    until = work.draft.world.now + EXCLUDE_FOR
    before = work.pending.get(model.name)
    if start(work, model, replica, dict.fromkeys(replica.nodes, until)):
        leave(work.draft, replica, f"it failed {len(replica.crashes)} times on {', '.join(replica.nodes)}; moved")
        return True
    if before is None:
        work.pending.pop(model.name, None)
    return False


def _again(work: Work, model: Model, replica: Replica) -> None:
    """A new attempt on the same devices, with other ports: an ended engine's ports may not be free for a minute."""
    draft = work.draft
    for name in replica.nodes:
        node = draft.nodes[name]
        if name not in draft.world.told or node.state is not NodeState.READY or in_quarantine(node, draft.world.now):
            return
    attempt = max(shard.attempt for shard in replica.shards) + 1
    ports = []
    for shard in replica.shards:
        assert shard.allocation is not None
        fresh = work.room.ports(shard.allocation.node, len(shard.allocation.ports)) if shard.allocation.ports else ()
        if fresh is None:
            work.notes[model.name] = f"{shard.shard}: no free ports on {shard.allocation.node}"
            return
        ports.append(fresh)
    head_port = ports[0][1] if len(ports[0]) > 1 else 0
    for shard, own in zip(replica.shards, ports, strict=True):
        assert shard.allocation is not None
        changed = evolve(
            shard,
            attempt=attempt,
            wanted=Wanted.RUN,
            next_at=None,
            crashes=replica.crashes,
            profile=model.profile if shard.generation == model.generation else shard.profile,
            served=(model.name, *model.aliases),
            allocation=evolve(shard.allocation, ports=own, head_port=head_port),
            placed_revision=draft.world.revision,
            operation=attempt_id(shard.shard, attempt, draft.world.epoch, draft.world.revision),
        )
        draft.move(changed, ShardState.PLACED, f"attempt {attempt}")


def start(work: Work, model: Model, instead: Replica | None = None, excluded: Mapping[str, float] | None = None) -> bool:
    """Place one more replica. C{instead} hands on the failures of the one whose place it takes."""
    draft = work.draft
    husk = shard_id(replica_id(model.name, draft.number(model.name)), 0)
    number = draft.number(model.name) + 1
    reasons = dict.fromkeys(excluded or {}, "it failed there repeatedly")
    wanted_room = want(draft, model, number, reasons)
    result = work.room.place(wanted_room)
    if isinstance(result, Explanation):
        work.pending[model.name] = Pending(wanted_room, result)
        return False
    draft.take_number(model.name)
    if husk in draft.shards and draft.shards[husk].allocation is None:
        del draft.shards[husk]
    for allocation in result.allocations:
        shard = shard_id(result.replica, allocation.rank)
        devices = f" on {len(allocation.devices)} devices" if allocation.devices else ""
        draft.put(
            ShardRecord(
                shard,
                model.name,
                number,
                allocation.rank,
                tuple(other.node for other in result.allocations),
                model.generation,
                attempt=1,
                state=ShardState.PLACED,
                since=draft.world.now,
                profile=model.profile,
                allocation=allocation,
                served=(model.name, *model.aliases),
                crashes=instead.crashes if instead else (),
                first_reason=instead.shards[0].first_reason if instead else "",
                last_reason=instead.shards[0].last_reason if instead else "",
                placed_revision=draft.world.revision,
                operation=attempt_id(shard, 1, draft.world.epoch, draft.world.revision),
                excluded=excluded or {},
            )
        )
        draft.say("placed", shard, f"{shard}: placed on {allocation.node}{devices}", allocation.node, after="placed")
    return True


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
