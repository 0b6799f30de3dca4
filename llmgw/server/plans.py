"""C{llmgw plan}: what a changed catalog or the loss of nodes would lead to. Nothing is changed.

Weights that no node was asked for yet are asked for first, since where a replica can go depends on them. The forecast runs in a
thread, on a copy of the leader's records: on a large fleet it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict, evolve
from twisted.internet.threads import deferToThreadPool

from llmgw.fleet.model import Catalog
from llmgw.planning.forecast import Forecast, forecast
from llmgw.planning.plan import Step, searching, steps
from llmgw.planning.strategy import Way
from llmgw.planning.world import World
from llmgw.server.catalogs import Applied, Catalogs
from llmgw.server.controller import Controller
from llmgw.server.inspection import Inspection
from llmgw.server.operations import Unknown

Data = dict[str, Any]
SEARCHES = 3


class Plans:
    """Forecasts over the present state."""

    def __init__(self, controller: Controller, catalogs: Catalogs, inspection: Inspection, reactor: Any) -> None:
        self._controller = controller
        self._catalogs = catalogs
        self._inspection = inspection
        self._reactor = reactor

    async def plan(
        self, new: Catalog | None, path: str, allow_removals: bool, allow_outage: bool, without: Sequence[str]
    ) -> Data:
        """What would happen.

        @param new: the changed catalog, None for the one in force; C{path} its file, for the words.
        @param allow_removals: as for apply, like C{allow_outage}.
        @param without: nodes that would be lost.
        @raise Unknown: there is no such node.
        @raise llmgw.errors.Invalid: an engine would refuse a profile of the new catalog.
        """
        truth = self._controller.truth
        if missing := sorted(set(without) - truth.nodes.keys()):
            raise Unknown(f"no node is called {missing[0]}; known: {', '.join(sorted(truth.nodes)) or 'none'}")
        proposed = truth.catalog if new is None else new
        done = await self._catalogs.apply(proposed, "plan", allow_removals=allow_removals, dry_run=True)
        revision, state = truth.catalog_revision, truth.revision
        found = await self._foresee(done.diff.catalog, without, allow_outage)
        made = [*steps(found, _facts(done)), *_kept(done)]
        text = _title(revision, done, without, made)
        lines = _lines(made)
        if not found.whole:
            lines.append("This is not the end of it: it goes on for too many steps to follow.")
        if new is not None:
            outage = allow_outage or any(decision.way is Way.OUTAGE for decision in found.decided)
            options = " --allow-removals" * allow_removals + " --allow-outage" * outage
            lines.append(f"Nothing was done. Apply it with: llmgw apply {path} --check-revision {revision}{options}")
        return {
            "text": text,
            "lines": lines,
            "catalog": revision,
            "revision": done.revision,
            "state": state,
            "without": list(without),
            "steps": [_data(step) for step in made],
            "complete": found.whole,
            "added": [model.name for model in done.diff.added],
            "changed": [change.name for change in done.diff.changed],
            "removed": [model.name for model in done.diff.removed],
            "kept": [model.name for model in done.diff.kept],
        }

    async def _foresee(self, catalog: Catalog, without: Sequence[str], outage: bool) -> Forecast:
        """Again after nodes have been asked for weights, as long as that brings news."""
        asked: set[tuple[str, str, str]] = set()
        for _ in range(SEARCHES):
            world = _copy(self._controller.world())
            pool = self._reactor.getThreadPool()
            found: Forecast = await deferToThreadPool(self._reactor, pool, forecast, world, catalog, tuple(without), outage)
            fresh = searching(found) - asked
            if not fresh:
                break
            asked |= fresh
            await self._inspection.look(sorted(fresh))
        return found


def _copy(world: World) -> World:
    """What the leader goes on changing while a thread reads it, copied."""
    return evolve(
        world,
        nodes=dict(world.nodes),
        shards=dict(world.shards),
        rollouts=dict(world.rollouts),
        weights=dict(world.weights),
        declined=dict(world.declined),
        left=dict(world.left),
        demand=dict(world.demand),
    )


def _facts(done: Applied) -> dict[str, str]:
    """C{context 8192 -> 4096, replicas.max none -> 2}; at most six a model."""
    shown = {
        change.name: [f"{key} {_show(old)} -> {_show(new)}" for key, old, new in change.facts[:6]] for change in done.diff.changed
    }
    return {name: ", ".join(facts) for name, facts in shown.items()}


def _show(value: object) -> str:
    return "none" if value is None else str(value)


def _kept(done: Applied) -> Iterable[Step]:
    text = "missing from the file, kept (remove it with --allow-removals)"
    return [Step("leave", model.name, text) for model in done.diff.kept]


def _title(revision: int, done: Applied, without: Sequence[str], made: Sequence[Step]) -> str:
    change = f"catalog {revision} -> {done.revision}" if done.revision != revision else f"catalog {revision}"
    what = f"{change} without {', '.join(without)}" if without else change
    return f"{what} would" if made else f"{what}: nothing changes"


def _lines(made: Sequence[Step]) -> list[str]:
    kinds, names = (max((len(getattr(step, name)) for step in made), default=0) for name in ("kind", "model"))
    return [f"  {step.kind:{kinds}}  {step.model:{names}}  {step.text}" for step in made]


def _data(step: Step) -> Data:
    return asdict(step) | {"replicas": [{"id": name, "place": place} for name, place in step.replicas]}
