"""An engine that answers byte for byte as a test says, also wrongly: half an event, a reset, silence.

It is deliberately not built from the parts that it tests: blocking sockets, one thread for each connection, and a reading of
HTTP that is a few lines long. What it received stays in C{requests}, raw bytes included.

A script is a function of one L{Conversation}; it is called for each connection and returns when it is done with it::

    def script(talk):
        while talk.request():
            talk.stream(b"data: one\n\n", b"data: [DONE]\n\n")

    with ScriptedEngine(script) as engine:
        ... engine.url ...
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType

from attrs import define, field, frozen

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@frozen
class Received:
    """A request as it arrived. C{headers} are in order, names in lower case."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    raw: bytes

    def header(self, name: bytes) -> bytes | None:
        """The first field of this name."""
        return next((value for known, value in self.headers if known == name), None)

    @property
    def json(self) -> dict[str, object]:
        """The body, read as JSON."""
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


@define
class Conversation:
    """One connection, from the engine's side."""

    engine: ScriptedEngine
    socket: socket.socket
    rest: bytes = b""

    def _more(self, size: int = 0) -> bool:
        """Read once, or until there are C{size} bytes."""
        pieces, have = [self.rest], len(self.rest)
        while True:
            try:
                data = self.socket.recv(2**20)
            except OSError:
                data = b""
            pieces.append(data)
            have += len(data)
            if not data or have >= size:
                break
        self.rest = b"".join(pieces)
        return bool(data)

    def request(self) -> Received | None:
        """The next request, None when there will be none."""
        while b"\r\n\r\n" not in self.rest:
            if not self._more():
                return None
        head, _, _ = self.rest.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        headers = []
        for one in fields:
            name, _, value = one.partition(b":")
            headers.append((name.strip().lower(), value.strip()))
        length = int(dict(headers).get(b"content-length", b"0"))
        size = len(head) + 4 + length
        while len(self.rest) < size:
            if not self._more(size):
                return None
        raw, self.rest = self.rest[:size], self.rest[size:]
        received = Received(line, headers, raw[len(head) + 4 :], raw)
        self.engine.requests.append(received)
        return received

    def send(self, data: bytes) -> bool:
        """Send these bytes as they are. Returns whether the other end still takes any."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def answer(self, body: bytes, status: bytes = b"200 OK", fields: bytes = b"content-type: application/json\r\n") -> None:
        """A whole answer with a length."""
        self.send(b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, fields, len(body), body))

    def stream(self, *events: bytes) -> None:
        """A whole chunked stream, one chunk each."""
        self.send(STREAM_HEAD + b"".join(chunk(event) for event in events) + b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with an RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def closed_within(self, seconds: float) -> float | None:
        """Wait for the other end to close; how long that took, None if it did not."""
        began = time.monotonic()
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(65536):
                if time.monotonic() - began > seconds:
                    return None
        except TimeoutError:
            return None
        except OSError:
            pass
        return time.monotonic() - began


Script = Callable[[Conversation], None]


@define
class ScriptedEngine:
    """Listens on a free port of the loopback while it is entered."""

    script: Script
    requests: list[Received] = field(factory=list)
    conversations: list[Conversation] = field(factory=list)
    open: int = 0
    most_open: int = 0
    _listening: socket.socket = field(factory=lambda: socket.create_server(("127.0.0.1", 0), backlog=512))
    _lock: threading.Lock = field(factory=threading.Lock)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listening.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """As a catalog names it."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ScriptedEngine:
        self.port  # noqa: B018 - the socket is bound already; fail here if not
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for talk in list(self.conversations):
            with contextlib.suppress(OSError):
                talk.socket.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        talk = Conversation(self, connection)
        with self._lock:
            self.conversations.append(talk)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        try:
            self.script(talk)
        finally:
            with self._lock:
                self.open -= 1
            with contextlib.suppress(OSError):
                connection.close()
