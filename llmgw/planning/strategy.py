"""How a changed profile would come into force, decided before anything happens: beside the old replicas, in their place, or not
at all, each with its reason. Tried by placing, as the rollout itself will do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from attrs import frozen

from llmgw.fleet.model import Model
from llmgw.planning.checks import SEARCHING, Want
from llmgw.planning.explanation import Explanation
from llmgw.planning.fleetroom import leaving, ledger, want
from llmgw.planning.loras import outlook, why_anew
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.profiles import follow_rollout
from llmgw.planning.replicas import Replica, given_up, group, wanted, worst_first
from llmgw.planning.world import Draft, World

# How many old replicas are looked at for whether a successor would fit in their place: on a large fleet each look takes a while.
LOOKED_AT = 16


class Way(StrEnum):
    """How replicas are changed. C{START}: nothing serves yet; C{LOAD}: their adapters are, as they run; C{OUTAGE}: the only one
    that serves has to stop first; C{HELD}: the new one fits nowhere, so nothing is; C{UNKNOWN}: nodes have not been asked for
    the weights yet."""

    START = "start"
    LOAD = "load"
    SURGE = "surge"
    REPLACE = "replace"
    OUTAGE = "outage"
    HELD = "held"
    UNKNOWN = "unknown"


@frozen
class Decision:
    """What a change of one model means. C{replicas} is how many are replaced; C{text} follows the model's name and a colon."""

    model: str
    way: Way
    replicas: int
    text: str


def decisions(world: World) -> tuple[Decision, ...]:
    """How each model of C{world.catalog} that has replicas of another profile would be brought to its own.

    The one way to find that out: what C{apply} says before it acts, what C{plan} and C{rollout} say, and what refuses an outage.
    """
    draft = Draft(world)
    replicas = group(draft.shards.values())
    models = [model for model in world.catalog.models if model.profile is not None]
    for model in models:
        follow_rollout(draft, model, replicas.get(model.name, []))
    room = ledger(draft, leaving(draft) | {shard for model in models for shard in _change(draft, model, replicas).freed})
    found = [_decide(draft, model, replicas, room) for model in models]
    return tuple(decision for decision in found if decision.replicas)


def decide(draft: Draft, name: str) -> Decision:
    """How the model C{name} would be brought to the profile in force."""
    model = draft.world.catalog.get(name)
    assert model is not None
    return _decide(draft, model, group(draft.shards.values()), ledger(draft, leaving(draft)))


@frozen
class _Change:
    """The replicas that take part.

    @ivar old: those that are replaced, the first of them first; C{staying} is how many serve while one of them does not.
    @ivar freed: the shards of those that only leave, since fewer are wanted.
    """

    model: Model
    old: tuple[Replica, ...]
    staying: int
    freed: frozenset[str]


def _change(draft: Draft, model: Model, replicas: Mapping[str, list[Replica]]) -> _Change:
    here = [one for one in replicas.get(model.name, []) if not one.leaving and not given_up(one, draft.nodes)]
    record = draft.rollouts.get(model.name)
    in_force = model if record is None or record.held else record.in_force(model)
    good = [one for one in here if one.generation == in_force.generation and not why_anew(draft, in_force, one)]
    old = worst_first(one for one in here if one.serving and one not in good)
    extra = max(0, len(old) + len(good) - wanted(model, draft.world.demand))
    going, stay = old[:extra], old[extra:]
    serving = len(stay) + sum(one.serving for one in good) - 1
    return _Change(in_force, tuple(stay), serving, frozenset(shard.shard for one in going for shard in one.shards))


def _decide(draft: Draft, model: Model, replicas: Mapping[str, list[Replica]], room: Ledger) -> Decision:
    change = _change(draft, model, replicas)
    if not change.old and (text := outlook(draft, change.model, replicas.get(model.name, []))):
        return Decision(model.name, Way.LOAD, len(replicas[model.name]), text)
    if not change.old:
        return Decision(model.name, Way.START, 0, "nothing of it serves that has to be replaced")
    record, count = draft.rollouts.get(model.name), _count(change.old)
    if record is not None and record.held:
        text = f"{count} kept as they are, since the rollout is paused: llmgw rollout {model.name} --resume"
        return Decision(model.name, Way.HELD, len(change.old), text)
    asked = want(draft, change.model, draft.number(model.name) + 1)
    found = room.place(asked) if model.rollout.strategy != "replace" else Explanation(model.name, 0, ())
    if isinstance(found, Placement):
        where = " and ".join(allocation.node for allocation in found.allocations)
        text = f"{count} replaced one at a time, each successor ready before the old one drains (the first on {where})"
        return Decision(model.name, Way.SURGE, len(change.old), text)
    if any(verdict.checks[0].text == SEARCHING for verdict in found.verdicts):
        text = f"{count} replaced one at a time; where is decided when nodes have been asked for the weights"
        return Decision(model.name, Way.UNKNOWN, len(change.old), text)
    return _without_room(draft, change, asked, found)


def _without_room(draft: Draft, change: _Change, asked: Want, found: Explanation) -> Decision:
    name, surge = change.model.name, change.model.rollout.strategy == "surge"
    why = found.line().partition(": ")[2] if found.looked else "rollout.strategy is replace"
    first, many = change.old[0], len(change.old)
    stuck = next((one for one in change.old[:LOOKED_AT] if not _fits_instead(draft, change, one, asked)), None)
    if stuck is first or surge:
        because = "a successor fits nowhere" if stuck is first else "rollout.strategy is surge and there is no room beside them"
        return Decision(name, Way.HELD, many, f"{_count(change.old)} kept as they are, since {because}: {why}")
    if not change.staying:
        text = f"{first.id} is the only replica that serves and has to stop before its successor starts ({why})"
        return Decision(name, Way.OUTAGE, many, text)
    order = f"an old one stops before its successor starts ({why}), at least {change.staying} serving"
    until = f", until {stuck.id}, in whose place a successor would not fit" if stuck else ""
    return Decision(name, Way.REPLACE, many, f"{_count(change.old)} replaced one at a time{until}: {order}")


def _fits_instead(draft: Draft, change: _Change, old: Replica, asked: Want) -> bool:
    freed = leaving(draft) | change.freed | {shard.shard for shard in old.shards}
    return isinstance(ledger(draft, freed).place(asked), Placement)


def _count(old: Sequence[Replica]) -> str:
    return f"{len(old)} replica{'s' if len(old) > 1 else ''}"
