"""The catalog in force: a revision in the store. A file only ever proposes a new one."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, frozen
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.config.catalog import CatalogDiff, diff_catalogs, dump_catalog
from llmgw.errors import Invalid, LlmgwError, Problem
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.shard import Wanted
from llmgw.interfaces import Flags
from llmgw.planning import loras
from llmgw.planning.profiles import follow_rollout, tried_again
from llmgw.planning.replicas import Replica, group
from llmgw.planning.rollout import leave
from llmgw.planning.strategy import Decision, Way, decisions
from llmgw.planning.world import Draft
from llmgw.server.controller import Controller
from llmgw.server.operations import Outage
from llmgw.server.truth import differences
from llmgw.store.records import CatalogRevision, Change, Drop


class Moved(LlmgwError):
    """The catalog is not the one that the caller has looked at."""


@frozen
class Applied:
    """What an apply did, or would do. C{lines} are sentences for people, one a model; C{decisions} are about those of them whose
    replicas change."""

    revision: int
    diff: CatalogDiff
    lines: tuple[str, ...]
    decisions: tuple[Decision, ...] = ()


class Catalogs:
    """Apply and propose."""

    log = Logger()

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def apply(
        self,
        new: Catalog,
        origin: str,
        *,
        allow_removals: bool = False,
        check_revision: int | None = None,
        dry_run: bool = False,
        lenient: bool = False,
        allow_outage: bool | None = None,
    ) -> Deferred[Applied]:
        """Make C{new} the catalog in force, with what it does not name kept.

        @param lenient: take profiles, too, that their engines will refuse, and only log that: at a start there may be nothing
            else to serve.
        @param allow_outage: whether a model's only replica may stop before its successor is there; None takes the catalog all the
            same and leaves that replica as it is.
        @raise Outage: it may not, and there is no other way.
        @raise Moved: the catalog in force is not C{check_revision}.
        @raise llmgw.errors.Invalid: an engine would refuse a profile, or a kept model and the new ones cannot stand together.
        """
        truth, done = self._controller.truth, list[Applied]()

        def make() -> list[Change]:
            if check_revision is not None and check_revision != truth.catalog_revision:
                text = f"the catalog is revision {truth.catalog_revision} by now, not {check_revision}: look again, then apply"
                raise Moved(text)
            diff = diff_catalogs(truth.catalog, new, allow_removals)
            self._ask_engines(diff, lenient)
            number = truth.catalog_revision + (not diff.empty)
            decided = self._decide(diff)
            lines = [*describe(diff, decided), *self._pinned(diff.catalog)]
            done.append(Applied(number, diff, tuple(lines), decided))
            if dry_run or diff.empty:
                return []
            if allow_outage is False:
                _refuse_outage(decided)
            return self._changes(diff, number, origin, bool(allow_outage), decided)

        return self._controller.change(make).addCallback(lambda revision: done[0])

    def _ask_engines(self, diff: CatalogDiff, lenient: bool) -> None:
        """What engines would refuse after minutes is refused now."""
        models = [*diff.added, *(change.new for change in diff.changed if change.replaced)]
        problems = [problem for model in models for problem in self._problems(model)]
        if problems and not lenient:
            raise Invalid(problems)
        for problem in problems:
            self.log.error("{problem}", problem=str(problem))

    def _problems(self, model: Model) -> list[Problem]:
        adapter = self._controller.reckoner.adapter(model.profile.engine) if model.profile else None
        if adapter is None or model.profile is None:
            return []
        try:
            found = adapter.problems(model.profile, None, None, None, Flags())
        except Exception:
            self.log.failure("the adapter of {engine} cannot judge {model}", engine=model.profile.engine, model=model.name)
            return []
        return [evolve(problem, where=".".join(filter(None, ("models", model.name, problem.where)))) for problem in found]

    def _decide(self, diff: CatalogDiff) -> tuple[Decision, ...]:
        """How each model whose profile changes will be brought to it; of others, which may be changing already, nothing."""
        changed = {change.name for change in diff.changed if change.old.profile != change.new.profile}
        found = decisions(evolve(self._controller.world(), catalog=diff.catalog))
        return tuple(decision for decision in found if decision.model in changed)

    def _pinned(self, catalog: Catalog) -> list[str]:
        """A sentence on each model that stays at an earlier profile, since this catalog says what has been rolled back before."""
        pairs = [(model, self._controller.truth.rollouts.get(model.name)) for model in catalog.models]
        pinned = [record for model, record in pairs if record and record.pinned and record.target == model.profile]
        return [f"{record.model} stays as it is: {record.reason}. {tried_again(record)}" for record in pinned]

    def _changes(self, diff: CatalogDiff, number: int, origin: str, outage: bool, decided: Iterable[Decision]) -> list[Change]:
        controller = self._controller
        now = controller.clocks.wall()
        draft = Draft(evolve(controller.world(), catalog=diff.catalog))
        replicas = group(draft.shards.values())
        for model in diff.removed:
            for replica in replicas.get(model.name, []):
                if not replica.leaving and all(shard.wanted is Wanted.RUN for shard in replica.shards):
                    leave(draft, replica, f"{model.name} was removed from the catalog")
        for change in diff.changed:
            if change.new.profile is not None:
                self._roll_out(draft, change.new, replicas.get(change.name, []), outage)
        text = f"catalog {number} ({origin}): " + "; ".join(describe(diff, decided))
        event = FleetEvent(now, "catalog", f"catalog {number}", text, epoch=controller.leadership.epoch)
        revision = CatalogRevision(number, dump_catalog(diff.catalog), now, origin)
        forgotten = [Drop("rollout", model.name) for model in diff.removed if model.name in controller.truth.rollouts]
        news = differences(controller.truth, controller.truth.nodes, draft.shards, draft.events, draft.rollouts)
        return [revision, event, *news, *forgotten]

    def _roll_out(self, draft: Draft, model: Model, replicas: list[Replica], outage: bool) -> None:
        """Begin the rollout with the revision, so that whoever looks next sees that it is not done."""
        before = draft.rollouts.get(model.name)
        follow_rollout(draft, model, replicas)
        if outage:
            loras.allow_outage(draft, model, replicas)
        record = draft.rollouts.get(model.name)
        if record is not None and record is not before:
            draft.put_rollout(evolve(record, outage=outage))


def _refuse_outage(decided: Iterable[Decision]) -> None:
    found = [f"{decision.model}: {decision.text}" for decision in decided if decision.way is Way.OUTAGE]
    if found:
        raise Outage(f"{'; '.join(found)}. Nothing was changed. To have that: --allow-outage")


def describe(diff: CatalogDiff, decided: Iterable[Decision] = ()) -> list[str]:
    """A sentence per model that differs or is kept; of one whose replicas change also how."""
    ways = {decision.model: decision.text for decision in decided}
    lines = [f"add {model.name}" for model in diff.added]
    for change in diff.changed:
        facts = ", ".join(f"{key} {_show(old)} -> {_show(new)}" for key, old, new in change.facts[:6])
        lines.append(f"change {change.name}: {facts}" + (f": {ways[change.name]}" if change.name in ways else ""))
    lines += [f"remove {model.name}: its replicas are drained" for model in diff.removed]
    lines += [f"leave {model.name}: missing from the file, kept (remove it with --allow-removals)" for model in diff.kept]
    return lines or ["nothing changes"]


def _show(value: object) -> str:
    return "none" if value is None else str(value)
