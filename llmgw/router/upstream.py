"""HTTP/1.1 towards engines: connections, a pool of idle ones for each endpoint, and what comes back.

What may surprise:

  - Idle connections are kept for less than 5 seconds, because that is when uvicorn (vLLM and others) closes them, and a request
    sent into that moment is lost. One that is lost on a reused connection before any byte of an answer is sent once more on a
    fresh one, which is why L{EngineConnection.reused} is remembered.
  - The parser looks on from the side. A read that is exactly one chunk holding whole events (nearly all are) is passed on as it
    came, without the parser seeing it: it stands between two chunks before and after. Comparing its first and last bytes decides
    that; only one that does not end like a token is searched for the engine's count of tokens, and for its error.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, Protocol

import httptools
from twisted.logger import Logger

from llmgw.errors import LlmgwError
from llmgw.router.choose import Candidate
from llmgw.router.errors import ANTHROPIC
from llmgw.router.request import Field
from llmgw.router.surface import CALLS, Call
from llmgw.router.table import RoutedEndpoint
from llmgw.router.usage import MARKS

LENGTH = "length"
CHUNKED = "chunked"
UNTIL_CLOSE = "until close"
OTHER = "other"
MAX_ANSWER_HEAD = 64 * 1024
ONE_WRITE = 64 * 1024
EVENT_END = b"\n\n\r\n"
# A chunk whose last field is its choices, as most are: then it is not the one with the usage, which comes last or has none.
DELTA_END = b"}]}\n\n\r\n"
_USAGE, _SPACED_USAGE = MARKS
_LARGEST_CHUNK = 16 * 1024
_FIRST_WORDS = 64
_monotonic = time.monotonic


def _chunk_heads() -> dict[int, bytes]:
    """For each length of a chunk with its framing, the only head that a chunk of that length can have."""
    heads = {}
    for size in range(2, _LARGEST_CHUNK):
        head = b"%x\r\n" % size
        heads[len(head) + size + 2] = head
    return heads


CHUNK_HEADS = _chunk_heads()
_NO_HEAD = b"\0"


def _notable(data: bytes) -> bool:
    """Whether these events may say something of tokens or of an error, which stands in the first words if at all."""
    if _USAGE in data or _SPACED_USAGE in data:
        return True
    return data.find(b"error", 0, _FIRST_WORDS) >= 0 or data.find(b".failed", 0, _FIRST_WORDS) >= 0


class NoHttp(LlmgwError):
    """An engine answered what is no HTTP/1.1 as it is spoken here; the text says what is wrong."""


class Reader(Protocol):
    """Who waits for an engine's answer."""

    def connected(self, connection: EngineConnection) -> None:
        """The connection asked for is there."""

    def not_connected(self, error: Exception) -> None:
        """It will not be."""

    def answer(self, status: int, fields: list[Field], framing: str) -> None:
        """The head of the answer has come; C{fields} have lower-case names."""

    def piece(self, data: bytes, done: bool) -> None:
        """A read's worth of the body, without its framing. C{done}: the answer is whole; nothing more follows."""

    def lost(self, error: Exception | None) -> None:
        """The connection is gone, or speaks no HTTP, before the answer was whole."""


class EngineConnection(asyncio.Protocol):
    """One connection to an engine, for one request at a time.

    @ivar reader: whose request it carries, None while it is idle.
    @ivar raw: where to write reads that are one whole chunk; None sends all of them through the parser.
    @ivar client: the connection whose C{moved} is set with each read.
    @ivar reused: it has carried a request before this one.
    @ivar heard: a byte of the answer has come.
    """

    __slots__ = (
        "_between_chunks", "_complete", "_endpoint", "_fields", "_framing", "_head_bytes", "_parser", "_pieces", "_reusable",
        "_status", "client", "closing", "heard", "idle_since", "raw", "reader", "reused", "transport",
    )  # fmt: skip

    def __init__(self, endpoint: Upstream) -> None:
        self._endpoint = endpoint
        self.reader: Reader | None = None
        self.client: Any = None
        self.raw: Any = None
        self.reused = False
        self.closing = False
        self.idle_since = 0.0
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._fields: list[Field] = []
        self._pieces: list[bytes] = []
        self._framing = ""
        self._head_bytes = 0
        self._status = 0
        self._complete = False
        self._reusable = False
        self._between_chunks = True
        self.heard = False

    @property
    def between_chunks(self) -> bool:
        """Whether the next byte begins a chunk, so that whole chunks may bypass the parser."""
        return self._between_chunks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine has accepted."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def send(self, reader: Reader, client: Any, head: bytes, body: tuple[bytes | memoryview, ...] = ()) -> None:
        """Send a request, and read its answer for C{reader}."""
        self.reader, self.client = reader, client
        if len(body) == 1 and len(body[0]) < ONE_WRITE:
            self.transport.write(head + body[0])
            return
        self.transport.write(head)
        for piece in body:
            self.transport.write(piece)

    def data_received(self, data: bytes) -> None:
        """A read: pass it on as it is, if that is known to be right, else parse it."""
        raw = self.raw
        if (
            raw is not None
            and data.startswith(CHUNK_HEADS.get(len(data), _NO_HEAD))
            and (data.endswith(DELTA_END) or (data.endswith(EVENT_END) and not _notable(data)))
        ):
            self.client.moved += 1
            raw(data)
            return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        reader = self.reader
        if reader is None or self._complete:
            self.abort()
            return
        self.heard = True
        self.client.moved += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._broken(NoHttp("it wants to speak another protocol"))
            return
        except httptools.HttpParserError as error:
            self._broken(NoHttp(str(error.__context__ or error)))
            return
        if not self._status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_ANSWER_HEAD:
                self._broken(NoHttp(f"the head of its answer is larger than {MAX_ANSWER_HEAD} bytes"))
            return
        if not self._framing:
            self._framing = self._find_framing()
            if self._framing == OTHER:
                self._broken(NoHttp("the only transfer coding taken is `chunked`"))
                return
            reader.answer(self._status, self._fields, self._framing)
        if self.reader is reader and (self._pieces or self._complete):
            pieces, self._pieces = self._pieces, []
            reader.piece(pieces[0] if len(pieces) == 1 else b"".join(pieces), self._complete)

    def eof_received(self) -> None:
        """The engine says no more."""
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        self.closing = True
        self._endpoint.forget(self)
        self._ended(exc)
        self._parser = self.raw = self.client = None

    def pause_writing(self) -> None:
        """The engine takes the request slowly; it is in memory already, so there is nothing to hold back."""

    def resume_writing(self) -> None:
        """It goes on taking it."""
        if self.client is not None:
            self.client.moved += 1

    def _ended(self, exc: Exception | None) -> None:
        reader = self.reader
        if reader is None:
            return
        if self._framing == UNTIL_CLOSE and exc is None:
            self._complete = True
            self.closing = True
            reader.piece(b"", True)
        else:
            self.reader = self.raw = None
            self.closing = True
            reader.lost(exc)

    def _broken(self, error: Exception) -> None:
        reader, self.reader, self.raw = self.reader, None, None
        self.abort()
        if reader is not None:
            reader.lost(error)

    def abort(self) -> None:
        """Close at once; the engine sees that nobody waits any more."""
        self.reader = self.raw = None
        self.closing = True
        self.transport.abort()

    def release(self) -> None:
        """The answer is whole and passed on: keep the connection for the next request, if it can be."""
        if self.reader is None:
            return
        reusable = self._complete and not self.closing and self._reusable
        self.reader = self.raw = self.client = None
        if not reusable or self.transport.get_write_buffer_size():
            self.abort()
            return
        self._reset()
        self.reused = True
        self.idle_since = _monotonic()
        self._endpoint.idle.append(self)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A response begins; a second one to the same request is none of ours."""
        if self._complete:
            raise NoHttp("it answered twice")
        self._fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer field, which is dropped."""
        if not self._status:
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole. 1xx are steps on the way and not passed on."""
        status: int = self._parser.get_status_code()
        if self._parser.get_http_version() not in ("1.1", "1.0") or not 100 <= status < 600:
            raise NoHttp(f"its answer begins with HTTP/{self._parser.get_http_version()} {status}")
        if status >= 200:
            self._status = status

    def _find_framing(self) -> str:
        framing = UNTIL_CLOSE
        for name, value in self._fields:
            if name == b"content-length":
                framing = LENGTH
            elif name == b"transfer-encoding":
                framing = CHUNKED if value.lower() == b"chunked" and framing == UNTIL_CLOSE else OTHER
        return framing

    def on_chunk_header(self) -> None:
        """Inside a chunk."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """Between two chunks."""
        self._between_chunks = True

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._status:
            self._complete = True
            self._reusable = self._framing != UNTIL_CLOSE and self._parser.should_keep_alive()


class Upstream(Candidate):
    """One endpoint as a worker sees it: where it is, its idle connections, and how requests to it begin.

    @ivar config: the table's entry.
    @ivar idle: connections without a request, the one used last at the end.
    @ivar flowing: how many answers are on their way from it now.
    @ivar used: how many connections were made, and how often one was used again; one list for all endpoints of the worker.
    """

    __slots__ = ("_dialling", "_heads", "_loop", "_open", "config", "flowing", "idle", "keep", "tls", "used")

    log = Logger()

    def __init__(self, loop: asyncio.AbstractEventLoop, config: RoutedEndpoint, keep: float, used: list[int]) -> None:
        super().__init__(config.id, config.row, config.limit or 0, config.share)
        self._loop = loop
        self.config = config
        self.keep = keep
        self.used = used
        self.flowing = 0
        self.idle: list[EngineConnection] = []
        self.tls = ssl.create_default_context() if config.tls else None
        self._heads: dict[bytes, bytes] = {}
        self._dialling: set[asyncio.Task[None]] = set()
        self._open: set[EngineConnection] = set()

    def connect(self, reader: Reader, fresh: bool = False) -> asyncio.Task[None] | None:
        """Give C{reader} a connection: an idle one at once, else one that is dialled; the task then may be cancelled.

        @param fresh: it has to be a new one.
        """
        oldest = _monotonic() - self.keep
        while self.idle and not fresh:
            connection = self.idle.pop()
            if not connection.closing and connection.idle_since > oldest:
                self.used[1] += 1
                reader.connected(connection)
                return None
            connection.abort()
        self.used[0] += 1
        task = self._loop.create_task(self._dial(reader))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return task

    async def _dial(self, reader: Reader) -> None:
        config = self.config
        try:
            _, connection = await self._loop.create_connection(
                lambda: EngineConnection(self), config.host, config.port, ssl=self.tls
            )
        except Exception as error:
            if not isinstance(error, OSError):
                self.log.failure("Connecting to {id} failed", id=self.id)
            reader.not_connected(error)
            return
        self._open.add(connection)
        reader.connected(connection)

    def give_back(self, connection: EngineConnection) -> None:
        """A connection that came too late for the one who asked."""
        connection.idle_since = _monotonic()
        self.idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """A connection has closed."""
        self._open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close connections that have been idle for too long to be trusted."""
        oldest = now - self.keep
        while self.idle and self.idle[0].idle_since < oldest:
            self.idle.pop(0).abort()

    def close(self) -> None:
        """The endpoint has left the table: no connection is to be kept for it. Requests under way go on."""
        self.keep = 0.0
        while self.idle:
            self.idle.pop().abort()

    def head(self, call: Call, query: bytes) -> bytes:
        """The beginning of every request of this call to this endpoint, up to the fields that differ."""
        if query:
            return self._make_head(call, query)
        found = self._heads.get(call.path)
        if found is None:
            found = self._heads[call.path] = self._make_head(call, b"")
        return found

    def probe_head(self) -> bytes:
        """A request for its models, without the empty line."""
        return self._make_head(CALLS[b"/v1/models"], b"")

    def _make_head(self, call: Call, query: bytes) -> bytes:
        config = self.config
        host = f"[{config.host}]" if ":" in config.host else config.host
        target = config.base.encode() + call.path + (b"?" + query if query else b"")
        lines = [b"%b %b HTTP/1.1" % (call.method, target), b"host: %b:%d" % (host.encode(), config.port)]
        lines.append(b"accept-encoding: identity")
        if config.key:
            lines.append(b"authorization: Bearer %b" % config.key.encode())
            if config.static and call.shape == ANTHROPIC:
                lines.append(b"x-api-key: %b" % config.key.encode())
        return b"\r\n".join(lines) + b"\r\n"
