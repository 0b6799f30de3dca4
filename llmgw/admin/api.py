"""The admin API: JSON over HTTP on a unix socket. Who may open the socket may do everything, so its mode is 0660.
Operators on other machines come by L{llmgw.admin.remote}.

Surprising: C{twisted.web} is enough here and nowhere else in llmgw; a few requests a second come from people and from
Prometheus, and none of them carries a client's tokens.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twisted.application.service import MultiService, Service
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request

from llmgw.admin.errors import BadRequest, answer_for, body
from llmgw.admin.fields import Fields
from llmgw.admin.handlers import Handler, Handlers
from llmgw.admin.remote import AdminPort, caller
from llmgw.admin.site import QuietSite
from llmgw.config.settings import Address, ServerSettings
from llmgw.errors import LlmgwError
from llmgw.holders import why_not
from llmgw.server.live import targets
from llmgw.server.operations import OPERATOR
from llmgw.server.service import Server

MODE = 0o660


class CannotServe(LlmgwError):
    """The admin socket cannot be opened."""


class Api(Resource):
    """C{/metrics}, C{/targets} (Prometheus' http_sd of the engines) and C{routes}; names never stand in a path.

    @param who: says who asks, as events name it, or raises why they may not.
    """

    isLeaf = True  # noqa: N815  (Twisted's name)
    log = Logger()

    def __init__(
        self,
        server: Server,
        routes: Mapping[tuple[str, str], Handler],
        who: Callable[[Request], str] = lambda request: OPERATOR,
    ) -> None:
        super().__init__()
        self._server = server
        self._who = who
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
            who = self._who(request)
            method, path = request.method.decode(errors="replace"), request.path.decode(errors="replace")
            if (method, path) == ("GET", "/metrics"):
                self._send(request, 200, (await self._server.metrics()).encode(), b"text/plain; version=0.0.4; charset=utf-8")
                return
            if (method, path) == ("GET", "/targets"):
                self._send(request, 200, json.dumps(targets(self._server.workers.table)).encode())
                return
            status, found = 200, await self._find(method, path)(self._fields(request, who))
        except LlmgwError as error:
            status, found = answer_for(error)
        self._send(request, status, json.dumps(found, ensure_ascii=False, default=str).encode())

    def _find(self, method: str, path: str) -> Any:
        if handler := self._routes.get((method, path)):
            return handler
        if path in self._paths:
            raise BadRequest(f"{path} does not take {method}", "method_not_allowed", 405)
        raise BadRequest(f"there is no {path} here; is the command newer than the server?", "not_found", 404)

    def _fields(self, request: Request, who: str) -> Fields:
        if request.method == b"GET":
            return Fields.of_query(request.args or {}, who)
        content = request.content
        return Fields.of_body(content.read() if content is not None else b"", who)

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


class Admin(Service):
    """The socket.

    @param path: where; its folder is made if it is not there. A socket that a dead server has left is replaced, one that
        somebody answers on is not.
    """

    log = Logger()

    def __init__(self, path: Path, server: Server, reactor: Any, routes: Mapping[tuple[str, str], Handler]) -> None:
        self.setName("admin")
        self._path = path
        self._server = server
        self._reactor = reactor
        self._site = QuietSite("admin", Api(server, routes), reactor)
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
        self._site = QuietSite("metrics", Api(server, {}), reactor)
        self._port: IListeningPort | None = None

    def startService(self) -> None:
        """Listen; ends the daemon with a sentence if that cannot be."""
        super().startService()
        try:
            self._port = self._reactor.listenTCP(self._address.port, self._site, interface=self._address.host)
        except (OSError, CannotListenError) as error:
            why = why_not(error, self._address.port)
            self._server.cannot_start(f"router.metrics {self._address}: {why}")

    def stopService(self) -> Deferred[Any]:
        """Close the port."""
        super().stopService()
        port, self._port = self._port, None
        return (port.stopListening() if port is not None else None) or succeed(None)


class AdminServices(MultiService):
    """All ways to the admin API.

    @ivar remote: the one for other machines, None where there is none.
    """

    def __init__(self, settings: ServerSettings, server: Server, reactor: Any) -> None:
        super().__init__()
        routes = Handlers(server, reactor, lambda: self.remote.refusals() if self.remote else ()).routes()
        Admin(settings.socket, server, reactor, routes).setServiceParent(self)
        if settings.router.metrics is not None:
            MetricsPort(settings.router.metrics, server, reactor).setServiceParent(self)
        self.remote: AdminPort | None = None
        if settings.admin is not None:
            api = Api(server, routes, caller)
            self.remote = AdminPort(settings, QuietSite("admin-remote", api, reactor), reactor, server.cannot_start)
            self.remote.setServiceParent(self)

    def reload(self, settings: ServerSettings) -> None:
        """SIGHUP: take certificates anew.

        @raise LlmgwError: one cannot be used, and the old one stays.
        """
        if self.remote is not None:
            self.remote.reload(settings)


def make_admin(settings: ServerSettings, server: Server, reactor: Any) -> AdminServices:
    """The admin API's services and, where it is asked for, the metrics' own address. Nothing is opened before they start."""
    return AdminServices(settings, server, reactor)
