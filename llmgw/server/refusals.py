"""An event when a model cannot be placed, when the reason is another one, and when it waits no more.

A reason is another one when other nodes fail for other things, not when there are some bytes more or less; of one that goes to
and fro only one event a minute is written. While there is no node, or weights are still looked for, nothing has been refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from llmgw.fleet.events import FleetEvent
from llmgw.planning.explanation import Explanation
from llmgw.planning.rollout import Pending

EVERY = 60.0


@frozen
class _Said:
    why: object
    at: float


class Refusals:
    """What has been written of which model, in this leadership."""

    def __init__(self, steady: Callable[[], float], wall: Callable[[], float]) -> None:
        self._steady = steady
        self._wall = wall
        self._said: dict[str, _Said] = {}

    def news(self, pending: Mapping[str, Pending], epoch: int) -> list[FleetEvent]:
        """What is to be written now."""
        told = [(model, f"{model} cannot be placed: {found.explanation.line()}") for model, found in self._fresh(pending).items()]
        told += [(model, f"{model} waits for a place no more") for model in self._said if model not in pending]
        return [FleetEvent(self._wall(), "refused", model, text, epoch=epoch) for model, text in told]

    def said(self, pending: Mapping[str, Pending]) -> None:
        """It is written."""
        fresh = {model: _Said(_why(found.explanation), self._steady()) for model, found in self._fresh(pending).items()}
        self._said = {model: said for model, said in self._said.items() if model in pending} | fresh

    def _fresh(self, pending: Mapping[str, Pending]) -> dict[str, Pending]:
        return {model: found for model, found in pending.items() if self._is_news(model, found)}

    def _is_news(self, model: str, found: Pending) -> bool:
        said = self._said.get(model)
        if found.searching or not found.explanation.looked:
            return False
        return said is None or (said.why != _why(found.explanation) and self._steady() - said.at >= EVERY)


def _why(explanation: Explanation) -> object:
    return explanation.note, [(text, len(checks)) for text, checks in explanation.counts().items()]
