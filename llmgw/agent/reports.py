"""What supervisors say: a report of an attempt as it is, and a transition when it has become something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from attrs import evolve, field, frozen
from twisted.internet.defer import Deferred

from llmgw.agent.loras import Look
from llmgw.agent.observer import Observer
from llmgw.agent.probe import EngineProbe
from llmgw.agent.processes import Tree
from llmgw.agent.shardfolder import Intent
from llmgw.fleet.shard import Diagnosis, ShardExit, ShardReport, ShardState


@frozen
class Transition:
    """One step of one attempt. C{tail} is the end of the output when it failed."""

    report: ShardReport
    before: ShardState
    reason: str
    diagnosis: Diagnosis | None = None
    tail: tuple[str, ...] = ()


@frozen
class Surroundings:
    """What all supervisors of a node have in common.

    @ivar instance: the agent's own id, which its engines carry.
    @ivar tell: called with every transition, and with a report alone when only health or a condition changed.
    @ivar serials: the next number of a report, growing over restarts of the agent.
    @ivar released: waits until these devices' memory is back from these pids; fires with what is still held, empty for nothing.
    @ivar look: what is found of an adapter's weights.
    @ivar clock: wall time, for people only.
    """

    reactor: Any
    instance: str
    probe: EngineProbe
    tell: Callable[[Transition | ShardReport], None]
    serials: Callable[[], int]
    released: Callable[[tuple[str, ...], frozenset[int]], Deferred[str]]
    look: Look
    clock: Callable[[], float] = field(default=time.time)


class Described(Protocol):
    """The part of a supervisor that a report is made from."""

    intent: Intent
    tree: Tree
    state: ShardState
    since: float
    reason: str
    exit: ShardExit | None
    diagnosis: Diagnosis | None
    conditions: set[str]

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""


def describe(of: Described, seen: Observer | None, last: ShardReport | None, serials: Callable[[], int]) -> ShardReport:
    """The report of C{of} as it is now: C{last} itself if nothing differs, else one with a new serial."""
    intent, order, engine = of.intent, of.intent.order, of.tree.engine
    now = ShardReport(
        shard=order.shard,
        model=order.model,
        generation=order.generation,
        attempt=order.attempt,
        state=of.state,
        serial=last.serial if last else 0,
        rank=order.allocation.rank,
        pid=engine.pid if engine and not of.is_over else None,
        since=of.since,
        url=intent.url,
        key=intent.key,
        devices=order.allocation.devices,
        ports=order.allocation.ports,
        installation=intent.installation,
        version=intent.version,
        reason=of.reason,
        exit=of.exit,
        diagnosis=of.diagnosis,
        conditions=tuple(sorted(of.conditions | (seen.conditions if seen else frozenset()))),
        limit=intent.limit,
        order=order,
        sleeps=bool(intent.sleep and intent.wake),
        fixed=intent.loras.fixed,
    )
    if seen:
        now = evolve(now, phase=seen.phase, progress=seen.progress, load=seen.load, healthy=seen.health.healthy)
        now = evolve(now, loras=seen.loras.has)
    return now if now == last else evolve(now, serial=serials())
