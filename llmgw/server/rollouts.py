"""C{llmgw rollout}: how far the change of a model to its new profile is, and what operators order about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from twisted.internet.defer import Deferred

from llmgw.fleet.model import Model
from llmgw.fleet.records import RolloutRecord, RolloutState
from llmgw.planning.profiles import Senseless, paused, resumed, undone
from llmgw.planning.replicas import Replica, group, wanted
from llmgw.planning.strategy import decide
from llmgw.planning.world import Draft
from llmgw.server.controller import Controller
from llmgw.server.operations import OPERATOR, Conflict, Unknown
from llmgw.server.truth import differences
from llmgw.store.records import Change

Data = dict[str, Any]
ACTIONS = ("pause", "resume", "undo")


class Rollouts:
    """Every change is one of the model's record; the next plan follows it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def order(self, name: str, action: str, allow_outage: bool = False, by: str = OPERATOR) -> Deferred[str]:
        """Pause, resume or undo.

        @return: a sentence on what happens now.
        @raise Unknown: the catalog runs no such model.
        @raise Conflict: it makes no sense as things stand.
        """
        return Deferred.fromCoroutine(self._order(name, action, allow_outage, by))

    async def _order(self, name: str, action: str, outage: bool, by: str) -> str:
        said: list[str] = []

        def make() -> Iterable[Change]:
            controller = self._controller
            model = self._model(name)
            draft = Draft(controller.world())
            try:
                record = _ordered(action, draft.rollouts.get(model.name), model.name, draft.world.now, outage)
            except Senseless as error:
                raise Conflict(str(error)) from None
            draft.put_rollout(record)
            draft.say("rollout", model.name, f"{model.name}: rollout {_DONE[action]} by {by}", after=record.state)
            said.append(f"{model.name}: {_DONE[action]}; {self._next(draft, model.name, record)}")
            return differences(controller.truth, controller.truth.nodes, draft.shards, draft.events, draft.rollouts)

        await self._controller.change(make)
        return said[0]

    def _next(self, draft: Draft, name: str, record: RolloutRecord) -> str:
        if record.held:
            return f"no further replica is changed before: llmgw rollout {name} --resume"
        return decide(draft, name).text

    def _model(self, name: str) -> Model:
        model = self._controller.truth.catalog.get(name)
        if model is None or model.profile is None:
            known = ", ".join(one.name for one in self._controller.truth.catalog.models if one.profile) or "none"
            raise Unknown(f"the catalog runs no model {name}; it runs: {known}")
        return model

    def show(self, name: str) -> Data:
        """How far it is, for people and programs.

        @raise Unknown: the catalog runs no such model.
        """
        controller = self._controller
        model = self._model(name)
        replicas = [one for one in group(controller.truth.shards.values()).get(name, []) if not one.leaving]
        data = rollout_data(controller, model, replicas) or {"state": "none", "failures": []}
        note = controller.outcome.notes.get(name, "") if controller.outcome else ""
        return data | {
            "model": name,
            "text": f"{name}: {_standing(data, model)}",
            "lines": [_line(one, data) for one in replicas] + ([f"  {note}"] if note else []),
            "note": note,
        }


def _ordered(action: str, record: RolloutRecord | None, name: str, now: float, outage: bool) -> RolloutRecord:
    orders: dict[str, Callable[[], RolloutRecord]] = {
        "pause": lambda: paused(record, name),
        "resume": lambda: resumed(record, name, now, outage),
        "undo": lambda: undone(record, name, now, outage),
    }
    return orders[action]()


# Their reason says what they are.
_SAYING = (RolloutState.ROLLED_BACK, RolloutState.UNDONE)
_DONE = {"pause": "paused", "resume": "resumed", "undo": "undone"}


def rollout_data(controller: Controller, model: Model, replicas: list[Replica]) -> Data | None:
    """A model's rollout as C{status --json} shows it, None before anything of it was ready.

    C{changed} counts the ready replicas of the profile that is in force, C{wanted} how many there shall be, C{serving_before}
    those that serve with another one meanwhile.
    """
    record = controller.truth.rollouts.get(model.name)
    if record is None:
        return None
    generation = in_force(controller, model).generation
    return {
        "state": "paused" if record.held else str(record.state),
        "target": record.target.generation(model.name),
        "back": record.back.generation(model.name) if record.back else None,
        "generation": generation,
        "since": record.since,
        "reason": record.reason,
        "failures": list(record.failures),
        "budget": model.rollout.failures,
        "changed": sum(one.ready and one.generation == generation for one in replicas),
        "serving_before": sum(one.ready and one.generation != generation for one in replicas),
        "wanted": wanted(model, controller.demand.wanted),
    }


def in_force(controller: Controller, model: Model) -> Model:
    """The model with the profile that its replicas shall run now."""
    record = controller.truth.rollouts.get(model.name)
    return record.in_force(model) if record else model


def _standing(data: Data, model: Model) -> str:
    state = data["state"]
    if state == "none":
        return "nothing of it has been ready yet, so there is nothing to go back to"
    failed = f"; {len(data['failures'])} of {data['budget']} failed attempts used" if data["failures"] else ""
    progress = f"{data['changed']} of {data['wanted']} replicas run profile {data['generation']}"
    if state == RolloutState.RUNNING:
        count = data["serving_before"]
        before = f"; {count} serve{'s' * (count == 1)} with {data['back']}, the one before" if data["back"] else ""
        return f"running: {progress}{before}{failed}"
    if state == "paused":
        return f"paused, between profiles {data['back']} and {data['target']}{failed}; go on: llmgw rollout {model.name} --resume"
    return data["reason"] if state in _SAYING else f"{state}: {data['reason'] or progress}"


def _line(replica: Replica, data: Data) -> str:
    shard = next((shard for shard in replica.shards if shard.state is replica.state), replica.shards[0])
    reason = f"  {shard.reason}" if shard.reason and not replica.ready else ""
    return f"  {replica.id}  {'+'.join(replica.nodes)}  profile {replica.generation}  {replica.state}{reason}"
