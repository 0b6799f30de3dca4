"""One connection of the link, either side: bytes to messages and back, and an end to every close.

What is said when is the business of L{llmgw.wire.agent_end} and L{llmgw.wire.server_end}; this is the rim under both.
Surprising: C{loseConnection} waits for ever for a peer that does not answer, so every close arms a timer that aborts.
C{transport.write} neither blocks nor refuses, so what a slow peer does not read is held here, up to a bound. Twisted calls
C{connectionMade} when TCP is there; nothing may be believed, said or counted before C{handshakeCompleted}.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from typing import Protocol as TypingProtocol

from attrs import frozen
from cryptography import x509
from OpenSSL import SSL
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IDelayedCall, IHandshakeListener, IPushProducer, IReactorTime, ITCPTransport
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from llmgw.wire.codec import Unknown, encode
from llmgw.wire.framing import LineSplitter, Malformed, Unsendable
from llmgw.wire.identity import PeerCertificate, Verdict, explain_tls
from llmgw.wire.messages import ALPN, AgentMessage, ServerMessage

ABORT_AFTER = 1.0
MAX_WAITING = 4 * 2**20
CLOSED, BROKE = "it closed the connection", "the connection broke"
# Twisted knows no more of it than that it was not closed.
NO_GOODBYE = "without a goodbye: the other side was killed, or its machine or the network failed"

Message = AgentMessage | ServerMessage | Unknown


@frozen
class Deadlines:
    """How long each step of a link may take, in seconds; C{missed} counts heartbeats.

    They are no settings, since both sides count on them. C{answer} is what a holder gets when another claims its name;
    C{refusal} is how long a refused peer may take to read why.
    """

    handshake: float = 5.0
    greeting: float = 5.0
    judgement: float = 10.0
    acceptance: float = 15.0
    answer: float = 3.0
    missed: float = 3.0
    refusal: float = 5.0


class LinkEnd(TypingProtocol):
    """What a L{Wire} tells the state machine above it. After C{lost} it says nothing more."""

    def opened(self, wire: Wire) -> None:
        """TCP is there; TLS is not."""

    def handshaken(self, certificate: x509.Certificate) -> None:
        """TLS is there, and OpenSSL has taken the peer's certificate."""

    def received(self, message: Message) -> None:
        """The peer said this."""

    def malformed(self, error: Malformed) -> None:
        """The peer broke the protocol; nothing more is read from it."""

    def lost(self, text: str) -> None:
        """The connection is gone; C{text} says why, as the end of a sentence that began with the peer."""


class Timer:
    """At most one delayed call."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._call: IDelayedCall | None = None

    def start(self, seconds: float, then: Callable[[], object]) -> None:
        """Call C{then} after C{seconds} instead of what was to be called before."""
        self.stop()
        self._call = self._clock.callLater(seconds, then)

    def stop(self) -> None:
        """Call nothing."""
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._call = None


@implementer(IHandshakeListener, IPushProducer)
class Wire(Protocol):
    """The protocol on top of TLS.

    @ivar peer: the peer's address, for people.
    @ivar local: our own address on this connection.
    """

    log = Logger()
    peer = "?"
    local = ""

    def __init__(
        self,
        clock: IReactorTime,
        end: LinkEnd,
        decode: Callable[[bytes, str], Message],
        own: Callable[[], PeerCertificate],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._end = end
        self._decode = decode
        self._own = own
        self._wall = wall
        self._abort_timer = Timer(clock)
        self._waiting: deque[bytes] = deque()
        self._waiting_size = 0
        self._latest: deque[AgentMessage | ServerMessage] = deque()
        self._fault = ""
        self._paused = self._closing = self._gone = False
        self._verdict = Verdict()

    def connectionMade(self) -> None:
        """TCP is there."""
        transport: Any = self.transport
        self.peer, self.local = _show(transport.getPeer()), getattr(transport.getHost(), "host", "")
        self._splitter = LineSplitter(self.peer)
        found = getattr(transport, "verdict", None)
        self._verdict = found if isinstance(found, Verdict) else self._verdict
        if ITCPTransport.providedBy(transport):
            transport.setTcpNoDelay(True)
            transport.setTcpKeepAlive(True)
        transport.registerProducer(self, True)
        self._end.opened(self)

    def handshakeCompleted(self) -> None:
        """TLS is there, though a server may yet refuse our certificate."""
        transport: Any = self.transport
        if transport.negotiatedProtocol != ALPN:
            self._end.malformed(Malformed(self.peer, f"no offer to speak {ALPN.decode()} (ALPN)"))
            return
        self._end.handshaken(transport.getHandle().get_peer_certificate(as_cryptography=True))

    def dataReceived(self, data: bytes) -> None:
        """Read what comes, but throw it away once we are closing: the peer's goodbye is behind it."""
        if self._closing:
            return
        try:
            for line in self._splitter.feed(data):
                self._end.received(self._decode(line, self.peer))
                if self._closing:
                    return
        except Malformed as error:
            self._end.malformed(error)

    def send(self, message: AgentMessage | ServerMessage) -> None:
        """Write C{message}, or hold it while the peer does not read; too much held ends the link.

        @raise Unsendable: the peer would have to refuse it; nothing was written.
        """
        line = encode(message)
        if self._closing or self._gone:
            return
        if not self._paused:
            self._write(line)
        elif self._waiting_size + len(line) > MAX_WAITING:
            self._fault = f"it does not read: {self._waiting_size} bytes wait for it"
            self.abort()
        else:
            self._waiting.append(line)
            self._waiting_size += len(line)

    def send_latest(self, messages: Iterable[AgentMessage | ServerMessage]) -> None:
        """Write C{messages} as fast as the peer reads, behind what waits already. What is left of an earlier call is dropped:
        so a state in many parts is never cut short by the bound of L{send}, and a slow peer gets the newest one.
        """
        if not self._closing and not self._gone:
            self._latest = deque(messages)
            self._write_latest()

    @property
    def closing(self) -> bool:
        """Whether this side has begun to end the connection, or it is gone."""
        return self._closing or self._gone

    def pauseProducing(self) -> None:
        """The transport's buffer is full."""
        self._paused = True

    def resumeProducing(self) -> None:
        """The transport's buffer is empty."""
        self._paused = False
        while self._waiting and not self._paused:
            line = self._waiting.popleft()
            self._waiting_size -= len(line)
            self._write(line)
        self._write_latest()

    def stopProducing(self) -> None:
        """The connection is going; C{connectionLost} says so, too."""

    def close(self, seconds: float = ABORT_AFTER) -> None:
        """Say what is left to say and close cleanly; abort if that has not been done in C{seconds}.

        Called again it only sets the time anew.
        """
        if self._gone:
            return
        self._abort_timer.start(seconds, self.abort)
        if self._closing:
            return
        transport: Any = self.transport
        transport.unregisterProducer()
        self._write(b"".join(self._waiting))
        self._drop()
        self._closing = True
        transport.loseConnection()

    def abort(self) -> None:
        """End it now; C{lost} follows in a later turn of the reactor."""
        self._closing = True
        self._drop()
        if not self._gone:
            self.transport.abortConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """It is over. Aborting after this would raise inside Twisted, hence the timer is stopped."""
        self._gone = True
        self._abort_timer.stop()
        self._drop()
        self._end.lost(self._why(reason.value))

    def _drop(self) -> None:
        self._waiting.clear()
        self._latest.clear()

    def _write_latest(self) -> None:
        while self._latest and not self._paused:
            message = self._latest.popleft()
            try:
                self._write(encode(message))
            except Unsendable as error:
                self._latest.clear()  # the peer counts only a whole, so the rest is of no use to it
                self.log.error("nothing was sent to {peer}: {error}", peer=self.peer, error=str(error))

    def _write(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[union-attr]

    def _why(self, error: BaseException | None) -> str:
        if self._fault:
            return self._fault
        if self._verdict.error:
            return self._verdict.explain(self._wall())
        if isinstance(error, SSL.Error):
            return explain_tls(error, self._own(), self._wall())
        if isinstance(error, ConnectionDone):
            return CLOSED
        if isinstance(error, ConnectionAborted):
            return "we gave it up"
        if isinstance(error, ConnectionLost):
            return f"{BROKE} {NO_GOODBYE}"
        return f"{BROKE}: {error}"


def try_send(wire: Wire, message: AgentMessage | ServerMessage) -> bool:
    """Send where nobody waits for an answer; what cannot be sent is logged. Returns whether it was sent."""
    try:
        wire.send(message)
    except Unsendable as error:
        wire.log.error("nothing was sent to {peer}: {error}", peer=wire.peer, error=str(error))
        return False
    return True


def _show(address: Any) -> str:
    host, port = getattr(address, "host", "?"), getattr(address, "port", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
