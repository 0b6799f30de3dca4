"""One download's child process: its orders go in by stdin, its news come out as lines, and it is killed when it says nothing new.

The token goes by environment or file, as huggingface_hub itself reads it: never in argv, and nothing here sees it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.agent import fetch_child

LINE = 64 * 1024
ERRORS_KEPT = 2000
# What of the agent's own environment the child gets beside what its engines would: the token, the hub, ways out of this network.
PASSED = ("HF_", "HUGGING_FACE_", "SSL_CERT_", "REQUESTS_CA_", "CURL_CA_")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def fetch_environment(own: Mapping[str, str], engines: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: the engines' (so that the cache is theirs), and what it takes to reach the hub."""
    passed = {name: value for name, value in own.items() if name.startswith(PASSED) or name.lower() in PROXIES}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {"HF_HUB_DOWNLOAD_TIMEOUT": "20", "HF_HUB_ETAG_TIMEOUT": "20", **passed, **engines, **quiet}


class FetchProcess(ProcessProtocol):
    """@param order: see L{llmgw.agent.fetch_child}.

    @param heard: gets each line as an object.
    @param stalled: seconds without a new byte or step until it is killed.
    """

    log = Logger()

    def __init__(
        self, reactor: Any, order: Mapping[str, str], heard: Callable[[Mapping[str, Any]], None], stalled: float
    ) -> None:
        self._reactor = reactor
        self._order = order
        self._heard = heard
        self._stalled = stalled
        self._rest = b""
        self._errors = b""
        self._why = ""
        self._last: object = None
        self._timer: Any = None
        self._over: Deferred[str] = Deferred()

    def run(self, environment: Mapping[str, str]) -> Deferred[str]:
        """Begin. Fires with why it ended where it could not say so itself."""
        argv = [sys.executable, "-P", str(fetch_child.__file__)]
        try:
            self._reactor.spawnProcess(self, argv[0], argv, env=dict(environment))
        except OSError as error:
            self._over.callback(f"{argv[0]} cannot be started: {error.strerror}")
        return self._over

    def leave(self) -> None:
        """Have it end and keep what it has got."""
        if self.transport is not None:
            self.transport.closeStdin()
            self._restart_timer(1.0)

    def cancel(self, within: float) -> None:
        """Have it remove what is not whole and end; it is killed after C{within} seconds."""
        if self.transport is not None:
            self.transport.write(b"cancel\n")
            self._restart_timer(within)

    def connectionMade(self) -> None:
        """From Twisted, as are all that follow."""
        assert self.transport is not None
        self.transport.write(json.dumps(self._order).encode() + b"\n")
        self._restart_timer(self._stalled)

    def outReceived(self, data: bytes) -> None:
        """News."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE:
            self._kill("it said too much")
        for line in lines:
            try:
                self._say(json.loads(line))
            except Exception:
                self.log.failure("while taking what a download said")

    def errReceived(self, data: bytes) -> None:
        """What it says where it cannot say it in a line: the end is kept."""
        self._errors = (self._errors + data)[-ERRORS_KEPT:]

    def _say(self, said: Mapping[str, Any]) -> None:
        now = (said.get("state"), said.get("bytes"))
        if now != self._last or said.get("state") == "verifying":
            self._last = now
            self._restart_timer(self._stalled)
        self._heard(said)

    def _restart_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._reactor.callLater(seconds, self._kill, f"no byte came in {seconds:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()

    def _kill(self, why: str) -> None:
        self._why = self._why or why
        try:
            if self.transport is not None:
                self.transport.signalProcess("KILL")
        except ProcessExitedAlready:
            pass

    def processEnded(self, reason: Failure) -> None:
        """It is over."""
        self._stop_timer()
        last = (self._errors.decode(errors="replace").strip().splitlines() or [""])[-1][:300]
        self._over.callback(self._why or last)
