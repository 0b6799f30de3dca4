"""Whether an agent that registered gets its node's session, and what to tell it if not.

Of two agents with one name the one that answers stays. An agent that has only lost its connection (same instance, same boot)
replaces its old link at once; a copied disk shows by another boot id.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from attrs import field, frozen
from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.interfaces import ILeadership
from llmgw.pki import with_article
from llmgw.server.imembers import IMembers
from llmgw.server.visitor import Visitor
from llmgw.wire.identity import PeerCertificate, short
from llmgw.wire.messages import PROTOCOL, Refused, Register

OUTRANK_WITHIN = 5.0


def same_agent(one: Register, other: Register) -> bool:
    """Whether both are the same state folder on the same boot of the same machine."""
    return (one.instance, one.boot) == (other.instance, other.boot)


def which(register: Register) -> str:
    """What tells two agents of one name apart."""
    return f"instance {register.instance[:8]}, boot {register.boot[:8]}"


@frozen
class Judge:
    """@ivar answer: how many seconds a holder gets to show that it is there."""

    log = Logger()
    _reactor: IReactorTime
    _server: str
    _fleet: str
    _leadership: ILeadership
    _members: IMembers
    _answer: float
    _sessions: Mapping[str, Visitor]
    _raising: DeferredLock = field(factory=DeferredLock)
    _hung: list[float] = field(factory=lambda: [-1.0])

    def wrong_side(self, certificate: PeerCertificate) -> Refused | None:
        """Why this certificate cannot be a node's of our fleet."""
        if certificate.role != "node":
            return Refused("wrong_role", f"certificate {certificate} is {with_article(certificate.role)}'s, not a node's")
        if certificate.fleet != self._fleet:
            return Refused("wrong_fleet", f"certificate {certificate} is of fleet {certificate.fleet}, this is {self._fleet}")
        return None

    def unready(self) -> Refused | None:
        """Why no agent is taken now."""
        try:
            return self._members.readiness()
        except Exception:
            self.log.failure("while asking whether agents may be taken")
            return Refused("starting", f"{self._server} cannot say whether it is ready (see its log)", retry_after=5.0)

    async def decide(self, visitor: Visitor, register: Register) -> Refused | Visitor | None:
        """Whether C{visitor} may have its node's session: why not, or whom it replaces, or None.

        Both questions that take time are asked again after each answer, since meanwhile others may have come.
        """
        certificate = visitor.certificate
        assert certificate is not None
        refused = self._mismatch(certificate, register) or self.unready() or self._judged(register, certificate)
        replaced: Visitor | None = None
        while not refused:
            holder = self._sessions.get(certificate.name)
            if holder is not replaced:
                replaced = holder
                refused = await self._arbitrate(holder, register) if holder else None
            elif self.behind(register.epoch, register.leader):
                refused = await self.outrank(register.epoch, register.leader, certificate.name)
            else:
                break
        if not refused and not self._leadership.may_act():
            refused = self.unready() or Refused("standby", f"{self._server} does not lead")
        return refused or replaced

    def _mismatch(self, certificate: PeerCertificate, register: Register) -> Refused | None:
        if register.node != certificate.name:
            return Refused("name_mismatch", f"certificate {certificate}, claimed {register.node[:80]}")
        if register.protocol != PROTOCOL:
            return Refused("protocol", f"{register.node} speaks version {register.protocol} of the protocol, we speak {PROTOCOL}")
        if register.fleet not in ("", self._fleet):
            return Refused("wrong_fleet", f"{register.node} says it is of fleet {register.fleet[:80]}, this is {self._fleet}")
        if register.facts.name != register.node:
            return Refused("malformed", f"{register.node} registered the facts of {register.facts.name[:80]}")
        return None

    def _judged(self, register: Register, certificate: PeerCertificate) -> Refused | None:
        try:
            return self._members.judge(register, certificate)
        except Exception:
            self.log.failure("while judging {node}", node=register.node)
            return Refused("starting", f"{self._server} failed while judging {register.node} (see its log)", retry_after=5.0)

    async def _arbitrate(self, holder: Visitor, register: Register) -> Refused | None:
        """Another link has this name: the one that answers stays, unless it is plainly the same agent come back."""
        held, facts = holder.register, holder.facts
        assert held is not None and facts is not None
        if not same_agent(held, register) and await holder.answers(self._answer):
            return Refused(
                "name_in_use",
                f"{register.node} is linked from {facts.peer} since {time.strftime('%F %T', time.gmtime(facts.since))} UTC"
                f" (serial {short(facts.serial)}, {which(held)}), which answers; the newcomer is"
                f" {which(register)}: give one of them a name and certificate of its own",
            )
        return None

    def replaced(self, holder: Visitor, visitor: Visitor, register: Register) -> str:
        """Why C{holder} gives its name to C{visitor}, for both logs."""
        assert holder.register is not None
        text = f"replaced by a link from {visitor.wire.peer} ({which(register)})"
        return text if same_agent(holder.register, register) else f"{text}, after it did not answer in {self._answer:g} s"

    def behind(self, epoch: int, leader: str) -> bool:
        """Whether an agent that obeys this leadership would refuse ours."""
        ours = self._leadership
        return epoch > ours.epoch or (epoch == ours.epoch and leader not in ("", ours.leader))

    async def outrank(self, epoch: int, leader: str, node: str) -> Refused | None:
        """Raise our epoch above the one that C{node} obeys; many nodes at once raise it once, or wait in vain once."""
        begun = self._reactor.seconds()
        await self._raising.acquire()
        try:
            while self.behind(epoch, leader):
                if self._hung[0] >= begun:
                    raise TimeoutError("the store did not answer another node's try")
                ours = self._leadership.epoch
                self.log.warn(
                    "{node} obeys epoch {epoch} of {leader}, ours is {ours}: raising it. {why}",
                    node=node, epoch=epoch, leader=leader, ours=ours, why=_SET_BACK, event="epoch_conflict",
                )  # fmt: skip
                await self._leadership.outrank(epoch).addTimeout(OUTRANK_WITHIN, self._reactor, self._gave_up)
                if self._leadership.epoch <= ours:
                    return Refused("starting", f"{self._server} is still at epoch {ours}", retry_after=1.0)
        except Exception as error:
            text = f"{node} obeys epoch {epoch}, and {self._server} cannot raise its own above that: {error}"
            self.log.error("{text}", text=text, event="epoch_conflict")
            return Refused("starting", text, retry_after=5.0)
        finally:
            self._raising.release()
        return None

    def _gave_up(self, _: object, seconds: float) -> Failure:
        self._hung[0] = self._reactor.seconds()
        return Failure(TimeoutError(f"the store did not answer in {seconds:g} s"))


_SET_BACK = "If no other server leads, the store was set back, or failed over, and has lost its last commits"
