"""HTTP/1.1 towards clients: bytes to requests, one at a time for each connection, and answers back to bytes.

llhttp (httptools) does the grammar and refuses most of what smuggling needs; what it lets through is refused here (a second or
missing C{Host}, transfer codings other than C{chunked}, versions that it reads but that we do not speak). Requests are never
passed on raw: an engine gets one that is built from the parsed parts, so two readings of the same bytes cannot exist.

What may surprise:

  - A client that half-closes (FIN) has left. It cannot be told apart from one that closed, and engines must not work for nobody.
  - While a request is served, the connection is still read from, since only reading notices that the client has left. What a
    client sends ahead (pipelining) is kept, up to a bound, and answered in order.
  - An answer that ends the connection while the client is still sending (413, 401 of a large upload) is followed by a short
    time of reading and throwing away: a close with unread bytes would reset the connection and take the answer with it.
  - C{Upgrade} is ignored, as HTTP/1.1 allows, but llhttp stops at it: the request is then parsed again without the field.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import httptools
from twisted.logger import Logger

from llmgw.router.errors import Refusal, date, error_body, error_head, reason_phrase
from llmgw.router.request import (
    LISTS,
    MAX_FIELDS,
    MAX_HEAD,
    ONCE,
    OURS,
    Field,
    Request,
    bad_request,
    check_head,
    head_too_large,
    internal_error,
    no_space,
    plain_head,
    too_large,
)  # fmt: skip
from llmgw.router.spool import Spool

MAX_AHEAD = 64 * 1024
WRITE_HIGH = 64 * 1024
LINGER = 2.0
SMALL_BODY = 64 * 1024
CHUNK_FRAME = 16

_monotonic = time.monotonic
log = Logger()


class Work(Protocol):
    """What serves a request, as its connection sees it."""

    def client_gone(self) -> None:
        """The client has left. Nothing may be written any more, and C{done} is not to be called."""

    def expired(self, now: float) -> None:
        """The connection's deadline has passed without anything having moved."""

    def cut(self) -> None:
        """The worker is about to exit: end the answer, saying so if there is a way to."""

    def pause(self) -> None:
        """The client does not keep up: produce no more."""

    def resume(self) -> None:
        """It does again."""


class App(Protocol):
    """What stands behind the connections."""

    body_limit: int
    folder: Path
    headers_timeout: float
    body_timeout: float
    keep_alive: float
    connections: set[ServerConnection]

    def head(self, connection: ServerConnection, request: Request) -> None:
        """Judge a request by its head. @raise Refusal: it is answered by that, if possible without reading the body."""

    def begin(self, connection: ServerConnection, request: Request) -> Work | None:
        """Serve a request; None if it has been answered at once. @raise Refusal: to be answered by that."""

    def refused(self, connection: ServerConnection, request: Request, refusal: Refusal) -> list[Field]:
        """A request was refused: count and log it. Returns fields for the answer's head."""

    def shape(self, request: Request) -> str:
        """How errors of this request look."""


class ServerConnection(asyncio.Protocol):
    """One client's connection.

    @ivar deadline: monotonic time at which C{expire} is due; the sweep in C{router/worker.py} watches it.
    @ivar known: whatever the app knows of this client from its last request.
    @ivar moved: counts what comes and goes. The sweep compares it with C{swept}; if they differ, the deadline starts again
        with C{grace}.
    """

    __slots__ = (
        "_ahead", "_app", "_building", "_closing", "_deaf", "_field_count", "_framing", "_head_bytes", "_leaving", "_parser",
        "_ready", "_request", "_twice", "deadline", "grace", "known", "moved", "peer", "swept", "transport", "work", "write",
    )  # fmt: skip

    def __init__(self, app: App) -> None:
        self._app = app
        self._parser: Any = httptools.HttpRequestParser(self)
        self._ready: deque[Request] = deque()
        self._building: Request | None = None  # its head has not ended yet
        self._request: Request | None = None  # its body has not ended yet
        self._head_bytes = 0
        self._field_count = 0
        self._framing = 0  # bytes of the body in hand that were none of it
        self._twice = False
        self._ahead = 0
        self._deaf = False  # input is thrown away
        self._leaving = False  # the next answer is the last
        self._closing = False  # nothing more is answered
        self.work: Work | None = None
        self.moved = self.swept = 0
        self.grace = math.inf
        self.deadline = math.inf
        self.known: Any = None
        self.peer = ""

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; it has the header timeout to say something."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.write = self.transport.write
        self.transport.set_write_buffer_limits(WRITE_HIGH)
        address = transport.get_extra_info("peername")
        self.peer = address[0] if address else ""
        self._app.connections.add(self)
        self.deadline = _monotonic() + self._app.headers_timeout

    def data_received(self, data: bytes) -> None:
        """Parse what has come, then serve what is complete."""
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._without_upgrade(data[stop.args[0] :])
        except httptools.HttpParserError as error:
            self._broken(error)
        if self._building is not None:
            self._bound_head(len(data))
        elif self._request is not None and self._request.length is None:
            self._bound_framing(len(data))
        if self.work is None:
            self._serve_next()
        elif self._ready or self._request or self._building:
            self._ahead += len(data)
            if self._ahead > MAX_AHEAD:
                self._drop()

    def eof_received(self) -> None:
        """The client has left, or has nothing more to say, which we cannot tell apart."""
        if self.work is not None:
            self._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        self._app.connections.discard(self)
        self._deaf = self._closing = True
        self._ready.clear()
        self._parser = None  # it holds us, and we it
        work, self.work = self.work, None
        if work is not None:
            work.client_gone()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        if self.work is not None:
            self.work.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.moved += 1
        if self.work is not None:
            self.work.resume()

    # What the parser calls. Nothing here answers anything: that would be in the middle of parsing.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._building = Request(_monotonic())
        self._head_bytes = self._field_count = 0
        self._twice = False
        if self.work is None:
            self.deadline = self._building.began + self._app.headers_timeout

    def on_url(self, url: bytes) -> None:
        """Its target, in one piece or several."""
        assert self._building is not None
        self._building.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer field, which is dropped."""
        request = self._building
        if request is None:
            return
        name = name.lower()
        self._field_count += 1
        if self._field_count > MAX_FIELDS:
            return
        self._head_bytes += len(name) + len(value) + 4
        if name in OURS:
            if name in request.ours:
                self._twice = self._twice or name in ONCE
                if name in LISTS:
                    value = request.ours[name] + b"," + value
            request.ours[name] = value
        else:
            request.fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The head has ended: judge it, and say whether the body is wanted."""
        request = self._building
        assert request is not None
        self._building, self._request = None, request
        self._framing = 0
        try:
            self._check(request)
            self._app.head(self, request)
        except Refusal as refusal:
            request.refusal = refusal
            if request.expects or request.length is None or request.length > SMALL_BODY or refusal.status in (400, 431, 505):
                self._stop_listening()
            return
        if request.expects and self.work is None and not self._ready:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._wait(self._app.body_timeout)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        request = self._request
        if request is None or request.refusal is not None:
            return
        spool = request.spool
        if spool is None:
            spool = request.spool = Spool(self._app.folder)
        if spool.size + len(data) > self._app.body_limit:
            self._turn_away(request, too_large(self._app.body_limit))
            return
        try:
            spool.add(data)
        except OSError as error:
            self._turn_away(request, no_space(error))
        if request.length is None:
            self._framing -= len(data) + CHUNK_FRAME
        self.moved += 1

    def _turn_away(self, request: Request, refusal: Refusal) -> None:
        request.refusal = refusal
        request.spool = None
        self._stop_listening()

    def on_message_complete(self) -> None:
        """A request is whole."""
        request = self._request
        if request is None or self._parser.should_upgrade():
            return
        self._request = None
        request.whole = _monotonic()
        request.keep_alive = self._parser.should_keep_alive()
        self._ready.append(request)

    # Judging heads.

    def _check(self, request: Request) -> None:
        if self._head_bytes > MAX_HEAD or self._field_count > MAX_FIELDS or len(request.path) > MAX_HEAD:
            raise head_too_large()
        request.method = self._parser.get_method()
        check_head(request, self._parser.get_http_version(), self._app.body_limit)
        if self._twice:
            raise bad_request("a field that may stand once stands twice")

    def _bound_head(self, fresh: int) -> None:
        """A head that does not end is cut off, however few fields llhttp has made of it."""
        self._head_bytes += fresh
        if self._head_bytes > 2 * MAX_HEAD and self._building is not None:
            request, self._building = self._building, None
            request.refusal = head_too_large()
            self._ready.append(request)
            self._deaf = True

    def _bound_framing(self, fresh: int) -> None:
        """A chunked body that is more extensions and trailer than body is work for nothing."""
        self._framing += fresh
        if self._framing > 4 * MAX_HEAD:
            self._broken(bad_request("its chunks' extensions, or its trailer, are too large"))

    def _broken(self, error: Exception) -> None:
        """What came is no HTTP. Requests before it are answered first, in order."""
        if self._deaf:
            return
        request = self._request or self._building or Request(_monotonic())
        request.refusal = request.refusal or bad_request(str(error.__context__ or error))
        request.keep_alive = False
        self._request = self._building = None
        self._ready.append(request)
        self._deaf = True

    def _without_upgrade(self, rest: bytes) -> None:
        """Parse a request again that wanted another protocol, this time without saying so; only then is its body parsed, too."""
        request, self._request = self._request, None
        if request is None or request.method == b"CONNECT":
            self._broken(bad_request("CONNECT is not spoken here"))
            return
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(plain_head(request) + rest)

    def _stop_listening(self) -> None:
        """The request in hand is refused; nothing that follows on this connection is read as HTTP."""
        request, self._request = self._request, None
        if request is not None:
            request.keep_alive = False
            self._ready.append(request)
        self._deaf = True

    # Serving.

    def _serve_next(self) -> None:
        """Serve what is complete, in order, until one takes time."""
        while self._ready and self.work is None and not self._closing:
            self._ahead = 0
            self._wait(math.inf)
            request = self._ready.popleft()
            self.serve(request, self._app.begin, self, request)

    def serve(self, request: Request, begin: Callable[..., Work | None], *arguments: object) -> None:
        """Have C{begin} serve a request; what it raises is the answer."""
        try:
            if request.refusal is not None:
                raise request.refusal
            self.work = begin(*arguments)
        except Refusal as refusal:
            self.refuse(request, refusal)
        except Exception:
            log.failure("A request could not be begun: {path}", path=repr(request.path))
            self.refuse(request, internal_error())

    def _wait(self, seconds: float) -> None:
        self.grace = seconds
        self.deadline = _monotonic() + seconds

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """Answer with an error."""
        fields = error_head(refusal) + self._app.refused(self, request, refusal)
        self.reply(request, refusal.status, fields, error_body(self._app.shape(request), refusal))

    def reply(self, request: Request, status: int, fields: list[Field], body: bytes) -> None:
        """Answer with a whole body and be done with the request."""
        keep = self.keeps(request)
        head = [b"HTTP/1.1 %d %b\r\ndate: %b\r\n" % (status, reason_phrase(status), date())]
        head += [b"%b: %b\r\n" % field for field in fields]
        head.append(b"content-length: %d\r\n%b\r\n" % (len(body), connection_field(request, keep)))
        self.write(b"".join(head) + (b"" if request.method == b"HEAD" else body))
        self.done(keep)

    def keeps(self, request: Request) -> bool:
        """Whether the connection goes on after the answer to this request, which the answer's head must say."""
        return request.keep_alive and not self._leaving and not self._closing and (not self._deaf or bool(self._ready))

    def done(self, keep: bool) -> None:
        """An answer is complete. C{keep} False ends the connection once it has been sent."""
        self.work = None
        if not keep:
            self._end()
            return
        self._wait(self._app.keep_alive)
        if self._ready:
            # In a later turn: a chain of answers that need no engine would otherwise nest as deep as it is long.
            asyncio.get_running_loop().call_soon(self._serve_next)

    def leave(self, idle: float) -> None:
        """This worker takes no new connections any more: the next answer is the last, and without a request it ends in a while.

        Not at once: a request may be on its way already, and it would be lost.

        @param idle: seconds.
        """
        self._leaving = True
        if self.work is None and not self._request and not self._ready and not self._building:
            self._wait(idle)

    def cut(self) -> None:
        """The worker has no more time: end the answer under way as if its engine had died, or the connection."""
        if self.work is not None:
            self.work.cut()
        else:
            self.transport.close()

    def _end(self) -> None:
        self._closing = True
        if self._deaf and self.transport.can_write_eof():
            self.transport.write_eof()
            self._wait(LINGER)
        else:
            self.transport.close()
            self._wait(LINGER)

    def _drop(self) -> None:
        """Nobody is to get anything more."""
        work, self.work = self.work, None
        self.transport.abort()
        if work is not None:
            work.client_gone()

    def expire(self, now: float) -> None:
        """The deadline has passed."""
        if self.work is not None:
            self.work.expired(now)
        elif self._closing or (self._request is None and self._building is None):
            self.transport.abort() if self._closing else self.transport.close()
        else:
            request = self._request or self._building
            assert request is not None
            self._request = self._building = None
            self._deaf, request.keep_alive = True, False
            self.refuse(request, Refusal(408, "request_timeout", "The request did not arrive in time. Send it again."))


def connection_field(request: Request, keep: bool) -> bytes:
    """The C{Connection} line of an answer: nothing where HTTP/1.1 means the same without it."""
    if keep:
        return b"" if request.http11 else b"connection: keep-alive\r\n"
    return b"connection: close\r\n"
