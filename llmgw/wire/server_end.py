"""The server's end of one link, as a state machine: it speaks first, then listens, judges, and keeps the beat.

Nothing is read before C{welcome} is written, so a server that is not ready refuses before it has read a byte, and closes
cleanly: an abort would throw the refusal away. In C{Live} whatever the agent says counts as a sign of life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import define, field
from automat import TypeMachineBuilder
from cryptography import x509
from twisted.internet.interfaces import IReactorTime

from llmgw.wire.framing import Malformed
from llmgw.wire.link import Deadlines, Message, Timer, Wire, try_send
from llmgw.wire.messages import Accepted, Beat, Desired, FetchLog, FetchWeights, Goaway, Inspect, Refused, Register, Welcome

Question = Inspect | FetchLog | FetchWeights

# How many seconds late a timer may be before that tells of a process that was stopped or blocked.
OVERSLEPT = 1.0


class ServerLink(Protocol):
    """What can happen at the server's end. The first four and C{lost} are the wire's to say, the others the server's."""

    def opened(self, wire: Wire) -> None:
        """TCP is there."""

    def handshaken(self, certificate: x509.Certificate) -> None:
        """TLS is there."""

    def received(self, message: Message) -> None:
        """The agent said this."""

    def malformed(self, error: Malformed) -> None:
        """The agent broke the protocol."""

    def greet(self, welcome: Welcome) -> None:
        """Let the agent register."""

    def refuse(self, refused: Refused) -> None:
        """Tell the agent why it is not taken, and close."""

    def registered(self, register: Register) -> None:
        """The agent said who it is."""

    def accept(self, accepted: Accepted) -> None:
        """The link is the node's."""

    def want(self, parts: Sequence[Desired]) -> None:
        """Send these instead of what is not yet sent of an earlier desired state; nothing happens on a link that is not live."""

    def ask(self, message: Question) -> None:
        """Send this; nothing happens on a link that is not live."""

    def end(self, goaway: Goaway, seconds: float) -> None:
        """Close the link, saying why where the agent can understand it; it is aborted after C{seconds}."""

    def ping(self) -> None:
        """Send a beat now."""

    def tick(self) -> None:
        """A heartbeat has passed."""

    def expired(self, text: str) -> None:
        """The agent took too long over the step it was at."""

    def lost(self, text: str) -> None:
        """The connection is gone."""


class ServerSide(Protocol):
    """Who owns the links of a server. Each is called in the link's own turn and may give it inputs."""

    def handshaken(self, link: ServerLink, certificate: x509.Certificate) -> None:
        """Answer with C{greet} or C{refuse}, at once."""

    def registered(self, link: ServerLink, register: Register) -> None:
        """Answer with C{accept} or C{refuse}, within C{Deadlines.judgement}."""

    def malformed(self, link: ServerLink, error: Malformed) -> None:
        """The agent broke the protocol before it was accepted; the link refuses it by itself."""

    def heard(self, link: ServerLink, message: Message) -> None:
        """The agent said something on a live link."""

    def ended(self, link: ServerLink, text: str) -> None:
        """The link is over. C{text} is the first cause that was known."""


@define
class ServerCore:
    """What the states share. C{cause} is why the link ends, empty while nobody knows."""

    side: ServerSide
    clock: IReactorTime
    heartbeat: float
    epoch: Callable[[], int]
    deadlines: Deadlines = Deadlines()
    wall: Callable[[], float] = time.time
    spread: Callable[[], float] = lambda: 0.0
    cause: str = ""
    serial: int = 0
    heard_at: float = 0.0
    tick_at: float = 0.0
    wire: Wire = field(init=False)
    timer: Timer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.timer = Timer(self.clock)

    def close(self, cause: str, seconds: float) -> None:
        """Close cleanly within C{seconds}; the first cause told stays."""
        self.cause = self.cause or cause
        self.timer.stop()
        self.wire.close(seconds)

    def within(self, seconds: float, step: str, link: ServerLink) -> None:
        """The link ends unless its next step comes first."""
        self.timer.start(seconds, lambda: link.expired(f"{step} was not done in {seconds:.0f} s"))

    def tick_in(self, seconds: float, link: ServerLink) -> None:
        """Look again after C{seconds}."""
        self.tick_at = self.clock.seconds() + seconds
        self.timer.start(seconds, link.tick)


_builder = TypeMachineBuilder(ServerLink, ServerCore)
New = _builder.state("New")
# TLS is being made: nobody is known.
Handshaking = _builder.state("Handshaking")
# The certificate is known; the server says at once whether it reads on.
Choosing = _builder.state("Choosing")
# Welcome is written: the agent may register, and nothing else.
Greeting = _builder.state("Greeting")
# The agent has registered and waits.
Judging = _builder.state("Judging")
# The link is the node's.
Live = _builder.state("Live")
# We are closing; what still comes is not looked at.
Closing = _builder.state("Closing")
Gone = _builder.state("Gone")


@New.upon(ServerLink.opened).to(Handshaking)
def _opened(link: ServerLink, core: ServerCore, wire: Wire) -> None:
    core.wire = wire
    core.within(core.deadlines.handshake, "the TLS handshake", link)


@Handshaking.upon(ServerLink.handshaken).to(Choosing)
def _handshaken(link: ServerLink, core: ServerCore, certificate: x509.Certificate) -> None:
    core.side.handshaken(link, certificate)


@Choosing.upon(ServerLink.greet).to(Greeting)
def _greet(link: ServerLink, core: ServerCore, welcome: Welcome) -> None:
    core.within(core.deadlines.greeting, "its registration", link)
    core.wire.send(welcome)


@Greeting.upon(ServerLink.received).loop()
def _received_greeting(link: ServerLink, core: ServerCore, message: Message) -> None:
    if isinstance(message, Register):
        link.registered(message)
    else:
        link.malformed(Malformed(core.wire.peer, f"{type(message).__name__.lower()} where register was due"))


@Greeting.upon(ServerLink.registered).to(Judging)
def _registered(link: ServerLink, core: ServerCore, register: Register) -> None:
    core.within(core.deadlines.judgement, "our judgement of it", link)
    core.side.registered(link, register)


@Judging.upon(ServerLink.received).loop()
def _received_judging(link: ServerLink, core: ServerCore, message: Message) -> None:
    link.malformed(Malformed(core.wire.peer, "more before it was accepted"))


@Judging.upon(ServerLink.accept).to(Live)
def _accept(link: ServerLink, core: ServerCore, accepted: Accepted) -> None:
    core.wire.send(accepted)
    core.heard_at = core.clock.seconds()
    core.tick_in(core.heartbeat, link)


@Live.upon(ServerLink.received).loop()
def _received(link: ServerLink, core: ServerCore, message: Message) -> None:
    core.heard_at = core.clock.seconds()
    core.side.heard(link, message)


@Live.upon(ServerLink.want).loop()
def _want(link: ServerLink, core: ServerCore, parts: Sequence[Desired]) -> None:
    core.wire.send_latest(parts)


@Live.upon(ServerLink.ask).loop()
def _ask(link: ServerLink, core: ServerCore, message: Question) -> None:
    try_send(core.wire, message)


@Live.upon(ServerLink.ping).loop()
def _ping(link: ServerLink, core: ServerCore) -> None:
    core.serial += 1
    core.wire.send(Beat(core.serial, core.epoch(), core.wall(), core.spread()))


@Live.upon(ServerLink.tick).loop()
def _tick(link: ServerLink, core: ServerCore) -> None:
    now = core.clock.seconds()
    if now - core.tick_at > OVERSLEPT:
        core.heard_at += now - core.tick_at  # while we did not run we could hear nobody: what has come meanwhile is yet unread
    silent = now - core.heard_at
    left = core.deadlines.missed * core.heartbeat - silent
    if left <= 0:
        link.expired(f"nothing was heard from it in {silent:.0f} s")
        return
    core.tick_in(min(core.heartbeat, left), link)
    link.ping()


@Handshaking.upon(ServerLink.expired).to(Closing)
@Greeting.upon(ServerLink.expired).to(Closing)
@Judging.upon(ServerLink.expired).to(Closing)
@Live.upon(ServerLink.expired).to(Closing)
def _expired(link: ServerLink, core: ServerCore, text: str) -> None:
    core.cause = text
    core.timer.stop()
    core.wire.abort()


@Choosing.upon(ServerLink.refuse).to(Closing)
@Greeting.upon(ServerLink.refuse).to(Closing)
@Judging.upon(ServerLink.refuse).to(Closing)
def _refuse(link: ServerLink, core: ServerCore, refused: Refused) -> None:
    try_send(core.wire, refused)
    core.close(f"we refused it: {refused.reason}", core.deadlines.refusal)


@Handshaking.upon(ServerLink.malformed).to(Closing)
@Greeting.upon(ServerLink.malformed).to(Closing)
@Judging.upon(ServerLink.malformed).to(Closing)
def _malformed(link: ServerLink, core: ServerCore, error: Malformed) -> None:
    core.side.malformed(link, error)
    try_send(core.wire, Refused("malformed", f"you sent {error.what}"))
    core.close(f"it sent {error.what}", core.deadlines.refusal)


@Live.upon(ServerLink.malformed).to(Closing)
def _malformed_live(link: ServerLink, core: ServerCore, error: Malformed) -> None:
    try_send(core.wire, Goaway("malformed", text=f"you sent {error.what}"))
    core.close(f"it sent {error.what}", core.deadlines.refusal)


@Handshaking.upon(ServerLink.end).to(Closing)
def _end_early(link: ServerLink, core: ServerCore, goaway: Goaway, seconds: float) -> None:
    core.close(goaway.text or goaway.reason, seconds)


@Choosing.upon(ServerLink.end).to(Closing)
@Greeting.upon(ServerLink.end).to(Closing)
@Judging.upon(ServerLink.end).to(Closing)
def _end_unaccepted(link: ServerLink, core: ServerCore, goaway: Goaway, seconds: float) -> None:
    reason = "standby" if goaway.leader or goaway.reason == "standby" else "starting"
    try_send(core.wire, Refused(reason, goaway.text or goaway.reason, goaway.leader, goaway.addresses))
    core.close(goaway.text or goaway.reason, seconds)


@Live.upon(ServerLink.end).to(Closing)
def _end(link: ServerLink, core: ServerCore, goaway: Goaway, seconds: float) -> None:
    try_send(core.wire, goaway)
    core.close(goaway.text or goaway.reason, seconds)


@Closing.upon(ServerLink.end).loop()
def _hurry(link: ServerLink, core: ServerCore, goaway: Goaway, seconds: float) -> None:
    core.close("", seconds)


@Handshaking.upon(ServerLink.lost).to(Gone)
@Choosing.upon(ServerLink.lost).to(Gone)
@Greeting.upon(ServerLink.lost).to(Gone)
@Judging.upon(ServerLink.lost).to(Gone)
@Live.upon(ServerLink.lost).to(Gone)
@Closing.upon(ServerLink.lost).to(Gone)
def _lost(link: ServerLink, core: ServerCore, text: str) -> None:
    core.timer.stop()
    core.side.ended(link, core.cause or text)


def _ignore(states: list[Any], *inputs: Any) -> None:
    """What may come late and then means nothing."""
    for state in states:
        for one in inputs:
            state.upon(one).loop().returns(None)


_ignore([Handshaking, Choosing, Greeting, Judging, Closing, Gone], ServerLink.want, ServerLink.ask, ServerLink.ping)
_ignore([Handshaking, Choosing, Greeting, Judging, Closing, Gone], ServerLink.tick)
_ignore([Closing, Gone], ServerLink.received, ServerLink.malformed, ServerLink.registered, ServerLink.handshaken)
_ignore([Closing, Gone], ServerLink.greet, ServerLink.refuse, ServerLink.accept, ServerLink.expired)
_ignore([Gone], ServerLink.end, ServerLink.lost)

_make = _builder.build()


def make_server_link(core: ServerCore) -> ServerLink:
    """A new link, to be given to a L{Wire}."""
    return _make(core)
