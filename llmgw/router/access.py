"""The access log: one JSON object for each request, gathered and written once a second by a thread of its own.

Writing never holds up a request. If the disk is slow or full, up to C{KEPT} lines wait, further ones are counted and dropped, and
the next line that can be written says how many. The file is opened anew when somebody has moved it away, so log rotation needs
no signal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from twisted.logger import Logger

from llmgw.router.proxies import Proxies

if TYPE_CHECKING:
    from llmgw.router.relay import Exchange
    from llmgw.router.request import Request

KEPT = 50_000
LONGEST = 200  # of what a client chooses freely
_encode_lines = msgspec.json.Encoder().encode_lines


class Row(msgspec.Struct, frozen=True, gc=False):
    """A request that went to an engine, or was to. Tokens are as far as known; C{asked} is the model that C{model} stood in for.

    C{queue_ms} is how long it waited in line, C{ttft_ms} from the whole request to the first byte of a streamed answer,
    C{duration_ms} from the request's first byte to the end.
    """

    time: float
    id: str
    client_id: str
    client: str
    key: str
    call: str
    model: str
    replica: str
    why: str
    status: int
    outcome: str
    reason: str
    retries: int
    queue_ms: float | None
    ttft_ms: float | None
    duration_ms: float
    prompt: int | None
    cached: int | None
    completion: int | None
    asked: str | None = None


class AccessLog:
    """Where a worker's requests are written down. C{flush} is to be called once a second; C{proxies} say who a client is."""

    log = Logger()

    def __init__(self, path: Path | None, executor: Executor, wall: Callable[[], float] = time.time) -> None:
        self.path = path
        self.proxies = Proxies(())
        self.dropped = 0
        self._executor = executor
        self._wall = wall
        self._monotonic = time.monotonic
        self._ended: list[Exchange] = []
        self._rows: list[Row | dict[str, object]] = []
        self._writing: Future[None] | None = None
        self._file: int | None = None
        self._complained = False

    def add(self, exchange: Exchange) -> None:
        """A request that went to an engine, or was to, has ended."""
        self._ended.append(exchange)

    def answered(self, peer: str, request: Request, status: int, outcome: str, reason: str = "") -> None:
        """The router has answered a request by itself, or refused it."""
        if self.path is None:
            return
        now, caller = self._monotonic(), request.context
        self._rows.append(
            {
                "time": self._wall() - (now - request.began),
                "id": request.id.decode(),
                "client_id": request.ours.get(b"x-request-id", b"")[:LONGEST].decode("latin-1"),
                "client": self.proxies.client(peer, request.ours.get(b"x-forwarded-for", b"")),
                "key": caller.id if caller is not None else "",
                "call": request.call.name if request.call is not None else "",
                "model": request.model,
                "path": request.path[:LONGEST].decode("latin-1"),
                "status": status,
                "outcome": outcome,
                "reason": reason,
                "duration_ms": round((now - request.began) * 1000, 2),
            }
        )

    def flush(self) -> None:
        """Hand what has been gathered to the writing thread, unless it is still busy."""
        ended, self._ended = self._ended, []
        if self.path is None:
            return
        shift = self._wall() - self._monotonic()
        self._rows += [self._row(exchange, shift) for exchange in ended]
        if self._writing is not None and not self._writing.done():
            surplus = len(self._rows) - KEPT
            if surplus > 0:
                self.dropped += surplus
                del self._rows[:surplus]
            return
        if self._rows:
            rows, self._rows = self._rows, []
            self._writing = self._executor.submit(self._write, rows)

    def _row(self, exchange: Exchange, shift: float) -> Row:
        request, usage, caller, upstream = exchange.request, exchange.usage, exchange.caller, exchange.upstream
        began = request.began
        return Row(
            began + shift,
            exchange.answer_id.decode(),
            request.ours.get(b"x-request-id", b"")[:LONGEST].decode("latin-1"),
            self.proxies.client(exchange.client.peer, request.ours.get(b"x-forwarded-for", b"")),
            caller.id if caller is not None else "",
            exchange.call.name,
            exchange.served.name,
            upstream.id if upstream is not None else "",
            exchange.why,
            exchange.status,
            exchange.outcome,
            exchange.reason,
            exchange.retries,
            round(exchange.waited * 1000, 2) if upstream is not None else None,
            round((exchange.first - request.whole) * 1000, 2) if exchange.first and exchange.body.stream else None,
            round((exchange.ended - began) * 1000, 2),
            usage[0] if usage is not None else None,
            usage[1] if usage is not None else None,
            usage[2] if usage is not None else None,
            exchange.asked.name if exchange.fell_back else None,
        )

    def _write(self, rows: list[Row | dict[str, object]]) -> None:
        try:
            if self.dropped:
                rows.append({"time": self._wall(), "dropped": self.dropped})
                self.dropped = 0
            data = _encode_lines(rows)
            descriptor = self._descriptor()
            while data:
                data = data[os.write(descriptor, data) :]
            self._complained = False
        except OSError as error:
            self.dropped += len(rows)
            if not self._complained:
                self._complained = True
                self.log.error("Access log {path} cannot be written: {error}. Requests go on.", path=str(self.path), error=error)

    def _descriptor(self) -> int:
        assert self.path is not None
        if self._file is not None:
            here = os.fstat(self._file)
            try:
                there = os.stat(self.path)
            except FileNotFoundError:
                there = None
            if there is not None and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                return self._file
            os.close(self._file)
            self._file = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        return self._file
