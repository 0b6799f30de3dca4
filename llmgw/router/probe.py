"""Probing endpoints that somebody else runs: no agent looks after them, so each worker asks them itself.

Three probes in a row without an answer (any answer but 5xx: even "not found" proves somebody is there) and the endpoint is left
alone like one that failed its requests; one answer and it is used again. A probe that fails while answers are flowing from the
endpoint says nothing: it is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from llmgw.router.request import Field
from llmgw.router.upstream import EngineConnection, Upstream

PERIOD = 5.0
FAILURES = 3


class Probe:
    """One question to one endpoint (L{llmgw.router.upstream.Reader}). C{answered} is None until it is known."""

    def __init__(self, upstream: Upstream) -> None:
        self.moved = 0
        self.answered: bool | None = None
        self._upstream = upstream
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = upstream.connect(self, fresh=True)

    def connected(self, connection: EngineConnection) -> None:
        """Ask for the list of models, the one thing that all of them have."""
        self._task = None
        self._connection = connection
        connection.send(self, self, self._upstream.probe_head() + b"\r\n")

    def not_connected(self, error: Exception) -> None:
        """Nobody is there."""
        self._task = None
        self.answered = False

    def answer(self, status: int, fields: list[Field], framing: str) -> None:
        """Somebody is."""
        self.answered = status < 500

    def piece(self, data: bytes, done: bool) -> None:
        """What it says does not matter."""
        if done and self._connection is not None:
            connection, self._connection = self._connection, None
            connection.release()

    def lost(self, error: Exception | None) -> None:
        """It hung up."""
        self._connection = None
        self.answered = bool(self.answered)

    def end(self) -> None:
        """Wait no longer."""
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.abort()


class Prober:
    """Asks all static endpoints. C{round} is to be called every L{PERIOD} seconds; answers are judged in the next one."""

    def __init__(self) -> None:
        self._probes: dict[str, Probe] = {}
        self._failures: dict[str, int] = {}

    def round(self, upstreams: Iterable[Upstream], now: float) -> list[tuple[Upstream, str]]:
        """Judge the probes of the round before and begin new ones.

        @return: endpoints whose breaker changed, with C{open} or C{closed}.
        """
        static = [upstream for upstream in upstreams if upstream.config.static]
        changed = [(upstream, to) for upstream in static if (to := self._judge(upstream, now))]
        for probe in self._probes.values():
            probe.end()
        known = {upstream.id for upstream in static}
        self._failures = {id: count for id, count in self._failures.items() if id in known}
        self._probes = {upstream.id: Probe(upstream) for upstream in static}
        return changed

    def _judge(self, upstream: Upstream, now: float) -> str:
        probe = self._probes.get(upstream.id)
        if probe is None:
            return ""
        if probe.answered:
            self._failures.pop(upstream.id, None)
            return "closed" if upstream.breaker.succeeded() else ""
        if upstream.flowing:
            return ""
        count = self._failures[upstream.id] = self._failures.get(upstream.id, 0) + 1
        if count < FAILURES:
            return ""
        was_open = bool(upstream.breaker.blocked_until)
        while not upstream.breaker.failed(now):
            pass
        return "" if was_open else "open"
