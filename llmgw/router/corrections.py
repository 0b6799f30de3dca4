"""What engines report of their load, as a correction of our own counts: requests that did not come through these workers.

A report is seconds old when it arrives, so it differs from our count even where nobody else uses the engine. Therefore it is held
against the most that we had there since the report before, and only what two reports in a row agree on is believed. That is
written into the server's column of the scoreboard, where every worker adds it to what it sees when it chooses.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import define

from llmgw.router.scoreboard import ELSEWHERE, Scoreboard


@define
class _Seen:
    """C{most}: our highest count since the last report, C{at}; C{surplus}: by how much that report exceeded it."""

    at: float
    most: int
    surplus: int = 0


class Corrections:
    """The server's; one for all endpoints. A row is an endpoint's in the scoreboard.

    @cvar APART: seconds. Agents look at their engines every 5 seconds, so what they report sooner after a report than this may
        be what they saw before.
    """

    APART = 4.5

    def __init__(self, board: Scoreboard) -> None:
        self._board = board
        self._seen: dict[int, _Seen] = {}
        self._routed: set[int] = set()

    def look(self) -> None:
        """Remember the most that was in flight; to be called once a second or so."""
        for row, seen in self._seen.items():
            seen.most = max(seen.most, self._board.total(row))

    def report(self, row: int, requests: int, now: float) -> None:
        """An engine says how many requests it has, running and waiting.

        @param now: seconds on a clock that only grows.
        """
        ours = self._board.total(row)
        before = self._seen.get(row)
        if before is None:
            self._seen[row] = _Seen(now, ours)
            return
        if now - before.at < self.APART:
            return
        surplus = max(0, requests - max(ours, before.most))
        self._seen[row] = _Seen(now, ours, surplus)
        self._board.own[row + ELSEWHERE] = min(surplus, before.surplus)

    def forget(self, row: int) -> None:
        """The engine is gone, or says nothing any more."""
        self._seen.pop(row, None)
        self._board.own[row + ELSEWHERE] = 0

    def route(self, rows: Collection[int]) -> None:
        """These are the endpoints of today. What an earlier server believed of one is not believed any more."""
        for row in self._routed ^ set(rows):
            self.forget(row)
        self._routed = set(rows)
