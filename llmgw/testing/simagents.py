"""Simulated nodes: agents that follow orders as the real one does, with the real one's fence, and engines that are only numbers.

They hold what a real node holds through every fault: an agent that restarts adopts its engines, a link that ends stops nothing,
an operation that is repeated has no second effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from attrs import define, evolve, field

from llmgw.agent.fence import Fence
from llmgw.fleet.node import Device, Fabric, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import (
    ADDRESS_GONE,
    NODE_RESTARTED,
    Diagnosis,
    EngineLoad,
    ShardExit,
    ShardLora,
    ShardOrder,
    ShardReport,
    ShardState,
    Wanted,
    replica_of,
)
from llmgw.wire.messages import Done, Register, Report

GIB = 2**30
# Seconds that an adapter takes: longer than all that an order for it sets going.
LOADING = 2.0


class SimFence(Fence):
    """The fence of a real agent on a disk that never fails."""

    def __init__(self) -> None:
        super().__init__(Path())

    def _store(self, epoch: int, leader: str) -> None:
        self.epoch, self.leader = epoch, leader


@define
class SimEngine:
    """One attempt of a shard. C{since} is when it entered its state; C{served}: this attempt has been ready."""

    order: ShardOrder
    pid: int
    state: ShardState = ShardState.STARTING
    since: float = 0.0
    reason: str = ""
    next: ShardOrder | None = None
    conditions: tuple[str, ...] = ()
    loras: tuple[ShardLora, ...] = ()
    equips: float = 0.0
    diagnosis: Diagnosis | None = None
    served: bool = False

    @property
    def live(self) -> bool:
        """Whether its process exists."""
        return self.state.live


@define
class SimAgent:
    """One node.

    @ivar load: seconds from start to ready; C{grace} from the order to stop to the end.
    @ivar doomed: models and generations whose engines die while loading.
    @ivar full: why every engine ends while it loads, None while there is room.
    @ivar ahead: how many seconds its clock is ahead of the others'.
    @ivar epochs: every epoch whose orders it has followed.
    @ivar stopped: every shard that was stopped by order, with the order: what nobody ordered must not be in it.
    @ivar fixed: why its engines take no adapters while they run.
    @ivar spoilt: by adapter's weights, why they cannot be loaded, and whether an engine started anew could.
    @ivar replaced: every attempt that was stopped for a later one, with the state it was in.
    @ivar effects: by the id of an operation, what it was told to do; C{reused} the ids that came with another effect.
    @ivar clashes: the orders to start on a device that another engine had.
    @ivar crashes: by replica, when an engine of it ended by itself, and for certain by its own failure: not on a full disk, nor
        beside ranks on other nodes, which may have been away.
    """

    name: str
    devices: int
    random: Random
    load: float = 5.0
    grace: float = 1.0
    labels: dict[str, str] = field(factory=dict)
    fabrics: tuple[Fabric, ...] = ()
    engines: dict[str, SimEngine] = field(factory=dict)
    answered: dict[str, Done] = field(factory=dict)
    fence: SimFence = field(factory=SimFence)
    applied: tuple[int, int] = (0, 0)
    session: str = ""
    alive: bool = True
    doomed: set[str] = field(factory=set)
    full: Diagnosis | None = None
    ahead: float = 0.0
    epochs: list[int] = field(factory=list)
    stopped: list[ShardOrder] = field(factory=list)
    replaced: list[tuple[ShardOrder, ShardState]] = field(factory=list)
    effects: dict[str, tuple[object, ...]] = field(factory=dict)
    reused: set[str] = field(factory=set)
    clashes: list[str] = field(factory=list)
    crashes: dict[str, list[float]] = field(factory=dict)
    say: Callable[[Any], None] = lambda message: None
    running_requests: int | None = None
    sleeps: bool = False
    fixed: str = ""
    spoilt: dict[str, tuple[str, bool]] = field(factory=dict)
    _pids: int = 100

    def facts(self) -> NodeFacts:
        """Its hardware."""
        found = tuple(Device(f"{self.name}-gpu{i}", i, "SIM", 80 * GIB, memory_used=0) for i in range(self.devices))
        inventory = Inventory(8, 64 * GIB, 64 * GIB, found)
        return NodeFacts(
            self.name, f"{self.name}.sim", inventory, (20000, 20099), self.labels, self.fabrics, (Installation("sim", "sim"),)
        )

    def register(self) -> Register:
        """Who it is and what runs."""
        return Register(
            1, self.name, f"i-{self.name}", "boot", self.fence.epoch, self.fence.leader, self.facts(), self._reports()
        )

    def report(self) -> Report:
        """What runs."""
        return Report(*self.applied, self._reports())

    def _reports(self) -> tuple[ShardReport, ...]:
        return tuple(
            ShardReport(
                shard,
                engine.order.model,
                engine.order.generation,
                engine.order.attempt,
                engine.state,
                rank=engine.order.allocation.rank,
                pid=engine.pid if engine.live else None,
                since=engine.since + self.ahead,
                url=f"http://{self.name}.sim:{engine.order.allocation.ports[0]}/v1" if not engine.order.allocation.rank else "",
                key=f"key-{engine.pid}",
                devices=engine.order.allocation.devices,
                ports=engine.order.allocation.ports,
                reason=engine.reason,
                exit=None if engine.live else ShardExit(code=1),
                order=engine.order,
                conditions=engine.conditions,
                diagnosis=engine.diagnosis,
                healthy=ADDRESS_GONE not in engine.conditions,
                sleeps=self.sleeps,
                loras=engine.loras,
                fixed=self.fixed,
                load=EngineLoad(self.running_requests, 0) if engine.state is ShardState.READY else EngineLoad(),
            )
            for shard, engine in sorted(self.engines.items())
        )

    def desired(self, epoch: int, leader: str, revision: int, orders: Sequence[ShardOrder], now: float) -> None:
        """Follow orders, unless they are of a leader that is over."""
        if not self.alive:
            return
        if self.fence.admit(epoch, leader) or (epoch, revision) < self.applied:
            return
        if self.epochs[-1:] != [epoch]:
            self.epochs.append(epoch)
        self.applied = epoch, revision
        for order in orders:
            self._follow(order, now)
        listed = {order.shard for order in orders}
        self.engines = {name: engine for name, engine in self.engines.items() if engine.live or name in listed}
        self.say(self.report())

    def _equip(self, engine: SimEngine, fresh: bool = False) -> None:
        """Have its order's adapters, those that can be loaded; what it is not started with comes a moment after the order."""
        there = {(one.name, one.weights): one for one in engine.loras if not one.problem}
        loras = []
        for one in engine.order.profile.loras:
            problem, anew = self.spoilt.get(one.weights, ("", False))
            problem = "" if fresh and anew else problem
            made = ShardLora(one.name, one.weights, one.name, problem, anew and bool(problem))
            loras.append(there.get((one.name, one.weights), made))
        engine.loras = tuple(loras)

    def _follow(self, order: ShardOrder, now: float) -> None:
        effect = (order.shard, order.attempt, order.wanted, order.allocation)
        if self.effects.setdefault(order.operation, effect) != effect:
            self.reused.add(order.operation)
        engine = self.engines.get(order.shard)
        if engine is not None and engine.live and engine.order.attempt == order.attempt and not self.fixed:
            engine.equips = now + LOADING if engine.order.profile != order.profile else engine.equips
            engine.order = evolve(engine.order, profile=order.profile)
        if done := self.answered.get(order.operation):
            self.say(done)
            return
        engine = self.engines.get(order.shard)
        if engine is not None and engine.state is ShardState.SLEEPING and order.wanted is Wanted.RUN:
            engine.state, engine.since = ShardState.LOADING, now
        elif order.wanted is Wanted.RUN:
            if engine is not None and engine.live and order.attempt > engine.order.attempt:
                self._succeed(engine, order, now)
            elif engine is None or order.attempt > engine.order.attempt:
                if taken := self._taken(order):
                    self.answered[order.operation] = Done(order.operation, False, *taken)
                    self.say(self.answered[order.operation])
                    return
                self._pids += 1
                self.engines[order.shard] = SimEngine(order, self._pids, since=now)
        elif engine is None:
            self.say(Done(order.operation, True))
        elif engine.live and order.attempt >= engine.order.attempt:
            if order.wanted is Wanted.STOP and engine.state is not ShardState.STOPPING:
                self.stopped.append(order)
                engine.state, engine.since = ShardState.STOPPING, now
            elif order.wanted is Wanted.SLEEP and engine.state in (ShardState.READY, ShardState.DRAINING):
                engine.state, engine.since = ShardState.SLEEPING, now
            elif order.wanted is Wanted.DRAIN and engine.state is ShardState.READY:
                engine.state, engine.since = ShardState.DRAINING, now

    def _succeed(self, engine: SimEngine, order: ShardOrder, now: float) -> None:
        """A later attempt while the one before lives: two never run at once, so that one is stopped first."""
        if engine.state is not ShardState.STOPPING:
            self.replaced.append((engine.order, engine.state))
            engine.state, engine.since = ShardState.STOPPING, now
        engine.next = order

    def _taken(self, order: ShardOrder) -> tuple[str, dict[str, str]] | None:
        """Whether another engine has a device that this order takes: then it is declined."""
        for shard, other in self.engines.items():
            shared = set(order.allocation.devices) & set(other.order.allocation.devices)
            alone = not (order.profile.resources.share and other.order.profile.resources.share)
            if other.live and shard != order.shard and shared and alone:
                self.clashes.append(f"{order.shard} on {self.name}, which {shard} has")
                return "device_in_use", {"text": f"a device of {order.shard} is held by {shard}"}
        return None

    def step(self, now: float) -> None:
        """Let time pass for its engines."""
        before = [(name, engine.state, engine.loras) for name, engine in self.engines.items()]
        for engine in self.engines.values():
            self._advance(engine, now - engine.since, now)
        if before != [(name, engine.state, engine.loras) for name, engine in self.engines.items()] and self.alive:
            self.say(self.report())

    def _advance(self, engine: SimEngine, lasted: float, now: float) -> None:
        state = engine.state
        if state is ShardState.STARTING and lasted >= 0.5:
            engine.state, engine.since = ShardState.LOADING, now
        elif state is ShardState.LOADING and lasted >= 1.0 and self.doomed & {engine.order.model, engine.order.generation}:
            self.die(engine, now, "it was doomed")
        elif state is ShardState.LOADING and lasted >= 1.0 and self.full is not None:
            engine.diagnosis = self.full
            self.die(engine, now, self.full.text)
        elif state is ShardState.LOADING and lasted >= self.load:
            engine.state, engine.since, engine.served = ShardState.READY, now, True
            self._equip(engine, fresh=True)
            self._answer(engine.order, True)
        elif state is ShardState.READY and self.alive and not self.fixed and now >= engine.equips:
            self._equip(engine)
        elif state is ShardState.STOPPING and lasted >= self.grace:
            engine.state, engine.since = ShardState.STOPPED, now
            if engine.next is not None:
                engine.order, engine.next = engine.next, None
                engine.state, engine.pid, engine.served = ShardState.STARTING, engine.pid + 1000, False
                engine.loras = ()

    def die(self, engine: SimEngine, now: float, reason: str) -> None:
        """An engine ends by itself."""
        if engine.diagnosis is None and engine.order.allocation.nodes == 1:
            self.crashes.setdefault(replica_of(engine.order.shard), []).append(now)
        engine.state, engine.since, engine.reason = ShardState.FAILED, now, reason
        self._answer(engine.order, False)
        if self.alive:
            self.say(self.report())

    def _answer(self, order: ShardOrder, ok: bool) -> None:
        """Remember what has become of an order to run, so that it starts nothing once more when all else of it is forgotten."""
        self.answered.setdefault(order.operation, Done(order.operation, ok))

    def reboot(self) -> None:
        """The machine starts anew: every engine is gone, the state folder is not."""
        for engine in self.engines.values():
            if engine.live:
                engine.state, engine.reason = ShardState.FAILED, "the machine was restarted"
                engine.conditions = (NODE_RESTARTED,)
                self._answer(engine.order, False)

    def wipe(self) -> None:
        """The machine was set up anew: it remembers nothing and runs nothing.

        So an id that it was told before may come with another effect, which is its first there: a server without its store has
        no epoch to begin above but those of nodes that remember one.
        """
        self.engines.clear()
        self.answered.clear()
        self.effects.clear()
        self.fence, self.applied = SimFence(), (0, 0)

    def running(self) -> list[SimEngine]:
        """The engines that live."""
        return [engine for engine in self.engines.values() if engine.live]
