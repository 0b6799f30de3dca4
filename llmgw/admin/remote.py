"""The admin API for operators on other machines: mutual TLS 1.3 with the server's own certificate, and a role of its own.

Surprising: a node's certificate is a client's, too, and of the same authority, so TLS lets it in; the role in it is what keeps
it out. It is told why in HTTP, since an alert would say nothing. A server's certificate TLS itself turns away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from OpenSSL import SSL
from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.internet.error import CannotListenError, ConnectionDone
from twisted.internet.interfaces import IAddress, IHandshakeListener, IListeningPort
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from twisted.web.server import Request, Site
from zope.interface import implementer

from llmgw.admin.errors import BadRequest
from llmgw.config.settings import ServerSettings, TlsFiles
from llmgw.errors import LlmgwError
from llmgw.holders import why_not
from llmgw.pki import OPERATOR, with_article
from llmgw.server.doorway import Doorway, Refusals
from llmgw.server.imembers import Refusal
from llmgw.wire.identity import IdentityError, PeerCertificate, Verdict, explain_tls
from llmgw.wire.link import Timer
from llmgw.wire.tls import LinkTls, read_identity

HTTP = b"http/1.1"
MOST, MOST_PER_HOST = 64, 16
HANDSHAKE, REFUSAL, CLOSING, STOPPING = 5.0, 10.0, 10.0, 1.0


def caller(request: Request) -> str:
    """Who asks, as events name it.

    @raise BadRequest: somebody with a certificate of the fleet, but no operator, or none any more.
    """
    connection: Any = request.transport
    if connection.refused:
        raise BadRequest(connection.refused, "forbidden", 403)
    return f"operator {connection.operator}"


@implementer(IHandshakeListener)
class OperatorConnection(ProtocolWrapper):
    """One connection, between TLS and HTTP. Nothing of HTTP is read before the certificate is; every wait has an end.

    @ivar operator: the name in the certificate, once it is known to be an operator's of our fleet; C{refused} why it is not.
    """

    factory: Operators
    transport: Any
    operator = ""
    refused = ""
    _serial = ""

    def makeConnection(self, transport: Any) -> None:
        """From Twisted: TCP is there."""
        self._timer = Timer(self.factory.port.reactor)
        self._timer.start(HANDSHAKE, transport.abortConnection)
        self._verdict: Verdict = transport.verdict
        self._peer = transport.getPeer()
        super().makeConnection(transport)

    def handshakeCompleted(self) -> None:
        """From Twisted: TLS is there, and the certificate is of our authority and a client's."""
        self._timer.stop()
        shown = self.transport.getHandle().get_peer_certificate(as_cryptography=True)
        try:
            certificate = PeerCertificate.read(shown)
        except IdentityError as error:
            self._refuse("certificate", str(error))
            return
        fleet, revoked = self.factory.port.fleet, self.factory.port.revoked
        if certificate.role != OPERATOR:
            whose = f"certificate {certificate} is {with_article(certificate.role)}'s, not an operator's"
            self._refuse("wrong_role", f"{whose}: make one with llmgw pki operator")
        elif certificate.fleet != fleet:
            self._refuse("wrong_fleet", f"certificate {certificate} is of fleet {certificate.fleet}, this is {fleet}")
        elif certificate.serial.startswith(revoked):
            self._refuse("revoked", f"certificate {certificate} is revoked (admin.revoked of server.yaml)")
        else:
            self.operator, self._serial = certificate.name, certificate.serial

    def look_again(self) -> None:
        """What is not taken any more ends now."""
        if self._serial and self._serial.startswith(self.factory.port.revoked):
            self.transport.abortConnection()

    def _refuse(self, reason: str, text: str) -> None:
        self.refused = text
        self.factory.port.note(self._peer, reason, text)
        self._timer.start(REFUSAL, self.transport.abortConnection)

    def loseConnection(self) -> None:  # noqa: N802
        """From HTTP: a peer that does not take the rest, or does not close, is not waited for."""
        self.end(CLOSING)

    def end(self, seconds: float) -> None:
        """Close, at the latest in C{seconds}."""
        self._timer.start(seconds, self.transport.abortConnection)
        super().loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """From Twisted."""
        self._timer.stop()
        if not self.operator and not self.refused:
            self.factory.port.lost(self._peer, self._verdict, reason.value)
        super().connectionLost(reason)
        self.factory.port.left(self._peer)


class Operators(WrappingFactory):
    """Makes them round the HTTP of C{site}."""

    protocol = OperatorConnection
    noisy = False

    def __init__(self, site: Site, port: AdminPort) -> None:
        super().__init__(site)
        self.port = port


class _Door(TLSMemoryBIOFactory):
    """Turns peers away before TLS is begun, where there are too many."""

    noisy = False

    def __init__(self, tls: LinkTls, operators: Operators, port: AdminPort) -> None:
        super().__init__(tls, False, operators, port.reactor)
        self._port = port

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """From Twisted; None closes the connection at once."""
        return super().buildProtocol(addr) if self._port.may_enter(addr) else None


class AdminPort(Service):
    """C{admin.listen}.

    @param cannot_start: told why it cannot listen; ends the daemon.
    @ivar fleet: the fleet of our certificate, whose operators are let in.
    @ivar revoked: the serial numbers, or how they begin, of certificates that are not taken.
    @ivar port: the port listened on, which is the settings' unless that is 0.
    """

    log = Logger()
    port = 0

    def __init__(
        self,
        settings: ServerSettings,
        site: Site,
        reactor: Any,
        cannot_start: Callable[[str], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        assert settings.admin is not None and settings.fleet is not None
        self.setName("admin-remote")
        self.reactor = reactor
        self._listen = settings.admin.listen
        self.revoked = settings.admin.revoked
        self._files: TlsFiles = settings.fleet.tls
        self._cannot_start = cannot_start
        self._wall = wall
        self._operators = Operators(site, self)
        self._doorway = Doorway(MOST, MOST_PER_HOST)
        self._refusals = Refusals()
        self._tls: LinkTls | None = None
        self._listening: IListeningPort | None = None
        self._empty: Deferred[None] | None = None

    def startService(self) -> None:
        """Read the certificate and listen; ends the daemon with a sentence if that cannot be."""
        super().startService()
        try:
            self._tls = LinkTls(read_identity(self._files, "server"), HTTP)
            door = _Door(self._tls, self._operators, self)
            self._listening = self.reactor.listenTCP(self._listen.port, door, interface=self._listen.host)
        except (OSError, CannotListenError, LlmgwError) as error:
            self._cannot_start(f"admin.listen {self._listen}: {why_not(error, self._listen.port)}")
        else:
            self.port = getattr(self._listening.getHost(), "port", self._listen.port)

    def stopService(self) -> Deferred[Any]:
        """Stop listening and end every connection, in little more than a second whatever their peers do."""
        super().stopService()
        listening, self._listening = self._listening, None
        waits: list[Deferred[Any]] = [(listening.stopListening() if listening else None) or succeed(None)]
        if self._operators.protocols:
            self._empty = Deferred()
            waits.append(self._empty)
        for connection in [*self._operators.protocols]:
            connection.end(STOPPING)
        return DeferredList(waits, consumeErrors=True)

    def reload(self, settings: ServerSettings) -> None:
        """Show new peers the certificate that is in the files now, and take operators of the authorities there. Connections of
        certificates that are revoked now end.

        @raise LlmgwError: it cannot be used, and the old one stays.
        """
        if self._tls is not None and settings.fleet is not None:
            self._tls.use(read_identity(settings.fleet.tls, "server"))
        self.revoked = settings.admin.revoked if settings.admin is not None else ()
        for connection in [*self._operators.protocols]:
            connection.look_again()

    @property
    def fleet(self) -> str:
        """See the class."""
        return self._tls.own.fleet if self._tls is not None else ""

    def refusals(self) -> list[Refusal]:
        """The last 50 peers that were not let in, the newest last."""
        return self._refusals.list()

    # What connections tell.

    def may_enter(self, peer: Any) -> bool:
        """Before TLS is begun."""
        if problem := self._doorway.enter(peer.host):
            self.note(peer, "crowded", problem)
        return not problem

    def note(self, peer: Any, reason: str, text: str) -> None:
        """Remember and log that somebody was not let in."""
        where = f"[{peer.host}]:{peer.port}" if ":" in peer.host else f"{peer.host}:{peer.port}"
        self._refusals.add(Refusal(self._wall(), where, reason, text), "admin", self.reactor.seconds())

    def lost(self, peer: Any, verdict: Verdict, error: BaseException | None) -> None:
        """A connection ended before TLS was there. One that is only opened and closed is a probe of the port."""
        own = self._tls.own if self._tls is not None else None
        if verdict.error:
            self.note(peer, "tls", verdict.explain(self._wall()))
        elif own is not None and isinstance(error, SSL.Error):
            self.note(peer, "tls", explain_tls(error, own, self._wall()))
        elif not isinstance(error, ConnectionDone):
            self.note(peer, "tls", f"it did not get through TLS: {error}")

    def left(self, peer: Any) -> None:
        """A connection is gone."""
        self._doorway.leave(peer.host)
        if self._empty is not None and not self._operators.protocols:
            empty, self._empty = self._empty, None
            empty.callback(None)
