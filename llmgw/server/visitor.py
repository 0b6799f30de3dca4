"""One connection at the fleet port, from TCP to its end; once accepted it is a node's session.

What was asked over it is answered over it or fails with it: an answer that comes on a later link belongs to nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from attrs import define, evolve, field
from cryptography import x509
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from llmgw.server.imembers import NodeAway, SessionFacts, Unanswered
from llmgw.wire.codec import encode
from llmgw.wire.framing import Malformed, Unsendable
from llmgw.wire.identity import PeerCertificate
from llmgw.wire.link import Message, Wire
from llmgw.wire.messages import Accepted, Desired, Done, Goaway, Refused, Register
from llmgw.wire.server_end import Question, ServerLink

MOST_ASKED = 64


class Host(Protocol):
    """What a visitor tells its fleet port."""

    def arrived(self, visitor: Visitor) -> None:
        """TLS is there; the certificate is unread."""

    def registered(self, visitor: Visitor, register: Register) -> None:
        """It said who it is."""

    def malformed(self, visitor: Visitor, error: Malformed) -> None:
        """It broke the protocol before it was accepted, and is told so."""

    def heard(self, visitor: Visitor, message: Message) -> None:
        """It said something after it was accepted."""

    def ended(self, visitor: Visitor, text: str) -> None:
        """It is gone."""


@define(eq=False)
class Visitor:
    """@ivar certificate: who it is, None until that has been read. C{session} is empty until it is accepted."""

    host: Host
    clock: IReactorTime
    link: ServerLink = field(init=False)
    wire: Wire = field(init=False)
    shown: x509.Certificate | None = None
    certificate: PeerCertificate | None = None
    register: Register | None = None
    session: str = ""
    facts: SessionFacts | None = None
    farewell: str = ""
    refused: bool = False
    _live: bool = False
    _wanted: Sequence[Desired] = ()
    _early: list[Question] = field(factory=list)
    _asked: dict[str, Deferred[Done]] = field(factory=dict)
    _listeners: list[Deferred[bool]] = field(factory=list)
    _settled: deque[str] = field(factory=lambda: deque(maxlen=MOST_ASKED))

    @property
    def node(self) -> str:
        """The node's name, empty while it is not known."""
        return self.certificate.name if self.certificate else ""

    def handshaken(self, link: ServerLink, certificate: x509.Certificate) -> None:
        """From the link."""
        self.shown = certificate
        self.host.arrived(self)

    def registered(self, link: ServerLink, register: Register) -> None:
        """From the link."""
        self.register = register
        self.host.registered(self, register)

    def malformed(self, link: ServerLink, error: Malformed) -> None:
        """From the link."""
        self.refused = True
        self.host.malformed(self, error)

    def heard(self, link: ServerLink, message: Message) -> None:
        """From the link."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.callback(True)
        if not (isinstance(message, Done) and self._answer(message)):
            self.host.heard(self, message)

    def ended(self, link: ServerLink, text: str) -> None:
        """From the link."""
        self.host.ended(self, text)
        self.abandon(text)

    def refuse(self, refused: Refused) -> None:
        """Tell it why it is not taken."""
        self.refused = True
        self.link.refuse(refused)

    def accept(self, accepted: Accepted) -> None:
        """The session begins; what was commanded before goes out behind this."""
        self.link.accept(accepted)
        self._live = True
        if self._wanted:
            self.link.want(self._wanted)
        early, self._early, self._wanted = self._early, [], ()
        for message in early:
            self.link.ask(message)

    def want(self, parts: Sequence[Desired]) -> None:
        """Send this desired state once the session has begun, instead of what is not yet sent of an earlier one."""
        if self._live:
            self.link.want(parts)
        else:
            self._wanted = parts

    def end(self, goaway: Goaway, seconds: float = 1.0) -> None:
        """Close the link within C{seconds}."""
        self.farewell = self.farewell or goaway.text or goaway.reason
        self.link.end(goaway, seconds)

    def answers(self, seconds: float) -> Deferred[bool]:
        """Whether anything is heard from it within C{seconds}; it is pinged."""
        heard: Deferred[bool] = Deferred()
        self._listeners.append(heard)
        self.link.ping()
        return heard.addTimeout(seconds, self.clock, lambda *_: False)

    def ask(self, message: Question, seconds: float) -> Deferred[Done]:
        """Send C{message} and wait for the C{done} of its operation.

        @raise Unanswered: not in time, 64 are waiting already, or it cannot be said in the protocol.
        @raise NodeAway: the link ended first.
        """
        operation = message.operation
        if len(self._asked) >= MOST_ASKED or operation in self._asked:
            raise Unanswered(f"{self.node} has {len(self._asked)} unanswered requests already")
        try:
            encode(message)
        except Unsendable as error:
            raise Unanswered(f"{self.node} was not asked: {error}") from None
        answer: Deferred[Done] = Deferred()
        self._asked[operation] = answer
        if self._live:
            self.link.ask(message)
        else:
            self._early.append(message)
        answer.addTimeout(seconds, self.clock, lambda *_: Failure(Unanswered(f"{self.node} did not answer in {seconds:g} s")))
        return answer.addErrback(self._unasked, operation)

    def _unasked(self, failure: Failure, operation: str) -> Failure:
        """Nobody waits for it any more, for whatever reason; its answer may still come."""
        if self._asked.pop(operation, None) is not None:
            self._settled.append(operation)
        return failure

    def abandon(self, text: str) -> None:
        """Nothing more comes from it: whoever waits is told."""
        for listener in self._listeners:
            listener.callback(False)
        asked, self._listeners, self._asked = self._asked, [], {}
        for answer in asked.values():
            answer.errback(NodeAway(f"the link to {self.node} ended before it answered: {text}"))

    def clock_is(self, wall: float, now: float) -> float:
        """Note what the node's clock says; returns how many seconds it is ahead of ours."""
        if self.facts is not None and wall:
            self.facts = evolve(self.facts, skew=wall - now)
        return wall - now

    def _answer(self, message: Done) -> bool:
        """Whether C{message} answers something that was asked; an answer that comes too late or twice is swallowed."""
        answer = self._asked.pop(message.operation, None)
        if answer is not None:
            self._settled.append(message.operation)
            answer.callback(message)
        return answer is not None or message.operation in self._settled
