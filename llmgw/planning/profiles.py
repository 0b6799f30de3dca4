"""Which profile of a model is in force: the rollout of a changed one, its budget of failures, and the way back.

A rollout begins when the catalog's profile is another one than the last rollout was about, counts each attempt with it that
fails, and ends when every replica runs it and is ready; for two minutes more its failures still count. When the budget is spent
the model is pinned to the last good profile until another apply changes it or an operator resumes. Everything is in one record
per model, so that a restarted server goes on where the last one was.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve

from llmgw.errors import LlmgwError
from llmgw.fleet.model import Model
from llmgw.fleet.records import RolloutRecord, RolloutState, ShardRecord
from llmgw.fleet.shard import ShardState
from llmgw.planning.replicas import Replica, given_up, group, wanted
from llmgw.planning.world import Draft

# So many seconds after a rollout its profile still counts as new: some engines only fail with their first requests.
WATCH = 120.0


class Senseless(LlmgwError):
    """What an operator asked of a rollout makes no sense as it stands; the text says why and what to do."""


def follow_rollouts(draft: Draft) -> None:
    """Begin, count and end the rollouts of all models. To be called after reports have been observed and before replicas are
    changed."""
    failed = _failed_now(draft)
    replicas = group(draft.shards.values())
    for model in draft.world.catalog.models:
        if model.profile is not None:
            follow_rollout(draft, model, replicas.get(model.name, []), failed.get(model.name, []))


def follow_rollout(draft: Draft, model: Model, replicas: list[Replica], failed: Iterable[ShardRecord] = ()) -> None:
    """Bring one model's record up to date; C{failed} are the shards whose attempts have failed since the last plan."""
    before = draft.rollouts.get(model.name)
    record = _renewed(before, model, replicas, draft.world.now)
    if record is None:
        return
    if record is not before and record.state is RolloutState.RUNNING:
        _say(draft, record, f"{model.name}: rollout of profile {model.generation}{_from(record)}")
    watched = record.state is RolloutState.DONE and draft.world.now - record.since < WATCH
    if record.state is RolloutState.RUNNING or watched:
        record = _judged(draft, model, _counted(record, model, failed), replicas)
    if record is not before:
        draft.put_rollout(record)


def _from(record: RolloutRecord) -> str:
    return f", from {record.back.generation(record.model)}" if record.back else ""


def _say(draft: Draft, record: RolloutRecord, text: str) -> None:
    draft.say("rollout", record.model, text, after=record.state)


def _renewed(record: RolloutRecord | None, model: Model, replicas: list[Replica], now: float) -> RolloutRecord | None:
    """The record that the catalog's profile needs: the one there is, or that of another rollout."""
    assert model.profile is not None
    if record is None:
        return _first(model, replicas, now)
    if record.target == model.profile:
        return record
    done = record.state is RolloutState.DONE
    if done and record.target.generation(model.name) == model.generation:
        return evolve(record, target=model.profile)
    back = record.target if done else record.back
    return RolloutRecord(model.name, RolloutState.RUNNING, model.profile, back, now, paused=record.paused)


def _first(model: Model, replicas: list[Replica], now: float) -> RolloutRecord | None:
    """A model that nothing is remembered of. What serves with another profile is what a rollback would return to."""
    assert model.profile is not None
    for replica in replicas:
        profile = replica.shards[0].profile
        others = replica.serving and not replica.leaving and replica.generation != model.generation
        if others and profile and profile.generation(model.name) == replica.generation:
            return RolloutRecord(model.name, RolloutState.RUNNING, model.profile, profile, now)
    if any(replica.ready and replica.generation == model.generation for replica in replicas):
        return RolloutRecord(model.name, RolloutState.DONE, model.profile, since=now)
    return None


def _failed_now(draft: Draft) -> dict[str, list[ShardRecord]]:
    """By model, the shards that this plan has seen fail by themselves: no profile is at fault for what went with its machine."""
    found: dict[str, list[ShardRecord]] = {}
    for name, record in draft.shards.items():
        before = draft.world.shards.get(name)
        if (
            before is not None
            and before is not record
            and record.crashes
            and record.crashes != before.crashes
            and not _taken_down(draft, before)
        ):
            found.setdefault(record.model, []).append(record)
    return found


def _taken_down(draft: Draft, record: ShardRecord) -> bool:
    """Whether its node does not know the shard any more: then nobody has seen its engine fail."""
    told = draft.world.told.get(record.allocation.node) if record.allocation else None
    if told and record.shard in told.shards:
        return False
    declined = draft.world.declined.get(record.shard)
    return declined is None or declined.attempt != record.attempt


def _counted(record: RolloutRecord, model: Model, failed: Iterable[ShardRecord]) -> RolloutRecord:
    """Ranks that fell together count once: they share an attempt."""
    ours = [shard for shard in failed if shard.generation == model.generation]
    attempts = {f"{shard.model}/{shard.number}:{shard.attempt}": f"{shard.shard}: {shard.last_reason}" for shard in ours}
    fresh = {attempt: reason for attempt, reason in attempts.items() if attempt not in record.failures}
    if not fresh:
        return record
    return evolve(record, failures=(*record.failures, *fresh), reason=list(fresh.values())[-1])


def _judged(draft: Draft, model: Model, record: RolloutRecord, replicas: list[Replica]) -> RolloutRecord:
    count, running = len(record.failures), record.state is RolloutState.RUNNING
    spent = count >= model.rollout.failures or (count > 0 and any(_given_up(model, replica) for replica in replicas))
    back = record.back.generation(model.name) if record.back else None
    if spent and back not in (None, model.generation):
        attempts = f"{count} failed attempt{'s' if count > 1 else ''} with profile {model.generation}"
        text = f"rolled back to profile {back} after {attempts}: {record.reason}"
        record = evolve(record, state=RolloutState.ROLLED_BACK, since=draft.world.now, reason=text, paused=False)
        _say(draft, record, f"{model.name}: {text}. {tried_again(record)}")
    elif running and not record.paused and _complete(draft, model, replicas):
        reason = f"all replicas run profile {model.generation}"
        record = evolve(record, state=RolloutState.DONE, since=draft.world.now, reason=reason, failures=(), outage=False)
        _say(draft, record, f"{model.name}: rollout done: {reason}")
    return record


def _given_up(model: Model, replica: Replica) -> bool:
    """Whether a replica of the new profile has used its own crash budget, so that no further attempt would ever follow."""
    return replica.state is ShardState.FAILED and replica.generation == model.generation and not replica.leaving


def tried_again(record: RolloutRecord) -> str:
    """How a model gets away from the profile that it is pinned to."""
    first = "To go forward again" if record.state is RolloutState.UNDONE else "Apply a profile that works, or try this one again"
    return f"{first}: llmgw rollout {record.model} --resume"


def _complete(draft: Draft, model: Model, replicas: list[Replica]) -> bool:
    here = [replica for replica in replicas if not replica.leaving and not given_up(replica, draft.nodes)]
    ready = all(replica.ready and replica.generation == model.generation for replica in here)
    return ready and len(here) >= wanted(model, draft.world.demand) > 0


def owed(draft: Draft, model: Model, replicas: Iterable[Replica]) -> bool:
    """Whether an old replica may have made room for a successor that is not there yet: nobody else may take that room."""
    rollout = draft.rollouts.get(model.name)
    here = sum(not replica.leaving and not given_up(replica, draft.nodes) for replica in replicas)
    changing = rollout is not None and (rollout.pinned or (rollout.state is RolloutState.RUNNING and rollout.back is not None))
    return changing and here < wanted(model, draft.world.demand)


# What operators order.


def paused(record: RolloutRecord | None, name: str) -> RolloutRecord:
    """
    @raise Senseless: nothing is changing.
    """
    if record is None or record.state is not RolloutState.RUNNING:
        raise Senseless(f"{name} is not changing, so there is nothing to pause{_standing(record)}")
    return evolve(record, paused=True)


def resumed(record: RolloutRecord | None, name: str, now: float, outage: bool) -> RolloutRecord:
    """Go on after a pause, or try again what was rolled back or undone, with a fresh budget.

    @raise Senseless: nothing waits to go on.
    """
    running = record is not None and record.state is RolloutState.RUNNING
    if record is None or record.state is RolloutState.DONE or (running and not record.paused and outage <= record.outage):
        raise Senseless(f"{name} has no rollout that waits to go on{_standing(record)}")
    if running:
        return evolve(record, paused=False, outage=record.outage or outage)
    return RolloutRecord(name, RolloutState.RUNNING, record.target, record.back, now, outage=outage)


def undone(record: RolloutRecord | None, name: str, now: float, outage: bool) -> RolloutRecord:
    """Go back to the profile before, and stay there.

    @raise Senseless: there is none, or the model is there already.
    """
    if record is None or record.back is None or record.back.generation(name) == record.target.generation(name):
        raise Senseless(f"{name} has no profile to go back to: it has run none but this")
    if record.pinned and outage <= record.outage:
        raise Senseless(f"{name} is back already{_standing(record)}")
    if record.pinned:
        return evolve(record, outage=True)
    reason = f"undone by an operator: back to profile {record.back.generation(name)}"
    return evolve(record, state=RolloutState.UNDONE, since=now, reason=reason, paused=False, outage=outage)


def _standing(record: RolloutRecord | None) -> str:
    return f": {record.reason}" if record is not None and record.reason else ""
