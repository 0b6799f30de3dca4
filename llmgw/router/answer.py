"""An engine's answer on its way to the client: its head made ours, its body framed anew, only whole events of a stream.

Pure: pieces of a body in, bytes for the client out. An unfinished event waits for the next piece, so that an engine that dies in
mid-event leaves nothing torn behind; an event longer than L{MAX_EVENT} goes out in pieces nevertheless. What a stream says of its
usage is read as it goes by, and taken out where the client did not ask for it (router/usage.py).
"""

from __future__ import annotations

from llmgw.router.errors import reason_phrase, says_failed, tells_error
from llmgw.router.request import Field
from llmgw.router.upstream import LENGTH
from llmgw.router.usage import MARKS, TAIL, TOLD, StreamUsage, Usage, guessed, of_body

MAX_EVENT = 2**20
# Fields of an engine's answer that end here; the rest goes to the client.
HERE = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade content-length "
    b"x-request-id x-llmgw-replica set-cookie".split()
)
_JSON = b"application/json"
_SSE = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"


class Answer:
    """One answer.

    @ivar head: the head for the client, up to the fields that the relay adds; no empty line yet.
    @ivar sse: it is an event stream.
    @ivar chunked: it is sent in chunks. If neither this nor C{plain}, it ends with the connection.
    @ivar plain: it has a length, known before, or can have no body (204, 304).
    @ivar events: about how many have gone through L{feed}.
    @ivar torn: what went out last was not the end of an event.
    @ivar failed: the engine has told an error within its answer, and that is all that the client learns of it.
    """

    __slots__ = ("_held", "_kind", "_tail", "_usage", "chunked", "events", "failed", "head", "plain", "sse", "status", "torn")

    def __init__(self, status: int, fields: list[Field], framing: str, http11: bool, kind: str, hide: bool) -> None:
        """
        @param framing: the engine's (see router/upstream.py).
        @param kind: of its usage, to be read if there is one (see router/surface.py).
        @param hide: take the usage of a stream out, since the client did not ask.
        """
        self.status = status
        self.sse = False
        self.torn = self.failed = False
        self.events = 0
        self._held = b""
        self._kind = kind
        self._tail: bytes | None = b"" if kind and status == 200 else None
        self._usage: StreamUsage | None = None
        self.head = self._make_head(fields, framing, http11)
        if self.sse:
            self._tail = None
            self._usage = StreamUsage(hide) if kind else None

    def _make_head(self, fields: list[Field], framing: str, http11: bool) -> bytes:
        lines = [b"HTTP/1.1 %d %b\r\n" % (self.status, reason_phrase(self.status))]
        length = named = b""
        packed = False
        for name, value in fields:
            if name == b"content-length":
                length = value
            elif name == b"connection":
                named = named + b"," + value.lower() if named else value.lower()
            elif name not in HERE:
                lines.append(b"%b: %b\r\n" % (name, value))
                if name == b"content-type":
                    self.sse = value != _JSON and value[:17].lower() == b"text/event-stream"
                elif name == b"content-encoding":
                    packed = value.lower() != b"identity"
        if named and named not in (b"close", b"keep-alive"):
            hidden = {token.strip() + b":" for token in named.split(b",")}
            lines = [line for line in lines if line.partition(b" ")[0] not in hidden]
        if self.sse:
            lines.append(_SSE)
            self.sse = not packed  # what nobody here can read goes out as it comes
        bodiless = self.status in (204, 304)
        self.plain = (framing == LENGTH and not self.sse) or bodiless
        self.chunked = http11 and not self.plain
        if bodiless:
            pass
        elif self.plain:
            lines.append(b"content-length: %b\r\n" % length)
        elif self.chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        return b"".join(lines)

    def feed(self, data: bytes, done: bool) -> bytes:
        """What goes to the client now that this piece of the body has come."""
        if self.sse:
            data = self._whole_events(data, done)
            self.events += data.count(b"\n\n") or 1
            self.failed = self.failed or tells_error(data)
            if self._usage is not None and (MARKS[0] in data or MARKS[1] in data):
                data = self._usage.look(data)
        elif self._tail is not None:
            self._tail = (self._tail + data)[-TAIL:] if self._tail or len(data) > TAIL else data
            self.failed = done and says_failed(self._tail)
        return self.framed(data, done) if self.chunked else data

    @staticmethod
    def framed(data: bytes, done: bool = False) -> bytes:
        """Data as a chunk, and the last chunk after it if it is C{done}."""
        if not data:
            return b"0\r\n\r\n" if done else b""
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if done else b"%x\r\n%b\r\n" % (len(data), data)

    def _whole_events(self, data: bytes, done: bool) -> bytes:
        if self._held:
            data = self._held + data
            self._held = b""
        if done or data.endswith((b"\n\n", b"\n\r\n", b"\r\r")):
            self.torn = False
            return data
        end = last_event_end(data)
        if len(data) - end > MAX_EVENT:
            self.torn = True
            return data
        self._held = data[end:]
        self.torn = self.torn and not end
        return data[:end]

    @property
    def between_events(self) -> bool:
        """Whether all that has come has gone out, and ended at an event: a whole event may follow without being looked at."""
        return self.sse and self.chunked and not self._held and not self.torn

    def last_words(self, event: bytes) -> bytes:
        """An error event for a stream that has broken; nothing where the client could not tell it from what came before."""
        if not self.sse or self.torn:
            return b""
        return self.framed(event) if self.chunked else event

    def usage(self, done: bool, unseen: int, prompt_bytes: int) -> Usage | None:
        """The tokens it took, as far as known; None if it took none.

        @param done: it ended well.
        @param unseen: how many whole events were passed on without L{feed}.
        @param prompt_bytes: the size of the request.
        """
        if self._usage is not None:
            silent = self._kind == TOLD and not self._usage.seen
            return None if silent else self._usage.result(done, self.events + unseen, prompt_bytes)
        if self._tail is None:
            return None
        told = of_body(self._tail) if self._tail and done else None
        return told if told is not None else guessed(self._kind, prompt_bytes, len(self._tail))


def last_event_end(data: bytes) -> int:
    """Where the last whole event in this piece of a stream ends; 0 if none does. A blank line ends an event."""
    best = 0
    for ending in (b"\n\n", b"\n\r\n", b"\r\r"):
        at = data.rfind(ending)
        if at >= 0:
            best = max(best, at + len(ending))
    return best
