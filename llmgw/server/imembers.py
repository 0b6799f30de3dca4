"""What the fleet port asks of the control plane and tells it, and the values that go between them."""

from __future__ import annotations

from attrs import frozen
from zope.interface import Interface

from llmgw.errors import LlmgwError
from llmgw.wire.identity import PeerCertificate
from llmgw.wire.messages import Done, Event, Refused, Register, Report


class NodeAway(LlmgwError):
    """The node has no link, or lost it before it answered: what was asked of it may or may not have happened."""


class NotActing(LlmgwError):
    """This server may not command now, so nothing was sent."""


class Unanswered(LlmgwError):
    """The node has a link but did not answer in time: what was asked of it may or may not have happened."""


@frozen
class SessionFacts:
    """One accepted link. C{since} is wall time, C{skew} how many seconds the node's clock is ahead, None unknown."""

    session: str
    since: float
    peer: str
    serial: str
    not_after: float
    skew: float | None = None
    version: str = ""


@frozen
class Refusal:
    """One peer that was not let in. C{text} is what the log says; C{node} is empty where no certificate named one."""

    at: float
    peer: str
    reason: str
    text: str
    node: str = ""


class IMembers(Interface):
    """What the fleet port asks of the control plane and tells it. No method may block.

    Per session: C{judge}, C{joined}, any number of C{report}, C{event} and C{done}, C{left}. Calls for one node never
    interleave between sessions: C{left} of the old one comes before C{joined} of the new one, and nothing of a session
    comes after its C{left}.
    """

    def readiness() -> Refused | None:
        """Why no agent is taken now (C{standby}, C{starting}), asked before anything is read and again at registration."""

    def judge(register: Register, certificate: PeerCertificate) -> Refused | None:
        """Why this node is not taken (C{revoked}, ...). Fleet, name, role and a second agent of one name are judged already."""

    def joined(node: str, session: str, register: Register) -> int:
        """The node's link is up; returns the revision that goes into C{accepted}.

        C{desired} may be called from here on but goes out after C{accepted}.
        """

    def report(node: str, session: str, message: Report) -> None:
        """All shards of the node."""

    def event(node: str, session: str, message: Event) -> None:
        """One transition."""

    def done(node: str, session: str, message: Done) -> None:
        """The outcome of an order; answers to C{ask} do not come here."""

    def left(node: str, session: str, reason: str) -> None:
        """The session is over."""
