"""Downloads that an operator orders: which nodes get them, what each answers, and how they are shown.

Without a node named, all those get the weights that could run the model but for room and weights: an order for a fleet brings
it to where it may be placed, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict
from twisted.internet.defer import Deferred, gatherResults

from llmgw.errors import LlmgwError
from llmgw.fleet.fetch import Fetch, FetchState, same_weights
from llmgw.fleet.model import Profile
from llmgw.fleet.plain import from_plain
from llmgw.planning.checks import Want, failed
from llmgw.planning.fleetroom import ledger
from llmgw.planning.room import NodeRoom
from llmgw.planning.world import Draft
from llmgw.server.controller import Controller
from llmgw.server.operations import OPERATOR, Conflict, Unknown
from llmgw.wire.messages import FetchWeights

Data = dict[str, Any]
AT_ONCE = 16
ANSWER = 30.0
# What keeps a node from ever running the model; what it lacks only now (room, the weights themselves) does not count.
LASTING = ("state", "cordoned", "draining", "quarantined", "labels", "fabric", "installation")


def fetch_data(fetch: Fetch) -> Data:
    """One download for people and programs."""
    return asdict(fetch) | {"text": fetch.text}


class Fetches:
    """Orders to download."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def order(self, name: str, node: str | None, cancel: bool, by: str = OPERATOR) -> list[Data]:
        """Begin on the nodes in question, or end what is under way there; one answer per node.

        @raise Unknown: no such model or node.
        @raise Conflict: the weights cannot be downloaded, or no node is in question.
        """
        self._controller.commits.must_lead()
        names, profile = self._weights(name)
        nodes = self._loading(names, node) if cancel else self._wanting(name, profile, node)
        await self._noted(name, names, nodes, cancel, by)
        asked = [(one, weights) for one in nodes for weights in names]
        rows: list[Data] = []
        for start in range(0, len(asked), AT_ONCE):
            some = [Deferred.fromCoroutine(self._ask(*one, cancel)) for one in asked[start : start + AT_ONCE]]
            rows += await gatherResults(some, consumeErrors=True)
        return rows

    def _weights(self, name: str) -> tuple[list[str], Profile]:
        """What of the model and its adapters comes from the hub."""
        catalog = self._controller.truth.catalog
        model = next((one for one in catalog.models if name == one.name or name in one.aliases), None)
        if model is None:
            raise Unknown(f"the catalog has no model {name}; it has: {', '.join(m.name for m in catalog.models) or 'none'}")
        if model.profile is None or model.profile.weights is None:
            raise Conflict(f"{name} has no weights that llmgw could download")
        every = [model.profile.weights, *(lora.weights for lora in model.profile.loras)]
        found = [weights for weights in every if weights.startswith("hf:")]
        if not found:
            which = ", ".join(every)
            raise Conflict(f"the weights of {name} are {which}, a path: only hf:ORG/NAME can be downloaded, copy these there")
        return list(dict.fromkeys(found)), model.profile

    def _wanting(self, name: str, profile: Profile, node: str | None) -> list[str]:
        if node is not None:
            self._must_be_present(node)
            return [node]
        draft, wanted = Draft(self._controller.world()), Want(f"{name}/0", name, profile)
        why: list[str] = []
        found = []
        for candidate in ledger(draft).candidates.values():
            checks = [check for check in failed(NodeRoom(candidate), wanted) if check.name in LASTING]
            why += [f"{candidate.name}: {checks[0].text}"] if checks else []
            found += [] if checks else [candidate.name]
        if not found:
            raise Conflict(f"no node could run {name}: {'; '.join(why[:8]) or 'none has registered yet'}. Name one with --node")
        return sorted(found)

    def _must_be_present(self, node: str) -> None:
        members, known = self._controller.members, self._controller.truth.nodes
        if node not in known:
            raise Unknown(f"no node is called {node}; known: {', '.join(sorted(known)) or 'none'}")
        if node not in members.present:
            raise Conflict(f"{node} has no link now")

    def _loading(self, names: Sequence[str], node: str | None) -> list[str]:
        """Where they are being downloaded."""
        wanted = set(map(same_weights, names))
        found = [
            name
            for name, here in sorted(self._controller.members.present.items())
            if node in (None, name)
            and any(same_weights(fetch.weights) in wanted and fetch.state.active for fetch in here.fetches)
        ]
        if node is not None and not found:
            self._must_be_present(node)
            return [node]
        if not found:
            raise Conflict(f"{', '.join(names)}: being downloaded on no node")
        return found

    async def _noted(self, name: str, names: Sequence[str], nodes: Sequence[str], cancel: bool, by: str) -> None:
        draft = Draft(self._controller.world())
        word = "download cancelled" if cancel else "download ordered"
        for node in nodes:
            draft.say("fetch", name, f"{', '.join(names)} on {node}: {word} by {by}", node)
        await self._controller.change(lambda: draft.events)

    async def _ask(self, node: str, weights: str, cancel: bool) -> Data:
        """What one node says; that it does not answer is its answer, so that others are not held up."""
        port, leadership = self._controller.emission.port, self._controller.leadership
        if port is None:
            return _silent(node, "it has no link now")
        operation = f"fetch:{leadership.epoch}:{self._controller.clocks.steady()}:{weights}"
        message = FetchWeights(operation, leadership.epoch, leadership.leader, weights, cancel)
        try:
            done = await port.ask(node, message, ANSWER)
            if not done.ok:
                return _silent(node, str(done.result.get("text") or done.error), done.error)
            fetch = from_plain(done.result.get("fetch"), Fetch)
        except (LlmgwError, ValueError) as error:
            return _silent(node, str(error))
        return fetch_data(fetch) | {"node": node}


def _silent(node: str, text: str, error: str = "no_answer") -> Data:
    return {"node": node, "state": FetchState.FAILED, "error": error, "reason": text, "text": text}
