"""Real daemons for tests: twistd processes, certificates made on the spot, engines that answer, faults by signal.

Everything of one fleet lives in one temporary folder, whose path is how left-over processes are found and ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.ports import free_ports
from tests.shared_files import remove_shared_files

BIN = Path(sys.executable).parent
PATIENCE = 20.0


T = TypeVar("T")


def until(found: Callable[[], T], what: str = "", seconds: float = PATIENCE) -> T:
    """The first true value of C{found}; errors count as "not yet"."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            if value := found():
                return value
            last = value
        except (OSError, LookupError, ValueError, RuntimeError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.05)
    raise AssertionError(f"{what or found}: not within {seconds} s; last: {last!r}")


def processes(marker: str) -> dict[int, str]:
    """pid to command of every living process with C{marker} in its command line, environment or working folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            told = command + b"\0" + (entry / "environ").read_bytes() + b"\0" + os.fsencode(os.readlink(entry / "cwd"))
            if state != "Z" and marker.encode() in told:
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def queued(pid: int) -> float:
    """Seconds that the threads of a process have been ready to run and had no processor; 0 when it is gone (schedstat)."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError):
                total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


QUICK = "heartbeat: 500ms, stop_grace: 2s, drain: 10s, lost_after: 5s, failover_grace: 5s, backoff: 1s"

FAKE_ENGINE = """
  - name: {name}
    replicas: {replicas}
    profile:
      engine: command
      argv: [{python}, -m, llmgw.testing.fake_engine, --port, "{{port}}", --name, "{{model}}"{extra}]
      health: /health
      resources: {{devices: 0, host_memory: 16MiB}}
"""


def fake_model(name: str = "m", replicas: int = 1, *extra: str, more: str = "") -> str:
    """A catalog entry run by the fake engine; C{extra} are its options, C{more} further YAML under profile."""
    options = "".join(f', "{option}"' for option in extra)
    return FAKE_ENGINE.format(name=name, replicas=replicas, python=sys.executable, extra=options) + more


class Stream(threading.Thread):
    """A streamed chat completion read in a thread; C{pieces} grows, C{error} says how it broke, C{done} that it ended whole."""

    def __init__(self, port: int, model: str = "m", tokens: int = 50, key: str = "") -> None:
        super().__init__(daemon=True)
        self.pieces: list[str] = []
        self.error: BaseException | None = None
        self.done = False
        self._ask = (port, model, tokens, key)
        self.start()

    def run(self) -> None:
        port, model, tokens, key = self._ask
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            body = {"model": model, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "x"}]}
            headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"{reply.status} {reply.read(500)!r}")
            for line in reply:
                if line.startswith(b"data: [DONE]"):
                    self.done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    self.pieces.append(line.decode())
            if not self.done:
                raise RuntimeError("ended without [DONE]")
        except BaseException as error:
            self.error = error

    def whole(self, seconds: float = 30) -> None:
        """Fails unless the stream ends with [DONE]."""
        self.join(seconds)
        assert self.done and self.error is None, f"{len(self.pieces)} pieces, then {self.error!r}"


@functools.cache
def authority() -> Path:
    """A folder with an authority, server cp1 and nodes n1 to n3, made once a run by the real command and then copied."""
    folder = Path(tempfile.mkdtemp(prefix="llmgw-pki-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for words in (["init"], ["server", "cp1", "--address", "127.0.0.1"], ["node", "n1"], ["node", "n2"], ["node", "n3"]):
        command = [str(BIN / "llmgw"), "pki", words[0], str(folder / "pki"), *words[1:]]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder / "pki"


class RealFleet:
    """One server and any number of agents as real processes under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.router, self.fleet = free_ports(2)
        self.socket = folder / "admin.sock"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "log").mkdir()
        shutil.copytree(authority(), folder / "pki")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(BIN / "llmgw"), *arguments], cwd=self.folder, capture_output=True, text=True, timeout=60)

    def pki(self, *arguments: str) -> None:
        done = self.command("pki", *arguments)
        assert done.returncode == 0, done.stderr

    def llmgw(self, *arguments: str, code: int | None = 0) -> str:
        done = self.command("--socket", str(self.socket), *arguments)
        if code is not None and done.returncode != code:
            raise RuntimeError(f"llmgw {' '.join(arguments)}: {done.returncode} {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        """What C{llmgw status --json} prints, without the price of a process each time it is asked."""
        found: dict[str, Any] = self.asked("/v1/status")
        return found

    def asked(self, path: str) -> Any:
        """An answer of the admin socket."""
        connection = http.client.HTTPConnection("admin", timeout=10)
        with socket.socket(socket.AF_UNIX) as connection.sock:
            connection.sock.settimeout(10)
            connection.sock.connect(str(self.socket))
            connection.request("GET", path)
            reply = connection.getresponse()
            body = json.loads(reply.read())
        if reply.status != 200:
            raise RuntimeError(f"{reply.status} {body}")
        return body

    def write_server(self, models: str, router: str = "", timing: str = QUICK, top: str = "") -> Path:
        path = self.folder / "server.yaml"
        path.write_text(
            f"router: {{listen: 127.0.0.1:{self.router}, access_log: log/access.jsonl{router}}}\n"
            f"fleet:\n  listen: 127.0.0.1:{self.fleet}\n  advertise: 127.0.0.1:{self.fleet}\n"
            "  tls: {authority: pki/ca.pem, certificate: pki/cp1.pem, key: pki/cp1.key}\n"
            f"admin: {{socket: {self.socket}}}\nstore: sqlite:///state/llmgw.db\n"
            f"timing: {{{timing}}}\n"
            f"{top}models:{models}"
        )
        return path

    def write_agent(self, name: str, extra: str = "", servers: str = "") -> Path:
        if not (self.folder / "pki" / f"{name}.pem").exists():
            self.pki("node", "pki", name)
        ports = free_ports(40)
        path = self.folder / f"{name}.yaml"
        path.write_text(
            f"node: {name}\n{servers or f'server: 127.0.0.1:{self.fleet}'}\n"
            f"tls: {{authority: pki/ca.pem, certificate: pki/{name}.pem, key: pki/{name}.key}}\n"
            f"state: state/{name}\naddress: 127.0.0.1\nports: {ports[0]}-{ports[-1]}\nmodels: [models]\n{extra}"
        )
        return path

    def daemon(self, name: str, kind: str, config: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        command = [BIN / "twistd", "-n", "--pidfile=", "--logger=llmgw.logs.text", f"llmgw-{kind}", "--config", config]
        with open(self.folder / "log" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "LLMGW_TEST": str(self.folder), **(environment or {})},
            )
        self.running[name] = process
        return process

    def start_server(self) -> subprocess.Popen[bytes]:
        process = self.daemon("server", "server", self.folder / "server.yaml")
        until(lambda: process.poll() is not None or self.status(), "the server answers")
        assert process.poll() is None, self.log("server")
        return process

    def start_agent(self, name: str = "n1") -> subprocess.Popen[bytes]:
        return self.daemon(name, "agent", self.folder / f"{name}.yaml")

    def end(self, name: str, number: int = signal.SIGTERM, seconds: float = 15) -> int:
        process = self.running[name]
        process.send_signal(number)
        return process.wait(seconds)

    def ends_in_time(self, name: str, number: int = signal.SIGTERM, seconds: float = 2.0) -> None:
        """Fails unless the daemon ends well within so many seconds, not counted those it stood in the queue for a processor.

        So it holds on a busy machine, too. One that hangs sleeps and stands in no queue, and a stop that was given up exits
        with another status.
        """
        process = self.running[name]
        before, began, waited = queued(process.pid), time.monotonic(), 0.0
        process.send_signal(number)
        while process.poll() is None and time.monotonic() - began < 15:
            waited = max(waited, queued(process.pid) - before)
            time.sleep(0.01)
        took = time.monotonic() - began
        assert process.poll() == 0, f"{name}: {process.poll()} after {took:.1f} s"
        assert took - waited < seconds, f"{name} took {took:.1f} s, of which {waited:.1f} s in the queue for a processor"

    def log(self, name: str) -> str:
        return (self.folder / "log" / f"{name}.log").read_text(errors="replace")

    def shards(self, model: str = "m") -> list[dict[str, Any]]:
        found = {row["name"]: row for row in self.status()["models"]}[model]
        return [shard for replica in found["replicas"] for shard in replica["shards"]]

    def ready(self, model: str = "m", count: int = 1, seconds: float = PATIENCE) -> list[dict[str, Any]]:
        """The shards of a model once C{count} of them are ready."""

        def look() -> list[dict[str, Any]] | None:
            found = [shard for shard in self.shards(model) if shard["state"] == "ready" and shard["pid"]]
            return found if len(found) >= count else None

        return until(look, f"{count} ready of {model}", seconds)

    def ask(self, model: str = "m", path: str = "/v1/chat/completions", key: str = "") -> tuple[int, dict[str, Any]]:
        """One small answer through the router: status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.router, timeout=20)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        body = {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
        try:
            connection.request("POST", path, json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def stream(self, model: str = "m", tokens: int = 50, key: str = "") -> Stream:
        return Stream(self.router, model, tokens, key)

    def close(self) -> dict[int, str]:
        """End everything; returns what had to be killed that no daemon of this fleet was."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        left = processes(str(self.folder))
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not processes(str(self.folder)), "everything killed")
        remove_shared_files(self.folder)
        return left
