"""A small Hugging Face hub on a loopback port: the part of its HTTP protocol that huggingface_hub speaks for a download."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from attrs import define, field

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@define
class Hub:
    """One repository; files whose names end in .safetensors are large ones.

    @ivar gated: the token that is let in, None for everybody.
    @ivar cut: after how many bytes the answers to GETs of a large file break off, None for never.
    @ivar held: large files are answered only up to C{cut} and then hang until C{release}.
    @ivar damaged: how many GETs of a large file still get another content than its hash says.
    @ivar asked: what was asked: method, path and Range.
    """

    files: dict[str, bytes]
    repo: str = "acme/tiny"
    gated: str | None = None
    cut: int | None = None
    held: bool = False
    damaged: int = 0
    size_told: dict[str, int] = field(factory=dict)
    asked: list[tuple[str, str, str]] = field(factory=list)
    tokens: list[str] = field(factory=list)
    release: threading.Event = field(factory=threading.Event)
    server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def start(self):
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def gets(self, name):
        """The Range of each GET of a file."""
        return [ranged for method, path, ranged in self.asked if method == "GET" and path.endswith(name)]

    def info(self):
        siblings = []
        for name, data in self.files.items():
            size = self.size_told.get(name, len(data))
            row = {"rfilename": name, "size": size, "blobId": git_sha1(data)}
            if name.endswith(".safetensors"):
                row["lfs"] = {"sha256": sha256(data), "size": size, "pointerSize": 134}
            siblings.append(row)
        return {"id": self.repo, "modelId": self.repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body):
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.tokens.append(token)
        if re.fullmatch(rf"/api/models/{hub.repo}(/revision/(main|{COMMIT}))?", path):
            self.reply(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, body)
        elif found := re.fullmatch(rf"/{hub.repo}/resolve/(?:main|{COMMIT})/(.+)", path):
            if hub.gated is not None and token != hub.gated:
                self.reply(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, body)
            else:
                self.file(found[1], body)
        else:
            code = "RepoNotFound" if hub.repo not in path else "RevisionNotFound"
            self.reply(404, b"", {"X-Error-Code": code, "X-Error-Message": "not here"}, body)

    def file(self, name, body):
        hub, data = self.hub, self.hub.files[name]
        large = name.endswith(".safetensors")
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{sha256(data) if large else git_sha1(data)}"', "Accept-Ranges": "bytes"}
        if large and body and hub.damaged:
            hub.damaged -= 1
            data = b"x" * len(data)
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(first[1]) if first else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = hub.cut if large and body else None
        self.reply(206 if start else 200, data[start:], headers, body, cut)

    def reply(self, status, data, headers, body, cut=None):
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data[:cut])
                self.wfile.flush()
            if cut is not None and cut < len(data):
                if self.hub.held:
                    self.hub.release.wait(30)
                self.close_connection = True
