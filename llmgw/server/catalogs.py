"""The catalog in force: a revision in the store. A file only ever proposes a new one."""

from __future__ import annotations

from attrs import evolve, frozen
from twisted.internet.defer import Deferred

from llmgw.config.catalog import CatalogDiff, diff_catalogs, dump_catalog
from llmgw.errors import LlmgwError
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Catalog
from llmgw.fleet.shard import Wanted
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
    ) -> Deferred[Applied]:
        """Make C{new} the catalog in force, with what it does not name kept.

        @raise Moved: the catalog in force is not C{check_revision}.
        @raise llmgw.errors.Invalid: a kept model and the new ones cannot stand together.
        """
        return Deferred.fromCoroutine(self._apply(new, origin, allow_removals, check_revision, dry_run))

    async def _apply(self, new: Catalog, origin: str, allow_removals: bool, check_revision: int | None, dry_run: bool) -> Applied:
        controller, done = self._controller, list[Applied]()

        def make() -> list[Change]:
            truth = controller.truth
            if check_revision is not None and check_revision != truth.catalog_revision:
                text = f"the catalog is revision {truth.catalog_revision} by now, not {check_revision}: look again, then apply"
                raise Moved(text)
            diff = diff_catalogs(truth.catalog, new, allow_removals)
            number = truth.catalog_revision + (not diff.empty)
            done.append(Applied(number, diff, tuple(describe(diff))))
            return [] if dry_run or diff.empty else self._changes(diff, number, origin)

        await controller.change(make)
        return done[0]

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
