"""Runs a launch for real, as an agent would, and talks HTTP to it; for tests only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import time
from urllib.parse import urlsplit

from llmgw.engines.launch import child_environment


def until(condition, seconds=20.0):
    """Waits for a truthy answer, which it returns; fails after C{seconds}."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"{condition} was not true within {seconds} s"
        time.sleep(0.01)
    return answer


class RunningEngine:
    """The process of a launch; whole sessions end with the C{with} block."""

    def __init__(self, launch, folder, environment=None):
        self.launch = launch
        self.log = folder / "engine.log"
        own = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(
            launch.argv,
            env=child_environment(own, {}, {}, launch) | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()

    @property
    def lines(self):
        return self.log.read_text(errors="replace").splitlines()

    def request(self, path, body=None, key=True):
        """Status and text; (0, "") when the connection is refused."""
        address = urlsplit(self.launch.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        headers = {"Authorization": f"Bearer {self.launch.key}"} if key else {}
        try:
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except ConnectionError:
            return 0, ""
        finally:
            connection.close()

    def ready(self, seconds=30.0):
        """Waits until C{ready} answers 200."""

        def healthy():
            assert self.process.poll() is None, "\n".join(self.lines)
            return self.request(self.launch.ready)[0] == 200

        until(healthy, seconds)
        return self

    def terminate(self, seconds=5.0):
        """SIGTERM; the exit status, negative for a signal."""
        self.process.terminate()
        return self.process.wait(seconds)
