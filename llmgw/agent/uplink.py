"""The agent's side of the link: dials the servers for ever and carries what is said between them and the node.

The uplink decides nothing about engines. It tries every address once per round and waits only when a round is over. Whether the
agent is stopping is known here and nowhere else (C{running}): a link that ends says how it ended, not why the agent acts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, wrapClientTLS
from twisted.internet.error import ConnectError, ConnectingCancelledError, ConnectionRefusedError, TimeoutError
from twisted.internet.interfaces import IAddress, IProtocol, IProtocolFactory
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger
from zope.interface import implementer

from llmgw.agent.fence import Fence
from llmgw.agent.inode import INode
from llmgw.agent.lookup import Lookup, LookupFailed
from llmgw.agent.rounds import Round, Target
from llmgw.agent.talk import Applied, Common, Talk
from llmgw.config.agent import AgentSettings
from llmgw.config.settings import Address
from llmgw.fleet.units import show_duration
from llmgw.wire.agent_end import AgentCore, Ending, make_agent_link
from llmgw.wire.backoff import Backoff
from llmgw.wire.codec import decode_from_server
from llmgw.wire.expiry import LOOK_EVERY, ExpiryWatch
from llmgw.wire.link import Deadlines, Wire
from llmgw.wire.messages import Bye, Goaway, Refused
from llmgw.wire.tls import LinkTls, read_identity

__all__ = ["INode", "Uplink"]

CONNECT_WITHIN = 3.0
SPREAD = 0.5
MOST_SPREAD = 60.0
STOP_WITHIN = 1.0
SUCCESSION = 60.0  # how long another one may take to lead: some leases
DEADLINES = Deadlines()


class Uplink(Service):
    """Keeps a link to whoever leads.

    @ivar stop_reason: what the server is told when this service stops.
    """

    log = Logger()
    stop_reason = "the agent stops"

    def __init__(
        self,
        reactor: Any,
        settings: AgentSettings,
        node: INode,
        random: Callable[[], float],
        wall: Callable[[], float] = time.time,
        lookup: Lookup | None = None,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self.setName("uplink")
        self._reactor = reactor
        self._settings = settings
        self._random = random
        self._deadlines = deadlines
        self._lookup = lookup or Lookup(reactor)
        self._backoff = Backoff(random)
        self._fence = Fence(settings.state / "fence.json")
        self._common = Common(settings.node, node, self._fence, Applied(), wall)
        self._tls: LinkTls | None = None
        self._talk: Talk | None = None
        self._waiting: Deferred[Any] | None = None
        self._resting = self._just_lost = False
        self._spread = SPREAD
        self._last: tuple[Address, ...] = ()
        self._parted = float("-inf")
        self._status = "not linked yet"
        self._over: Deferred[None] = succeed(None)
        self._watch = ExpiryWatch()
        self._looking = LoopingCall(self._look_at_certificate)
        self._looking.clock = reactor

    @property
    def status(self) -> str:
        """One line for people: linked to whom, or why not and when the next try is."""
        return self._talk.status if self._talk else self._status

    def prepare(self) -> None:
        """Read the certificate and the fence, once; C{startService} does it if nobody has.

        @raise LlmgwError: one sentence; without them no server may be obeyed.
        """
        if self._tls is None:
            self._fence.load()
            self._tls = LinkTls(read_identity(self._settings.tls, "node"))
            if self._tls.own.name != self._settings.node:
                self.log.error(
                    "{node}: our certificate is {certificate}'s: no server will take us",
                    node=self._settings.node,
                    certificate=str(self._tls.own),
                )

    def startService(self) -> None:
        """Begin to dial.

        @raise LlmgwError: see L{prepare}.
        """
        self.prepare()
        super().startService()
        self._looking.start(LOOK_EVERY)
        self._over = Deferred.fromCoroutine(self._run())
        self._over.addErrback(lambda failure: self.log.failure("the uplink failed and no longer dials", failure))

    def stopService(self) -> Deferred[None]:
        """Take leave of the server, if there is one; done within little more than a second, whatever it does."""
        super().stopService()
        self._status = "stopped"
        if self._looking.running:
            self._looking.stop()
        over: Deferred[None] = Deferred()
        self._over.addCallback(lambda _: over.callback(None))
        if self._talk is not None:
            self._talk.link.end(Bye(self.stop_reason, tuple(self._running_shards())), STOP_WITHIN)
        elif self._waiting is not None:
            self._waiting.cancel()
        return over

    def reload(self, settings: AgentSettings) -> None:
        """Dial these servers with the certificate that is in the files now; a link that is up stays.

        @raise LlmgwError: the certificate cannot be used, and everything stays as it was.
        """
        identity = read_identity(settings.tls, "node")
        if self._tls is not None:
            self._tls.use(identity)
        self._settings, self._last = settings, ()
        self._look_at_certificate()
        if self._resting and self._waiting is not None:
            self._waiting.cancel()  # it may be about the very thing that was just put right

    def _look_at_certificate(self) -> None:
        if self._tls is not None:
            whose = f"{self._settings.node}: our own certificate ({self._tls.own})"
            self._watch.look([(whose, self._tls.identity.chain[0])], self._common.wall())

    def _running_shards(self) -> Iterable[str]:
        try:
            return [shard.shard for shard in self._common.node.report().shards if shard.state.live]
        except Exception:
            self.log.failure("while listing what goes on running")
            return []

    # Dialing.

    async def _run(self) -> None:
        first: tuple[str, ...] = ()
        while self.running:
            turn = Round.over((*self._settings.servers, *self._last), first)
            first = ()
            while self.running and (target := turn.next()):
                ending = await self._try(turn, target)
                if ending and ending.lived is not None and self._backoff.lasted(ending.lived):
                    first = ending.word.addresses if ending.word else ()
                    break
            else:
                await self._rest(turn)
                continue
            await self._pause(self._random() * self._crowd)

    @property
    def _crowd(self) -> float:
        """Over how many seconds the agents of this fleet dial that have lost a link at once."""
        return min(max(SPREAD, self._spread), MOST_SPREAD)

    async def _rest(self, turn: Round) -> None:
        """The round is over and nobody took us."""
        if not self.running:
            return
        # A standby that we reach waits for a leader as we do, and one comes soon: no reason to ask ever more rarely.
        soon = turn.stood_by and self._reactor.seconds() - self._parted < SUCCESSION
        delay = max(self._backoff.again() if soon else self._backoff.next(), turn.pause)
        if self._crowd > SPREAD:
            # All lost the same server: those that dialed while it was away must not come together when it is back.
            window = self._crowd if self._just_lost else min(self._crowd, self._backoff.cap)
            delay = max(delay, self._random() * window)
        what = "round" if turn.several else "try"
        self._status = f"{turn.summary()}. Next {what} in {show_duration(delay)}."
        self.log.warn("{node}: {status}", node=self._settings.node, status=self._status, event="no_leader")
        await self._pause(delay)

    async def _pause(self, seconds: float) -> None:
        if not self.running:
            return
        self._resting = True
        await self._cancellable(deferLater(self._reactor, seconds))
        self._resting = False

    async def _cancellable(self, waited: Deferred[Any]) -> Any:
        """Wait, unless the service stops or is reloaded first: then None."""
        self._waiting = waited
        try:
            return await waited
        except (CancelledError, ConnectingCancelledError):
            return None
        finally:
            self._waiting = None

    async def _try(self, turn: Round, target: Target) -> Ending | None:
        """One address: look it up, or dial it and stay as long as the link does. Whatever fails here is one address's failure."""
        self._just_lost = False
        try:
            if target.ip:
                return await self._dial(turn, target)
            turn.found(target, await self._cancellable(self._lookup.addresses(target.address.host)) or [])
        except LookupFailed as error:
            turn.failed(target, f"the name {error}")
        except ConnectError as error:
            turn.failed(target, _unconnected(error))
        except Exception as error:
            self.log.failure("while dialing {target}", target=str(target))
            turn.failed(target, f"we could not dial: {error}")
        return None

    async def _dial(self, turn: Round, target: Target) -> Ending | None:
        self._status = f"dialing {target}"
        talk = self._make_talk(target)
        if await self._cancellable(self._connect(target, talk)) is None:
            return None
        self._talk = talk
        ending = await talk.over
        self._talk = None
        self._came_of(turn, target, talk, ending)
        return ending

    def _make_talk(self, target: Target) -> Talk:
        assert self._tls is not None
        talk = Talk(self._common, str(target), target.address.host, self._tls.own)
        talk.link = make_agent_link(AgentCore(talk, self._reactor, self._deadlines))
        return talk

    def _connect(self, target: Target, talk: Talk) -> Deferred[IProtocol]:
        tls, own = self._tls, talk.own
        assert tls is not None
        kind = TCP6ClientEndpoint if ":" in target.ip else TCP4ClientEndpoint
        tcp = kind(self._reactor, target.ip, target.address.port, timeout=CONNECT_WITHIN)
        wire = Wire(self._reactor, talk.link, decode_from_server, lambda: own, self._common.wall)
        return wrapClientTLS(tls.towards(target.address.host), tcp, self._reactor).connect(_Once(wire))

    def _came_of(self, turn: Round, target: Target, talk: Talk, ending: Ending) -> None:
        """Say how a link ended, and remember what it means for the round."""
        if not self.running:
            self._status = "stopped"
            return
        self._spread = talk.spread or self._spread
        self._just_lost = ending.lived is not None
        if ending.lived is not None:
            self._last = (target.address,) if talk.leader else self._last
            self._parted = self._reactor.seconds()
            self._status = f"the link to {target} ended after {show_duration(ending.lived)}: {ending.text}"
            tell = self.log.info if ending.clean else self.log.error
            tell("{node}: {status}", node=self._settings.node, status=self._status, event="link_lost")
        word = ending.word
        if word is None:
            turn.failed(target, ending.text)
            return
        turn.failed(target, self._told_off(word, talk), word.retry_after if isinstance(word, Refused) else 0.0)
        turn.stood_by |= word.reason == "standby"
        turn.hint(word.addresses)

    def _told_off(self, word: Refused | Goaway, talk: Talk) -> str:
        if isinstance(word, Goaway):
            return f"sent us away: {word.text or word.reason}"
        if word.reason in ("standby", "starting"):
            return f"refused ({word.reason}{f', {word.leader} leads' if word.leader else ''})"
        text, own, node = word.text, talk.own, self._settings.node
        if word.reason == "name_mismatch":
            text = (
                f"our certificate says {own}, our configuration says {node}. Set `node: {own.name}` or use {node}'s certificate"
            )
        return f"refused us: {word.reason}: {text}"


def _unconnected(error: ConnectError) -> str:
    """As the end of a sentence that began with the address."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return f"no answer in {CONNECT_WITHIN:.0f} s"
    return os.strerror(error.osError).lower() if isinstance(error.osError, int) else f"we could not connect: {error}"


@implementer(IProtocolFactory)
class _Once:
    """A factory for the one protocol that it is given."""

    noisy = False

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def buildProtocol(self, addr: IAddress) -> IProtocol:
        """From Twisted."""
        return self._wire

    def doStart(self) -> None:
        """From Twisted."""

    def doStop(self) -> None:
        """From Twisted."""
