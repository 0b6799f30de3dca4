"""Weights that somebody wants to know of now: asked of nodes at once and waited for, unlike placement's own unhurried search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from twisted.internet.defer import Deferred, DeferredList

from llmgw.fleet.shard import WeightFiles
from llmgw.server.controller import Controller


class Inspection:
    """Asks nodes for weights; what they say is known to placement, too."""

    AT_ONCE = 16
    MOST = 256

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def look(self, wanted: Iterable[tuple[str, str, str]]) -> None:
        """Ask each C{(NODE, WEIGHTS, ENGINE)} that has a link, at most L{MOST}; returns when all have answered or given up."""
        present = self._controller.members.present
        asked = list(islice((one for one in wanted if one[0] in present), self.MOST))
        for start in range(0, len(asked), self.AT_ONCE):
            waiting = [Deferred.fromCoroutine(self._ask(*one)) for one in asked[start : start + self.AT_ONCE]]
            await DeferredList(waiting, fireOnOneErrback=True, consumeErrors=True)

    async def _ask(self, node: str, weights: str, engine: str) -> None:
        port, leadership = self._controller.emission.port, self._controller.leadership
        if port is not None and leadership.may_act():
            await self._controller.weights.ask(port, node, weights, engine, leadership.epoch, leadership.leader)

    def known(self, weights: str, nodes: Sequence[str]) -> tuple[str, WeightFiles] | None:
        """The first of these nodes that has the weights whole, else in any state, and what was found there."""
        known = ((node, self._controller.weights.found.get((node, weights))) for node in nodes)
        found = [(node, files) for node, files in known if files is not None and files.found]
        return next((one for one in found if not one[1].problem), next(iter(found), None))
