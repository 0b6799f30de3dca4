"""What engines report of their load, as a correction of our own counts: requests that did not come through these workers.

A report is seconds old when it arrives, so it differs from our count even where nobody else uses the engine. Only what
two reports in a row agree on is believed, and it is written into the server's column of the scoreboard, where every worker
adds it to what it sees.
"""

from __future__ import annotations

from llmgw.router.scoreboard import ELSEWHERE, Scoreboard


class Corrections:
    """The server's; one for all endpoints."""

    def __init__(self, board: Scoreboard) -> None:
        self._board = board
        self._before: dict[int, int] = {}

    def report(self, row: int, requests: int) -> int:
        """An engine says how many requests it has, running and waiting; returns how many of them are believed to be others'."""
        surplus = max(0, requests - self._board.total(row))
        believed = min(surplus, self._before.get(row, 0))
        self._before[row] = surplus
        self._board.own[row + ELSEWHERE] = believed
        return believed

    def forget(self, row: int) -> None:
        """The engine is gone, or says nothing any more."""
        self._before.pop(row, None)
        self._board.own[row + ELSEWHERE] = 0
