"""One plan: from everything the leader knows to the records as they should be, with an event for each change.

Level-triggered and pure: called again with its own result and no news it changes nothing. It never orders anything because
something is absent: not a model from the catalog, not a shard from the store, not a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import evolve, field, frozen

from llmgw.fleet.events import FleetEvent
from llmgw.fleet.records import NodeRecord, RolloutRecord, ShardRecord
from llmgw.fleet.shard import ShardState, Wanted, replica_of
from llmgw.planning.adopt import Orphan, adopt_matching, orphans
from llmgw.planning.devices import follow_devices
from llmgw.planning.explanation import Explanation
from llmgw.planning.fleetroom import ledger
from llmgw.planning.gangs import follow_gangs
from llmgw.planning.giveway import give_way
from llmgw.planning.hints import smaller_context, with_hints
from llmgw.planning.lifecycle import Holding, follow_nodes, follow_quarantine, next_step
from llmgw.planning.observe import observe
from llmgw.planning.orders import drain_limit
from llmgw.planning.peaks import follow_peaks
from llmgw.planning.profiles import follow_rollouts, owed
from llmgw.planning.replicas import group, turns
from llmgw.planning.rollout import Pending, Work, follow_model
from llmgw.planning.sleep import follow_sleepers
from llmgw.planning.world import Draft, World


@frozen
class Outcome:
    """A plan.

    @ivar nodes: all nodes, C{shards} all shards as they should be; compare with the world's to see what changed.
    @ivar pending: by model, a replica that could not be placed and why.
    @ivar sought: by model, one that fails where it is and would be tried elsewhere, if there were room and weights.
    @ivar notes: by model, a sentence on a change that waits or cannot go on.
    @ivar rollouts: by model, how far its change is.
    @ivar wake: in how many seconds something is due by itself, None if nothing is.
    @ivar broken: parts of the plan that raised, each with its subject; the rest was done.
    @ivar gave: by model, how many of its replicas make room for others, so that so many fewer are wanted.
    """

    nodes: Mapping[str, NodeRecord]
    shards: Mapping[str, ShardRecord]
    events: tuple[FleetEvent, ...]
    orphans: tuple[Orphan, ...] = ()
    pending: Mapping[str, Pending] = field(factory=dict)
    notes: Mapping[str, str] = field(factory=dict)
    rollouts: Mapping[str, RolloutRecord] = field(factory=dict)
    holding: Holding = Holding()
    wake: float | None = None
    broken: tuple[tuple[str, Exception], ...] = ()
    gave: Mapping[str, int] = field(factory=dict)
    sought: Mapping[str, Pending] = field(factory=dict)


def reconcile(world: World) -> Outcome:
    """Make the plan."""
    draft = Draft(world)
    broken: list[tuple[str, Exception]] = []
    held = follow_nodes(draft)
    for model_name, why in world.scaled.items():
        draft.say("scaled", model_name, why)
    for replica, why in world.failing.items():
        draft.say("failing", replica, why)
    for record in world.shards.values():
        _guarded(broken, record.shard, observe, draft, record)
    _guarded(broken, "peaks", follow_peaks, draft)
    _guarded(broken, "gangs", follow_gangs, draft)
    _guarded(broken, "quarantine", follow_quarantine, draft)
    _guarded(broken, "devices", follow_devices, draft)
    _guarded(broken, "rollouts", follow_rollouts, draft)
    _guarded(broken, "drains", _follow_drains, draft)
    _guarded(broken, "orphans", adopt_matching, draft)
    _guarded(broken, "sleepers", follow_sleepers, draft)
    replicas = group(draft.shards.values())
    work = Work(draft, turns=turns(replicas))
    if not world.settling:
        models = [model for model in draft.catalog.models if model.profile is not None]
        for model in sorted(models, key=lambda one: not owed(draft, one, replicas.get(one.name, []))):
            _guarded(broken, model.name, follow_model, work, model, replicas.get(model.name, []))
        for name in list(work.pending):
            _guarded(broken, name, give_way, work, name)
    else:
        work.notes.update(dict.fromkeys((model.name for model in world.catalog.models if model.profile), _SETTLING))
    return Outcome(
        draft.nodes,
        draft.shards,
        tuple(draft.events),
        tuple(orphans(draft)),
        work.pending,
        work.notes,
        draft.rollouts,
        held,
        _wake(draft, work.again),
        tuple(broken),
        work.gave,
        work.sought,
    )


OVERDUE_AGAIN = 3.0
_SETTLING = "the store is new but the fleet is not: waiting for nodes to report what runs before anything is started"


def _guarded(broken: list[tuple[str, Exception]], subject: str, step: Callable[..., None], *arguments: object) -> None:
    """One bad record or model must not stop the others."""
    try:
        step(*arguments)
    except Exception as error:  # the caller logs it with its traceback
        broken.append((subject, error))


def _follow_drains(draft: Draft) -> None:
    """A drained replica is stopped when nothing runs on it any more, or its time is up."""
    world = draft.world
    for record in list(draft.shards.values()):
        if record.wanted is not Wanted.DRAIN or record.state is not ShardState.DRAINING or record.allocation is None:
            continue
        late = world.now - record.since >= drain_limit(record, draft.nodes, world.timing)
        if record.to_sleep and not late and replica_of(record.shard) in world.idle:
            draft.put(evolve(record, wanted=Wanted.SLEEP, to_sleep=False, reason=f"{record.reason}; drained"))
        elif late or replica_of(record.shard) in world.idle:
            reason = "its time to drain is up" if late else "drained"
            draft.move(evolve(record, wanted=Wanted.STOP), ShardState.STOPPING, f"{record.reason}; {reason}".lstrip("; "))


def _wake(draft: Draft, again: list[float]) -> float | None:
    """When the next retry, the end of a drain or the next step of a node that is away is due, or room may be made."""
    world = draft.world
    nodes = next_step(draft)
    due = [*again]
    due += [record.next_at - world.now for record in draft.shards.values() if record.next_at is not None]
    due += [
        record.since + drain_limit(record, draft.nodes, world.timing) - world.now
        for record in draft.shards.values()
        if record.wanted is Wanted.DRAIN
    ]
    due += [nodes] if nodes is not None else []
    # What is overdue waits for a node; it is looked at again now and then, not all the time.
    return min(wait if wait > 0 else OVERDUE_AGAIN for wait in due) if due else None


def explain(world: World, outcome: Outcome, model: str) -> Explanation | None:
    """Why the next replica of C{model} waits, with the changes that would help; None when none waits."""
    pending = outcome.pending.get(model)
    if pending is None:
        return None
    draft = Draft(evolve(world, nodes=outcome.nodes, shards=outcome.shards))
    room = ledger(draft)
    found, want = room.explain(pending.want), pending.want
    files = world.files_of(want.profile)
    return with_hints(found, room, want, smaller_context(found, want, lambda profile: world.reckon(profile, files)))
