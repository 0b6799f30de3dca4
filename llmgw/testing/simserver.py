"""A simulated server round the real controller: its leadership, its routers, its links to simulated nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from zope.interface import implementer

from llmgw.fleet.shard import ShardOrder
from llmgw.interfaces import ILeadership
from llmgw.router.table import Table
from llmgw.server.controller import Controller
from llmgw.server.imembers import NodeAway, Refusal, SessionFacts
from llmgw.testing.simagents import SimAgent
from llmgw.wire.messages import Done, Goaway


class Net(Protocol):
    """What a port needs of the fleet."""

    agents: dict[str, SimAgent]
    clock: Clock

    def send(self, node: str, line: str, arrive: Callable[[], None]) -> None:
        """A message on its way to or from a node; one does not overtake another of its line."""


@implementer(ILeadership)
class SimLeadership:
    """A leadership that a test gives and takes. C{raised} is told of an epoch above the one it began with."""

    addresses: tuple[str, ...] = ()
    problem = ""

    def __init__(self, epoch: int, leader: str, raised: Callable[[int], None] = lambda epoch: None) -> None:
        self._raised = raised
        self.epoch = epoch
        self.leader = leader
        self.held = True

    def may_act(self) -> bool:
        """See L{ILeadership}."""
        return self.held

    def start(self) -> Deferred[None]:
        """See L{ILeadership}."""
        return succeed(None)

    def outrank(self, epoch: int) -> Deferred[int]:
        """See L{ILeadership}."""
        self.epoch = max(self.epoch, epoch) + 1
        self._raised(self.epoch)
        return succeed(self.epoch)

    def watch(self, changed: Callable[[], None]) -> None:
        """See L{ILeadership}."""

    def release(self) -> Deferred[None]:
        """See L{ILeadership}."""
        self.held = False
        return succeed(None)


class SimRouters:
    """Router workers that outlive their server. They route by a table a moment after it is published."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.table: Table | None = None
        self.routing: Table = Table()
        self.flying: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()
        self.queued: dict[str, int | None] = {}
        self.delay = 0.1

    def publish(self, table: Table) -> int:
        """Put a table in force soon."""
        before = self.table.version if self.table else 0
        self.table = replace(table, version=before + 1)
        self._clock.callLater(self.delay, self._route, self.table)
        return self.table.version

    def _route(self, table: Table) -> None:
        if table.version > self.routing.version:
            self.routing = table

    def when_routing(self, version: int, timeout: float) -> Deferred[Any]:
        """Fires when it is."""
        done: Deferred[Any] = Deferred()
        self._clock.callLater(self.delay, done.callback, None)
        return done

    def in_flight(self, endpoint_id: str) -> int:
        """What runs there."""
        return self.flying[endpoint_id]

    def load(self, endpoint_id: str) -> int:
        """With what others sent there."""
        return self.flying[endpoint_id] + self.elsewhere[endpoint_id]

    def waiting(self, model: str) -> int | None:
        """What waits for it; C{None} in L{queued} for not known."""
        return self.queued.get(model, 0)

    def reported(self, endpoint_id: str, requests: int | None) -> None:
        """Believed at once."""
        self.elsewhere[endpoint_id] = max(0, (requests or 0) - self.flying[endpoint_id])

    @property
    def routed(self) -> dict[str, tuple[str, int]]:
        """Where requests go now, by replica."""
        return {one.id: (one.host, one.port) for one in self.routing.endpoints}


class SimPort:
    """The links of one leader.

    @ivar unfit: how often orders were to be sent by a server that may not act, which is asked before they come here.
    @ivar known: every node that has had a link.
    """

    def __init__(self, fleet: Net, controller: Controller, leadership: SimLeadership) -> None:
        self._fleet = fleet
        self._controller = controller
        self._leadership = leadership
        self._count = 0
        self.expected = self.unfit = 0
        self.links: dict[str, str] = {}
        self.known: set[str] = set()

    def desired(self, node: str, orders: Sequence[ShardOrder], revision: int) -> bool:
        """See L{llmgw.server.fleetport.FleetPort}."""
        session = self.links.get(node)
        self.unfit += not self._leadership.may_act()
        if session is None or not self._leadership.may_act():
            return False
        agent = self._fleet.agents[node]
        epoch, leader = self._leadership.epoch, self._leadership.leader

        def arrive() -> None:
            if self.links.get(node) == session:
                agent.desired(epoch, leader, revision, orders, self._fleet.clock.seconds())

        self._fleet.send(node, f"{leader} {session} down", arrive)
        return True

    def ask(self, node: str, message: Any, timeout: float) -> Deferred[Done]:
        """Nobody answers questions here."""
        return fail(NodeAway(f"{node} has no link"))

    def close(self, node: str, goaway: Goaway) -> None:
        """End a link."""
        self.unlink(node, goaway.reason)

    def sessions(self) -> dict[str, SessionFacts]:
        """The links."""
        return {node: SessionFacts(session, 0.0, "sim", "01", 1e12) for node, session in self.links.items()}

    def refusals(self) -> list[Refusal]:
        """None."""
        return []

    def link(self, agent: SimAgent) -> None:
        """An agent that has no link dials in."""
        if agent.name in self.links or not agent.alive or self._controller.readiness() is not None:
            return
        register = agent.register()
        if self._controller.judge(register, _certificate()) is not None:
            return
        if register.epoch >= self._leadership.epoch and register.leader != self._leadership.leader:
            self._leadership.outrank(register.epoch)
            self._controller.epoch_moved()
        self._count += 1
        session = self.links[agent.name] = f"{self._leadership.epoch}.{self._count}"
        agent.session = session
        self.known.add(agent.name)
        up = f"{self._leadership.leader} {session} up"
        agent.say = lambda message: self._fleet.send(agent.name, up, lambda: self._hear(agent.name, session, message))
        self._controller.joined(agent.name, session, register)
        agent.say(agent.report())

    def _hear(self, node: str, session: str, message: Any) -> None:
        if self.links.get(node) != session:
            return
        if isinstance(message, Done):
            self._controller.done(node, session, message)
        else:
            self._controller.report(node, session, message)

    def unlink(self, node: str, reason: str) -> None:
        """A link ends."""
        session = self.links.pop(node, None)
        if session is not None:
            self._fleet.agents[node].say = lambda message: None
            self._controller.left(node, session, reason)


def _certificate() -> Any:
    """Something with a C{not_after}."""
    return SessionFacts("", 0.0, "", "01", 1e12)
