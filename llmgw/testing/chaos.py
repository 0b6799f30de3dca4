"""One life of a simulated fleet in which everything fails, by a seed; at the end all is mended and must be as wanted.

    python -m llmgw.testing.chaos --seed 17 [--nodes 4] [--steps 25]

repeats the life that a failing test printed. Messages are lost, doubled, late and overtaken by those of other links; links,
machines, engines, agents, servers and stores fail; several servers believe to lead; clocks are 10 minutes off; the store is
stalled, full, older or empty. What must hold at each step is in L{llmgw.testing.invariants}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from random import Random
from typing import Any

from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from llmgw.errors import LlmgwError
from llmgw.fleet.model import Model, Scale
from llmgw.fleet.node import Fabric
from llmgw.server.operations import Operations
from llmgw.server.rollouts import Rollouts
from llmgw.testing.invariants import Broken
from llmgw.testing.memorystore import MemoryStore
from llmgw.testing.simagents import SimAgent
from llmgw.testing.simulate import Fleet, model

MINUTES_OFF = 600.0
SETTLE = 1500.0
LOOP = 240.0
IDLE = 20.0


class Chaos:
    """A fleet and its fate.

    @param nodes: how many machines of three devices, at least three. Half as many models want one device for each replica, one
        wants two, one is spread over two machines, and one runs only while it is asked for.
    """

    def __init__(self, seed: int, nodes: int = 4, steps: int = 25) -> None:
        self._chance = Random(seed)
        self._steps = steps
        self.fleet = Fleet({f"n{number}": 3 for number in range(nodes)}, seed=seed)
        for agent in self.fleet.agents.values():
            agent.fabrics, agent.sleeps = (Fabric("rack"),), self._chance.random() < 0.5
        self._backup: MemoryStore | None = None
        singles = [model(f"m{number}", 1) for number in range(max(2, nodes // 2))]
        self._models = [*singles, model("big", 1, devices=2), model("gang", 1, nodes=2), on_demand("z")]
        self.done: list[str] = []
        self._fates: list[tuple[int, Callable[[], None]]] = [
            (20, self.cut), (14, self.die), (10, self.crash), (6, self.usurp), (3, self.cut_most), (6, self.reboot),
            (4, self.wipe), (6, self.agent_away), (6, self.full), (6, self.stall), (4, self.answers_lost), (3, self.restore),
            (2, self.forget), (14, self.apply), (5, self.clocks), (8, self.weather), (4, self.routers), (6, self.drain),
            (4, self.restart), (5, self.doom), (3, self.loop), (10, self.ask), (4, self.lapse),
        ]  # fmt: skip

    def live(self) -> Fleet:
        """From the start to a fleet that is as wanted.

        @raise Broken: with the command that repeats it.
        """
        try:
            self.fleet.lead(self._models)
            weights = [weight for weight, _ in self._fates]
            for _ in range(self._steps):
                (fate,) = self._chance.choices([fate for _, fate in self._fates], weights)
                self.done.append(fate.__name__)
                fate()
                self.fleet.run(self._chance.random() * 15)
            self._mend()
        except AssertionError as error:
            raise Broken(f"{error}\nafter {' '.join(self.done)}\nagain: {self.command}") from error
        return self.fleet

    @property
    def command(self) -> str:
        """What repeats this life."""
        return f"python -m llmgw.testing.chaos --seed {self.fleet.seed} --nodes {len(self.fleet.agents)} --steps {self._steps}"

    def _agent(self) -> SimAgent:
        return self._chance.choice(list(self.fleet.agents.values()))

    def _ordered(self, asked: Deferred[Any]) -> None:
        """An operator's order; one that is refused with a sentence is no fault."""

        def refused(failure: Failure) -> None:
            failure.trap(LlmgwError)

        asked.addErrback(refused)

    # Machines, engines, links.

    def cut(self) -> None:
        """A link breaks, or heals."""
        self.fleet.cut ^= {self._agent().name}

    def cut_most(self) -> None:
        """The network of most nodes is away for longer than a node may be."""
        names = list(self.fleet.agents)
        away = set(names[: max(3, len(names) - 1)])
        self.fleet.cut |= away
        self.fleet.run(self.fleet.timing.lost_after + self._chance.random() * 60)
        self.fleet.cut -= away

    def die(self) -> None:
        """An engine dies."""
        if running := (agent := self._agent()).running():
            agent.die(self._chance.choice(running), self.fleet.clock.seconds(), "chance")

    def reboot(self) -> None:
        """A machine starts anew; its link breaks with it."""
        agent = self._agent()
        self._unlink(agent)
        agent.reboot()

    def wipe(self) -> None:
        """A machine is set up anew under its name."""
        agent = self._agent()
        self._unlink(agent)
        agent.wipe()
        agent.epochs.clear()

    def agent_away(self) -> None:
        """An agent is down while its engines go on, or it is back."""
        agent = self._agent()
        agent.alive = not agent.alive

    def doom(self) -> None:
        """On one node a model cannot start, or can again."""
        self._agent().doomed ^= {self._chance.choice(self._models).name}

    def loop(self) -> None:
        """A model can start nowhere for longer than it is tried."""
        name = self._chance.choice(self._models).name
        for agent in self.fleet.agents.values():
            agent.doomed.add(name)
        self.fleet.run(LOOP)

    def _unlink(self, agent: SimAgent) -> None:
        for port in self.fleet.ports:
            port.unlink(agent.name, "the machine went down")

    # Servers and stores.

    def crash(self) -> None:
        """kill -9 of the server; another starts later."""
        self._readable()
        self.fleet.end()
        self.fleet.run(self._chance.random() * 20)
        self.fleet.lead()

    def usurp(self) -> None:
        """Failover, of which the one before learns late."""
        self._readable()
        self.fleet.usurp()

    def lapse(self) -> None:
        """The lease is not renewed in time, and is again later: until then the server may not act."""
        leadership = self.fleet.leadership
        leadership.held = False
        self.fleet.run(self._chance.random() * 20)
        leadership.held = True

    def full(self) -> None:
        """The store takes nothing, or works again."""
        self.fleet.store.failing = "" if self.fleet.store.failing else "the disk is full"

    def stall(self) -> None:
        """The store answers nothing for a while."""
        self.fleet.store.stalled = True
        self.fleet.run(self._chance.random() * 90)
        self.fleet.store.resume()

    def answers_lost(self) -> None:
        """The store takes everything and says nothing of it, for a while."""
        self.fleet.store.lossy = True
        self.fleet.run(self._chance.random() * 20)
        self.fleet.store.lossy = False

    def restore(self) -> None:
        """The store is an older one after a crash of the server; a copy is made for the next time."""
        self._readable()
        backup, self._backup = self._backup, self.fleet.older()
        if backup is not None:
            self.fleet.end()
            self.fleet.store = backup
            self.fleet.lenient = True
            self.fleet.lead()

    def forget(self) -> None:
        """The store is lost; the server's file still has the catalog."""
        self._readable()
        self.fleet.end()
        self.fleet.forget()
        self.fleet.lenient = True
        self.fleet.lead(self._models, fresh=True)

    def _readable(self) -> None:
        """Nobody begins to lead while the store cannot be read."""
        self.fleet.store.failing = ""

    # The world around, operators.

    def clocks(self) -> None:
        """The server's clock jumps, and a node's."""
        self.fleet.wall_ahead = self._chance.choice((0.0, MINUTES_OFF, -MINUTES_OFF))
        self._agent().ahead = self._chance.choice((0.0, MINUTES_OFF, -MINUTES_OFF))

    def weather(self) -> None:
        """Messages are lost, doubled, late and overtaken by those of other links, more or less."""
        chance = self._chance.choice
        self.fleet.loss, self.fleet.double, self.fleet.jitter = chance((0, 0.1, 0.4)), chance((0, 0.2)), chance((0.0, 0.5, 8.0))

    def routers(self) -> None:
        """Routers take their tables late, or at once again."""
        self.fleet.routers.delay = self._chance.choice((0.1, 2.0, 8.0))

    def apply(self) -> None:
        """Another catalog: numbers of replicas and profiles."""
        self._models = [self._another(one) for one in self._models]
        self.fleet.apply(self._models)

    def _another(self, one: Model) -> Model:
        count, version = self._chance.randint(0, 2), self._chance.randint(1, 2)
        changed = _like(one, version, Scale(count, count))
        return changed if one.replicas.min == one.replicas.max else evolve(changed, replicas=one.replicas)

    def ask(self) -> None:
        """A request waits for the model that runs on demand, for a while."""
        self.fleet.routers.queued["z"] = 1
        self.fleet.controller.demand.asked("z")
        self.fleet.run(self._chance.random() * 20)
        self.fleet.routers.queued.clear()

    def drain(self) -> None:
        """A node is drained, or opened again."""
        name, operations = self._agent().name, Operations(self.fleet.controller)
        if self._chance.random() < 0.5:
            self._ordered(operations.drain([name], None, False, True))
        else:
            self._ordered(operations.cordon([name], False))

    def restart(self) -> None:
        """A model is restarted by an operator."""
        self._ordered(Operations(self.fleet.controller).restart(self._chance.choice(self._models).name, None, None, False))

    # The end.

    def _mend(self) -> None:
        fleet = self.fleet
        fleet.cut.clear()
        fleet.store.failing, fleet.loss, fleet.double, fleet.jitter, fleet.routers.delay = "", 0.0, 0.0, 0.0, 0.1
        for agent in fleet.agents.values():
            agent.alive = True
            agent.doomed.clear()
        wanted = [_like(one, 3, Scale(1, 1)) for one in self._models]
        fleet.run(20)
        for name in fleet.agents:
            self._ordered(Operations(fleet.controller).reset(name))
            self._ordered(Operations(fleet.controller).cordon([name], False))
        fleet.apply(wanted)
        fleet.until(lambda: self._as_wanted(wanted), "all as wanted", SETTLE)

    def _as_wanted(self, wanted: list[Model]) -> bool:
        """Orphans are an operator's to stop: here one does so as soon as it is told of them."""
        fleet = self.fleet
        for orphan in Operations(fleet.controller).orphans():
            known = fleet.controller.truth.shards.get(orphan.report.shard)
            if known is None or known.allocation is None:
                self._ordered(Operations(fleet.controller).stop(orphan.report.shard, orphan.node))
            elif engine := fleet.agents[orphan.node].engines.get(orphan.report.shard):
                fleet.agents[orphan.node].die(engine, fleet.clock.seconds(), "stopped by hand on its node")
        for name, note in fleet.controller.outcome.notes.items() if fleet.controller.outcome else ():
            if "--allow-outage" in note:
                self._ordered(Rollouts(fleet.controller).order(name, "resume", True))
        running = sorted((e.order.model, e.order.generation) for agent in fleet.agents.values() for e in agent.running())
        whole = sorted((one.name, one.generation) for one in wanted for _ in range(_spread(one)))
        return all(fleet.ready(one.name) == 1 for one in wanted) and running == whole


def on_demand(name: str) -> Model:
    """A model that runs only while somebody asks for it."""
    return evolve(model(name), replicas=Scale(0, 1, idle_after=IDLE))


def _spread(one: Model) -> int:
    return one.profile.parallel.nodes if one.profile else 0


def _like(one: Model, version: int, replicas: Scale) -> Model:
    assert one.profile is not None
    return evolve(model(one.name, 1, one.profile.resources.devices or 0, _spread(one), version), replicas=replicas)


def main() -> None:
    """One life, as the command line has it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--nodes", type=int, default=4)
    options.add_argument("--steps", type=int, default=25)
    asked = options.parse_args()
    chaos = Chaos(asked.seed, asked.nodes, asked.steps)
    fleet = chaos.live()
    sys.stdout.write(f"{fleet.describe()}\nevents {fleet.log()}\n")


if __name__ == "__main__":
    main()
