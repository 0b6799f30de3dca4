"""The admin API over its unix socket, with the standard library's HTTP: small, and quick to start.

Names go into the query or the body, never into the path, since a model's name may hold slashes.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlencode

from llmgw.errors import LlmgwError

Answer = dict[str, Any]
PATIENCE = 30.0


class Unreachable(LlmgwError):
    """No server answers at the admin socket."""


class Refused(LlmgwError):
    """The server understood and said no. C{code} is a stable word, C{problems} what is wrong with a catalog."""

    def __init__(self, status: int, code: str, message: str, problems: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
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


class Client:
    """One connection per request: commands make one or two, and a restarted server is found again.

    @param path: the unix socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path

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
        connection = _UnixConnection(self.path, timeout)
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, route, json.dumps(body) if body is not None else None, headers)
            reply = connection.getresponse()
            status, text = reply.status, reply.read()
        except (OSError, HTTPException) as error:
            raise Unreachable(self._why(error, timeout)) from None
        finally:
            connection.close()
        return self._judge(status, text)

    def _judge(self, status: int, text: bytes) -> Answer:
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            raise Unreachable(f"what answers at {self.path} is not llmgw-server: HTTP {status}, no JSON") from None
        if not isinstance(answer, dict):
            raise Unreachable(f"what answers at {self.path} is not llmgw-server: HTTP {status}, {type(answer).__name__}")
        if status < 400:
            return answer
        error = answer.get("error")
        error = error if isinstance(error, dict) else {}
        message = error.get("message") or f"the server answered HTTP {status}"
        raise Refused(status, error.get("code", ""), message, error.get("problems") or ())

    def _why(self, error: Exception, timeout: float) -> str:
        if isinstance(error, TimeoutError):
            return f"llmgw-server did not answer at {self.path} within {timeout:g} s: is it stopped, or its machine overloaded?"
        number = getattr(error, "errno", None)
        if number == errno.ENOENT:
            return f"there is no {self.path}: is llmgw-server running, and is this its admin.socket? (--socket or LLMGW_SOCKET)"
        if number == errno.ECONNREFUSED:
            return f"nobody listens at {self.path}: llmgw-server is not running (systemctl status llmgw-server)"
        if number in (errno.EACCES, errno.EPERM):
            return f"you may not open {self.path}: join the group that owns it (ls -l {self.path}), usually llmgw"
        return f"no answer at {self.path}: {error or type(error).__name__}"
