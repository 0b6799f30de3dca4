"""What happens to this server itself: an event, if it leads, and for a while a remark in its status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.errors import LlmgwError
from llmgw.fleet.events import FleetEvent
from llmgw.interfaces import ILeadership
from llmgw.server.commits import Commits

if TYPE_CHECKING:
    from llmgw.server.controller import Clocks

LASTING = 600.0


class Notes:
    """C{name} is the server's."""

    log = Logger()

    def __init__(self, name: str, commits: Commits, leadership: ILeadership, clocks: Clocks) -> None:
        self._name, self._commits, self._leadership, self._clocks = name, commits, leadership, clocks
        self._at: dict[str, float] = {}

    def add(self, kind: str, text: str) -> None:
        """It has happened.

        @param kind: a word for programs, as of events.
        """
        self._at = {said: self._at[said] for said in self.recent()}
        self._at[text] = self._clocks.steady()
        if self._commits.open and self._leadership.may_act():
            event = FleetEvent(self._clocks.wall(), kind, self._name, text, epoch=self._leadership.epoch)
            self._commits.change(lambda: [event]).addErrback(self._not_taken, text)

    def _not_taken(self, failure: Failure, text: str) -> None:
        failure.trap(LlmgwError)
        self.log.warn("this is no event, since {error}: {text}", error=str(failure.value), text=text)

    def recent(self) -> list[str]:
        """What has happened in the last L{LASTING} seconds."""
        return [text for text, at in self._at.items() if self._clocks.steady() - at < LASTING]
