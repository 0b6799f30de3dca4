"""How a changed profile would come into force, decided before anything happens: beside the old replicas, in their place, or not
at all, each with its reason. Tried by placing, as the rollout itself will do it.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from llmgw.fleet.model import Model
from llmgw.planning.checks import SEARCHING
from llmgw.planning.explanation import Explanation
from llmgw.planning.fleetroom import leaving, ledger, want
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.replicas import Replica, given_up, group, worst_first
from llmgw.planning.world import Draft


class Way(StrEnum):
    """How replicas are changed. C{START}: nothing serves yet; C{OUTAGE}: the only one that serves has to stop first;
    C{HELD}: the new one fits nowhere, so nothing changes; C{UNKNOWN}: nodes have not been asked for the weights yet."""

    START = "start"
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


def decide(draft: Draft, model: Model, room: Ledger | None = None) -> Decision:
    """How C{model}, as the catalog shall have it, would be brought into force.

    @param room: what is free, or will be when what leaves has left; give the same one for all models of a catalog, so that no
        room is counted twice.
    """
    room = ledger(draft, leaving(draft)) if room is None else room
    old = [replica for replica in group(draft.shards.values()).get(model.name, []) if _replaced(draft, model, replica)]
    if not old:
        return Decision(model.name, Way.START, 0, "nothing of it serves, so it is started with the new profile")
    asked = want(draft, model, draft.number(model.name) + 1)
    found = room.place(asked) if model.rollout.strategy != "replace" else Explanation(model.name, 0, ())
    if isinstance(found, Placement):
        where = " and ".join(allocation.node for allocation in found.allocations)
        text = f"{_count(old)} replaced one at a time, each successor ready before the old one drains (the first on {where})"
        return Decision(model.name, Way.SURGE, len(old), text)
    if any(verdict.checks[0].text == SEARCHING for verdict in found.verdicts):
        text = f"{_count(old)} replaced one at a time; where is decided when nodes have been asked for the weights"
        return Decision(model.name, Way.UNKNOWN, len(old), text)
    return _without_room(draft, model, old, found)


def _without_room(draft: Draft, model: Model, old: list[Replica], found: Explanation) -> Decision:
    why = found.line().partition(": ")[2] if found.looked else "rollout.strategy is replace"
    first = worst_first(old)[0]
    freed = leaving(draft) | {shard.shard for shard in first.shards}
    fits = isinstance(ledger(draft, freed).place(want(draft, model, draft.number(model.name) + 1)), Placement)
    replicas = group(draft.shards.values())[model.name]
    staying = sum(replica.serving and not replica.leaving for replica in replicas) - 1
    if not fits or model.rollout.strategy == "surge":
        surge = "rollout.strategy is surge and there is no room beside them" if fits else "a successor fits nowhere"
        return Decision(model.name, Way.HELD, len(old), f"{_count(old)} kept as they are, since {surge}: {why}")
    if not staying:
        text = f"{first.id} is the only replica that serves and has to stop before its successor starts ({why})"
        return Decision(model.name, Way.OUTAGE, len(old), text)
    order = f"an old one stops before its successor starts ({why}), at least {staying} serving"
    return Decision(model.name, Way.REPLACE, len(old), f"{_count(old)} replaced one at a time, {order}")


def _replaced(draft: Draft, model: Model, replica: Replica) -> bool:
    changed = replica.generation != model.generation
    return changed and replica.serving and not replica.leaving and not given_up(replica, draft.nodes)


def _count(old: list[Replica]) -> str:
    return f"{len(old)} replica{'s' if len(old) > 1 else ''}"
