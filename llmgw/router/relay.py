"""One request on its way: it waits for its turn, an endpoint is chosen, the request sent, the answer passed on, all counted once.

Nothing of an answer goes to the client before its first whole event (or first piece of a plain body) is here, head included:
until then another replica can still answer. After that nothing is ever sent again; an engine that dies leaves the client with a
stream that ends in an error event, then an abnormal close, never with C{[DONE]}.

What may surprise: L{Exchange._finish} is the only end. It is reached exactly once, from whichever side ends first, and gives
back all that the request holds: its place, its grant, its connection.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmgw.router.answer import Answer
from llmgw.router.breaker import is_failure
from llmgw.router.errors import Refusal, error_event
from llmgw.router.http import ServerConnection, connection_field
from llmgw.router.limits import UNLIMITED
from llmgw.router.reading import leaving
from llmgw.router.request import Field, Request
from llmgw.router.routes import Caller, Served
from llmgw.router.scoreboard import LIVE
from llmgw.router.seeking import Seeker
from llmgw.router.surface import Call
from llmgw.router.upstream import EngineConnection, NoHttp, Upstream
from llmgw.router.usage import Usage

if TYPE_CHECKING:
    import asyncio

    from llmgw.router.body import Body
    from llmgw.router.door import Door

EXTRA_TRIES = 2
RETRIED = frozenset((429, 502, 503, 504))
CONNECT, FIRST_TOKEN, FLOWING, OVER = "connect", "first_token", "flowing", "over"
_monotonic = time.monotonic


class Exchange(Seeker):
    """A request and its answer.

    @ivar state: C{queued}, C{connect}, C{first_token}, C{flowing}, C{over}.
    @ivar outcome: how it ended, for metrics and the log: C{done}, C{client_gone}, C{upstream_error}, C{timeout}, C{refused} or
        C{cut}.
    @ivar phase: the state in which it ended.
    @ivar retries: how many endpoints failed it before, the last time because of C{cause}.
    @ivar sent, first, ended: when (monotonic; 0.0 never) it was sent, its answer began, it was over.
    """

    __slots__ = (
        "_answer", "_budgeted", "_connection", "_moved", "_paused", "_task", "answer_id", "call", "cause", "ended", "first",
        "outcome", "phase", "retries", "sent", "status", "usage",
    )  # fmt: skip

    def __init__(
        self, door: Door, client: ServerConnection, request: Request, call: Call, asked: Served, caller: Caller | None, body: Body
    ) -> None:
        super().__init__(door, client, request, asked, caller, body)
        self.call = call
        self.answer_id = door.next_id()
        self.outcome = self.cause = self.phase = ""
        self.status = self.retries = 0
        self.sent = self.first = self.ended = 0.0
        self.usage: Usage | None = None
        self._answer: Answer | None = None
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._moved = 0
        self._paused = self._budgeted = False

    # Towards an endpoint.

    def _connect(self, now: float) -> None:
        assert self.upstream is not None
        self._wait(CONNECT, self._door.timeouts.connect, now)
        self._task = self.upstream.connect(self, self._fresh)

    def connected(self, connection: EngineConnection) -> None:
        """An endpoint has a connection for us."""
        self._task = None
        upstream, request = self.upstream, self.request
        assert upstream is not None
        if self.state is OVER:
            upstream.give_back(connection)
            return
        self._connection = connection
        pieces = self.body.sent_to(self.served.config.served or upstream.config.model)
        fields = [b"%b: %b\r\n" % field for field in request.fields]
        head = b"%bx-request-id: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            upstream.head(self.call, request.query), self.answer_id, sum(map(len, pieces)), b"".join(fields),
        )  # fmt: skip
        self.sent = now = _monotonic()
        self._wait(FIRST_TOKEN, self._door.timeouts.first_token, now)
        connection.send(self, self.client, head, pieces)

    def not_connected(self, error: Exception) -> None:
        """The endpoint refuses connections, or is not to be reached."""
        self._task = None
        if self.state is not OVER:
            self._failed("connect", f"cannot be connected to: {error}")

    def lost(self, error: Exception | None) -> None:
        """The engine's connection broke before its answer was whole."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self.state is FLOWING:
            assert self.upstream is not None
            self._failure("reset", "broke off in mid-answer")
            left = " was leaving (drained or stopped) and" if self.upstream.id not in self._door.routes.upstreams else ""
            self._break_off("upstream_error", Refusal(502, "engine_lost", f"{self._name()}{left} broke off in mid-answer."))
        elif connection.reused and not connection.heard and not self._fresh:
            # It closed an idle connection just as we used it; that is nobody's fault and happens once at most.
            self._fresh = True
            self._door.accounts.stale()
            self._connect(_monotonic())
        else:
            what = "answered what is no HTTP/1.1" if isinstance(error, NoHttp) else "closed the connection before it answered"
            self._failed("reset", what + (f" ({error})" if error else ""))

    def _failed(self, kind: str, text: str, status: int = 502) -> None:
        """This endpoint did not answer: try another one, or another model, or say so."""
        self._failure(kind, text)
        name = self._name()
        if self._retry(kind):
            return
        after = 1 if status != 504 else None
        refusal = Refusal(status, f"engine_{kind}", f"{name} {text}.", retry_after=after)
        # What an engine may have begun with is not for an engine of another model: it may be what ended the first.
        if kind != "reset" and self._fall_back():
            self.retries += 1
            self.cause = kind
            try:
                if self.served.line.crowded() or not self._take():
                    self._get_in_line()
                return
            except Refusal:
                pass
        self._refuse("upstream_error", refusal)

    def _retry(self, cause: str) -> bool:
        """Go on with another endpoint, if one has room and retrying is not what keeps the fleet busy already."""
        failed, line = self.upstream, self.served.line
        assert failed is not None
        tried = [*self._tried, failed]
        if len(tried) > EXTRA_TRIES or all(one in tried for one in self.served.upstreams):
            return False
        if not self._budgeted:
            if not self._door.budget.take():
                return False
            self._budgeted = True
        line.give(failed)
        hint = self._hint
        found, why = line.take(_monotonic(), hint.held, hint.blocks, hint.session, tried)
        if found is None:
            self._door.board.enter(failed.row, 0)
            self._door.board.enter(line.row, 0)
            return False
        self._tried = tried
        self.retries += 1
        self.cause = cause
        self._go(found, why)
        return True

    def _failure(self, kind: str, text: str) -> None:
        assert self.upstream is not None
        self._door.failure(self.served, self.upstream, kind, text)

    def _name(self) -> str:
        return f"The replica {self.upstream.id} of {self.served.name}" if self.upstream else "The engine"

    # The answer.

    def answer(self, status: int, fields: list[Field], framing: str) -> None:
        """The head of the answer: keep it until there is something to send with it, unless another endpoint may do better."""
        upstream, connection = self.upstream, self._connection
        assert upstream is not None
        assert connection is not None
        if status < 400:
            if upstream.breaker.failures or upstream.breaker.blocked_until:
                self._door.recovered(self.served, upstream)
        elif self._turned_away(status, upstream, connection):
            return
        self.status = status
        body = self.body
        self._answer = Answer(status, fields, framing, self.request.http11, self.call.usage, body.hides_usage)
        if not self._answer.chunked and not self._answer.plain:
            self.request.keep_alive = False

    def _turned_away(self, status: int, upstream: Upstream, connection: EngineConnection) -> bool:
        """An answer that may say something of the endpoint rather than of the request. Returns whether it has been dealt with."""
        now = _monotonic()
        if status in (401, 403):
            self._connection = None
            connection.abort()
            self._failed(
                "key" if status == 401 else "forbidden",
                f"refused the router's key (HTTP {status}): something else may have its port",
            )
            return True
        if is_failure(status):
            self._failure("status", f"answered HTTP {status}")
        else:
            upstream.breaker.neutral(now)
            if status in (429, 503):
                upstream.press(now)
        if status not in RETRIED or not self._retry("status"):
            return False
        connection.abort()
        return True

    def piece(self, data: bytes, done: bool) -> None:
        """More of the answer's body."""
        connection, answer, client = self._connection, self._answer, self.client
        assert connection is not None
        assert answer is not None
        connection.raw = None
        data = answer.feed(data, done)
        if not data and not done:
            return
        if self.state is not FLOWING:
            data = self._head(answer) + data
            self.first = now = _monotonic()
            self._wait(FLOWING, self._door.timeouts.idle, now)
            assert self.upstream is not None
            self.upstream.flowing += 1
            self._moved = client.moved
        else:
            self._moved += 1
        client.write(data)
        if done:
            self._finish("done")
        elif answer.between_events and connection.between_chunks:
            connection.raw = client.write

    def _head(self, answer: Answer) -> bytes:
        request = self.request
        assert self.upstream is not None
        return b"%bx-request-id: %b\r\nx-llmgw-replica: %b\r\n%b%b\r\n" % (
            answer.head, request.ours.get(b"x-request-id") or self.answer_id, self.upstream.id.encode(),
            b"x-llmgw-fallback: %b\r\n" % self.served.name.encode() if self.fell_back else b"",
            connection_field(request, self.client.keeps(request)),
        )  # fmt: skip

    # Ends.

    def _break_off(self, outcome: str, refusal: Refusal) -> None:
        """The answer has begun and cannot be ended well: say so where there is a way to, then close without an ending."""
        client, answer = self.client, self._answer
        assert answer is not None
        if not client.transport.is_closing():
            client.write(answer.last_words(error_event(self.call.shape, refusal)))
        self.reason = refusal.code
        self._finish(outcome)
        if answer.chunked or answer.plain:
            client.transport.close()
        else:
            client.transport.abort()

    def client_gone(self) -> None:
        """The client has left: the engine must not work for nobody."""
        if self.upstream is not None and not self.status and self.state is not OVER:
            self.upstream.breaker.neutral(_monotonic())
        self._finish("client_gone", 499)

    def expired(self, now: float) -> None:
        """Nothing has moved for as long as this step may take."""
        waited = self.client.grace
        if self.state is CONNECT:
            if self._task is not None:
                self._task.cancel()
                self._task = None
            self._failed("timeout", f"did not accept a connection within {waited:g} s (timeouts.connect)", 504)
        elif self.state is FIRST_TOKEN:
            self._failure("timeout", "sent nothing in time")
            text = f"{self._name()} sent nothing within {waited:g} s (timeouts.first_token)."
            self._refuse("timeout", Refusal(504, "first_token_timeout", text))
        elif self.state is OVER or self._paused:
            self._finish("client_gone", 499)
            self.client.transport.abort()
        else:
            self._failure("timeout", "fell silent in mid-answer")
            text = f"{self._name()} sent nothing for {waited:g} s (timeouts.idle)."
            self._break_off("timeout", Refusal(504, "idle_timeout", text))

    def cut(self) -> None:
        """The worker exits."""
        refusal = leaving()
        if self.state is FLOWING:
            self._break_off("cut", refusal)
        elif self.state is not OVER:
            self._refuse("cut", refusal)

    def out_of_time(self) -> None:
        """The engine is being ended. It may wait for us to close: one with an open stream heeds no SIGTERM for long."""
        text = "is being stopped: the time that running requests had to end (its drain) is over"
        if self.state is FLOWING:
            self._break_off("cut", Refusal(503, "engine_drained", f"{self._name()} {text}."))
        elif self.state is not OVER:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.abort()
            if self._task is not None:
                self._task.cancel()
                self._task = None
            now = self._door.routes.models.get(self.served.name)
            if now is not None and now.line is self.served.line:  # where its place is to be given back
                self._renew()
            self._failed("drained", text, 503)

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
        if self.state is OVER:
            return
        self.phase, self.state = self.state, OVER
        self.ended = _monotonic()
        self.outcome = outcome
        self.status = status or self.status
        door, client = self._door, self.client
        door.board.mine[LIVE] -= 1
        if self._budgeted:
            door.budget.give()
        if self._waiter is not None:
            self._waiter.leave()
            self._waiter = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.upstream is not None:
            self.served.line.give(self.upstream)
            self.upstream.flowing -= self.phase is FLOWING
        connection, self._connection = self._connection, None
        if connection is not None:
            if outcome == "done":
                if self._paused:
                    connection.transport.resume_reading()
                connection.release()
            else:
                connection.abort()
        if self._answer is not None:
            self.usage = self._answer.usage(outcome == "done", client.moved - self._moved, self.body.size)
            if self._answer.failed and not self.reason:
                self.reason = "engine_error"
        grant, self._grant = self._grant, UNLIMITED
        door.finished(self, grant)
        if outcome == "done":
            client.done(client.keeps(self.request))
