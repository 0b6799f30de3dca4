"""One request on its way: an endpoint is chosen, the request sent, the answer passed on, and everything counted once.

Nothing of an answer goes to the client before its first whole event (or first piece of a plain body) is here, head included:
until then another replica can still answer. After that nothing is ever sent again; an engine that dies leaves the client with a
stream that ends in an error event, then an abnormal close, never with C{[DONE]}.

What may surprise:

  - Of an event stream only whole events go out. An unfinished tail waits for the next read, so that a death in mid-event leaves
    nothing torn behind. An event longer than 1 MiB goes out in pieces nevertheless.
  - Bodies are framed anew where a read is not exactly one chunk (L{upstream.EngineConnection} passes that on as it is).
  - L{Exchange._finish} is the only end. It is reached exactly once, from whichever side ends first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmgw.router.breaker import is_failure
from llmgw.router.errors import Refusal, error_event, reason_phrase
from llmgw.router.http import ServerConnection, connection_field
from llmgw.router.request import Field, Request
from llmgw.router.routes import Served
from llmgw.router.surface import Call
from llmgw.router.table import KeyEntry
from llmgw.router.upstream import LENGTH, EngineConnection, Upstream

if TYPE_CHECKING:
    import asyncio

    from llmgw.router.body import Body
    from llmgw.router.door import Door

MAX_EVENT = 2**20
EXTRA_TRIES = 2
RETRIED = frozenset((502, 503, 504))
# Fields of an engine's answer that end here; the rest goes to the client.
HERE = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade content-length "
    b"x-request-id set-cookie".split()
)
_monotonic = time.monotonic


class Exchange:
    """A request and its answer.

    @ivar outcome: how it ended, for metrics and the log: C{done}, C{client_gone}, C{upstream_error}, C{timeout}, C{refused}.
    @ivar why: why this endpoint (see router/choose.py).
    @ivar retries: how many endpoints failed it before.
    """

    __slots__ = (
        "_budgeted", "_connection", "_door", "_fresh", "_head", "_held", "_over", "_paused", "_plain", "_sse", "_task", "_torn",
        "_tried", "_waiting_for", "answer_id", "body", "call", "chunked", "client", "ended", "first", "key", "outcome", "parts",
        "request", "retries", "sent", "served", "status", "upstream", "usage_at", "why",
    )  # fmt: skip

    def __init__(
        self, door: Door, client: ServerConnection, request: Request, call: Call, served: Served, key: KeyEntry | None, body: Body
    ) -> None:
        self._door = door
        self.client = client
        self.request = request
        self.call = call
        self.served = served
        self.key = key
        self.body = body
        self.answer_id = door.next_id()
        self.upstream: Upstream | None = None
        self.why = ""
        self.retries = 0
        self.status = 0
        self.first = 0.0
        self.ended = 0.0
        self.outcome = ""
        self.sent = False
        self.chunked = False
        self.parts: list[bytes] | None = None
        self.usage_at: bytes = b""
        self._tried: list[Upstream] = []
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._head = b""
        self._held = b""
        self._plain = False
        self._sse = False
        self._torn = False
        self._paused = False
        self._fresh = False
        self._budgeted = False
        self._over = False
        self._waiting_for = ""

    # Towards an endpoint.

    def start(self) -> None:
        """Send the request to the endpoint that is best for it.

        @raise Refusal: there is none.
        """
        self._door.budget.live += 1
        try:
            self._dispatch()
        except Refusal:
            self._finish("refused")
            raise

    def _dispatch(self) -> None:
        door, now = self._door, _monotonic()
        excluded = self._tried
        while True:
            upstream, why = self.served.group.choose(now, excluded=excluded)
            if upstream is None:
                raise door.nothing(self.served, why, self._tried)
            assert isinstance(upstream, Upstream)
            if door.board.enter(upstream.row, upstream.limit):
                break
            excluded = [*excluded, upstream]
        if upstream.breaker.blocked_until:
            upstream.breaker.trying(now)
        self.upstream, self.why, self._fresh = upstream, why, False
        self._connect()

    def _connect(self) -> None:
        assert self.upstream is not None
        self._wait("connect", self._door.timeouts.connect)
        self._task = self.upstream.connect(self, self._fresh)

    def _wait(self, what: str, seconds: float) -> None:
        self._waiting_for = what
        self.client.grace = seconds
        self.client.deadline = _monotonic() + seconds

    def connected(self, connection: EngineConnection) -> None:
        """An endpoint has a connection for us."""
        self._task = None
        upstream = self.upstream
        assert upstream is not None
        if self._over:
            upstream.give_back(connection)
            return
        self._connection = connection
        request = self.request
        data = self.body.sent_to(upstream.config.model)
        fields = [b"%b: %b\r\n" % field for field in request.fields]
        head = b"%bx-request-id: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            upstream.head(self.call, request.query), self.answer_id, len(data), b"".join(fields),
        )  # fmt: skip
        self._wait("first_token", self._door.timeouts.first_token)
        connection.send(self, self.client, head + data)

    def not_connected(self, error: Exception) -> None:
        """The endpoint refuses connections, or is not to be reached."""
        self._task = None
        if not self._over:
            self._failed("connect", f"cannot be connected to: {error}")

    def lost(self, error: Exception | None) -> None:
        """The engine's connection broke before its answer was whole."""
        connection, self._connection = self._connection, None
        if self._over or connection is None:
            return
        if self.sent:
            self._failure("reset", "broke off in mid-answer")
            self._break_off("upstream_error", Refusal(502, "engine_lost", f"{self._name()} broke off in mid-answer."))
        elif connection.reused and not connection.heard and not self._fresh:
            # It closed an idle connection just as we used it; that is nobody's fault and happens once at most.
            self._fresh = True
            self._connect()
        else:
            self._failed("reset", f"closed the connection before it answered{f' ({error})' if error else ''}")

    def _failed(self, kind: str, text: str, status: int = 502) -> None:
        """This endpoint did not answer: try another one, or say so."""
        self._failure(kind, text)
        refusal = Refusal(status, f"engine_{kind}", f"{self._name()} {text}.", retry_after=1 if status != 504 else None)
        if not self._retry():
            self._finish("upstream_error", refusal.status)
            self.client.refuse(self.request, refusal)

    def _retry(self) -> bool:
        """Go on with another endpoint, if there is one and retrying is not what keeps the fleet busy already."""
        assert self.upstream is not None
        excluded = [*self._tried, self.upstream]
        if len(excluded) > EXTRA_TRIES or self.served.group.choose(_monotonic(), excluded=excluded)[0] is None:
            return False
        if not self._budgeted:
            if not self._door.budget.take():
                return False
            self._budgeted = True
        self._door.board.leave(self.upstream.row)
        self._tried, self.upstream = excluded, None
        self.retries += 1
        try:
            self._dispatch()
        except Refusal as refusal:
            self._finish("upstream_error", refusal.status)
            self.client.refuse(self.request, refusal)
        return True

    def _failure(self, kind: str, text: str) -> None:
        assert self.upstream is not None
        self.upstream.breaker.failed(_monotonic())
        self._door.failure(self.upstream, kind, text)

    def _name(self) -> str:
        return f"The replica {self.upstream.id} of {self.served.name}" if self.upstream else "The engine"

    # The answer.

    def answer(self, status: int, fields: list[Field], framing: str) -> None:
        """The head of the answer: keep it until there is something to send with it, unless another endpoint may do better."""
        upstream, connection = self.upstream, self._connection
        assert upstream is not None
        assert connection is not None
        if status in RETRIED or status in (401, 403):
            if self._turned_away(status, connection):
                return
        elif is_failure(status):
            upstream.breaker.failed(_monotonic())
        elif status == 429:
            upstream.breaker.neutral(_monotonic())
        else:
            upstream.breaker.succeeded()
        self.status = status
        self._head = self._make_head(status, fields, framing)

    def _turned_away(self, status: int, connection: EngineConnection) -> bool:
        """An answer that says something of the endpoint rather than of the request. Returns whether it has been dealt with."""
        upstream = self.upstream
        assert upstream is not None
        if status in (401, 403):
            self._connection = None
            connection.abort()
            self._failed("key", f"refused the router's key (HTTP {status}): something else may have its port")
            return True
        if status == 503:
            upstream.breaker.neutral(_monotonic())
        else:
            self._failure("status", f"answered HTTP {status}")
        if not self._retry():
            return False
        connection.abort()
        return True

    def _make_head(self, status: int, fields: list[Field], framing: str) -> bytes:
        request = self.request
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason_phrase(status))]
        length = named = b""
        for name, value in fields:
            if name == b"content-length":
                length = value
            elif name == b"connection":
                named = value.lower()
            elif name not in HERE:
                lines.append(b"%b: %b\r\n" % (name, value))
                if name == b"content-type":
                    self._sse = value.startswith(b"text/event-stream")
        if named and named not in (b"close", b"keep-alive"):
            hidden = {token.strip() + b":" for token in named.split(b",")}
            lines = [line for line in lines if line.partition(b" ")[0] not in hidden]
        if self._sse:
            lines.append(b"cache-control: no-cache\r\nx-accel-buffering: no\r\n")
        self._plain = framing == LENGTH and not self._sse
        if self._plain:
            lines.append(b"content-length: %b\r\n" % length)
        elif request.http11:
            self.chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            request.keep_alive = False
        assert self.upstream is not None
        lines.append(
            b"x-request-id: %b\r\nx-llmgw-replica: %b\r\n%b\r\n"
            % (request.ours.get(b"x-request-id", self.answer_id), self.upstream.id.encode(),
               connection_field(request, self.client.keeps(request)))
        )  # fmt: skip
        return b"".join(lines)

    def piece(self, data: bytes, done: bool) -> None:
        """More of the answer's body."""
        connection = self._connection
        if self._sse:
            if connection is not None:
                connection.raw = None
            if b'"usage":{' in data:
                self.usage_at = data
            data = self._whole_events(data, done)
        elif self.parts is not None:
            self.parts.append(data)
        if not data and not done:
            return
        if self.chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if done:
                data += b"0\r\n\r\n"
        if not self.sent:
            self.sent = True
            self.first = _monotonic()
            data = self._head + data
            self._wait("idle", self._door.timeouts.idle)
        self.client.write(data)
        if done:
            self._finish("done")
        elif connection is not None and self._sse and self.chunked and not self._held and not self._torn:
            connection.raw = self.client.write if connection.between_chunks else None

    def _whole_events(self, data: bytes, done: bool) -> bytes:
        """What may go out now: up to the end of the last whole event."""
        if self._held:
            data = self._held + data
            self._held = b""
        if done or data.endswith((b"\n\n", b"\n\r\n", b"\r\r")):
            self._torn = False
            return data
        end = last_event_end(data)
        if len(data) - end > MAX_EVENT:
            self._torn = True
            return data
        self._held = data[end:]
        self._torn = self._torn and not end
        return data[:end]

    # Ends.

    def _break_off(self, outcome: str, refusal: Refusal) -> None:
        """The answer has begun and cannot be ended well: say so where there is a way to, then close without an ending."""
        client = self.client
        if self._sse and not self._torn and not client.transport.is_closing():
            event = error_event(self.call.shape, refusal)
            client.write(b"%x\r\n%b\r\n" % (len(event), event) if self.chunked else event)
        self._finish(outcome)
        if self.chunked or self._plain:
            client.transport.close()
        else:
            client.transport.abort()

    def client_gone(self) -> None:
        """The client has left: the engine must not work for nobody."""
        if self.upstream is not None and self.status == 0:
            self.upstream.breaker.neutral(_monotonic())
        self._finish("client_gone", 499)

    def expired(self, now: float) -> None:
        """Nothing has moved for as long as this step may take."""
        waited = self.client.grace
        if self._over:
            self.client.transport.abort()
        elif self._waiting_for == "connect":
            self._failed("timeout", f"did not accept a connection within {waited:g} s (timeouts.connect)", 504)
        elif self._waiting_for == "first_token":
            self._failure("timeout", "sent nothing in time")
            self._finish("timeout", 504)
            text = f"{self._name()} sent nothing within {waited:g} s (timeouts.first_token)."
            self.client.refuse(self.request, Refusal(504, "first_token_timeout", text))
        elif self._paused:
            self._finish("client_gone", 499)
            self.client.transport.abort()
        else:
            text = f"{self._name()} sent nothing for {waited:g} s (timeouts.idle)."
            self._failure("timeout", "fell silent in mid-answer")
            self._break_off("timeout", Refusal(504, "idle_timeout", text))

    def cut(self) -> None:
        """The worker exits."""
        refusal = Refusal(503, "router_leaving", "This router is being stopped. Send the request again.", retry_after=1)
        if self._over:
            return
        if self.sent:
            self._break_off("cut", refusal)
        else:
            self._finish("cut", 503)
            self.client.refuse(self.request, refusal)

    def pause(self) -> None:
        """The client does not keep up."""
        self._paused = True
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        """It does again."""
        self._paused = False
        if self._connection is not None:
            self._connection.transport.resume_reading()

    def _finish(self, outcome: str, status: int = 0) -> None:
        if self._over:
            return
        self._over = True
        self.ended = _monotonic()
        self.outcome = outcome
        self.status = status or self.status
        door = self._door
        door.budget.live -= 1
        if self._budgeted:
            door.budget.give()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.upstream is not None:
            door.board.leave(self.upstream.row)
        connection, self._connection = self._connection, None
        if connection is not None:
            if outcome == "done":
                if self._paused:
                    connection.transport.resume_reading()
                connection.release()
            else:
                connection.abort()
        client = self.client
        door.finished(self)
        if outcome == "done":
            client.done(client.keeps(self.request))


def last_event_end(data: bytes) -> int:
    """Where the last whole event in this piece of a stream ends; 0 if none does. A blank line ends an event."""
    best = 0
    for ending in (b"\n\n", b"\n\r\n", b"\r\r"):
        at = data.rfind(ending)
        if at >= 0:
            best = max(best, at + len(ending))
    return best
