"""A request on its way to an endpoint: it takes a place, waits for one in line, or goes over to another model.

What may surprise: a model whose endpoints have all failed is answered for by its fallbacks, as one that has none. That is found
out where a place is taken, and again when the last endpoint has not accepted the connection. The model is not forgotten: when its
endpoint is due for a probe (router/breaker.py) the next request goes there, and to the fallback if that fails.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llmgw.router.errors import Refusal
from llmgw.router.instead import nothing, turned_out
from llmgw.router.limits import UNLIMITED, Grant
from llmgw.router.prefixes import NO_HINT, Hint
from llmgw.router.scoreboard import LIVE

if TYPE_CHECKING:
    from llmgw.router.admission import Waiter
    from llmgw.router.body import Body
    from llmgw.router.door import Door
    from llmgw.router.http import ServerConnection
    from llmgw.router.request import Request
    from llmgw.router.routes import Caller, Served
    from llmgw.router.upstream import Upstream

SETTLE = 0.3
QUEUED = "queued"
_monotonic = time.monotonic


class Seeker:
    """A request until it has a place at an endpoint; what follows is the subclass's (L{llmgw.router.relay.Exchange}).

    @ivar served: the model that answers: the one that was C{asked} for, or, if it C{fell_back}, one of its fallbacks.
    @ivar why: why this endpoint (see router/choose.py).
    @ivar waited: for how many seconds it was in line.
    @ivar reason: the code of the error that it was answered with, or its stream ended with; empty if it was none of ours;
        C{engine_error} if the engine told an error within its stream.
    """

    __slots__ = (
        "_door", "_fresh", "_grant", "_hint", "_lined", "_passed", "_tried", "_waiter", "asked", "body", "caller", "client",
        "fell_back", "reason", "request", "served", "state", "upstream", "waited", "why",
    )  # fmt: skip

    def __init__(
        self, door: Door, client: ServerConnection, request: Request, asked: Served, caller: Caller | None, body: Body
    ) -> None:
        self._door, self.client, self.request = door, client, request
        self.served = self.asked = asked
        self.caller, self.body = caller, body
        self.upstream: Upstream | None = None
        self.state = QUEUED
        self.why = self.reason = ""
        self.waited = self._lined = 0.0
        self.fell_back = self._fresh = False
        self._waiter: Waiter | None = None
        self._grant: Grant = UNLIMITED
        self._hint: Hint = NO_HINT
        self._tried: list[Upstream] = []
        self._passed: tuple[str, ...] = (asked.name,)

    def _connect(self, now: float) -> None:
        """A place is taken at C{upstream}: go there."""
        raise NotImplementedError

    def _finish(self, outcome: str, status: int = 0) -> None:
        """It is over."""
        raise NotImplementedError

    def start(self, grant: Grant) -> None:
        """Send the request to the endpoint that is best for it, now or when it is its turn.

        @raise Refusal: there is no use in waiting.
        """
        door = self._door
        door.board.mine[LIVE] += 1
        self._grant = grant
        try:
            if self.asked.upstreams:
                self._hint = door.hint(self.asked, self.request, self.body)
            else:
                door.asleep(self.asked, self._fall_back())
            if not self.served.upstreams or self.served.line.crowded() or not self._take():
                self._get_in_line()
        except Refusal as refusal:
            self.reason = refusal.code
            self._finish("refused", refusal.status)
            raise

    def _take(self) -> bool:
        """Take a place and go; False if all are taken. @raise Refusal: no place will become free."""
        hint = self._hint
        found, why = self.served.line.take(_monotonic(), hint.held, hint.blocks, hint.session, self._tried)
        if found is None:
            if why == "full" or not self.served.upstreams:
                return False
            if self._fall_back():
                return not self.served.line.crowded() and self._take()
            raise nothing(self.served, why, len(self._tried))
        self._go(found, why)
        return True

    def _fall_back(self) -> bool:
        """Go over to another model, if the one asked for has one that may answer in its place. Returns whether it has."""
        other = self._door.fallback(self.asked, self.caller, self._passed)
        if other is None:
            return False
        if self.upstream is not None:
            self.served.line.give(self.upstream)
            self.upstream = None
        self._passed = (*self._passed, other.name)
        self.served, self._tried, self.fell_back = other, [], True
        self._hint = self._door.hint(other, self.request, self.body)
        return True

    def _go(self, upstream: Any, why: str) -> None:
        now = _monotonic()
        if upstream.breaker.blocked_until:
            upstream.breaker.trying(now)
        if self._hint.hashes and self.served.hints is not None and upstream in self.served.upstreams:
            self.served.hints.sent(self._hint, self.served.upstreams.index(upstream), now)
        self.upstream, self.why, self._fresh = upstream, why, False
        if self._lined:
            self.waited += now - self._lined
            self._lined = 0.0
        self._connect(now)

    def _get_in_line(self) -> None:
        served, line = self.served, self.served.line
        high = self.caller is not None and self.caller.high
        # Who has just been told that a model is ready may be here before the table is.
        patience = self._door.timeouts.queue if served.upstreams or served.config.on_demand else SETTLE
        self._waiter = line.wait(high, patience, self._turn, self._turned_out)
        if self._waiter is None:
            if not served.upstreams:
                raise nothing(served, "none", 0)
            text = f"All replicas of {served.name} are busy and as many requests wait as may."
            raise Refusal(429, "queue_full", text, retry_after=line.retry_after())
        self._lined = _monotonic()
        self._wait(QUEUED, float("inf"), 0.0)

    def _renew(self) -> None:
        """Go by the table in force."""
        served = self._door.routes.models.get(self.served.name)
        if served is not None and served is not self.served:
            self.served, self._hint = served, NO_HINT

    def _turn(self) -> bool:
        self._renew()
        waiter, self._waiter = self._waiter, None
        line = self.served.line
        try:
            if not self._take():
                if self.served.line is line:
                    self._waiter = waiter
                    return False
                self._get_in_line()
        except Refusal as refusal:
            self._refuse("upstream_error", refusal)
        return True

    def _turned_out(self, reason: str) -> None:
        self._waiter = None
        self._refuse(*turned_out(reason, self.served, self._door.timeouts.queue))

    def _wait(self, state: str, seconds: float, now: float) -> None:
        self.state = state
        self.client.grace = seconds
        self.client.deadline = now + seconds

    def _refuse(self, outcome: str, refusal: Refusal) -> None:
        """Answer with an error of ours."""
        self.reason = refusal.code
        self._finish(outcome, refusal.status)
        self.client.refuse(self.request, refusal)
