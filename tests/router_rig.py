"""One router worker as a real process, with a table that tests replace, and raw clients for it."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from msgspec.structs import replace

from llmgw.config.server import Timeouts
from llmgw.router.channel import decode, encode
from llmgw.router.scoreboard import Scoreboard, shared_file
from llmgw.router.table import KeyEntry, RoutedModel, Table, endpoint, key_digest, write_table
from tests.shared_files import remove_shared_files

KEY = "sk-test"
OK = b'{"ok":true}'
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
AUTH = b"Host: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
BODY = b'{"model":"m"}'
LENGTH = b"Content-Length: 13\r\n"
EVENTS = [b'data: {"n":%d}\n\n' % number for number in range(5)]
DONE = b"data: [DONE]\n\n"


def until(condition, seconds=5.0, what="condition"):
    """Wait for a condition, checking often; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


class Rig:
    """A worker, its folder and its channel."""

    def __init__(self, *extra: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="llmgw-rig-"))
        self.board = Scoreboard.create(shared_file(self.folder, "scoreboard"))
        self.version = 0
        self.heard: list[dict] = []
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=1024, reuse_port=True)
        self.port = self.listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.access = self.folder / "access.jsonl"
        self.table = Table()
        self.start(*extra)

    def start(self, *extra: str) -> None:
        ours, theirs = socket.socketpair()
        column = self.board.claim()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmgw.router.worker", "--folder", str(self.folder), "--generation", "1",
             "--column", str(column), "--channel", str(theirs.fileno()), "--listen", str(self.listening.fileno()), *extra],
            pass_fds=[theirs.fileno(), self.listening.fileno()],
        )  # fmt: skip
        theirs.close()
        self.channel = ours
        threading.Thread(target=self._listen, args=(ours,), daemon=True).start()
        until(lambda: any(m["type"] == "ready" for m in self.heard), 10, "worker ready")

    def _listen(self, ours: socket.socket) -> None:
        with ours.makefile("rb") as lines:
            for line in lines:
                self.heard.append(decode(line))

    def stop(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(5)
        self.listening.close()
        remove_shared_files(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def use(self, *engines, timeouts=None, keys_required=True, keys=None, limit=None, model=None, served="m", **table) -> Table:
        """Route the model C{m} (alias C{alias}) to these engines; other models by C{models}. Waits until it is in force."""
        self.version += 1
        endpoints = [
            endpoint(
                f"m/{number}", engine if isinstance(engine, str) else engine.url, model=served, key=f"ek-{number}", limit=limit
            )
            for number, engine in enumerate(engines)
        ]
        main = model or RoutedModel("m", aliases=("alias",), policy="round_robin")
        main = replace(main, endpoints=tuple(one.id for one in endpoints))
        keys = keys if keys is not None else (KeyEntry("k1", key_digest(KEY), name="test"),)
        models = (main, RoutedModel("cold", reason="0/3 nodes can run this: 3 too few devices"))
        fill = {"timeouts": timeouts or Timeouts(), "keys_required": keys_required, "access_log": str(self.access)}
        fill |= {"models": models, "endpoints": tuple(endpoints), "keys": keys} | table
        return self.publish(Table(version=self.version, **fill))

    def publish(self, table: Table) -> Table:
        names = [f"endpoint/{one.id}" for one in table.endpoints] + [f"model/{one.name}" for one in table.models]
        names += [f"key/{key.id}" for key in table.keys] + [f"team/{key.team}" for key in table.keys if key.team]
        rows = self.board.assign(names, table.version)
        self.table = replace(table, endpoints=tuple(replace(one, row=rows[f"endpoint/{one.id}"]) for one in table.endpoints))
        write_table(self.folder / "table.json", self.table)
        self.channel.sendall(encode("table", version=table.version))
        until(lambda: any(m["type"] == "routing" and m["version"] == table.version for m in self.heard), 5, "table in force")
        return self.table

    def in_flight(self) -> int:
        return sum(self.board.total(one.row) for one in self.table.endpoints)

    def log(self, count=1, **wanted) -> list[dict]:
        """The access log's rows with these values, once there are C{count} of them."""

        def rows():
            if not self.access.exists():
                return []
            found = [json.loads(line) for line in self.access.read_text().splitlines()]
            found = [row for row in found if all(row.get(name) == value for name, value in wanted.items())]
            return found if len(found) >= count else []

        return until(rows, 4, f"{count} log rows with {wanted}")

    def scrape(self) -> dict[str, float]:
        """The worker's metrics, by series."""
        self.heard.clear()
        self.channel.sendall(b'{"type":"metrics","request":7}\n')
        text = until(lambda: [m for m in self.heard if m["type"] == "metrics"])[0]["text"]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}

    def rss(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096

    def post(self, path="/v1/chat/completions", body=None, headers=None, key=KEY):
        """(status, headers, body) of one request on a connection of its own."""
        body = {"model": "m", "messages": []} if body is None else body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, data, headers, key)

    def get(self, path, headers=None, key=KEY):
        return self.send("GET", path, None, headers, key)

    def send(self, method, path, data, headers=None, key=KEY):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, data, {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def client(self) -> RawClient:
        return RawClient(self.port)


def finished(steps, each=None):
    """What a generator returns that works in steps; C{each} is called with the seconds of CPU time that each of them took."""
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        finally:
            if each is not None:
                each(time.thread_time() - began)


def longest_step(make):
    """The most CPU time that one step took, in the quickest of three rounds: what all have in common is the code's."""
    rounds = []
    for _ in range(3):
        took = []
        finished(make(), took.append)
        rounds.append(max(took))
    return min(rounds)


def request_bytes(body=b'{"model":"m","stream":true}', path=b"/v1/chat/completions", fields=b"", key=KEY) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path, key.encode(), fields, len(body), body,
    )  # fmt: skip


def plain(talk):
    """The script of an engine that answers every request with C{OK}."""
    while talk.request():
        talk.answer(OK)


def idle(rig):
    until(lambda: rig.in_flight() == 0, 2, "nothing in flight")


def stream(rig, **client):
    """A client that has just asked for a stream."""
    raw = rig.client()
    raw.send(request_bytes(**client))
    return raw


def descriptors(rig):
    return len(os.listdir(f"/proc/{rig.process.pid}/fd"))


class RawClient:
    """A client that sends and sees bytes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.seen = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to read; unlike C{select}, of any descriptor."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def read_until(self, mark: bytes, seconds=5.0) -> bytes:
        """Everything up to and with the mark."""
        deadline = time.monotonic() + seconds
        while mark not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0 and self.readable(left), f"no {mark!r} in {self.seen!r}"
            data = self.socket.recv(65536)
            assert data, f"closed before {mark!r}: {self.seen!r}"
            self.seen += data
        end = self.seen.index(mark) + len(mark)
        found, self.seen = self.seen[:end], self.seen[end:]
        return found

    def read_all(self, seconds=5.0) -> bytes:
        """Everything until the other end closes, however it does."""
        self.socket.settimeout(seconds)
        try:
            while data := self.socket.recv(65536):
                self.seen += data
        except ConnectionResetError:
            pass
        found, self.seen = self.seen, b""
        return found

    def answer(self, seconds=5.0) -> tuple[int, bytes, bytes]:
        """(status, head, body) of one answer with a length or in chunks."""
        head = self.read_until(b"\r\n\r\n", seconds)
        status = int(head.split()[1])
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            return status, head, self._chunks(seconds)
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0])
        deadline = time.monotonic() + seconds
        while len(self.seen) < length:
            assert self.readable(deadline - time.monotonic())
            data = self.socket.recv(65536)
            assert data
            self.seen += data
        body, self.seen = self.seen[:length], self.seen[length:]
        return status, head, body

    def _chunks(self, seconds):
        body = b""
        while True:
            size = int(self.read_until(b"\r\n", seconds), 16)
            piece = b""
            while len(piece) < size + 2:
                if not self.seen:
                    assert self.readable(seconds)
                    data = self.socket.recv(65536)
                    assert data, "closed in mid-chunk"
                    self.seen += data
                take = size + 2 - len(piece)
                piece, self.seen = piece + self.seen[:take], self.seen[take:]
            body += piece[:-2]
            if not size:
                return body


def dechunk(data: bytes) -> tuple[bytes, bool]:
    """(the body of as many whole chunks as there are, whether the last chunk is there)."""
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        count = int(size, 16)
        if len(rest) < count + 2:
            return body, False
        if not count:
            return body, True
        body, data = body + rest[:count], rest[count + 2 :]
    return body, False
