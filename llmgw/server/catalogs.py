"""The catalog in force: a revision in the store. A file only ever proposes a new one."""

from __future__ import annotations

from attrs import evolve, frozen
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.config.catalog import CatalogDiff, diff_catalogs, dump_catalog
from llmgw.errors import Invalid, LlmgwError, Problem
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.shard import Wanted
from llmgw.interfaces import Flags
from llmgw.planning.replicas import group
from llmgw.planning.rollout import leave
from llmgw.planning.world import Draft
from llmgw.server.controller import Controller
from llmgw.server.truth import differences
from llmgw.store.records import CatalogRevision, Change


class Moved(LlmgwError):
    """The catalog is not the one that the caller has looked at."""


@frozen
class Applied:
    """What an apply did, or would do. C{lines} are sentences for people, one a model."""

    revision: int
    diff: CatalogDiff
    lines: tuple[str, ...]


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
    ) -> Deferred[Applied]:
        """Make C{new} the catalog in force, with what it does not name kept.

        @param lenient: take profiles, too, that their engines will refuse, and only log that: at a start there may be nothing
            else to serve.
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
            done.append(Applied(number, diff, tuple(describe(diff))))
            return [] if dry_run or diff.empty else self._changes(diff, number, origin)

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

    def _changes(self, diff: CatalogDiff, number: int, origin: str) -> list[Change]:
        controller = self._controller
        now = controller.clocks.wall()
        draft = Draft(evolve(controller.world(), catalog=diff.catalog))
        replicas = group(draft.shards.values())
        for model in diff.removed:
            for replica in replicas.get(model.name, []):
                if not replica.leaving and all(shard.wanted is Wanted.RUN for shard in replica.shards):
                    leave(draft, replica, f"{model.name} was removed from the catalog")
        text = f"catalog {number} ({origin}): " + "; ".join(describe(diff))
        event = FleetEvent(now, "catalog", f"catalog {number}", text, epoch=controller.leadership.epoch)
        revision = CatalogRevision(number, dump_catalog(diff.catalog), now, origin)
        nodes = controller.truth.nodes
        return [revision, *differences(controller.truth, nodes, draft.shards, draft.events), event]


def describe(diff: CatalogDiff) -> list[str]:
    """A sentence per model that differs or is kept."""
    lines = [f"add {model.name}" for model in diff.added]
    for change in diff.changed:
        facts = ", ".join(f"{key} {_show(old)} -> {_show(new)}" for key, old, new in change.facts[:6])
        lines.append(f"change {change.name}: {facts}" + ("; its replicas are replaced one at a time" if change.replaced else ""))
    lines += [f"remove {model.name}: its replicas are drained" for model in diff.removed]
    lines += [f"leave {model.name}: missing from the file, kept (remove it with --allow-removals)" for model in diff.kept]
    return lines or ["nothing changes"]


def _show(value: object) -> str:
    return "none" if value is None else str(value)
