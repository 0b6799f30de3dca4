"""The admin API: JSON over HTTP on a unix socket. Who may open the socket may do everything, so its mode is 0660.

Surprising: C{twisted.web} is enough here and nowhere else in llmgw; a few requests a second come from people and from
Prometheus, and none of them carries a client's tokens.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.application.service import MultiService, Service
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from llmgw.admin.errors import BadRequest, answer_for, body
from llmgw.admin.fields import Fields
from llmgw.admin.handlers import Handler, Handlers
from llmgw.config.settings import Address, ServerSettings
from llmgw.errors import LlmgwError
from llmgw.server.live import targets
from llmgw.server.service import Server

BODY_LIMIT = 8 * 2**20
MODE = 0o660


class CannotServe(LlmgwError):
    """The admin socket cannot be opened."""


class Api(Resource):
    """C{/metrics}, C{/targets} (Prometheus' http_sd of the engines) and C{routes}; names never stand in a path."""

    isLeaf = True  # noqa: N815  (Twisted's name)
    log = Logger()

    def __init__(self, server: Server, routes: Mapping[tuple[str, str], Handler]) -> None:
        super().__init__()
        self._server = server
        self._routes = routes
        self._paths = {path for _, path in self._routes}

    def render(self, request: Request) -> int:
        """From C{twisted.web}."""
        answering = Deferred.fromCoroutine(self._answer(request))
        gone = request.notifyFinish()
        gone.addErrback(lambda _: answering.cancel())
        answering.addErrback(lambda failure: None if request._disconnected else self._failed(failure, request))
        return NOT_DONE_YET

    async def _answer(self, request: Request) -> None:
        try:
            method, path = request.method.decode(errors="replace"), request.path.decode(errors="replace")
            if (method, path) == ("GET", "/metrics"):
                self._send(request, 200, (await self._server.metrics()).encode(), b"text/plain; version=0.0.4; charset=utf-8")
                return
            if (method, path) == ("GET", "/targets"):
                self._send(request, 200, json.dumps(targets(self._server.workers.table)).encode())
                return
            status, found = 200, await self._find(method, path)(self._fields(request))
        except LlmgwError as error:
            status, found = answer_for(error)
        self._send(request, status, json.dumps(found, ensure_ascii=False, default=str).encode())

    def _find(self, method: str, path: str) -> Any:
        if handler := self._routes.get((method, path)):
            return handler
        if path in self._paths:
            raise BadRequest(f"{path} does not take {method}", "method_not_allowed", 405)
        raise BadRequest(f"there is no {path} here; is the command newer than the server?", "not_found", 404)

    def _fields(self, request: Request) -> Fields:
        if request.method == b"GET":
            return Fields.of_query(request.args or {})
        content = request.content
        text = content.read(BODY_LIMIT + 1) if content is not None else b""
        if len(text) > BODY_LIMIT:
            raise BadRequest(f"the body is larger than {BODY_LIMIT} bytes", "too_large", 413)
        return Fields.of_body(text)

    def _failed(self, failure: Failure, request: Request) -> None:
        self.log.failure("while answering {path}", failure, path=request.path.decode(errors="replace"))
        said = body("internal", "llmgw-server failed on this; its log has the details")
        self._send(request, 500, json.dumps(said).encode())

    @staticmethod
    def _send(request: Request, status: int, text: bytes, kind: bytes = b"application/json") -> None:
        if request._disconnected or request.finished:
            return
        request.setResponseCode(status)
        request.setHeader(b"content-type", kind)
        request.setHeader(b"content-length", str(len(text)).encode())
        request.write(text)
        request.finish()


class QuietSite(Site):
    """What operators ask is no news: twisted.web would log every request. C{name} is what the log calls it."""

    displayTracebacks = False  # noqa: N815  (Twisted's name)
    noisy = False

    def __init__(self, name: str, resource: Any) -> None:
        super().__init__(resource)
        self._name = name

    def logPrefix(self) -> str:
        """From Twisted."""
        return self._name

    def log(self, request: Any) -> None:
        """Say nothing."""


class Admin(Service):
    """The socket.

    @param path: where; its folder is made if it is not there. A socket that a dead server has left is replaced, one that
        somebody answers on is not.
    """

    log = Logger()

    def __init__(self, path: Path, server: Server, reactor: Any) -> None:
        self.setName("admin")
        self._path = path
        self._server = server
        self._reactor = reactor
        self._site = QuietSite("admin", Api(server, Handlers(server, reactor).routes()))
        self._port: IListeningPort | None = None

    def startService(self) -> None:
        """Listen; ends the daemon with a sentence if that cannot be."""
        super().startService()
        try:
            self._clear()
            self._port = self._reactor.listenUNIX(str(self._path), self._site, mode=MODE)
        except (OSError, CannotListenError, LlmgwError) as error:
            why = getattr(error, "socketError", error)
            self._server.cannot_start(f"admin.socket {self._path}: {why}")

    def _clear(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        try:
            if not stat.S_ISSOCK(self._path.stat().st_mode):
                raise CannotServe("something that is no socket is there: remove it or set another path")
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                os.unlink(self._path)
                return
            except OSError as error:
                raise CannotServe(str(error)) from None
        raise CannotServe("another llmgw-server answers there: stop it or set another path")

    def stopService(self) -> Deferred[Any]:
        """Close the socket; it is taken away with it."""
        super().stopService()
        port, self._port = self._port, None
        return (port.stopListening() if port is not None else None) or succeed(None)


class MetricsPort(Service):
    """C{router.metrics}: C{/metrics} and C{/targets} and nothing else, for Prometheus, without a key."""

    def __init__(self, address: Address, server: Server, reactor: Any) -> None:
        self.setName("metrics")
        self._address = address
        self._server = server
        self._reactor = reactor
        self._site = QuietSite("metrics", Api(server, {}))
        self._port: IListeningPort | None = None

    def startService(self) -> None:
        """Listen; ends the daemon with a sentence if that cannot be."""
        super().startService()
        try:
            self._port = self._reactor.listenTCP(self._address.port, self._site, interface=self._address.host)
        except (OSError, CannotListenError) as error:
            why = getattr(error, "socketError", error)
            self._server.cannot_start(f"router.metrics {self._address}: {why}")

    def stopService(self) -> Deferred[Any]:
        """Close the port."""
        super().stopService()
        port, self._port = self._port, None
        return (port.stopListening() if port is not None else None) or succeed(None)


def make_admin(settings: ServerSettings, server: Server, reactor: Any) -> MultiService:
    """The admin API's service and, where it is asked for, the metrics' own address."""
    both = MultiService()
    Admin(settings.socket, server, reactor).setServiceParent(both)
    if settings.router.metrics is not None:
        MetricsPort(settings.router.metrics, server, reactor).setServiceParent(both)
    return both
