"""A forecast in words and as data: for each model what would start, change, move, stop, be lost or wait, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from llmgw.fleet.model import Model
from llmgw.planning.forecast import Forecast, is_lost
from llmgw.planning.reconcile import explain
from llmgw.planning.replicas import Replica, group, wanted
from llmgw.planning.world import World


@frozen
class Step:
    """Something that would happen, or not.

    @ivar kind: C{start}, C{change}, C{update} (no replica is touched), C{move}, C{stop}, C{lose}, C{wait}, C{remove}, C{leave}.
    @ivar replicas: those it is about, each with where it is or would be: C{(ID, PLACE)}.
    @ivar why: the reason, or what it waits for.
    """

    kind: str
    model: str
    text: str
    replicas: tuple[tuple[str, str], ...] = ()
    why: str = ""


def steps(found: Forecast, facts: Mapping[str, str]) -> list[Step]:
    """The steps of all models that the catalog would have or has, in its order.

    @param facts: by model, which of its keys change and how.
    """
    ways = {decision.model: decision.text for decision in found.decided}
    before, after = group(found.before.shards.values()), group(found.after.shards.values())
    names = [model.name for model in found.after.catalog.models]
    names += [model.name for model in found.before.catalog.models if model.name not in names]
    made: list[Step] = []
    for name in names:
        here = [replica for replica in before.get(name, []) if not replica.leaving]
        then = [replica for replica in after.get(name, []) if not replica.leaving]
        model = found.after.catalog.get(name)
        if model is None:
            made.append(Step("remove", name, f"{_count(len(here))} drained", _places(found.before, here)))
        else:
            made += _of_model(found, model, here, then, facts.get(name, ""), ways.get(name, ""))
    return made


def _of_model(found: Forecast, model: Model, here: list[Replica], then: list[Replica], fact: str, way: str) -> Iterator[Step]:
    numbers = {replica.number for replica in then}
    lost = [replica for replica in here if is_lost(found.after, replica.nodes)]
    gone = [replica for replica in here if replica.number not in numbers]
    kept = {replica.number for replica in here}
    new = [replica for replica in then if replica.number not in kept]
    changed = [replica for replica in gone if replica.generation != model.generation or way][: len(new)] if model.profile else []
    if changed:
        fresh, new = new[: len(changed)], new[len(changed) :]
        text = way or f"{_count(len(changed))} replaced one at a time"
        serving = _serving(found, model)
        why = "" if serving and serving in text else serving
        yield _step("change", found, model, f"{fact}: {text}" if fact else text, fresh, why)
    elif fact:
        yield Step("change" if way else "update", model.name, f"{fact}: {way}" if way else fact)
    left = [*lost, *(replica for replica in gone if replica not in changed)]
    moved = list(zip(left, new, strict=False))
    for old, successor in moved:
        why = f"{old.nodes[0]} is lost" if old in lost else found.reasons.get(old.id, "")
        text = f"{old.id} {_place(found.before, old)} -> {_place(found.after, successor)}, as {successor.id}"
        yield Step("move", model.name, f"{text}: {why}" if why else text, _places(found.after, [successor]), why)
    if started := new[len(moved) :]:
        yield _step("start", found, model, _count(len(started)), started)
    for old in left[len(moved) :]:
        kind, why = ("lose", "nothing takes its place") if old in lost else ("stop", found.reasons.get(old.id, ""))
        text = f"{old.id} on {_place(found.before, old)}" + (f": {why}" if why else "")
        yield Step(kind, model.name, text, _places(found.before, [old]), why)
    yield from _waiting(found, model, then)


def _step(kind: str, found: Forecast, model: Model, text: str, replicas: Sequence[Replica], why: str = "") -> Step:
    places = _places(found.after, replicas)
    where = f" ({', '.join(place for _, place in places)})" if places else ""
    return Step(kind, model.name, f"{text}{where}" + (f", {why}" if why else ""), places, why)


def _serving(found: Forecast, model: Model) -> str:
    least = found.least.get(model.name)
    return f"at least {least} serving" if least else "served by nobody on the way" if least == 0 else ""


def _waiting(found: Forecast, model: Model, then: list[Replica]) -> Iterator[Step]:
    """What cannot be placed and what would help, or what the planner has to remark."""
    if model.profile is None:
        return
    pending = explain(found.after, found.outcome, model.name)
    note = found.outcome.notes.get(model.name, "")
    missing = wanted(model, found.after.demand) - sum(not is_lost(found.after, replica.nodes) for replica in then)
    if pending is not None and missing > 0:
        hints = " · ".join(hint.text for hint in pending.hints)
        why = pending.line() + (f". It would fit if: {hints}" if hints else "")
        yield Step("wait", model.name, f"{_count(missing)}: {why}", why=why)
    elif note:
        yield Step("wait", model.name, note, why=note)


def _count(number: int) -> str:
    return f"{number} replica" + ("s" if number != 1 else "")


def _places(world: World, replicas: Iterable[Replica]) -> tuple[tuple[str, str], ...]:
    return tuple((replica.id, _place(world, replica)) for replica in replicas)


def _place(world: World, replica: Replica) -> str:
    """C{n1 gpu 0,1 + n2 gpu 0,1}."""
    given = [shard.allocation for shard in replica.shards if shard.allocation]
    return " + ".join(_on_node(world, allocation.node, allocation.devices) for allocation in given)


def _on_node(world: World, name: str, devices: Sequence[str]) -> str:
    node = world.nodes.get(name)
    known = {device.uuid: device.index for device in node.facts.inventory.devices} if node and node.facts else {}
    indexes = ",".join(str(known.get(uuid, "?")) for uuid in devices)
    return f"{name} gpu {indexes}" if indexes else name


def searching(found: Forecast) -> set[tuple[str, str, str]]:
    """Which nodes nobody has asked yet for the weights that keep a replica waiting and its adapters: (node, weights, engine)."""
    return {
        (verdict.node, weights, pending.want.profile.engine)
        for pending in found.outcome.pending.values()
        for verdict in pending.explanation.verdicts
        if pending.want.profile.weights and verdict.checks[0].name == "weights"
        for weights in (pending.want.profile.weights, *(lora.weights for lora in pending.want.profile.loras))
    }
