"""What must hold after every step of a simulated fleet, whatever fails (the names are those of the invariants' list):

- I-L1, I-L2: no agent ever followed a lower epoch than before, and the leader's is the highest;
- I-L6: a server that may not act sends nothing;
- I-C1: an operation's id never comes with another effect;
- I-C3: no engine was stopped that no record had ordered away, with a reason; no later attempt pushed out one that lived;
- I-C5: no shard has two engines that live, no device or port belongs to two of them; nor does the truth give a device to two,
  and nothing is started on one that is held;
- I-C6, I-C7: no node is given up while half of them are away, in the grace of a new leader who misses some, or before it was
  away for long enough, counted from when the leader began;
- the plan: no engine ends by itself more often than its budget says; the ranks of a replica are of one attempt; a change takes
  nobody away while a successor is not ready and too few would serve, nor the last one without leave;
- no router routes to an engine that was told to drain or stop or never was ready, or for an adapter that it has not, and a new
  leader takes no endpoint away that may serve.

Not here, since the simulation has other leases, links and requests than a fleet: I-L3 to I-L5 and I-L7 to I-L12 are in
test_store_lease*.py, test_store_tenure.py and test_server_leading.py; I-C4, I-C8 and I-A in test_server_fleetport*.py and
test_agent_uplink*.py; I-C9 in test_agent_supervisor.py; I-D in end_to_end/test_failover.py and test_router*.py. I-C2 is that
every life ends as wanted, whatever was lost.
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
BUDGET = 5
BUDGET_WITHIN = 500.0
_CAREFUL = ("its profile changed", "restart ordered", "is drained; no room")
_SERVING = (ShardState.READY, ShardState.UNKNOWN)
_BEGUN = (ShardState.PLACED, ShardState.STARTING, ShardState.LOADING)
_LEAVING = (ShardState.DRAINING, ShardState.STOPPING)


class Broken(AssertionError):
    """Something that must always hold did not."""


class Invariants:
    """Looks at a L{llmgw.testing.simulate.Fleet} after each of its steps."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._stops: Counter[str] = Counter()
        self._states: dict[str, NodeState] = {}
        self._away: dict[str, float] = {}
        self._began = 0.0
        self._shards: dict[str, ShardRecord] = {}
        self._going: set[tuple[str, int]] = set()
        self._heard = 0

    def begun(self) -> None:
        """A server begins to lead from what the store has: everybody is away, nothing is ordered."""
        truth, self._began = self._fleet.controller.truth, self._fleet.clock.seconds()
        self._states = {name: node.state for name, node in truth.nodes.items()}
        self._away = dict.fromkeys(truth.nodes, self._began)
        self._shards = dict(truth.shards)
        if self._fleet.lenient:
            # An older store may not know yet that they were told to leave; their nodes will say so.
            agents = self._fleet.agents.values()
            self._going |= {
                (agent.name, engine.pid) for agent in agents for engine in agent.running() if engine.state in _LEAVING
            }

    def check(self) -> None:
        """@raise Broken: something does not hold."""
        fleet = self._fleet
        engines = [(agent, engine) for agent in fleet.agents.values() for engine in agent.running()]
        self._exclusive(engines)
        self._together(engines)
        self._routes(engines)
        for agent in fleet.agents.values():
            self._agent(agent)
        for port in fleet.ports:
            self._must(not port.unfit, "orders were to be sent by a server that may not act")
        self._nodes()
        self._claims(fleet.controller.truth.shards.values())
        self._changes()
        self._legal()

    def _exclusive(self, engines: list[tuple[SimAgent, SimEngine]]) -> None:
        alone = [engine.order for _, engine in engines if not engine.order.profile.resources.share]
        self._must(not (double := _doubles(d for order in alone for d in order.allocation.devices)), f"{double} have two engines")
        double = _doubles((agent.name, port) for agent, engine in engines for port in engine.order.allocation.ports)
        self._must(not double or self._fleet.lenient, f"{double} have two engines")
        twice = _doubles(engine.order.shard for _, engine in engines)
        self._must(not twice or self._fleet.lenient, f"two engines of {twice}")

    def _together(self, engines: list[tuple[SimAgent, SimEngine]]) -> None:
        attempts: dict[str, int] = {}
        for _, engine in engines:
            if engine.state is not ShardState.STOPPING and engine.order.allocation.nodes > 1:
                replica, attempt = replica_of(engine.order.shard), engine.order.attempt
                same = attempts.setdefault(replica, attempt) == attempt
                self._must(same or self._fleet.lenient, f"the ranks of {replica} are of several attempts")

    def _routes(self, engines: list[tuple[SimAgent, SimEngine]]) -> None:
        routed = self._fleet.routers.routed
        there = {(f"{agent.name}.sim", port) for agent, engine in engines for port in engine.order.allocation.ports}
        told = [engine for agent, engine in engines if engine.state in _LEAVING and (agent.name, engine.pid) not in self._going]
        stopping = {replica_of(engine.order.shard) for engine in told}
        # Where rank 0 is gone no request reaches the others.
        wrong = {replica for replica in stopping & set(routed) if routed[replica] in there}
        self._must(not wrong, f"requests go to {wrong}, which were told to leave")
        for agent, engine in engines:
            here = (f"{agent.name}.sim", engine.order.allocation.ports[0])
            early = not engine.served and routed.get(replica_of(engine.order.shard)) == here
            self._must(not early, f"requests go to {engine.order.shard}, which has never been ready")
        self._adapters(engines)

    def _adapters(self, engines: list[tuple[SimAgent, SimEngine]]) -> None:
        for model in self._fleet.routers.routing.models if any(engine.order.profile.loras for _, engine in engines) else ():
            lacks = [
                engine.order.shard
                for _, engine in engines
                if model.served and engine.state is ShardState.READY and replica_of(engine.order.shard) in model.endpoints
                if not any(one.name == model.name and not one.problem for one in engine.loras)
            ]
            self._must(not lacks, f"requests for {model.name} go to {lacks}, which have not loaded it")

    def _agent(self, agent: SimAgent) -> None:
        for order in agent.stopped[self._stops[agent.name] :]:
            said = any(event.subject == order.shard and event.text.count(":") > 1 for event in self._fleet.store.events)
            self._must(order.wanted is Wanted.STOP and said, f"{order.shard} was stopped and no event says why")
        self._stops[agent.name] = len(agent.stopped)
        served = [f"{order.shard} ({state})" for order, state in agent.replaced]
        self._must(not served, f"{served} lived and had to go for a later attempt")
        self._must(agent.epochs == sorted(agent.epochs), f"{agent.name} followed the epochs {agent.epochs}")
        self._must(agent.fence.epoch <= self._fleet.leadership.epoch or agent.name not in self._fleet.port.links,
                   f"{agent.name} obeys epoch {agent.fence.epoch} of a leader with {self._fleet.leadership.epoch}")  # fmt: skip
        self._must(not agent.reused, f"{agent.reused} were told with several effects")
        self._must(not agent.clashes or self._fleet.lenient, f"to be started: {agent.clashes}")
        for replica, ended in agent.crashes.items():
            recent = [at for at in ended if at > self._fleet.clock.seconds() - BUDGET_WITHIN]
            self._must(len(recent) <= BUDGET or self._fleet.lenient, f"{replica} was started again after {BUDGET} failures")

    def _nodes(self) -> None:
        fleet, before, now = self._fleet, self._states, self._fleet.clock.seconds()
        truth, links = fleet.controller.truth, fleet.port.links
        self._states = {name: node.state for name, node in truth.nodes.items()}
        self._away = {name: self._away.get(name, now) for name in truth.nodes if name not in links}
        fresh = [name for name, state in self._states.items() if state is NodeState.LOST and before.get(name) is not state]
        if not fresh:
            return
        known = [name for name, state in before.items() if state in (NodeState.READY, NodeState.UNREACHABLE)]
        away = [name for name in known if name not in links]
        braked = len(away) >= BRAKE_LEAST and 2 * len(away) >= len(known) and set(fresh) <= set(away)
        self._must(not braked, f"{fresh} were given up while {away} of {known} are away")
        unseen = [name for name in known if name not in fleet.port.known]
        early = now < self._began + fleet.timing.failover_grace and unseen
        self._must(not early, f"{fresh} were given up in the grace of a new leader who has not heard of {unseen}")
        for name in fresh:
            lasted = now - self._away.get(name, now)
            self._must(lasted >= fleet.timing.lost_after - 1.0, f"{name} was given up after {lasted:g} s")

    def _claims(self, records: Iterable[ShardRecord]) -> None:
        alone = [r.allocation for r in records if r.allocation and r.state is not ShardState.FAILED and _owns_devices(r)]
        double = _doubles((allocation.node, device) for allocation in alone for device in allocation.devices)
        self._must(not double or self._fleet.lenient, f"the truth gives {double} to two shards")

    def _legal(self) -> None:
        events = self._fleet.store.events
        illegal = [event.text for event in events[self._heard :] if event.kind == "illegal"]
        self._heard = len(events)
        self._must(not illegal, f"not in the table: {illegal}")

    def _changes(self) -> None:
        """Who is ordered away for a change or a drain, compared with the step before."""
        truth, before = self._fleet.controller.truth, self._shards
        if all(before.get(name) is record for name, record in truth.shards.items()):
            return
        self._shards = dict(truth.shards)
        for name, record in truth.shards.items():
            was = before.get(name)
            if was is not None and was.wanted is Wanted.RUN and record.state is ShardState.DRAINING:
                self._changed(record)

    def _changed(self, record: ShardRecord) -> None:
        truth, model = self._fleet.controller.truth, self._fleet.controller.truth.catalog.get(record.model)
        if model is None or not any(why in record.reason for why in _CAREFUL):
            return
        staying = _staying(one for one in truth.shards.values() if one.model == record.model)
        serving = sum(all(one.state in _SERVING for one in ranks) for ranks in staying)
        fresh = [one for ranks in staying for one in ranks if one.generation == model.generation]
        unready = {one.shard for one in fresh if one.state not in _SERVING}
        text = f"{record.shard} was ordered away ({record.reason})"
        self._must(serving >= model.replicas.min or not unready, f"{text} while {unready} are not ready")
        rollout = truth.rollouts.get(record.model)
        leave = record.outage or (rollout is not None and rollout.outage)
        ranks = [one.allocation.node for one in truth.shards.values() if one.allocation and _replica(one) == _replica(record)]
        leave = leave or any(truth.nodes[name].outage for name in ranks if name in truth.nodes)
        self._must(serving > 0 or leave or not model.replicas.min, f"{text} without leave, and nobody serves {record.model}")

    def taken_over(self, before: Table) -> None:
        """
        @raise Broken: a server that has just begun to lead took an endpoint from the routers that may serve.
        """
        truth, table = self._fleet.controller.truth, self._fleet.routers.table or Table()
        there = {one.id for one in table.endpoints}
        for gone in {one.id for one in before.endpoints} - there:
            shards = [record for record in truth.shards.values() if record.allocation and replica_of(record.shard) == gone]
            serves = shards and all(s.wanted is Wanted.RUN and self._may_serve(s) and not s.given_up for s in shards)
            self._must(not serves, f"the new leader took {gone} from the routers")
            model = truth.catalog.get(gone.rpartition("/")[0])
            enough = model is not None and sum(one.startswith(f"{model.name}/") for one in there) >= max(1, model.replicas.min)
            self._must(bool(shards) or enough or model is None, f"the new leader knows nothing of {gone} and took it")

    def _may_serve(self, shard: ShardRecord) -> bool:
        """Whether its record says so, or is of before it was ready, and its node has said nothing since."""
        silent = shard.allocation is not None and shard.allocation.node not in self._fleet.port.links
        return shard.state in _SERVING or (silent and shard.state in _BEGUN)

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            fleet = self._fleet
            raise Broken(f"seed {fleet.seed} at {fleet.clock.seconds():g}: {what}; {fleet.describe()}")


def _staying(records: Iterable[ShardRecord]) -> list[list[ShardRecord]]:
    """The replicas that are not ordered away, each as its shards."""
    found: dict[int, list[ShardRecord]] = {}
    for record in records:
        if record.allocation is not None:
            found.setdefault(record.number, []).append(record)
    return [ranks for ranks in found.values() if all(one.wanted is Wanted.RUN or one.next_at is not None for one in ranks)]


def _replica(record: ShardRecord) -> tuple[str, int]:
    return record.model, record.number


def _owns_devices(record: ShardRecord) -> bool:
    return record.profile is not None and not record.profile.resources.share


def _doubles(found: Iterable[Hashable]) -> list[Hashable]:
    """What is in C{found} more than once; nearly always nothing, and this is asked at every step."""
    several = list(found)
    return [] if len(set(several)) == len(several) else [one for one, count in Counter(several).items() if count > 1]
