"""Who the fleet port asks about agents: the leadership in force, and while there is none, whoever tells them where to go.

The port listens from the start to the end of the process, leaderships come and go behind it. A standby says who leads and where
before it has read a byte of the agent's.
"""

from __future__ import annotations

from zope.interface import implementer

from llmgw.interfaces import ILeadership
from llmgw.server.controller import Controller
from llmgw.server.imembers import IMembers
from llmgw.wire.identity import PeerCertificate
from llmgw.wire.messages import Done, Event, Goaway, Refused, Register, Report


@implementer(IMembers)
class Reception:
    """See L{IMembers}."""

    def __init__(self, name: str, leadership: ILeadership) -> None:
        self._name = name
        self._leadership = leadership
        self._controller: Controller | None = None
        self._stands_by = False

    def stand_by(self) -> None:
        """From now on another one may lead, and is told of."""
        self._stands_by = True

    def open(self, controller: Controller) -> None:
        """A leadership has begun."""
        self._controller = controller

    def close(self) -> None:
        """It is over."""
        self._controller = None

    def elsewhere(self) -> tuple[str, tuple[str, ...]]:
        """Who leads, if that is not us, and where."""
        leader = self._leadership.leader.partition("@")[0]
        return ("", ()) if leader == self._name else (leader, self._leadership.addresses)

    def goaway(self) -> Goaway:
        """What linked agents are told when a leadership has ended."""
        leader, addresses = self.elsewhere()
        return Goaway("standby", leader, addresses, f"{self._name} leads no more; {self._who(leader)}")

    def readiness(self) -> Refused | None:
        """See L{IMembers}."""
        if self._controller is not None:
            return self._controller.readiness()
        if self._leadership.may_act() or not self._stands_by:
            return Refused("starting", f"{self._name} has not begun to lead yet", retry_after=1.0)
        leader, addresses = self.elsewhere()
        return Refused("standby", f"{self._name} stands by; {self._who(leader)}", leader, addresses, 0.0 if leader else 1.0)

    def _who(self, leader: str) -> str:
        """A leader last seen before the store went out of sight is still worth a try, but not a promise."""
        problem = self._leadership.problem
        if problem:
            return f"{leader or 'nobody'} led when that could last be seen: {problem}"
        return f"{leader} leads" if leader else "nobody leads now"

    def judge(self, register: Register, certificate: PeerCertificate) -> Refused | None:
        """See L{IMembers}."""
        return self._controller.judge(register, certificate) if self._controller is not None else self.readiness()

    def joined(self, node: str, session: str, register: Register) -> int:
        """See L{IMembers}. The port has asked for leave just before."""
        assert self._controller is not None
        return self._controller.joined(node, session, register)

    def report(self, node: str, session: str, message: Report) -> None:
        """See L{IMembers}."""
        if self._controller is not None:
            self._controller.report(node, session, message)

    def event(self, node: str, session: str, message: Event) -> None:
        """See L{IMembers}."""
        if self._controller is not None:
            self._controller.event(node, session, message)

    def done(self, node: str, session: str, message: Done) -> None:
        """See L{IMembers}."""
        if self._controller is not None:
            self._controller.done(node, session, message)

    def left(self, node: str, session: str, reason: str) -> None:
        """See L{IMembers}."""
        if self._controller is not None:
            self._controller.left(node, session, reason)
