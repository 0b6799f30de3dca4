"""Leaving alone what is broken, and not making an outage worse by retrying.

L{Breaker} has no state without a way out: it is closed (C{blocked_until} is 0), or it says until when nothing should be
tried. After that the next request is the probe, which pushes C{blocked_until} forward for as long as a probe may take, so
that it stays the only one; an outcome that says nothing (a 4xx, a client that left) lets the next request probe.

Each worker keeps its own: an endpoint that is down costs every worker its few failures and then one probe per period.
"""

from __future__ import annotations

from llmgw.router.scoreboard import LIVE, RETRYING, Scoreboard

FAILURES = 5
OPEN_FOR = 30.0


class Breaker:
    """One endpoint's. Failures are transport errors and 5xx other than 503; 4xx, 429, 503 and client cancels are neutral.

    @ivar blocked_until: 0 while closed, else the monotonic time from which one probe may go through.
    @ivar failures: consecutive ones.
    @ivar opened: how often it has opened.
    """

    __slots__ = ("blocked_until", "failures", "opened")

    def __init__(self) -> None:
        self.blocked_until = 0.0
        self.failures = 0
        self.opened = 0

    @property
    def state(self) -> str:
        """C{closed}, or C{open} (also while a probe is under way)."""
        return "open" if self.blocked_until else "closed"

    def trying(self, now: float) -> None:
        """A request is about to be sent there. Call it if C{blocked_until} is not 0: the request is the probe."""
        if self.blocked_until:
            self.blocked_until = now + OPEN_FOR

    def succeeded(self) -> bool:
        """An answer came that shows the endpoint works. Returns whether that closed the breaker."""
        self.failures = 0
        if not self.blocked_until:
            return False
        self.blocked_until = 0.0
        return True

    def failed(self, now: float) -> bool:
        """A transport error or a 5xx. Returns whether that opened the breaker (or opened it again)."""
        self.failures += 1
        if self.failures < FAILURES and not self.blocked_until:
            return False
        self.opened += not self.blocked_until
        self.blocked_until = now + OPEN_FOR
        return True

    def neutral(self, now: float) -> None:
        """The request ended in a way that says nothing about the endpoint; if it was the probe, the next one is."""
        if self.blocked_until:
            self.blocked_until = now


def is_failure(status: int) -> bool:
    """Whether an answer's status counts against the endpoint: 503 is back-pressure, not sickness."""
    return status >= 500 and status != 503


class RetryBudget:
    """At most a fifth of the live requests may be retries, with a few always allowed.

    One for all requests of all workers, so that an outage of many endpoints is not multiplied by retrying each request, nor the
    few that are always allowed by the number of workers. The relay counts live requests itself, in the scoreboard's C{LIVE}.
    """

    __slots__ = ("_board",)

    def __init__(self, board: Scoreboard) -> None:
        self._board = board

    def take(self) -> bool:
        """Whether one more request may be retried now; if so, L{give} must follow when that request ends."""
        board = self._board
        board.mine[RETRYING] += 1
        board.fence()
        if (board.crowd(RETRYING) - 1) * 5 < max(board.crowd(LIVE), 15):
            return True
        board.mine[RETRYING] -= 1
        return False

    def give(self) -> None:
        """A retried request has ended."""
        self._board.mine[RETRYING] -= 1
