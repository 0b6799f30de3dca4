"""The server's side of the link: holds one session per node and is the only way to command a node.

Whether this server may command is asked at each emission, never remembered. A standby refuses before it has read a byte. Of two
agents with one name the one that answers stays: an agent that has only lost its connection comes back at once (same instance,
same boot), a copy of it does not get in while the first one is heard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve
from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort, ILoggingContext, IProtocol, IProtocolFactory
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.protocols.tls import TLSMemoryBIOFactory
from zope.interface import implementer

from llmgw.config.settings import FleetSettings
from llmgw.errors import LlmgwError
from llmgw.fleet.shard import ShardOrder
from llmgw.fleet.timing import Timing
from llmgw.holders import why_not
from llmgw.interfaces import ILeadership
from llmgw.server.doorway import Doorway, Refusals
from llmgw.server.imembers import IMembers, NodeAway, NotActing, Refusal, SessionFacts, Unanswered
from llmgw.server.judge import Judge
from llmgw.server.visitor import Visitor
from llmgw.wire.codec import Unknown, decode_from_agent
from llmgw.wire.expiry import LOOK_EVERY, ExpiryWatch
from llmgw.wire.framing import Malformed
from llmgw.wire.identity import IdentityError, PeerCertificate, clock_skew
from llmgw.wire.link import BROKE, CLOSED, Deadlines, Message, Wire
from llmgw.wire.messages import (
    PROTOCOL,
    Accepted,
    Bye,
    Done,
    Event,
    FetchLog,
    FetchWeights,
    Goaway,
    Inspect,
    Refused,
    Register,
    Report,
    Welcome,
)
from llmgw.wire.parts import MAX_ORDER, split
from llmgw.wire.server_end import ServerCore, make_server_link
from llmgw.wire.tls import LinkTls, TlsError, TlsIdentity, read_identity

__all__ = ["FleetPort", "IMembers", "NodeAway", "NotActing", "Refusal", "SessionFacts", "Unanswered"]

BACKLOG = 1024
# A handshake costs a server 2 to 3 ms, and so does what it has to say to who comes; 500 nodes come back within 25 s.
REDIALS_PER_SECOND = 20.0
SKEW_WARNED = 30.0
# Of the 2 s that a daemon may take to stop, on a machine that may have little time for it.
STOP_WITHIN = 0.5
DEADLINES = Deadlines()
# Refusals that are about us and not about who is refused.
PASSING = ("standby", "starting")


class CannotListen(LlmgwError):
    """The fleet's address cannot be listened on."""


class FleetPort(Service):
    """Listens for agents.

    @ivar port: the port listened on, which is the settings' unless that is 0.
    @ivar expected: how many nodes there are, for spreading their redials; the control plane sets it.
    """

    log = Logger()
    port = 0
    expected = 0

    def __init__(
        self,
        reactor: Any,
        settings: FleetSettings,
        name: str,
        fleet_id: str,
        leadership: ILeadership,
        timing: Timing,
        members: IMembers,
        wall: Callable[[], float] = time.time,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self.setName("fleetport")
        self._reactor = reactor
        self._settings = settings
        self._server = name
        self._fleet = fleet_id
        self._leadership = leadership
        self._timing = timing
        self._members = members
        self._wall = wall
        self._deadlines = deadlines
        self._doorway = Doorway()
        self._refusals = Refusals()
        self._visitors: dict[Visitor, str] = {}
        self._sessions: dict[str, Visitor] = {}
        self._count = 0
        self._empty: list[Deferred[None]] = []
        self._listening: IListeningPort | None = None
        self._tls: LinkTls | None = None
        self._watch = ExpiryWatch()
        self._looking = LoopingCall(self._look_at_certificates)
        self._looking.clock = reactor
        self._judge = Judge(reactor, name, fleet_id, leadership, members, deadlines.answer, self._sessions)
        self._outranking = False

    # What the control plane calls.

    def desired(self, node: str, orders: Sequence[ShardOrder], revision: int) -> bool:
        """Send a node all that is wanted of it, instead of what it has not yet read of an earlier call.

        @return: whether it goes out, which does not mean that it will arrive.
        """
        visitor = self._sessions.get(node)
        if visitor is None or not self._leadership.may_act():
            return False
        declined: list[Done] = []
        epoch, leader = self._leadership.epoch, self._leadership.leader
        visitor.want(split(epoch, leader, revision, orders, lambda order, size: declined.append(_too_long(order, size))))
        for done in declined:  # in the node's place: it cannot be told of it
            self._members.done(node, visitor.session, done)
        return True

    def ask(self, node: str, message: Inspect | FetchLog | FetchWeights, timeout: float) -> Deferred[Done]:
        """Ask a node something; the message's epoch and leader are filled in here.

        The Deferred fails with L{NodeAway}, L{Unanswered} or L{NotActing}, each with a sentence.
        """

        async def asking() -> Done:
            visitor = self._sessions.get(node)
            if visitor is None:
                raise NodeAway(f"{node} has no link to this server")
            if not self._leadership.may_act():
                raise NotActing(f"{self._server} does not lead, so it asks {node} nothing")
            stamped = evolve(message, epoch=self._leadership.epoch, leader=self._leadership.leader)
            return await visitor.ask(stamped, timeout)

        return Deferred.fromCoroutine(asking())

    def close(self, node: str, goaway: Goaway) -> None:
        """End a node's session on purpose; its engines go on."""
        if visitor := self._sessions.get(node):
            visitor.end(goaway)

    def close_all(self, goaway: Goaway, seconds: float = 1.0) -> None:
        """End every session within C{seconds}, e.g. since another server leads now; C{readiness} judges new agents."""
        for visitor in [*self._visitors]:
            visitor.end(goaway, seconds)

    def sessions(self) -> dict[str, SessionFacts]:
        """The nodes that have a link."""
        return {node: visitor.facts for node, visitor in self._sessions.items() if visitor.facts}

    @property
    def certificate_expires(self) -> float | None:
        """When our own certificate ends; None before it has been read."""
        return self._tls.identity.chain[0].not_valid_after_utc.timestamp() if self._tls is not None else None

    def refusals(self) -> list[Refusal]:
        """The last 50 peers that were not let in, the newest last."""
        return self._refusals.list()

    # Life.

    def startService(self) -> None:
        """Read the certificate and listen.

        @raise LlmgwError: one of them cannot be done; nothing is left open.
        """
        tls = self._tls = LinkTls(self._identity(self._settings))
        listen = self._settings.listen
        inner = TLSMemoryBIOFactory(tls, False, _Maker(lambda peer: self._admit(peer, tls)), self._reactor)
        door = _Maker(lambda peer: inner.buildProtocol(peer) if self._may_enter(peer) else None)
        try:
            self._listening = self._reactor.listenTCP(listen.port, door, BACKLOG, listen.host)
        except CannotListenError as error:
            raise CannotListen(f"fleet: cannot listen on {listen}: {why_not(error, listen.port)}") from None
        super().startService()
        self.port = getattr(self._listening.getHost(), "port", listen.port)
        self._looking.start(LOOK_EVERY)

    def stopService(self) -> Deferred[None]:
        """Stop listening and send all agents away; done within little more than half a second, whatever they do."""
        super().stopService()
        if self._looking.running:
            self._looking.stop()
        listening, self._listening = self._listening, None
        waits: list[Deferred[Any]] = [listening.stopListening() or succeed(None)] if listening else []
        self.close_all(Goaway("stopping", text=f"{self._server} stops"), STOP_WITHIN)
        if self._visitors:
            empty: Deferred[None] = Deferred()
            self._empty.append(empty)
            waits.append(empty)
        return DeferredList(waits, consumeErrors=True).addCallback(lambda _: None)

    def reload(self, settings: FleetSettings) -> None:
        """Show new agents the certificate that is in the files now; links that are up stay.

        @raise LlmgwError: it cannot be used, and the old one stays.
        """
        if self._tls is None:
            return
        self._tls.use(self._identity(settings))
        if settings.listen != self._settings.listen:
            self.log.warn("fleet: listen on {address} takes effect at the next start", address=str(settings.listen))
        self._look_at_certificates()

    def _identity(self, settings: FleetSettings) -> TlsIdentity:
        identity = read_identity(settings.tls, "server")
        if identity.own.fleet != self._fleet:
            raise TlsError(f"{settings.tls.certificate} is of fleet {identity.own.fleet}, this server serves fleet {self._fleet}")
        return identity

    # What visitors tell.

    def _may_enter(self, peer: Any) -> bool:
        """Before TLS is begun."""
        problem = self._doorway.enter(peer.host)
        if problem:
            self._note(f"{peer.host}:{peer.port}", "crowded", problem)
        return not problem

    def _admit(self, peer: Any, tls: LinkTls) -> IProtocol:
        visitor = Visitor(self, self._reactor)
        core = ServerCore(
            visitor,
            self._reactor,
            self._timing.heartbeat,
            lambda: self._leadership.epoch,
            self._deadlines,
            self._wall,
            self._spread,
        )
        visitor.link = make_server_link(core)
        visitor.wire = Wire(self._reactor, visitor.link, decode_from_agent, lambda: tls.own, self._wall)
        self._visitors[visitor] = peer.host
        return visitor.wire

    def arrived(self, visitor: Visitor) -> None:
        """TLS is there: read the certificate, and refuse now if we can."""
        assert visitor.shown is not None
        try:
            certificate = PeerCertificate.read(visitor.shown)
        except IdentityError as error:
            self._refuse(visitor, Refused("certificate", str(error)))
            return
        visitor.certificate = certificate
        if refused := self._judge.wrong_side(certificate) or self._judge.unready():
            self._refuse(visitor, refused)
            return
        epoch, beat = self._leadership.epoch, self._timing.heartbeat
        visitor.link.greet(Welcome(PROTOCOL, PROTOCOL, self._server, self._fleet, epoch, beat, self._spread(), self._wall()))

    def _spread(self) -> float:
        return max(self.expected, len(self._sessions)) / REDIALS_PER_SECOND

    def registered(self, visitor: Visitor, register: Register) -> None:
        """It said who it is: judge it."""
        judging = Deferred.fromCoroutine(self._judge.decide(visitor, register))
        judging.addCallback(lambda verdict: self._seat(visitor, register, verdict))
        judging.addErrback(lambda failure: self.log.failure("while judging {peer}", failure, peer=visitor.wire.peer))

    def heard(self, visitor: Visitor, message: Message) -> None:
        """A node's session said something; one bad message harms no more than itself."""
        if self._sessions.get(visitor.node) is not visitor:
            return
        try:
            self._dispatch(visitor, message)
        except Exception:
            self.log.failure("while taking a {kind} of {node}", kind=type(message).__name__, node=visitor.node)

    def malformed(self, visitor: Visitor, error: Malformed) -> None:
        """It broke the protocol; the link tells it."""
        self._note(visitor.wire.peer, "malformed", _certified(visitor, f"it sent {error.what}"), visitor.node)

    def ended(self, visitor: Visitor, text: str) -> None:
        """A connection is gone."""
        host = self._visitors.pop(visitor)
        if not visitor.session:
            self._doorway.leave(host)
            probe = visitor.shown is None and text.startswith((CLOSED, BROKE))
            if not visitor.refused and not probe:
                reason = "link" if visitor.certificate else "tls"
                self._note(visitor.wire.peer, reason, _certified(visitor, text), visitor.node)
        self._leave(visitor, visitor.farewell or text)
        if not self._visitors:
            waiting, self._empty = self._empty, []
            for empty in waiting:
                empty.callback(None)

    def _refuse(self, visitor: Visitor, refused: Refused) -> None:
        if refused.reason not in PASSING:
            refused = evolve(refused, text=_certified(visitor, refused.text))
        self._note(visitor.wire.peer, refused.reason, refused.text, visitor.node)
        visitor.refuse(refused)

    def _note(self, peer: str, reason: str, text: str, node: str = "") -> None:
        self._refusals.add(Refusal(self._wall(), peer, reason, text, node), self._server, self._reactor.seconds())

    # Sessions.

    def _seat(self, visitor: Visitor, register: Register, verdict: Refused | Visitor | None) -> None:
        if visitor.wire.closing:
            return
        if isinstance(verdict, Refused):
            self._refuse(visitor, verdict)
        elif verdict is None:
            self._accept(visitor, register)
        else:
            text = self._judge.replaced(verdict, visitor, register)
            verdict.end(Goaway("replaced", text=text))
            self._unseat(verdict, text)
            self._accept(visitor, register)
            verdict.abandon(text)  # last: who waits for it may judge others by who has the name now

    def _accept(self, visitor: Visitor, register: Register) -> None:
        certificate = visitor.certificate
        assert certificate is not None
        self._count += 1
        visitor.session = f"{self._leadership.epoch}.{self._count}"
        self._doorway.leave(self._visitors[visitor])
        visitor.facts = SessionFacts(
            visitor.session, self._wall(), visitor.wire.peer, certificate.serial, certificate.not_after, version=register.version
        )
        self._sessions[certificate.name] = visitor
        skew = visitor.clock_is(register.clock, self._wall())
        try:
            revision = self._members.joined(certificate.name, visitor.session, register)
        except Exception:
            self.log.failure("while taking the registration of {node}", node=certificate.name)
            self._sessions.pop(certificate.name)
            text = f"{self._server} failed to take the registration of {certificate.name} (see its log)"
            self._refuse(visitor, Refused("starting", text, retry_after=5.0))
            return
        self.log.info(
            "{server}: {node} is linked from {peer} with {shards} shards",
            server=self._server,
            node=certificate.name,
            peer=visitor.wire.peer,
            shards=len(register.shards),
            event="link_accepted",
        )
        if register.clock and abs(skew) > SKEW_WARNED:
            self.log.warn("{node}: its clock is {skew} ours", node=certificate.name, skew=clock_skew(skew))
        visitor.accept(Accepted(visitor.session, self._leadership.epoch, self._leadership.leader, revision))

    def _dispatch(self, visitor: Visitor, message: Message) -> None:
        node, session = visitor.node, visitor.session
        if isinstance(message, Report):
            visitor.clock_is(message.clock, self._wall())
            self._members.report(node, session, message)
        elif isinstance(message, Event):
            self._members.event(node, session, message)
        elif isinstance(message, Done):
            self._members.done(node, session, message)
            self._heed(node, message)
        elif isinstance(message, Bye):
            visitor.farewell = f"the agent left: {message.reason[:200]}"
        elif isinstance(message, Unknown):
            self.log.debug("{node} sent a {kind}, which this version does not know", node=node, kind=message.type)
        else:
            visitor.link.malformed(Malformed(visitor.wire.peer, f"{type(message).__name__.lower()} on an accepted link"))

    def _heed(self, node: str, done: Done) -> None:
        """An agent that obeys a higher epoch than ours: raise ours, or find out that we do not lead."""
        seen, leader = done.result.get("epoch"), done.result.get("leader")
        if done.error not in ("stale_epoch", "epoch_conflict") or not isinstance(seen, int) or not isinstance(leader, str):
            return
        self.log.error("{node} refused our order: {error}", node=node, error=done.error, event="epoch_conflict")
        if self._judge.behind(seen, leader) and not self._outranking:
            self._outranking = True
            raising = Deferred.fromCoroutine(self._judge.outrank(seen, leader, node))
            raising.addBoth(lambda _: setattr(self, "_outranking", False))

    def _leave(self, visitor: Visitor, text: str) -> None:
        self._unseat(visitor, text)
        visitor.abandon(text)

    def _unseat(self, visitor: Visitor, text: str) -> None:
        if not visitor.session or self._sessions.get(visitor.node) is not visitor:
            return
        del self._sessions[visitor.node]
        self.log.info("{server}: {node} is gone: {text}", server=self._server, node=visitor.node, text=text, event="link_lost")
        try:
            self._members.left(visitor.node, visitor.session, text)
        except Exception:
            self.log.failure("while letting {node} go", node=visitor.node)

    def _look_at_certificates(self) -> None:
        shown = [(f"{node}'s certificate", visitor.shown) for node, visitor in self._sessions.items() if visitor.shown]
        if self._tls is not None:
            shown.append((f"our own certificate ({self._tls.own})", self._tls.identity.chain[0]))
        self._watch.look(shown, self._wall())


def _too_long(order: ShardOrder, size: int) -> Done:
    text = (
        f"its order takes {size} bytes, more than the link carries ({MAX_ORDER}): "
        f"arguments, environment and argv of {order.model}'s profile have to be shorter"
    )
    return Done(order.operation, False, "unsendable", {"text": text})


def _certified(visitor: Visitor, text: str) -> str:
    """C{text} with the name in the certificate, which is what both sides can be found by."""
    own = f"certificate {visitor.certificate}"
    return f"{own}: {text}" if visitor.certificate and own not in text else text


@implementer(IProtocolFactory, ILoggingContext)
class _Maker:
    """A factory out of a function; None from it closes the connection at once."""

    def __init__(self, make: Callable[[Any], IProtocol | None]) -> None:
        self._make = make

    def buildProtocol(self, addr: IAddress) -> IProtocol | None:
        """From Twisted."""
        return self._make(addr)

    def logPrefix(self) -> str:
        """From Twisted: what the log calls the port."""
        return "fleet"

    def doStart(self) -> None:
        """From Twisted."""

    def doStop(self) -> None:
        """From Twisted."""
