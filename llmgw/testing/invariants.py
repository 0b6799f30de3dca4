"""What must hold after every step of a simulated fleet, whatever fails (the names are those of the invariants' list):

- I-C5: no shard has two engines that live, and no device belongs to two of them; nor does the truth give it to two;
- I-C3: no engine was stopped that no record had ordered away, with a reason; no later attempt pushed out one that lived;
- I-L1, I-L2: no agent ever followed a lower epoch than before, and the leader's is the highest;
- I-C6, I-C7: no node is given up while half of them are away, nor in the grace of a new leader who misses some;
- no router routes to an engine that was told to drain or stop, and a new leader takes no endpoint away that may serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from llmgw.fleet.node import NodeState
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardState, Wanted, replica_of
from llmgw.router.table import Table
from llmgw.testing.simagents import SimAgent, SimEngine

# Stated anew: what is checked does not say itself what is right.
BRAKE_LEAST = 3
_SERVING = (ShardState.READY, ShardState.UNKNOWN)


class Broken(AssertionError):
    """Something that must always hold did not."""


class Invariants:
    """Looks at a L{llmgw.testing.simulate.Fleet} after each of its steps."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._stops: Counter[str] = Counter()
        self._lost: dict[str, NodeState] = {}
        self._leader: Any = None

    def check(self) -> None:
        """@raise Broken: something does not hold."""
        fleet = self._fleet
        engines = [(agent, engine) for agent in fleet.agents.values() for engine in agent.running()]
        self._exclusive(engines)
        self._routes(engines)
        for agent in fleet.agents.values():
            self._agent(agent)
        self._nodes()
        self._claims(fleet.controller.truth.shards.values())

    def _exclusive(self, engines: list[tuple[SimAgent, SimEngine]]) -> None:
        alone = [engine.order for _, engine in engines if not engine.order.profile.resources.share]
        self._must(not (double := _doubles(d for order in alone for d in order.allocation.devices)), f"{double} have two engines")
        twice = _doubles(engine.order.shard for _, engine in engines)
        self._must(not twice or self._fleet.lenient, f"two engines of {twice}")

    def _routes(self, engines: list[tuple[SimAgent, SimEngine]]) -> None:
        leaving = (ShardState.DRAINING, ShardState.STOPPING)
        stopping = {replica_of(engine.order.shard) for _, engine in engines if engine.state in leaving}
        self._must(not (wrong := stopping & set(self._fleet.routers.routed)), f"requests go to {wrong}, which were told to leave")

    def _agent(self, agent: SimAgent) -> None:
        for order in agent.stopped[self._stops[agent.name] :]:
            said = any(event.subject == order.shard and event.text.count(":") > 1 for event in self._fleet.store.events)
            self._must(order.wanted is Wanted.STOP and said, f"{order.shard} was stopped and no event says why")
        self._stops[agent.name] = len(agent.stopped)
        served = [f"{order.shard} ({state})" for order, state in agent.replaced]
        self._must(not served, f"{served} lived and had to go for a later attempt")
        self._must(agent.epochs == sorted(agent.epochs), f"{agent.name} followed the epochs {agent.epochs}")
        self._must(agent.fence[0] <= self._fleet.leadership.epoch or agent.name not in self._fleet.port.links,
                   f"{agent.name} obeys epoch {agent.fence[0]} of a leader with {self._fleet.leadership.epoch}")  # fmt: skip

    def _nodes(self) -> None:
        fleet, before = self._fleet, self._lost
        controller = fleet.controller
        self._lost = {name: node.state for name, node in controller.truth.nodes.items()}
        if controller is not self._leader:
            self._leader = controller
            return
        fresh = [name for name, state in self._lost.items() if state is NodeState.LOST and before.get(name) is not state]
        known = [name for name, state in before.items() if state in (NodeState.READY, NodeState.UNREACHABLE)]
        away = [name for name in known if name not in controller.members.present]
        braked = len(away) >= BRAKE_LEAST and 2 * len(away) >= len(known) and set(fresh) <= set(away)
        self._must(not (fresh and braked), f"{fresh} were given up while {away} of {known} are away")

    def _claims(self, records: Iterable[ShardRecord]) -> None:
        alone = [r.allocation for r in records if r.allocation and r.state is not ShardState.FAILED and _owns_devices(r)]
        double = _doubles((allocation.node, device) for allocation in alone for device in allocation.devices)
        self._must(not double or self._fleet.lenient, f"the truth gives {double} to two shards")

    def taken_over(self, before: Table) -> None:
        """
        @raise Broken: a server that has just begun to lead took an endpoint from the routers that may serve.
        """
        truth, table = self._fleet.controller.truth, self._fleet.routers.table or Table()
        there = {one.id for one in table.endpoints}
        for gone in {one.id for one in before.endpoints} - there:
            shards = [record for record in truth.shards.values() if record.allocation and replica_of(record.shard) == gone]
            serves = shards and all(s.wanted is Wanted.RUN and s.state in _SERVING and not s.given_up for s in shards)
            self._must(not serves, f"the new leader took {gone} from the routers")
            model = truth.catalog.get(gone.rpartition("/")[0])
            enough = model is not None and sum(one.startswith(f"{model.name}/") for one in there) >= max(1, model.replicas.min)
            self._must(bool(shards) or enough or model is None, f"the new leader knows nothing of {gone} and took it")

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            fleet = self._fleet
            raise Broken(f"seed {fleet.seed} at {fleet.clock.seconds():g}: {what}; {fleet.describe()}")


def _owns_devices(record: ShardRecord) -> bool:
    return record.profile is not None and not record.profile.resources.share


def _doubles(found: Iterable[Hashable]) -> list[Hashable]:
    """What is in C{found} more than once; nearly always nothing, and this is asked at every step."""
    several = list(found)
    return [] if len(set(several)) == len(several) else [one for one, count in Counter(several).items() if count > 1]
