"""What happens to the replicas of one model: more, fewer, or others.

Replicas are changed one at a time and the new one is ready before an old one drains, where there is room for both; where there
is none it is said, and one old replica makes room only if the new one would really fit there. The only one that serves makes
room only with an operator's leave. A new replica that does not get ready holds the change: what still serves is not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from llmgw.fleet.causes import NODE, moves_after
from llmgw.fleet.model import Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import DISK_FULL, ShardState, Wanted, replica_id, replica_of, shard_id
from llmgw.planning.budget import counts, may_leave, remembered, rest, told
from llmgw.planning.checks import SEARCHING, Want
from llmgw.planning.devices import closed_device
from llmgw.planning.explanation import Explanation
from llmgw.planning.fleetroom import leaving, ledger, want
from llmgw.planning.lifecycle import in_quarantine
from llmgw.planning.loras import equip, remark, why_anew
from llmgw.planning.orders import attempt_id
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.profiles import tried_again
from llmgw.planning.replicas import Replica, given_up, surplus, wanted, worst_first
from llmgw.planning.sleep import can_sleep, lull, stays_awake, wake
from llmgw.planning.world import Draft

EXCLUDE_FOR = 300.0
# So long a retry waits for a node's word on the weights that it would need to be tried there.
SEARCH_FOR = 10.0


@frozen
class Pending:
    """A replica that could not be placed, kept so that hints can be looked for when somebody asks."""

    want: Want
    explanation: Explanation

    @property
    def searching(self) -> bool:
        """Whether some node has not said yet whether it has the weights."""
        return any(verdict.checks[0].text == SEARCHING for verdict in self.explanation.verdicts)


@frozen
class Work:
    """What a plan gathers while it goes from model to model. C{room} is made when first needed: most plans place nothing.

    @ivar sought: by model, a failing replica that would rather be elsewhere, so that weights are looked for there.
    @ivar turns: the replicas whose ordered restart has its turn.
    @ivar gave: by model, how many of its replicas have to make room for others.
    @ivar again: in how many seconds something may be possible that is not now.
    """

    draft: Draft
    pending: dict[str, Pending] = field(factory=dict)
    sought: dict[str, Pending] = field(factory=dict)
    gave: dict[str, int] = field(factory=dict)
    again: list[float] = field(factory=list)
    notes: dict[str, str] = field(factory=dict)
    turns: frozenset[str] = frozenset()
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


def follow_model(work: Work, model: Model, replicas: Iterable[Replica]) -> None:
    """Take the next steps for one model that llmgw runs; C{model} is as L{Draft.catalog} has it."""
    draft = work.draft
    replicas = [_patient(draft, model, replica) for replica in replicas]
    target = wanted(model, draft.world.demand)
    here = [replica for replica in replicas if not replica.leaving and not given_up(replica, draft.nodes)]
    here = [replica for replica in here if not _forced(draft, replica)]
    reasons = {replica.number: _why_old(work, model, replica) for replica in here}
    good = [replica for replica in here if not reasons[replica.number]]
    old = [replica for replica in here if reasons[replica.number]]
    for replica in [replica for replica in old if not replica.serving]:
        if not _comes_back(work, model, replica, good):
            leave(draft, replica, reasons[replica.number])
            old.remove(replica)
            work.forget_room()
    _retry(work, model, good)
    equip(draft, model, good)
    if old:
        victim = worst_first(old)[0]
        _replace(work, model, target, good, old, Victim(victim, reasons[victim.number]))
    elif len(staying := may_leave(model, target, good)) > target + (beside := _beside(draft, model, good)):
        for replica in surplus(model, staying, target + beside, draft.world.load):
            why = f"{model.name} wants {target}{'' if target else stays_awake(draft, replica)}"
            if target == 0 and can_sleep(draft, replica):
                lull(draft, replica, why)
            else:
                leave(draft, replica, why, remember=model.replicas.max > 0)
    else:
        _welcome(draft, good)
        for _ in range(target - len(good)):
            if not wake(draft, model) and not _start_rested(work, model):
                break
        if target == 0 and (before := remembered(draft, model)):
            work.notes[model.name] = f"{told(before)}; a request starts it again"
    _remark(work, model, here)


def _start_rested(work: Work, model: Model) -> bool:
    """Place one more replica, with the failures of one that left since fewer were wanted, and not before that may start again."""
    before = remembered(work.draft, model)
    if before is not None and (wait := rest(work.draft, before)) > 0:
        work.again.append(wait)
        work.notes[model.name] = f"{told(before)}; it waits before it is started again, as after each failure"
        return False
    return start(work, model, before)


def _patient(draft: Draft, model: Model, replica: Replica) -> Replica:
    """It drains for as long as its model says now, also when that is gone from the catalog."""
    if all(shard.drain == model.drain for shard in replica.shards):
        return replica
    return evolve(replica, shards=tuple(draft.put(evolve(shard, drain=model.drain)) for shard in replica.shards))


def _comes_back(work: Work, model: Model, replica: Replica, good: list[Replica]) -> bool:
    """Start an old replica of the last good profile that has crashed as it was; whether that is done.

    Its successor takes its place at once where it fits and either has proved itself or is the first to try. While that first
    one is on its way the profile may still turn out to be bad, and one that fits nowhere brings nothing back.
    """
    draft, record = work.draft, work.draft.rollouts.get(model.name)
    before = record.back if record else None
    if before is None or before.generation(model.name) != replica.generation or model.generation == replica.generation:
        return False
    proved = any(one.ready for one in good)
    freed = frozenset(shard.shard for shard in replica.shards)
    if proved or not good:
        asked = want(draft, model, draft.number(model.name) + 1)
        if isinstance(ledger(draft, leaving(draft) | freed).place(asked), Placement):
            return False
    _retry(work, evolve(model, profile=before), [replica])
    return True


def _beside(draft: Draft, model: Model, good: list[Replica]) -> int:
    """How many more than wanted may stay: a paused rollout keeps the successor that it had begun."""
    rollout = draft.rollouts.get(model.name)
    return int(rollout is not None and rollout.held and len({replica.generation for replica in good}) > 1)


def _remark(work: Work, model: Model, here: list[Replica]) -> None:
    """Say what an operator has to know of a model that is kept from the catalog's profile."""
    rollout = work.draft.rollouts.get(model.name)
    if model.name in work.notes:
        return
    if rollout is not None and rollout.pinned:
        work.notes[model.name] = f"{rollout.reason}. {tried_again(rollout)}"
    elif rollout is not None and rollout.held:
        fresh = sum(replica.generation == rollout.target.generation(model.name) for replica in here)
        work.notes[model.name] = (
            f"rollout paused with {fresh} of {len(here)} replicas changed; go on: llmgw rollout {model.name} --resume"
        )
    elif text := remark(model, here):
        work.notes[model.name] = text


def _welcome(draft: Draft, good: list[Replica]) -> None:
    """Whoever is back from a lost node and stays is one like the others again."""
    for shard in [shard for replica in good if replica.given_up and replica.ready for shard in replica.shards]:
        draft.put(evolve(draft.shards[shard.shard], given_up=False))


@frozen
class Victim:
    """The next replica to be replaced, and why."""

    replica: Replica
    why: str


def _why_old(work: Work, model: Model, replica: Replica) -> str:
    """Why this replica is to be replaced; empty for a good one."""
    draft = work.draft
    rollout = draft.rollouts.get(model.name)
    if replica.generation != model.generation and not (rollout and rollout.held):
        return f"its profile changed ({replica.generation} -> {model.generation})"
    if not (rollout and rollout.held) and (reason := why_anew(draft, model, replica)):
        return reason
    if replica.state is ShardState.FAILED and replica.shards[0].profile not in (None, model.profile):
        return "its profile changed"
    draining = [name for name in replica.nodes if draft.nodes[name].draining]
    if draining:
        return f"{draining[0]} is drained"
    return next((shard.replace for shard in replica.shards if shard.replace), "") if replica.id in work.turns else ""


def _forced(draft: Draft, replica: Replica) -> bool:
    """Order away at once what a node's drain does not wait for any more; whether it did."""
    for node in [draft.nodes[name] for name in replica.nodes if draft.nodes[name].draining]:
        if node.drain_deadline is not None and node.drain_deadline <= draft.world.now:
            leave(draft, replica, "the drain's deadline has passed", at_once=True)
            return True
        if node.force:
            leave(draft, replica, f"{node.name} is drained by force")
            return True
    return False


def leave(draft: Draft, replica: Replica, reason: str, at_once: bool = False, remember: bool = False) -> None:
    """Order a replica away for good: drained while it serves, else stopped. C{remember}: its failures count for the next one."""
    drain = replica.serving and not at_once
    if remember:
        failed = evolve(replica.last_failed[0], crashes=replica.crashes)
        replica = evolve(replica, shards=tuple(evolve(s.with_failures_of(failed), remembered=True) for s in replica.shards))
    for shard in replica.shards:
        order = Wanted.DRAIN if drain else Wanted.STOP
        changed = evolve(shard, wanted=order, next_at=None)
        if shard.state in (ShardState.BACKOFF, ShardState.FAILED, ShardState.UNKNOWN, ShardState.STOPPING):
            draft.put(evolve(changed, reason=reason))
            draft.say("leaving", shard.shard, f"{shard.shard}: to be stopped: {reason}")
        else:
            draft.move(changed, ShardState.DRAINING if drain else ShardState.STOPPING, reason)


def _replace(work: Work, model: Model, target: int, good: list[Replica], old: list[Replica], victim: Victim) -> None:
    draft, here = work.draft, len(good) + len(old)
    ready = sum(replica.ready for replica in good)
    if here > target and ready + len(old) > target:
        leave(draft, victim.replica, victim.why)
    elif here < target and start(work, model):
        return
    elif here > target or ready < len(good):
        _stalled(work, model, good)
    # One that is missing for want of room must not keep the others from being replaced.
    elif here < target or _in_place(model, victim) or not start(work, model):
        _make_room(work, model, victim, alone=ready + len(old) == 1, missing=here < target)


def _in_place(model: Model, victim: Victim) -> bool:
    """Whether the catalog says that an old replica goes first when the profile changes."""
    return model.rollout.strategy == "replace" and victim.replica.generation != model.generation


def _stalled(work: Work, model: Model, good: list[Replica]) -> None:
    """A change in progress waits for its newest replica."""
    waiting = next((replica for replica in worst_first(good) if not replica.ready), None)
    if waiting is None:
        return
    reason = next((shard.reason for shard in waiting.shards if shard.reason), "")
    if waiting.state in (ShardState.FAILED, ShardState.BACKOFF):
        work.notes[model.name] = f"the change is held: {waiting.id} is {waiting.state}: {reason}; what serves is not touched"
    else:
        work.notes[model.name] = f"changing: waiting for {waiting.id} ({waiting.state})"


def _make_room(work: Work, model: Model, victim: Victim, alone: bool, missing: bool) -> None:
    """An old replica may go before its successor is there: would that fit in its place, and may it?

    @param missing: fewer are there than wanted, perhaps since one has just gone for its successor, which waits for its room.
    """
    draft, replica, why = work.draft, victim.replica, victim.why
    pending = work.pending.get(model.name)
    if pending is None:
        pending = Pending(want(draft, model, draft.number(model.name) + 1), Explanation(model.name, 0, ()))
    if pending.searching:
        return
    soon = leaving(draft)
    patient = missing or not _in_place(model, victim)
    if soon and patient and isinstance(ledger(draft, soon).place(pending.want), Placement):
        gone = ", ".join(sorted({replica_of(shard) for shard in soon})[:4])
        work.notes[model.name] = f"changing: waiting for the room of {gone}"
        return
    freed = frozenset(shard.shard for shard in replica.shards)
    fits = isinstance(ledger(draft, freed).place(pending.want), Placement)
    if fits and model.rollout.strategy == "surge" and replica.generation != model.generation:
        work.notes[model.name] = f"{replica.id} waits for room beside it, as rollout.strategy surge says ({why})"
    elif fits and alone and not _may_fail(draft, model, victim):
        work.notes[model.name] = (
            f"{replica.id} should be replaced ({why}), but is the only one that serves and there is no room beside it. To have "
            f"it stopped first: {_leave_for_outage(draft, model, victim)}"
        )
    elif fits:
        work.pending.pop(model.name, None)
        beside = "as rollout.strategy says" if _in_place(model, victim) else "no room for its successor beside it"
        leave(draft, replica, f"{why}; {beside}, so it goes first")
    elif any(draft.nodes[name].draining and draft.nodes[name].outage for name in replica.nodes):
        leave(draft, replica, f"{why}; no other node can run it")
    else:
        work.notes[model.name] = f"{replica.id} should be replaced ({why}) but its successor fits nowhere; it stays as it is"


def _may_fail(draft: Draft, model: Model, victim: Victim) -> bool:
    """Whether somebody has allowed that the model is served by nobody for a while."""
    if victim.replica.generation != model.generation:
        rollout = draft.rollouts.get(model.name)
        return rollout is not None and rollout.outage
    nodes = [draft.nodes[name] for name in victim.replica.nodes]
    return any(node.draining and node.outage for node in nodes) or any(shard.outage for shard in victim.replica.shards)


def _leave_for_outage(draft: Draft, model: Model, victim: Victim) -> str:
    if victim.replica.generation != model.generation:
        rollout = draft.rollouts.get(model.name)
        return f"llmgw rollout {model.name} --{'undo' if rollout and rollout.pinned else 'resume'} --allow-outage"
    return f"llmgw restart {model.name} --replica {victim.replica.number} --allow-outage"


def _retry(work: Work, model: Model, good: list[Replica]) -> None:
    """Start again what failed and is due; after some failures on one node rather on another, and at once if it was the node's."""
    draft = work.draft
    cap = draft.world.timing.backoff_max * 2
    for replica in list(good):
        if any(shard.state is not ShardState.BACKOFF for shard in replica.shards):
            continue
        due = max(shard.next_at or 0.0 for shard in replica.shards)
        # A clock that was set back must not make it wait for hours.
        waits = 0 < due - draft.world.now <= cap
        failed, cause = replica.last_failed
        if waits and cause != NODE:
            continue
        often = replica.failures_here >= moves_after(cause)
        barred = any(in_quarantine(draft.nodes[name], draft.world.now) for name in replica.nodes)
        if not waits and (closed := closed_device(draft, replica.shards)):
            # What was refused is left to be explained: there is nothing else to do for it.
            if not _move(work, model, replica, {}, f"{closed}; moved", keep=True):
                work.notes[model.name] = f"{replica.id} is not started again where it was: {closed}"
            continue
        sick = [failed.allocation.node] if cause == NODE and failed.allocation else replica.nodes
        full = any(shard.fault == DISK_FULL for shard in replica.shards)
        why = f"it failed on {', '.join(sick)} ({failed.last_reason}); moved"
        if (often or barred or full) and _move(work, model, replica, dict.fromkeys(sick, draft.world.now + EXCLUDE_FOR), why):
            continue
        if waits or (model.name in work.sought and work.sought[model.name].searching and 0 <= draft.world.now - due < SEARCH_FOR):
            continue
        _again(work, model, replica)


def _move(work: Work, model: Model, replica: Replica, excluded: Mapping[str, float], why: str, keep: bool = False) -> bool:
    """Place it elsewhere, if there is room; C{keep} has the refusal stay for people."""
    before = work.pending.get(model.name)
    if start(work, model, replica, excluded):
        leave(work.draft, replica, why)
        return True
    work.sought[model.name] = work.pending[model.name]
    if before is None and not keep:
        del work.pending[model.name]
    return False


def _again(work: Work, model: Model, replica: Replica) -> None:
    """A new attempt on the same devices, at its nodes' present addresses, with other ports: the former may not be free yet."""
    draft = work.draft
    for name in replica.nodes:
        node = draft.nodes[name]
        if name not in draft.world.told or node.state is not NodeState.READY or in_quarantine(node, draft.world.now):
            return
    attempt, cause = max(shard.attempt for shard in replica.shards) + 1, replica.last_failed[1]
    ports = []
    for shard in replica.shards:
        assert shard.allocation is not None
        fresh = work.room.ports(shard.allocation.node, len(shard.allocation.ports)) if shard.allocation.ports else ()
        if fresh is None:
            work.notes[model.name] = f"{shard.shard}: no free ports on {shard.allocation.node}"
            return
        ports.append(fresh)
    head_port = ports[0][1] if len(ports[0]) > 1 else 0
    placed = work.room.renewed([shard.allocation for shard in replica.shards if shard.allocation], replica.shards[0].profile)
    for shard, allocation, own in zip(replica.shards, placed, ports, strict=True):
        changed = evolve(
            shard,
            attempt=attempt,
            wanted=Wanted.RUN,
            next_at=None,
            served_since=0.0,
            loras=None,
            crashes=replica.crashes,
            fault="",
            cause=cause or shard.cause,
            profile=model.profile if shard.generation == model.generation else shard.profile,
            served=(model.name, *model.aliases),
            allocation=evolve(allocation, ports=own, head_port=head_port),
            placed_revision=draft.world.revision,
            operation=attempt_id(shard.shard, attempt, draft.world.epoch, draft.world.revision),
        )
        draft.move(changed, ShardState.PLACED, f"attempt {attempt}")


def start(work: Work, model: Model, instead: Replica | None = None, excluded: Mapping[str, float] | None = None) -> bool:
    """Place one more replica. C{instead} hands on the failures of the one whose place it takes."""
    draft = work.draft
    husk = shard_id(replica_id(model.name, draft.number(model.name)), 0)
    number = draft.number(model.name) + 1
    failed = instead.last_failed[0] if instead else ShardRecord("", model.name, 0)
    excluded = {node: until for node, until in failed.excluded.items() if until > draft.world.now} | dict(excluded or {})
    wanted_room = want(draft, model, number, dict.fromkeys(excluded, "it failed there"))
    result = work.room.place(wanted_room)
    if isinstance(result, Explanation):
        work.pending[model.name] = Pending(wanted_room, result)
        return False
    draft.take_number(model.name)
    taken_over = [shard.shard for shard in (instead.shards if instead else ())]
    for gone in [draft.shards[shard] for shard in {husk, *taken_over} if shard in draft.shards]:
        if gone.shard in taken_over:
            gone = draft.put(evolve(gone, remembered=False))
        if gone.allocation is None and not counts(draft, model, gone):
            del draft.shards[gone.shard]
    for allocation in result.allocations:
        shard = shard_id(result.replica, allocation.rank)
        count = len(allocation.devices)
        devices = f" on {count} device{'s' * (count > 1)}" if count else ""
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
                node_failures=failed.node_failures,
                cause=failed.cause,
                first_reason=failed.first_reason,
                last_reason=failed.last_reason,
                placed_revision=draft.world.revision,
                operation=attempt_id(shard, 1, draft.world.epoch, draft.world.revision),
                excluded=excluded,
                drain=model.drain,
            )
        )
        draft.say("placed", shard, f"{shard}: placed on {allocation.node}{devices}", allocation.node, after="placed")
    return True
