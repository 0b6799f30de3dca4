"""Large things being read, a few milliseconds at a time, while everybody else's requests go on: bodies, and the routing table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

from twisted.logger import Logger

from llmgw.router.errors import Refusal
from llmgw.router.request import internal_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.router.body import Body
    from llmgw.router.http import ServerConnection, Work
    from llmgw.router.request import Request

T = TypeVar("T")
TURN = 0.002
log = Logger()


class Reading:
    """The work of a connection until its request's body is known (L{llmgw.router.http.Work}).

    @ivar steps: what reads it (L{llmgw.router.body.skim_json}, L{llmgw.router.form.skim_form}).
    @ivar then: what serves the request when it is.
    """

    __slots__ = ("_connection", "_loop", "_over", "_request", "_steps", "_then")

    def __init__(
        self,
        connection: ServerConnection,
        request: Request,
        steps: Generator[None, None, Body],
        then: Callable[[Body], Work | None],
    ) -> None:
        self._connection, self._request, self._steps, self._then = connection, request, steps, then
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._over:
            return
        body = None
        until = time.monotonic() + TURN
        try:
            while time.monotonic() < until:
                next(self._steps)
        except StopIteration as end:
            body = end.value
        except Refusal as refusal:
            self._end()
            self._connection.refuse(self._request, refusal)
            return
        except Exception:
            log.failure("A body could not be read: {path}", path=repr(self._request.path))
            self._end()
            self._connection.refuse(self._request, internal_error())
            return
        if body is None:
            self._loop.call_soon(self._turn)
        else:
            self._end()
            self._connection.serve(self._request, self._then, body)

    def _end(self) -> None:
        self._over = True
        self._connection.work = None

    def client_gone(self) -> None:
        """Nobody waits for it any more."""
        self._over = True

    def expired(self, now: float) -> None:
        """It has no deadline: it never waits."""

    def cut(self) -> None:
        """The worker exits."""
        self._end()
        self._connection.refuse(self._request, leaving())

    def pause(self) -> None:
        """Nothing is written."""

    def resume(self) -> None:
        """Nothing was paused."""


async def in_turns(steps: Generator[None, None, T]) -> T:
    """What C{steps} return, run for a C{TURN} at a time, between which the loop serves everybody."""
    until = time.monotonic() + TURN
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
        if time.monotonic() >= until:
            await asyncio.sleep(0)
            until = time.monotonic() + TURN


def leaving() -> Refusal:
    """503, for what the end of the worker cuts off."""
    return Refusal(503, "router_leaving", "This router is being stopped. Send the request again.", retry_after=1)
