"""One dial to one server: from its first packet to its end, with everything that is said in between.

It owns its own link and nothing else, so that whatever comes late on an old link dies with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve
from cryptography import x509
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.protocol import Factory
from twisted.logger import Logger

from llmgw.agent.fence import Fence, FenceError
from llmgw.agent.inode import INode
from llmgw.config.settings import Address
from llmgw.wire.agent_end import AgentCore, AgentLink, Ending, make_agent_link
from llmgw.wire.codec import Unknown, decode_from_server
from llmgw.wire.link import Deadlines, Message, Wire
from llmgw.wire.messages import (
    PROTOCOL,
    Accepted,
    AgentMessage,
    Beat,
    Bye,
    Desired,
    Done,
    FetchLog,
    Inspect,
    Register,
    Welcome,
)
from llmgw.wire.parts import Joiner
from llmgw.wire.tls import LinkTls, check_server

CONNECT = 3.0


class Call:
    """@param name: the node's name by its own settings; its certificate may say another.

    @ivar on_live: called with who leads once the link is ours.
    """

    log = Logger()

    def __init__(
        self, reactor: Any, name: str, node: INode, fence: Fence, tls: LinkTls, address: Address, wall: Callable[[], float]
    ) -> None:
        self._reactor = reactor
        self._name = name
        self._node = node
        self._fence = fence
        self._tls = tls
        self._address = address
        self._wall = wall
        self._joiner = Joiner()
        self._applied = (0, 0)
        self._link: AgentLink | None = None
        self._is_live = False
        self._connecting: Deferred[Any] | None = None
        self._over: Deferred[Ending] = Deferred()
        self._gone: Deferred[None] | None = None
        self._waiting: list[Deferred[Done]] = []
        self.on_live: Callable[[str], None] = lambda text: None

    async def run(self, deadlines: Deadlines) -> Ending:
        """Dial, and return how it ended. Never raises but when cancelled."""
        link = make_agent_link(AgentCore(self, self._reactor, deadlines))
        factory = Factory.forProtocol(lambda: Wire(self._reactor, link, decode_from_server, lambda: self._tls.own))
        factory.noisy = False
        host = self._address.host
        plain = HostnameEndpoint(self._reactor, host.encode(), self._address.port, timeout=CONNECT)
        self._connecting = wrapClientTLS(self._tls.towards(host), plain).connect(factory)
        try:
            await self._connecting
        except CancelledError:
            return Ending("we left", clean=True)
        except Exception as error:
            return Ending(_why_not_connected(error))
        finally:
            self._connecting = None
        self._link = link
        return await self._over

    async def leave(self, reason: str, seconds: float) -> None:
        """Say goodbye and wait until the link is gone, C{seconds} at most."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is None or self._over.called:
            return
        running = tuple(shard.shard for shard in self._node.report().shards if shard.state.live)
        gone = self._gone = Deferred()
        self._link.end(Bye(reason, running), seconds)
        await gone

    # AgentSide.

    def check(self, certificate: x509.Certificate) -> None:
        """Whether this is a server of our fleet at the address we dialed."""
        check_server(certificate, self._address.host, self._tls.own.fleet)

    def register(self, welcome: Welcome, local: str) -> Register | str:
        """Our registration."""
        fleet = self._tls.own.fleet
        if welcome.fleet != fleet:
            return f"it leads fleet {welcome.fleet}, ours is {fleet}"
        whole = self._node.register(fleet, local)
        return evolve(
            whole,
            protocol=PROTOCOL,
            epoch=self._fence.epoch,
            leader=self._fence.leader,
            fleet=fleet,
            clock=self._wall(),
        )

    def accepted(self, link: AgentLink, accepted: Accepted) -> str:
        """The link is live, unless the fence knows better."""
        if problem := self._fenced(accepted.epoch, accepted.leader):
            return f"{problem}: we obey epoch {self._fence.epoch} of {self._fence.leader or 'nobody yet'}"
        self._is_live = True
        self._node.accepted(accepted.epoch, accepted.leader, accepted.revision)
        self._node.connected(self._send)
        self.on_live(f"epoch {accepted.epoch} of {accepted.leader}")
        self._report(0)
        return ""

    def heard(self, link: AgentLink, message: Message) -> None:
        """Pass on what the node may obey."""
        try:
            self._heard(message)
        except Exception:
            self.log.failure("while obeying {what}; the link stays", what=type(message).__name__.lower())

    def ended(self, link: AgentLink, ending: Ending) -> None:
        """The link is over."""
        for waiting in self._waiting:
            waiting.cancel()
        self._waiting.clear()
        if self._is_live:
            self._is_live = False
            self._node.disconnected(ending.text)
        if self._link is None:
            self._link = link  # it ended within the turn in which it was made
        self._over.callback(ending)
        if self._gone is not None:
            self._gone.callback(None)

    # What is said on a live link.

    def _heard(self, message: Message) -> None:
        if isinstance(message, Desired):
            self._desired(message)
        elif isinstance(message, Beat):
            self._report(message.serial)
        elif isinstance(message, Inspect):
            self._ask(message, lambda: self._node.inspect(message))
        elif isinstance(message, FetchLog):
            self._ask(message, lambda: self._node.fetch_log(message))
        elif isinstance(message, Unknown) and message.operation:
            self._send(Done(message.operation, False, "unsupported", {"text": f"we do not know {message.type}"}))

    def _desired(self, part: Desired) -> None:
        if problem := self._fenced(part.epoch, part.leader):
            for order in part.orders:
                self._send(self._refusal(order.operation, problem))
            return
        whole = self._joiner.add(part)
        if whole is not None:
            self._applied = (whole.epoch, whole.revision)
            self._node.desired(whole)
            self._report(0)

    def _ask(self, message: Inspect | FetchLog, ask: Callable[[], Deferred[Done]]) -> None:
        if problem := self._fenced(message.epoch, message.leader):
            self._send(self._refusal(message.operation, problem))
            return
        answer = ask()
        self._waiting.append(answer)
        answer.addErrback(lambda failure: self._failed(message.operation, failure))
        answer.addCallback(self._send)
        answer.addBoth(lambda _: self._waiting.remove(answer) if answer in self._waiting else None)

    def _failed(self, operation: str, failure: Any) -> Done:
        if not failure.check(CancelledError):
            self.log.failure("while answering {operation}", failure, operation=operation)
        return Done(operation, False, "failed", {"text": failure.getErrorMessage()})

    def _fenced(self, epoch: int, leader: str) -> str:
        """Why this leader is not obeyed, or nothing; a higher epoch is on disk when this returns."""
        try:
            problem = self._fence.admit(epoch, leader)
        except FenceError as error:
            self.log.error("{error}", error=str(error))
            return "fence_unwritable"
        if problem:
            self.log.error(
                "{node}: {address} commands as {leader} of epoch {epoch}: {problem}, we obey epoch {own} of {holder}",
                node=self._name,
                address=str(self._address),
                leader=leader,
                epoch=epoch,
                problem=problem,
                own=self._fence.epoch,
                holder=self._fence.leader,
            )
        return problem

    def _refusal(self, operation: str, problem: str) -> Done:
        return Done(operation, False, problem, {"epoch": self._fence.epoch, "leader": self._fence.leader})

    def _report(self, beat: int) -> None:
        epoch, revision = self._applied
        self._send(evolve(self._node.report(beat), epoch=epoch, revision=revision, beat=beat, clock=self._wall()))

    def _send(self, message: AgentMessage) -> None:
        if self._is_live and self._link is not None:
            self._link.send(message)


def _why_not_connected(error: Exception) -> str:
    reason = getattr(error, "reasons", None)
    inner = reason[0].value if reason else error
    text = getattr(inner, "osError", None) or str(inner) or type(inner).__name__
    names = {"ConnectionRefusedError": "connection refused", "TimeoutError": f"no answer in {CONNECT:g} s"}
    return names.get(type(inner).__name__, f"cannot be reached: {text}")
