"""What is said on one link, from the agent's side: who may speak to the node, and what it answers.

One talk belongs to one link. What the node answers to an old link's question finds that link closed and goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define, evolve, field, frozen
from cryptography import x509
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.agent.fence import Fence, FenceError
from llmgw.agent.inode import INode
from llmgw.errors import LlmgwError
from llmgw.fleet.shard import ShardOrder, ShardReport
from llmgw.wire.agent_end import AgentLink, Ending
from llmgw.wire.codec import Unknown
from llmgw.wire.identity import PeerCertificate
from llmgw.wire.link import Message
from llmgw.wire.messages import (
    PROTOCOL,
    Accepted,
    AgentMessage,
    Beat,
    Desired,
    Done,
    FetchLog,
    FetchWeights,
    Inspect,
    Register,
    Report,
    Welcome,
)
from llmgw.wire.parts import MAX_ORDER, Joiner, size_of
from llmgw.wire.tls import check_server


@define
class Applied:
    """The desired state that was last given to the node; it outlives links, not the process."""

    epoch: int = 0
    revision: int = 0


@frozen
class Common:
    """What every talk of an agent shares."""

    name: str
    node: INode
    fence: Fence
    applied: Applied
    wall: Callable[[], float]


@define(eq=False)
class Talk:
    """@ivar leader: who took us, empty until then; C{epoch} is its epoch. C{over} fires with the L{Ending}.

    @ivar spread: over how many seconds the server wants its agents' redials to be spread.
    """

    log = Logger()
    _common: Common
    _server: str
    _host: str
    own: PeerCertificate
    link: AgentLink = field(init=False)
    leader: str = ""
    epoch: int = 0
    spread: float = 0.0
    over: Deferred[Ending] = field(factory=Deferred)
    _told: dict[str, ShardOrder | None] = field(factory=dict)
    _joiner: Joiner = field(factory=Joiner)

    @property
    def status(self) -> str:
        """Where this link stands, for people."""
        return f"linked to {self._server}, {self.leader} leads (epoch {self.epoch})" if self.leader else f"dialing {self._server}"

    def check(self, certificate: x509.Certificate) -> None:
        """From the link, as are all that follow."""
        check_server(certificate, self._host, self.own.fleet)

    def register(self, welcome: Welcome, local: str) -> Register | str:
        """The node's registration, with what only the uplink knows."""
        if welcome.fleet != self.own.fleet:
            return f"it serves fleet {welcome.fleet}, our certificate is of fleet {self.own.fleet}"
        self.spread = welcome.spread
        try:
            register = self._common.node.register(welcome.fleet, local)
        except Exception:
            self.log.failure("while making our registration")
            return "our registration failed (see the log)"
        fence = self._common.fence
        return evolve(
            register,
            shards=self._short(register.shards),
            protocol=PROTOCOL,
            fleet=welcome.fleet,
            epoch=fence.epoch,
            leader=fence.leader,
            clock=self._common.wall(),
        )

    def accepted(self, link: AgentLink, accepted: Accepted) -> str:
        """The link is the node's, if the fence admits this leader."""
        problem, text = self._fenced(accepted.epoch, accepted.leader)
        if problem:
            return f"{problem}: {text}"
        self.leader, self.epoch = accepted.leader, accepted.epoch
        self.log.info("{node}: {status}", node=self._common.name, status=self.status, event="link_accepted")
        try:
            self._common.node.accepted(accepted.epoch, accepted.leader, accepted.revision)
            self._common.node.connected(self._send)
            self._report()
        except Exception:
            self.log.failure("while telling the node of its link")
            return "the agent failed (see its log)"
        return ""

    def heard(self, link: AgentLink, message: Message) -> None:
        """One message; a failure of the node's harms nothing but the answer."""
        try:
            self._dispatch(message)
        except Exception:
            self.log.failure("while taking a {kind}", kind=type(message).__name__)

    def ended(self, link: AgentLink, ending: Ending) -> None:
        """The link is over."""
        if self.leader:
            try:
                self._common.node.disconnected(ending.text)
            except Exception:
                self.log.failure("while telling the node that its link is gone")
        self.over.callback(ending)

    def _send(self, message: AgentMessage) -> None:
        if isinstance(message, Report):  # whoever made it: as of which orders it is true is known only here
            applied, clock = self._common.applied, self._common.wall()
            shards = self._short(message.shards)
            message = evolve(message, shards=shards, epoch=applied.epoch, revision=applied.revision, clock=clock)
        self.link.send(message)

    def _short(self, shards: Iterable[ShardReport]) -> tuple[ShardReport, ...]:
        """C{shards} without the orders told on this link before, which are most of a report, and it goes out at each beat; nor
        with those for which this line has no room: they go with the next ones.
        """
        told, self._told, room = self._told, {}, MAX_ORDER
        short = []
        for shard in shards:
            order = shard.order
            size = size_of(order) if order is not None and told.get(shard.shard) != order else 0
            fits = size <= room
            if fits:
                room -= size
                self._told[shard.shard] = order
            short.append(shard if size and fits else evolve(shard, order=None))
        return tuple(short)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Beat):
            self.spread = message.spread or self.spread
            self._report(message.serial)
        elif isinstance(message, Desired):
            if whole := self._joiner.add(message):
                self._desired(whole)
        elif isinstance(message, Inspect):
            self._ask(message, lambda: self._common.node.inspect(message))
        elif isinstance(message, FetchLog):
            self._ask(message, lambda: self._common.node.fetch_log(message))
        elif isinstance(message, FetchWeights):
            self._ask(message, lambda: self._common.node.fetch(message))
        elif isinstance(message, Unknown):
            self._send(Done(message.operation, False, "unsupported", {"text": f"this agent does not know {message.type}"}))

    def _report(self, beat: int = 0) -> None:
        self._send(evolve(self._common.node.report(beat), beat=beat))

    def _desired(self, message: Desired) -> None:
        applied = self._common.applied
        problem, text = self._fenced(message.epoch, message.leader)
        if not problem and message.epoch == applied.epoch and message.revision < applied.revision:
            problem, text = "stale_revision", f"revision {message.revision} came after {applied.revision}"
        if problem:
            for operation in [order.operation for order in message.orders] or [""]:
                self._refuse(operation, problem, text)
            return
        self._common.node.desired(message)
        applied.epoch, applied.revision = message.epoch, message.revision
        self._report()

    def _ask(self, message: Inspect | FetchLog | FetchWeights, ask: Callable[[], Deferred[Done]]) -> None:
        problem, text = self._fenced(message.epoch, message.leader)
        if problem:
            self._refuse(message.operation, problem, text)
            return
        asked = Deferred.fromCoroutine(self._answer(message.operation, ask))
        asked.addErrback(lambda failure: self.log.failure("while answering", failure))

    async def _answer(self, operation: str, ask: Callable[[], Deferred[Done]]) -> None:
        try:
            done = await ask()
        except LlmgwError as error:
            done = Done(operation, False, "failed", {"text": str(error)})
        except Exception:
            self.log.failure("while carrying out {operation}", operation=operation)
            done = Done(operation, False, "failed", {"text": "the agent failed (see its log)"})
        self._send(done)

    def _refuse(self, operation: str, problem: str, text: str) -> None:
        fence = self._common.fence
        self.log.error(
            "{node}: refused an order: {problem}: {text}", node=self._common.name, problem=problem, text=text, event=problem
        )
        self._send(Done(operation, False, problem, {"epoch": fence.epoch, "leader": fence.leader, "text": text}))

    def _fenced(self, epoch: int, leader: str) -> tuple[str, str]:
        """Why this leader is not obeyed, as a word and a sentence; two empty texts if it is."""
        fence = self._common.fence
        try:
            problem = fence.admit(epoch, leader)
        except FenceError as error:
            return "fence", str(error)
        obeyed = f"this node obeys {fence.leader} at epoch {fence.epoch}"
        return problem, f"{leader} commands at epoch {epoch}, {obeyed}" if problem else ""
