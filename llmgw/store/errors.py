"""What can go wrong with a store, as values with a sentence."""

from __future__ import annotations

from llmgw.errors import LlmgwError


class StoreError(LlmgwError):
    """The store did not do what was asked; the text says which store, why, and what to do.

    @ivar code: a stable word: C{locked}, C{full}, C{unreachable}, C{timeout}, C{busy}, C{foreign}, C{damaged}, C{newer},
        C{conflict}, C{closed}, C{failed}.
    """

    def __init__(self, text: str, code: str = "failed") -> None:
        super().__init__(text)
        self.code = code


class NotLeader(StoreError):
    """A leader's write was refused, and nothing changed: the leadership it was made under is over.

    @ivar epoch: the epoch of the leadership in force, as far as the store knows.
    @ivar leader: who holds it.
    """

    def __init__(self, text: str, epoch: int = 0, leader: str = "") -> None:
        super().__init__(text, "not_leader")
        self.epoch = epoch
        self.leader = leader
