"""The admin API with the standard library's HTTP: small, and quick to start. Here over its unix socket; over TLS see
L{llmgw.cli.remote}.

Names go into the query or the body, never into the path, since a model's name may hold slashes.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any, Protocol
from urllib.parse import urlencode

import click

from llmgw.errors import LlmgwError
from llmgw.fleet.line import escape

Answer = dict[str, Any]
PATIENCE = 30.0


class Unreachable(LlmgwError):
    """No server answers where it was asked."""


class Refused(LlmgwError):
    """The server understood and said no. C{code} is a stable word, C{problems} what is wrong with a catalog.

    @ivar address: where operators reach the server that leads, if this one does not and knows.
    """

    def __init__(self, status: int, code: str, message: str, problems: Sequence[Any] = (), address: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.address = address
        self.problems = [_problem(problem) for problem in problems]


def _problem(problem: Any) -> str:
    if not isinstance(problem, dict):
        return str(problem)
    where, text = problem.get("where", ""), problem.get("text", "")
    return f"{where}: {text}" if where else str(text)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("llmgw", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Dial(Protocol):
    """How a server is reached. C{place} is what messages call it."""

    place: str

    def open(self, timeout: float) -> HTTPConnection:
        """A connection that is made when it is used."""

    def why(self, error: Exception) -> str:
        """The sentence for an error of that connection."""


class Local:
    """By the unix socket."""

    def __init__(self, path: str) -> None:
        self.place = path

    def open(self, timeout: float) -> HTTPConnection:
        """See L{Dial}."""
        return _UnixConnection(self.place, timeout)

    def why(self, error: Exception) -> str:
        """See L{Dial}."""
        number = getattr(error, "errno", None)
        path = self.place
        if number == errno.ENOENT:
            return f"there is no {path}: is llmgw-server running, and is this its admin.socket? (--socket or LLMGW_SOCKET)"
        if number == errno.ECONNREFUSED:
            return f"nobody listens at {path}: llmgw-server is not running (systemctl status llmgw-server)"
        if number in (errno.EACCES, errno.EPERM):
            return f"you may not open {path}: join the group that owns it (ls -l {path}), usually llmgw"
        return f"no answer at {path}: {error or type(error).__name__}"


class Client:
    """One connection per request: commands make one or two, and a restarted server is found again.

    @param dial: how our server is reached.
    @param elsewhere: how the one is that our server names because it leads; each request follows once. None: it is told.
    """

    def __init__(self, dial: Dial, elsewhere: Callable[[str], Dial] | None = None) -> None:
        self._dial = dial
        self._elsewhere = elsewhere
        self._said = ""

    def get(self, route: str, /, *, timeout: float = PATIENCE, **query: Any) -> Answer:
        """C{GET}; query values of None are left out.

        @raise Unreachable: nobody answers.
        @raise Refused: the server says no.
        """
        text = urlencode({name: value for name, value in query.items() if value is not None})
        return self._ask("GET", f"{route}?{text}" if text else route, None, timeout)

    def post(self, route: str, /, *, timeout: float = PATIENCE, **body: Any) -> Answer:
        """C{POST} of a JSON object; members of None are left out. Raises as L{get}."""
        return self._ask("POST", route, {name: value for name, value in body.items() if value is not None}, timeout)

    def _ask(self, method: str, route: str, body: Answer | None, timeout: float) -> Answer:
        try:
            return self._ask_at(self._dial, method, route, body, timeout)
        except Refused as refused:
            if refused.code != "not_leader" or not refused.address or self._elsewhere is None:
                raise
            if self._said != str(refused):
                click.echo(f"llmgw: {self._dial.place}: {escape(str(refused))}", err=True)
            self._said = str(refused)
            return self._ask_at(self._elsewhere(refused.address), method, route, body, timeout)

    @staticmethod
    def _ask_at(dial: Dial, method: str, route: str, body: Answer | None, timeout: float) -> Answer:
        connection = dial.open(timeout)
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, route, json.dumps(body) if body is not None else None, headers)
            reply = connection.getresponse()
            status, text = reply.status, reply.read()
        except TimeoutError:
            slow = f"llmgw-server did not answer at {dial.place} within {timeout:g} s"
            raise Unreachable(f"{slow}: is it stopped, or its machine overloaded?") from None
        except (OSError, HTTPException) as error:
            raise Unreachable(dial.why(error)) from None
        finally:
            connection.close()
        return _judge(dial.place, status, text)


def _judge(place: str, status: int, text: bytes) -> Answer:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        raise Unreachable(f"what answers at {place} is not llmgw-server: HTTP {status}, no JSON") from None
    if not isinstance(answer, dict):
        raise Unreachable(f"what answers at {place} is not llmgw-server: HTTP {status}, {type(answer).__name__}")
    if status < 400:
        return answer
    error = answer.get("error")
    error = error if isinstance(error, dict) else {}
    message = error.get("message") or f"the server answered HTTP {status}"
    address = error.get("address")
    where = address if isinstance(address, str) else ""
    raise Refused(status, error.get("code", ""), message, error.get("problems") or (), where)
