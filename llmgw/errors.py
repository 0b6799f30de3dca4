"""Errors are values: each carries its data, and its text is what an operator needs.

Everything llmgw raises on purpose descends from L{LlmgwError}, so one C{except} at a rim can tell
what we expected (logged in one line) from what we did not (logged with its traceback).
"""

from __future__ import annotations

from attrs import frozen


class LlmgwError(Exception):
    """Something llmgw expected to be possible went wrong; the text says what, to what, why, what to do."""


@frozen
class Problem:
    """One thing wrong with a configuration or a profile.

    @ivar text: what was found and what is allowed, one line, no full stop needed.
    @ivar where: C{FILE:LINE} where a file is behind it, else the key's path (C{models.smol.context}), else empty.
    @ivar code: a short stable name for programs (C{unknown_key}, C{heads_not_divisible}).
    """

    text: str
    where: str = ""
    code: str = "invalid"

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class Invalid(LlmgwError):
    """A configuration or a profile cannot be used; C{problems} lists every reason at once."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
