"""The agent's side of the link: dials the servers for ever and carries what is said between them and the node.

The uplink decides nothing about engines. It tries every address once per round, lets only a leader that the fence allows
speak to the node, and joins the parts of a desired state. What the node says on a link that has ended goes nowhere: the
next link begins with a registration, which is complete. Whether the agent is shutting down is asked of this service alone,
never of a link: a link that broke is told with its cause, whatever else happens at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from llmgw.agent.call import Call
from llmgw.agent.fence import Fence
from llmgw.agent.inode import INode
from llmgw.config.agent import AgentSettings
from llmgw.config.settings import Address
from llmgw.fleet.units import show_duration
from llmgw.wire.agent_end import Ending
from llmgw.wire.backoff import Backoff
from llmgw.wire.link import Deadlines
from llmgw.wire.messages import Goaway, Refused
from llmgw.wire.tls import LinkTls, read_identity

__all__ = ["INode", "Uplink"]

MAX_HINTS = 2
SPREAD = 0.5
GOODBYE = 1.0
DEADLINES = Deadlines()
ADVICE = {
    "name_mismatch": ". Set `node:` in agent.yaml to the certificate's name, or use a certificate of the name that is there",
    "name_in_use": ". Stop the other agent, or give this node a name and a certificate of its own",
    "revoked": ". An operator removed this node; `llmgw node reset NAME` on the server lets it join again",
    "wrong_fleet": ". This state folder or certificate belongs to another fleet",
}


class Round:
    """One turn over all addresses: each once, a hinted one first, and why each failed."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._left = list(addresses)
        self._hints = 0
        self.reasons: list[str] = []
        self.wait = 0.0

    def next(self) -> Address | None:
        """The next address, None when all have been tried."""
        return self._left.pop(0) if self._left else None

    def failed(self, address: Address, ending: Ending) -> None:
        """Note why, and follow the server's word for who leads, among the addresses that are ours and not yet tried."""
        word = ending.word
        advice = ADVICE.get(word.reason, "") if isinstance(word, Refused) else ""
        self.reasons.append(f"{address} {ending.text.rstrip('.')}{advice}")
        if isinstance(word, Refused):
            self.wait = max(self.wait, word.retry_after)
        if isinstance(word, Refused | Goaway) and self._hints < MAX_HINTS:
            hinted = [address for address in self._left if str(address) in word.addresses]
            self._hints += bool(hinted)
            self._left = hinted + [address for address in self._left if address not in hinted]


class Uplink(Service):
    """@param random: uniform in [0, 1), for jitter.

    @ivar status: what the daemon shows: linked to whom, or why not.
    @ivar stop_reason: what the server is told when the agent ends.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        settings: AgentSettings,
        node: INode,
        random: Callable[[], float],
        wall: Callable[[], float] = time.time,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self.setName("uplink")
        self._reactor = reactor
        self._settings = settings
        self._node = node
        self._random = random
        self._wall = wall
        self._deadlines = deadlines
        self._fence = Fence(settings.state / "fence")
        self._backoff = Backoff(random)
        self._tls: LinkTls | None = None
        self._call: Call | None = None
        self._dialing: Deferred[None] | None = None
        self.status = "not started"
        self.stop_reason = "the agent is shutting down"

    def startService(self) -> None:
        """Begin to dial.

        @raise LlmgwError: the certificate, the key or the fence cannot be used.
        """
        self._tls = LinkTls(read_identity(self._settings.tls, "node"))
        self._fence.load()
        super().startService()
        self._dialing = Deferred.fromCoroutine(self._dial_for_ever())
        self._dialing.addErrback(self._ended)

    def _ended(self, failure: Any) -> None:
        if not (failure.check(CancelledError) and not self.running):
            self.log.failure("the uplink has stopped dialing; restart the agent", failure)

    def stopService(self) -> Deferred[None]:
        """Say goodbye and go: at most a second, however the peer behaves."""
        super().stopService()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._call is not None:
            await self._call.leave(self.stop_reason, GOODBYE)
        if self._dialing is not None:
            self._dialing.cancel()
        self.status = "stopped"

    def reload(self) -> None:
        """Take renewed certificates for the next link; the one that is up goes on.

        @raise LlmgwError: they cannot be used, and the old ones stay.
        """
        identity = read_identity(self._settings.tls, "node")
        if self._tls is not None:
            self._tls.use(identity)

    async def _dial_for_ever(self) -> None:
        while self.running:
            wait = await self._round()
            if wait > 0 and self.running:
                await deferLater(self._reactor, wait)

    async def _round(self) -> float:
        """Try every address once; returns the seconds to wait before the next round."""
        trial = Round(self._settings.servers)
        while self.running and (address := trial.next()):
            ending = await self._dial(address)
            if ending.lived is not None and self._backoff.lasted(ending.lived):
                # A good link broke: everybody's may have, so the redials are spread, but none waits longer than that.
                return self._random() * SPREAD
            trial.failed(address, ending)
        return self._after(trial)

    def _after(self, trial: Round) -> float:
        if not self.running:
            return 0.0
        wait = max(self._backoff.next(), trial.wait)
        reasons = "; ".join(trial.reasons)
        self.status = f"no leader: {reasons}"
        self.log.warn(
            "{node}: no leader: {reasons}. Next round in {wait:.1f} s",
            node=self._settings.node,
            reasons=reasons,
            wait=wait,
        )
        return wait

    async def _dial(self, address: Address) -> Ending:
        """One link from its first packet to its end."""
        assert self._tls is not None
        call = self._call = Call(self._reactor, self._settings.node, self._node, self._fence, self._tls, address, self._wall)
        call.on_live = lambda text: self._live(address, text)
        try:
            ending = await call.run(self._deadlines)
        finally:
            self._call = None
        if self.running:
            self._tell(address, ending)
        return ending

    def _live(self, address: Address, text: str) -> None:
        self.status = f"linked to {address}, {text}"
        self.log.info("{node}: linked to {address}, {text}", node=self._settings.node, address=str(address), text=text)

    def _tell(self, address: Address, ending: Ending) -> None:
        """One line for each link that was live; those that never were stand in their round's line."""
        if ending.lived is None:
            return
        say = self.log.info if ending.clean else self.log.error
        say(
            "{node}: the link to {address} ended after {lived}: {why}. Engines go on",
            node=self._settings.node,
            address=str(address),
            lived=show_duration(ending.lived),
            why=ending.text,
        )
