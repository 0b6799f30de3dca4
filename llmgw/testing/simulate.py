"""A fleet in one process on a virtual clock: the real controller, simulated nodes and routers, faults by a seed.

After every step what must hold whatever happens is checked: see L{llmgw.testing.invariants}. A test that fails prints its seed;
the same seed makes the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from random import Random

from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw.config.catalog import dump_catalog
from llmgw.errors import LlmgwError
from llmgw.fleet.model import Catalog, Model, Parallel, Place, Profile, Resources, Scale
from llmgw.fleet.timing import Timing
from llmgw.router.table import Table
from llmgw.server.controller import Clocks, Controller
from llmgw.server.reckoning import Reckoner
from llmgw.store.records import CatalogRevision, Change
from llmgw.testing.invariants import Invariants
from llmgw.testing.memorystore import MemoryStore
from llmgw.testing.simagents import SimAgent
from llmgw.testing.simserver import SimLeadership, SimPort, SimRouters

STEP = 0.25


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
        self.loss = self.double = 0.0
        self.delay, self.jitter = 0.02, 0.0
        self._arrivals: dict[str, float] = {}
        self._servers = 0
        self.refusals: list[str] = []
        self.lenient = False
        self.wall_ahead = 0.0
        self.controller: Controller
        self.port: SimPort
        self.leadership: SimLeadership
        self.former: list[tuple[Controller, SimPort]] = []
        self._invariants = Invariants(self)

    # The server.

    def lead(self, models: Iterable[Model] = (), fresh: bool = False) -> None:
        """Start a server, or the next one, on what the store has."""
        self._servers += 1
        before = self.routers.table or Table()
        self.leadership = SimLeadership(self.store.leads + 1, f"cp@{self._servers}", self.store.outranked)
        self.controller = Controller(
            self.clock, "cp", self.timing, self.store, self.leadership, self.routers, self.random,
            Clocks(lambda: self.clock.seconds() + self.wall_ahead, self.clock.seconds), Reckoner({}),
        )  # fmt: skip
        self.port = SimPort(self, self.controller, self.leadership)
        self.controller.attach(self.port)
        self.controller.routing.before = self.routers.table
        if models and self.store.catalog is None:
            self.apply(models)
        self.controller.begin(self.store.snapshot(self.leadership.epoch), fresh)
        self._invariants.begun()
        self.controller.go()
        self.clock.advance(0.2)
        self._invariants.taken_over(before)

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

    def usurp(self) -> None:
        """Another server leads while this one does not know it yet: it keeps its links until the store tells it, or 15 s."""
        controller, port = self.controller, self.port
        self.former.append((controller, port))
        self.clock.callLater(15.0, controller.end)
        self.lead()

    def _end_former(self) -> None:
        """Those that were told that they do not lead any more send their agents away."""
        for controller, port in [one for one in self.former if not one[0].leading]:
            self.former.remove((controller, port))
            for name in list(port.links):
                port.unlink(name, "another server leads")

    @property
    def ports(self) -> list[SimPort]:
        """The links of every server that believes to lead."""
        return [self.port, *(port for _, port in self.former)]

    def forget(self) -> None:
        """The store is lost."""
        self.store = MemoryStore()

    def older(self) -> MemoryStore:
        """A copy of the store as it is now, to be given back later."""
        copy = MemoryStore()
        copy.records, copy.catalog, copy.leads = dict(self.store.records), self.store.catalog, self.store.leads
        copy.revision, copy.events, copy.ahead = self.store.revision, list(self.store.events), self.store.ahead
        return copy

    # Time.

    def send(self, node: str, line: str, arrive: Callable[[], None]) -> None:
        """A message on its way: late, lost, doubled, and with C{jitter} after those of other lines that were sent later.

        A line keeps its order, as the stream below every link does.
        """
        chance = self.random.random()
        for _ in range(0 if chance < self.loss else 2 if chance < self.loss + self.double else 1):
            late = self.delay + (self.random.random() * self.jitter if self.jitter else 0.0)
            at = self._arrivals[line] = max(self.clock.seconds() + late, self._arrivals.get(line, 0.0))
            self.clock.callLater(at - self.clock.seconds(), arrive)

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
        self._end_former()
        leads = self.controller.leading and self.leadership.held
        beats = int(now / STEP) % round(self.timing.heartbeat / STEP) == 0
        for name, agent in self.agents.items():
            ports = [port for port in self.ports if name in port.links]
            if name in self.cut or not agent.alive:
                for port in ports:
                    port.unlink(name, "the line was cut")
            elif leads and not ports:
                self.port.link(agent)
            agent.step(now)
            if beats and agent.alive and (ports or name in self.port.links):
                agent.say(agent.report())
        self.clock.advance(STEP)
        self._invariants.check()

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

    def log(self) -> str:
        """A digest of all that has happened: two runs of one seed have the same."""
        lines = [f"{event.at!r} {event.kind} {event.text}\n" for event in self.store.events]
        return f"{len(lines)} {sha256(''.join(lines).encode()).hexdigest()}"

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
