"""A recorded admin API on a unix socket: answers what the test put in, and remembers what was asked."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, urlsplit

import pytest

from llmgw.cli.main import run


class _Handler(BaseHTTPRequestHandler):
    def address_string(self):
        return "unix"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        url = urlsplit(self.path)
        self._answer(url.path, dict(parse_qsl(url.query)))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._answer(self.path, body)

    def _answer(self, path, asked):
        stub = self.server.stub
        stub.asked.append((f"{self.command} {path}", asked))
        status, answer = stub.next(f"{self.command} {path}")
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class AdminStub:
    """C{answers} maps C{"GET /v1/status"} to an answer, or to a list of answers of which the last is repeated."""

    def __init__(self, path):
        self.path = str(path)
        self.answers = {}
        self.asked = []
        self._server = _Server(self.path, _Handler)
        self._server.stub = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def next(self, what):
        if what not in self.answers:
            return 404, {"error": {"code": "unknown", "message": f"no {what}"}}
        answer = self.answers[what]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer if isinstance(answer, tuple) else (200, answer)

    def run(self, *arguments):
        return run(["--socket", self.path, *arguments])

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def admin(tmp_path):
    with contextlib.closing(AdminStub(tmp_path / "admin.sock")) as stub:
        yield stub
