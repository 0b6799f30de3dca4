"""A fleet in one process on a virtual clock: the real controller, simulated nodes and routers, faults by a seed.

Every L{Fleet.run} step checks what must hold whatever happens:

 - no shard has two engines that live, and no device belongs to two of them;
 - no engine was stopped that no record had ordered away, with a reason;
 - no router routes to an engine that was told to stop;
 - a new leader takes no endpoint away that serves.

A test that fails prints its seed; the same seed makes the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from msgspec.structs import replace
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from llmgw.config.catalog import dump_catalog
from llmgw.errors import LlmgwError
from llmgw.fleet.model import Catalog, Model, Parallel, Place, Profile, Resources, Scale
from llmgw.fleet.shard import ShardOrder, ShardState, Wanted
from llmgw.fleet.timing import Timing
from llmgw.interfaces import ILeadership
from llmgw.router.table import Table
from llmgw.server.controller import Clocks, Controller
from llmgw.server.imembers import NodeAway, Refusal, SessionFacts
from llmgw.server.reckoning import Reckoner
from llmgw.store.records import CatalogRevision, Change
from llmgw.testing.memorystore import MemoryStore
from llmgw.testing.simagents import SimAgent
from llmgw.wire.messages import Done, Goaway

STEP = 0.25


class Broken(AssertionError):
    """Something that must always hold did not."""


@implementer(ILeadership)
class SimLeadership:
    """A leadership that a test gives and takes."""

    addresses: tuple[str, ...] = ()
    problem = ""

    def __init__(self, epoch: int, leader: str) -> None:
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
    """The links of one leader. A message takes C{delay} and is lost with probability C{loss}."""

    def __init__(self, fleet: Fleet, controller: Controller, leadership: SimLeadership) -> None:
        self._fleet = fleet
        self._controller = controller
        self._leadership = leadership
        self._count = 0
        self.expected = 0
        self.links: dict[str, str] = {}

    def desired(self, node: str, orders: Sequence[ShardOrder], revision: int) -> bool:
        """See L{llmgw.server.fleetport.FleetPort}."""
        session = self.links.get(node)
        if session is None or not self._leadership.may_act():
            return False
        agent = self._fleet.agents[node]
        epoch, leader = self._leadership.epoch, self._leadership.leader

        def arrive() -> None:
            if self.links.get(node) == session:
                agent.desired(epoch, leader, revision, orders, self._fleet.clock.seconds())

        self._fleet.send(arrive)
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
        """An agent dials in."""
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
        agent.say = lambda message: self._fleet.send(lambda: self._hear(agent.name, session, message))
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


class Fleet:
    """The simulation.

    @param seed: of everything random.
    @param nodes: by name, how many devices.
    """

    TIMING = Timing(heartbeat=5.0, lost_after=60.0, failover_grace=30.0, drain=60.0, node_drain=120.0)

    def __init__(self, nodes: dict[str, int], seed: int = 0, timing: Timing | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.clock = Clock()
        self.clock.advance(1_000_000.0)
        self.store = MemoryStore()
        self.routers = SimRouters(self.clock)
        self.timing = timing or self.TIMING
        self.agents = {name: SimAgent(name, devices, self.random) for name, devices in nodes.items()}
        self.cut: set[str] = set()
        self.loss = 0.0
        self.delay = 0.02
        self.epoch = 0
        self.refusals: list[str] = []
        self.wall_ahead = 0.0
        self.controller: Controller
        self.port: SimPort
        self.leadership: SimLeadership
        self._checked_stops: Counter[str] = Counter()

    # The server.

    def lead(self, models: Iterable[Model] = (), fresh: bool = False) -> None:
        """Start a server, or the next one, on what the store has."""
        self.epoch += 1
        before = set(self.routers.routed)
        self.leadership = SimLeadership(self.epoch, f"cp@{self.epoch}")
        self.controller = Controller(
            self.clock, "cp", self.timing, self.store, self.leadership, self.routers, self.random,
            Clocks(lambda: self.clock.seconds() + self.wall_ahead, self.clock.seconds), Reckoner({}),
        )  # fmt: skip
        self.port = SimPort(self, self.controller, self.leadership)
        self.controller.attach(self.port)
        self.controller.routing.before = self.routers.table
        if models and self.store.catalog is None:
            self.apply(models)
        self.controller.begin(self.store.snapshot(self.epoch), fresh)
        self.controller.go()
        self.clock.advance(0.2)
        table = self.routers.table or Table()
        if gone := before - {one.id for one in table.endpoints}:
            raise Broken(f"the new leader took {sorted(gone)} from the routers")

    def apply(self, models: Iterable[Model]) -> None:
        """Write a catalog into the store, and tell a leader of it."""
        number = (self.store.catalog.number if self.store.catalog else 0) + 1
        revision = CatalogRevision(number, dump_catalog(Catalog(tuple(models))), self.clock.seconds(), "test")
        if getattr(self, "controller", None) is not None and self.controller.leading:
            changes: list[Change] = [revision]
            self.controller.change(lambda: changes).addErrback(self._refused)
        else:
            self.store._take(revision)

    def _refused(self, failure: Failure) -> None:
        failure.trap(LlmgwError)
        self.refusals.append(str(failure.value))

    def end(self) -> None:
        """The server dies: no message, no release."""
        self.controller.end()
        self.leadership.held = False
        for name in list(self.port.links):
            self.port.links.pop(name)
            self.agents[name].say = lambda message: None

    def forget(self) -> None:
        """The store is lost."""
        self.store = MemoryStore()

    # Time.

    def send(self, arrive: Callable[[], None]) -> None:
        """A message on its way: late, or lost."""
        if self.random.random() >= self.loss:
            self.clock.callLater(self.delay, arrive)

    def run(self, seconds: float) -> None:
        """Let time pass, step by step, checking after each."""
        for _ in range(max(1, round(seconds / STEP))):
            self.step()

    def until(self, found: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        """Let time pass until something is true."""
        for _ in range(round(seconds / STEP)):
            if found():
                return
            self.step()
        raise AssertionError(f"{what}: not within {seconds:g} s of seed {self.seed}; {self.describe()}")

    def step(self) -> None:
        """A quarter of a second."""
        now = self.clock.seconds()
        for name, agent in self.agents.items():
            if name in self.cut or not agent.alive:
                self.port.unlink(name, "the line was cut")
            elif self.controller.leading and self.leadership.held:
                self.port.link(agent)
            agent.step(now)
            if agent.alive and name in self.port.links and int(now / STEP) % 20 == 0:
                agent.say(agent.report())
        self.clock.advance(STEP)
        self.check()

    # What must hold.

    def check(self) -> None:
        """@raise Broken: something does not."""
        engines = [(agent, engine) for agent in self.agents.values() for engine in agent.running()]
        twice = [shard for shard, n in Counter(engine.order.shard for _, engine in engines).items() if n > 1]
        held = Counter(device for _, engine in engines if not engine.order.profile.resources.share
                       for device in engine.order.allocation.devices)  # fmt: skip
        double = [device for device, n in held.items() if n > 1]
        self._must(not twice, f"two engines of {twice}")
        self._must(not double, f"{double} belong to two engines")
        stopping = {
            f"{engine.order.model}/{engine.order.shard.rsplit('/', 2)[1]}"
            for _, engine in engines
            if engine.state is ShardState.STOPPING
        }
        self._must(not (wrong := stopping & set(self.routers.routed)), f"requests go to {wrong}, which stop")
        for agent in self.agents.values():
            for order in agent.stopped[self._checked_stops[agent.name] :]:
                self._check_stop(order)
            self._checked_stops[agent.name] = len(agent.stopped)

    def _check_stop(self, order: ShardOrder) -> None:
        said = [event for event in self.store.events if event.subject == order.shard and event.text.count(":") > 1]
        self._must(order.wanted is Wanted.STOP and bool(said), f"{order.shard} was stopped and no event says why")

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(f"seed {self.seed} at {self.clock.seconds():g}: {what}; {self.describe()}")

    # What tests look at.

    def engines(self, model: str = "") -> list[str]:
        """C{shard@node state attempt} of every live engine."""
        return sorted(
            f"{engine.order.shard}@{agent.name} {engine.state} {engine.order.attempt}"
            for agent in self.agents.values()
            for engine in agent.running()
            if model in ("", engine.order.model)
        )

    def ready(self, model: str) -> int:
        """How many replicas are routed."""
        return sum(one.id.rpartition("/")[0] == model for one in self.routers.routing.endpoints)

    def pids(self) -> dict[str, int]:
        """By shard and node."""
        return {f"{e.order.shard}@{a.name}": e.pid for a in self.agents.values() for e in a.running()}

    def says(self, *words: str) -> bool:
        """Whether some event holds all these words."""
        return any(all(word in event.text for word in words) for event in self.store.events)

    def describe(self) -> str:
        """Where it stands."""
        records = [f"{r.shard} {r.wanted} {r.state}" for r in self.controller.truth.shards.values()]
        return f"engines {self.engines()}; records {records}; routes {self.routers.routed}"


def model(name: str, replicas: int = 1, devices: int = 1, nodes: int = 1, version: int = 1, spread: bool = True) -> Model:
    """A model whose replicas take whole devices on nodes far apart; another C{version} is another generation."""
    profile = Profile(
        "sim",
        arguments={"version": version},
        parallel=Parallel(nodes=nodes),
        resources=Resources(devices=devices, device_memory=10 * 2**30),
        place=Place(spread=spread),
    )
    return Model(name, replicas=Scale(replicas, replicas), profile=profile)
