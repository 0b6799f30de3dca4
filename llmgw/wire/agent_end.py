"""The agent's end of one link, as a state machine: it listens first, registers, and answers every beat.

It writes nothing before C{welcome}: then a bad certificate is told with its real reason, and a standby's refusal cannot be
lost behind our own bytes. How a link ended is a value, L{Ending}, made from what happened on it; whether the agent is
shutting down is not to be read from it, that only the uplink knows.
"""

from __future__ import annotations

from typing import Any, Protocol

from attrs import define, field, frozen
from automat import TypeMachineBuilder
from cryptography import x509
from twisted.internet.interfaces import IReactorTime

from llmgw.wire.framing import Malformed
from llmgw.wire.identity import IdentityError
from llmgw.wire.link import Deadlines, Message, Timer, Wire, try_send
from llmgw.wire.messages import PROTOCOL, Accepted, AgentMessage, Bye, Done, Goaway, Refused, Register, Welcome


@frozen
class Ending:
    """How a link ended. C{text} completes a sentence that began with the server's address.

    @ivar lived: how many seconds it was accepted, None if it never was.
    @ivar word: what the server said at the end, if it did.
    @ivar clean: the link ended as the protocol has it: refused, told to go away, or closed by us because the agent stops.
    """

    text: str
    lived: float | None = None
    word: Refused | Goaway | None = None
    clean: bool = False


class AgentLink(Protocol):
    """What can happen at the agent's end. C{end} is the uplink's to say, the others the wire's and the timers'."""

    def opened(self, wire: Wire) -> None:
        """TCP is there."""

    def handshaken(self, certificate: x509.Certificate) -> None:
        """TLS is there; the server may yet refuse our certificate."""

    def received(self, message: Message) -> None:
        """The server said this."""

    def malformed(self, error: Malformed) -> None:
        """The server broke the protocol."""

    def welcomed(self, welcome: Welcome) -> None:
        """The server took our certificate."""

    def accepted(self, accepted: Accepted) -> None:
        """The server took our registration."""

    def told_off(self, word: Refused | Goaway) -> None:
        """The server does not want this link."""

    def decline(self, text: str) -> None:
        """We do not want this server, though it took us."""

    def send(self, message: AgentMessage) -> None:
        """Send this; nothing happens on a link that is not live."""

    def end(self, bye: Bye, seconds: float) -> None:
        """Close the link, saying why where the server can understand it; it is aborted after C{seconds}."""

    def expired(self, text: str) -> None:
        """The server took too long over the step it was at."""

    def lost(self, text: str) -> None:
        """The connection is gone."""


class AgentSide(Protocol):
    """Who owns the agent's link. None of these may raise."""

    def check(self, certificate: x509.Certificate) -> None:
        """Whether this is a server of our fleet at the address we dialed.

        @raise IdentityError: it is not.
        """

    def register(self, welcome: Welcome, local: str) -> Register | str:
        """Our registration, or why this server is none for us."""

    def accepted(self, link: AgentLink, accepted: Accepted) -> str:
        """The link is live. Returns why it must end at once, else nothing."""

    def heard(self, link: AgentLink, message: Message) -> None:
        """The server said something on a live link."""

    def ended(self, link: AgentLink, ending: Ending) -> None:
        """The link is over."""


@define
class AgentCore:
    """What the states share."""

    side: AgentSide
    clock: IReactorTime
    deadlines: Deadlines = Deadlines()
    heartbeat: float = 5.0
    since: float | None = None
    cause: str = ""
    word: Refused | Goaway | None = None
    clean: bool = False
    wire: Wire = field(init=False)
    timer: Timer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.timer = Timer(self.clock)

    def close(self, cause: str, seconds: float) -> None:
        """Close cleanly within C{seconds}; the first cause told stays."""
        self.cause = self.cause or cause
        self.timer.stop()
        self.wire.close(seconds)

    def abort(self, cause: str) -> None:
        """Close without a word."""
        self.cause = self.cause or cause
        self.timer.stop()
        self.wire.abort()

    def within(self, seconds: float, step: str, link: AgentLink) -> None:
        """The link ends unless its next step comes first."""
        self.timer.start(seconds, lambda: link.expired(f"{step} in {seconds:.0f} s"))

    def listen(self, link: AgentLink) -> None:
        """The link ends unless something is heard again in time."""
        self.within(self.deadlines.missed * self.heartbeat, "nothing was heard from it", link)

    def ending(self, text: str) -> Ending:
        """How it ended, given how the connection did."""
        lived = None if self.since is None else self.clock.seconds() - self.since
        return Ending(self.cause or text, lived, self.word, self.clean)


_builder = TypeMachineBuilder(AgentLink, AgentCore)
New = _builder.state("New")
# TLS is being made.
Handshaking = _builder.state("Handshaking")
# The server is who it should be; it may yet refuse our certificate, and speaks first.
Waiting = _builder.state("Waiting")
# We have registered.
Registered = _builder.state("Registered")
# The link is ours.
Live = _builder.state("Live")
# We are closing; what still comes is not looked at.
Closing = _builder.state("Closing")
Gone = _builder.state("Gone")


@New.upon(AgentLink.opened).to(Handshaking)
def _opened(link: AgentLink, core: AgentCore, wire: Wire) -> None:
    core.wire = wire
    core.within(core.deadlines.handshake, "the TLS handshake was not done", link)


@Handshaking.upon(AgentLink.handshaken).to(Waiting)
def _handshaken(link: AgentLink, core: AgentCore, certificate: x509.Certificate) -> None:
    try:
        core.side.check(certificate)
    except IdentityError as error:
        core.abort(str(error))
    else:
        core.within(core.deadlines.greeting, "it said nothing", link)


@Waiting.upon(AgentLink.received).loop()
def _received_waiting(link: AgentLink, core: AgentCore, message: Message) -> None:
    if isinstance(message, Welcome):
        link.welcomed(message)
    elif isinstance(message, Refused):
        link.told_off(message)
    else:
        link.malformed(_untimely(core, message, "welcome"))


@Waiting.upon(AgentLink.welcomed).to(Registered)
def _welcomed(link: AgentLink, core: AgentCore, welcome: Welcome) -> None:
    core.within(core.deadlines.acceptance, "it did not answer our registration", link)
    if not welcome.minimum <= PROTOCOL <= welcome.maximum:
        spoken = f"{welcome.minimum} to {welcome.maximum}"
        core.close(f"it speaks versions {spoken} of the protocol, we speak {PROTOCOL}", core.deadlines.refusal)
        return
    if not 0.05 <= welcome.heartbeat <= 3600:
        link.malformed(Malformed(core.wire.peer, f"a heartbeat of {welcome.heartbeat} s"))
        return
    core.heartbeat = welcome.heartbeat
    register = core.side.register(welcome, core.wire.local)
    if isinstance(register, str):
        core.close(register, core.deadlines.refusal)
    elif not try_send(core.wire, register):
        core.close("our registration cannot be sent (see above)", core.deadlines.refusal)


@Registered.upon(AgentLink.received).loop()
def _received_registered(link: AgentLink, core: AgentCore, message: Message) -> None:
    if isinstance(message, Accepted):
        link.accepted(message)
    elif isinstance(message, Refused):
        link.told_off(message)
    else:
        link.malformed(_untimely(core, message, "accepted or refused"))


@Registered.upon(AgentLink.accepted).to(Live)
def _accepted(link: AgentLink, core: AgentCore, accepted: Accepted) -> None:
    core.since = core.clock.seconds()
    core.listen(link)
    if refusal := core.side.accepted(link, accepted):
        link.decline(refusal)


@Live.upon(AgentLink.received).loop()
def _received(link: AgentLink, core: AgentCore, message: Message) -> None:
    core.listen(link)
    if isinstance(message, Goaway):
        link.told_off(message)
    elif isinstance(message, Welcome | Accepted | Refused):
        link.malformed(_untimely(core, message, "an order"))
    else:
        core.side.heard(link, message)


@Live.upon(AgentLink.send).loop()
def _send(link: AgentLink, core: AgentCore, message: AgentMessage) -> None:
    if not try_send(core.wire, message) and isinstance(message, Done):
        try_send(core.wire, Done(message.operation, False, "unsendable", {"text": "the result does not fit the protocol"}))


@Waiting.upon(AgentLink.told_off).to(Closing)
@Registered.upon(AgentLink.told_off).to(Closing)
@Live.upon(AgentLink.told_off).to(Closing)
def _told_off(link: AgentLink, core: AgentCore, word: Refused | Goaway) -> None:
    core.word, core.clean = word, True
    core.close(f"refused us: {word.reason}: {word.text}" if isinstance(word, Refused) else f"sent us away: {word.reason}", 1.0)


@Handshaking.upon(AgentLink.malformed).to(Closing)
@Waiting.upon(AgentLink.malformed).to(Closing)
@Registered.upon(AgentLink.malformed).to(Closing)
def _malformed(link: AgentLink, core: AgentCore, error: Malformed) -> None:
    core.close(f"it sent {error.what}", core.deadlines.refusal)


@Live.upon(AgentLink.malformed).to(Closing)
def _malformed_live(link: AgentLink, core: AgentCore, error: Malformed) -> None:
    try_send(core.wire, Bye(f"you sent {error.what}"))
    core.close(f"it sent {error.what}", core.deadlines.refusal)


@Handshaking.upon(AgentLink.expired).to(Closing)
@Waiting.upon(AgentLink.expired).to(Closing)
@Registered.upon(AgentLink.expired).to(Closing)
@Live.upon(AgentLink.expired).to(Closing)
def _expired(link: AgentLink, core: AgentCore, text: str) -> None:
    core.abort(text)


@Live.upon(AgentLink.decline).to(Closing)
def _declined(link: AgentLink, core: AgentCore, text: str) -> None:
    try_send(core.wire, Bye(text))
    core.close(f"we left: {text}", core.deadlines.refusal)


@Live.upon(AgentLink.end).to(Closing)
def _end(link: AgentLink, core: AgentCore, bye: Bye, seconds: float) -> None:
    try_send(core.wire, bye)
    core.clean = True
    core.close(f"we left: {bye.reason}", seconds)


@Handshaking.upon(AgentLink.end).to(Closing)
@Waiting.upon(AgentLink.end).to(Closing)
@Registered.upon(AgentLink.end).to(Closing)
@Closing.upon(AgentLink.end).loop()
def _end_early(link: AgentLink, core: AgentCore, bye: Bye, seconds: float) -> None:
    core.close(f"we left: {bye.reason}", seconds)


@Handshaking.upon(AgentLink.lost).to(Gone)
@Waiting.upon(AgentLink.lost).to(Gone)
@Registered.upon(AgentLink.lost).to(Gone)
@Live.upon(AgentLink.lost).to(Gone)
@Closing.upon(AgentLink.lost).to(Gone)
def _lost(link: AgentLink, core: AgentCore, text: str) -> None:
    core.timer.stop()
    core.side.ended(link, core.ending(text))


def _untimely(core: AgentCore, message: Message, due: str) -> Malformed:
    return Malformed(core.wire.peer, f"{type(message).__name__.lower()} where {due} was due")


def _ignore(states: list[Any], *inputs: Any) -> None:
    """What may come late and then means nothing."""
    for state in states:
        for one in inputs:
            state.upon(one).loop().returns(None)


_ignore([New, Handshaking, Waiting, Registered, Closing, Gone], AgentLink.send)
_ignore([Closing, Gone], AgentLink.received, AgentLink.malformed, AgentLink.handshaken, AgentLink.welcomed)
_ignore([Closing, Gone], AgentLink.accepted, AgentLink.told_off, AgentLink.decline, AgentLink.expired)
_ignore([Gone], AgentLink.end, AgentLink.lost)

_make = _builder.build()


def make_agent_link(core: AgentCore) -> AgentLink:
    """A new link, to be given to a L{Wire}."""
    return _make(core)
