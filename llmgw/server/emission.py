"""Orders on their way to nodes: sent when they differ from what a session has, again from time to time, never without leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.fleet.shard import ShardOrder
from llmgw.interfaces import ILeadership
from llmgw.server.imembers import Refusal, SessionFacts
from llmgw.wire.messages import Done, Goaway


class Port(Protocol):
    """What is used of L{llmgw.server.fleetport.FleetPort}."""

    expected: int

    def refusals(self) -> list[Refusal]:
        """The last peers that were not let in."""

    def desired(self, node: str, orders: Sequence[ShardOrder], revision: int) -> bool:
        """Send the whole of what is wanted; False if the node has no link or this server may not act."""

    def ask(self, node: str, message: Any, timeout: float) -> Deferred[Done]:
        """Ask something and wait for the answer."""

    def close(self, node: str, goaway: Goaway) -> None:
        """End a node's link on purpose."""

    def sessions(self) -> Mapping[str, SessionFacts]:
        """The links that are up."""


@frozen
class _Sent:
    session: str
    orders: tuple[ShardOrder, ...]
    revision: int
    at: float


class Emission:
    """What each node was told last. The whole is sent again now and then: a lost message is healed by the next.

    @ivar port: None until the fleet port is made, and for ever on a server that only routes.
    """

    log = Logger()
    AGAIN = 60.0

    def __init__(self, leadership: ILeadership, steady: Callable[[], float]) -> None:
        self._leadership = leadership
        self._steady = steady
        self._sent: dict[str, _Sent] = {}
        self.port: Port | None = None

    def forget(self, node: str) -> None:
        """A new session knows nothing."""
        self._sent.pop(node, None)

    def forget_all(self) -> None:
        """The epoch has moved: what was sent under the one before may have been refused."""
        self._sent.clear()

    def send(self, wanted: Mapping[str, tuple[ShardOrder, ...]], sessions: Mapping[str, str], revision: int) -> None:
        """Tell every node with a link what is wanted there, if it does not know it yet."""
        for node, session in sessions.items():
            listed = wanted.get(node, ())
            sent = self._sent.get(node)
            if sent is None or sent.session != session or sent.orders != listed:
                self._tell(node, session, listed, revision)

    def repeat(self) -> None:
        """Say again what was said long ago."""
        now = self._steady()
        for node, sent in list(self._sent.items()):
            if now - sent.at >= self.AGAIN:
                self._tell(node, sent.session, sent.orders, sent.revision)

    def _tell(self, node: str, session: str, listed: tuple[ShardOrder, ...], revision: int) -> None:
        if self.port is None or not self._leadership.may_act():
            return
        try:
            went = self.port.desired(node, listed, revision)
        except Exception:
            # One node's orders must not keep the others from theirs.
            self.log.failure("while sending orders to {node}", node=node)
            went = False
        if went:
            self._sent[node] = _Sent(session, listed, revision, self._steady())
        else:
            self._sent.pop(node, None)
