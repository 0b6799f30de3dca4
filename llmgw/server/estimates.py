"""C{llmgw estimate}: what a replica takes of memory, rank by rank, and what context would fit on each node's devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from attrs import evolve
from twisted.internet.threads import deferToThreadPool

from llmgw.engines.estimates import context_that_fits
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Catalog, Model, Profile
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import IEngineAdapter, IMemoryEstimator
from llmgw.planning.fleetroom import ledger
from llmgw.planning.peaks import peak_of
from llmgw.planning.room import NodeRoom
from llmgw.planning.world import Draft
from llmgw.server.controller import Controller
from llmgw.server.imembers import NodeAway
from llmgw.server.inspection import Inspection
from llmgw.server.operations import Conflict, Unknown

Data = dict[str, Any]


class Estimates:
    """Estimates over the present state."""

    def __init__(self, controller: Controller, inspection: Inspection, reactor: Any) -> None:
        self._reactor = reactor
        self._controller = controller
        self._inspection = inspection

    async def estimate(self, catalog: Catalog, name: str, node: str | None) -> Data:
        """What one replica of a model takes.

        @param node: look at the weights of this node, and at its devices only.
        @raise Unknown: there is no such model or node.
        @raise Conflict: llmgw does not run it, or its engine's adapter cannot reckon.
        @raise NodeAway: the node has no link.
        """
        model = next((one for one in catalog.models if name in (one.name, *one.aliases)), None)
        if model is None:
            raise Unknown(f"the catalog has no model {name}; it has: {', '.join(m.name for m in catalog.models) or 'none'}")
        profile, adapter = self._adapter(model)
        nodes = self._nodes(node)
        where, files = await self._weights(profile, nodes)
        found: Estimate = adapter.estimate(profile, files)
        peak = peak_of(self._controller.truth.shards.values(), model)
        found = found if found.elastic else evolve(found, observed=peak)
        answer = {"model": model.name, "engine": profile.engine, "weights": profile.weights, "node": where, **found.data()}
        answer["seen"] = peak
        rooms = self._rooms(nodes)
        fits = cache(partial(context_that_fits, profile, files, adapter))
        # On a large fleet this takes seconds: as many sizes of free memory as there are nodes.
        pool = self._reactor.getThreadPool()
        answer["nodes"] = await deferToThreadPool(self._reactor, pool, _fitting, rooms, found, profile.parallel.nodes, fits)
        return answer

    def _adapter(self, model: Model) -> tuple[Profile, IMemoryEstimator]:
        if model.profile is None:
            raise Conflict(f"{model.name} has no profile: llmgw does not run it, so there is nothing to estimate")
        adapter: IEngineAdapter | None = self._controller.reckoner.adapter(model.profile.engine)
        if adapter is None or not IMemoryEstimator.providedBy(adapter):
            said = "set resources.device_memory for it" if adapter else "llmgw has no adapter for it"
            raise Conflict(f"{model.name}: nobody can tell what engine {model.profile.engine} takes; {said}")
        return model.profile, IMemoryEstimator(adapter)

    def _nodes(self, node: str | None) -> list[str]:
        present = self._controller.members.present
        if node is None:
            return sorted(present)
        if node not in self._controller.truth.nodes and node not in present:
            known = ", ".join(sorted(self._controller.truth.nodes)) or "none"
            raise Unknown(f"no node is called {node}; known: {known}")
        if node not in present:
            raise NodeAway(f"{node} has no link to this server, so nobody can look there")
        return [node]

    async def _weights(self, profile: Profile, nodes: Sequence[str]) -> tuple[str | None, WeightFiles | None]:
        """Where the weights are and what was found of them; the paths looked at where no node has them."""
        if profile.weights is None:
            return None, None
        weights, known = profile.weights, self._controller.weights.found
        found = self._inspection.known(weights, nodes)
        beside = [lora.weights for lora in profile.loras]
        if found is None or found[1].problem or any(self._inspection.known(one, nodes) is None for one in beside):
            await self._inspection.look((node, one, profile.engine) for node in nodes for one in (weights, *beside))
            found = self._inspection.known(weights, nodes)
        if found:
            loras = [known.get((found[0], one)) or WeightFiles(one, False) for one in beside]
            return found[0], evolve(found[1], loras=tuple(loras))
        return None, next((known[node, weights] for node in nodes if (node, weights) in known), None)

    def _rooms(self, nodes: Sequence[str]) -> list[NodeRoom]:
        draft = Draft(self._controller.world())
        room = ledger(draft)
        return [NodeRoom(room.candidate(name)) for name in nodes if name in room.candidates]


def _fitting(rooms: Sequence[NodeRoom], found: Estimate, nodes: int, fits: Callable[[int], int | None]) -> list[Data]:
    """By node, what is free there for one shard and the context that would fit; None where nobody can tell."""
    return [_on_node(room, found, -(-len(found.ranks) // nodes), fits) for room in rooms]


def _on_node(room: NodeRoom, found: Estimate, each: int, fits: Callable[[int], int | None]) -> Data:
    """The device with the least room of the C{each} best decides; without devices the host's memory does."""
    devices = [_device(one.device.index, one.device.name, one.device.memory_total, one.free) for one in room.devices.values()]
    facts = room.candidate.facts
    total = facts.inventory.memory_total if facts else 0
    sizes = {"empty": [total], "free": [room.host_free]}
    if each:
        sizes = {
            "empty": sorted((one["memory_total"] or 0 for one in devices), reverse=True),
            "free": sorted((one["free"] or 0 for one in devices), reverse=True),
        }
    answer: Data = {"node": room.name, "devices": devices, "host_memory": None if each else total}
    for word, memory in sizes.items():
        enough = len(memory) >= max(1, each)
        answer[f"context_{word}"] = fits(int(memory[max(1, each) - 1] * found.share)) if enough else 0
    return answer


def _device(index: int, name: str, total: int | None, free: int | None) -> Data:
    return {"index": index, "name": name, "memory_total": total, "free": free}
