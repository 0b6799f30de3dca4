"""What a server does for its routers while another one leads: it gives them the leader's table as the store has it.

A store that is away, or that was lost and has no table, takes nothing from them: they go on by the table they have. The keys of
upstreams that nobody here started are not in the store; they come from this server's own files, at the paths of the catalog.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace
from twisted.logger import Logger

from llmgw.errors import LlmgwError
from llmgw.fleet.model import Catalog
from llmgw.router.table import RoutedEndpoint, Table, read_text
from llmgw.store.servers import SharedTable


class Workers(Protocol):
    """What is used of L{llmgw.server.workers.RouterWorkers}."""

    table: Table | None

    def publish(self, table: Table) -> int:
        """Put a table in force; the version it gets here."""

    def versions(self) -> dict[int, int]:
        """By worker, the version that it routes by."""

    def in_flight(self, endpoint: str) -> int:
        """How many requests are under way there."""


class Follower:
    """The shared table on its way to this server's workers.

    @ivar version: of the shared table that was last given to them, 0 for none.
    """

    log = Logger()

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._local = 0
        self._trouble = ""
        self._known: set[str] = set()
        self.version = 0

    def take(self, shared: SharedTable, catalog: Catalog) -> None:
        """A table came. One that cannot be used leaves the one before in force, and is tried again when it comes again."""
        self.version = shared.version
        try:
            table = with_keys(read_text(shared.text), catalog, self._workers.table, self._secret)
            self._local = self._workers.publish(table)
        except (LlmgwError, OSError) as error:
            self.version = 0
            if self._trouble != str(error):
                self.log.error("table {version} cannot be routed by yet: {error}", version=shared.version, error=str(error))
            self._trouble = str(error)
        else:
            self._trouble = ""

    def again(self) -> None:
        """Another leader may have shared a table, or the catalog or a key file has changed: take the table anew."""
        self.version = 0

    def routed(self) -> int:
        """The version of the shared table by which all workers route; 0 if they do not yet, or by none."""
        versions = self._workers.versions().values()
        return self.version if versions and all(each >= self._local for each in versions) else 0

    def routes(self, local: int) -> bool:
        """Whether all workers route by this version of their own, or a later one."""
        return all(each >= local for each in self._workers.versions().values())

    def in_flight(self, besides: set[str]) -> dict[str, int]:
        """By endpoint what runs there: those of the table, of tables before while anything runs, and C{besides}."""
        table = self._workers.table
        names = self._known | besides | {one.id for one in (table.endpoints if table else ())}
        found = {name: count for name in names if (count := self._workers.in_flight(name))}
        # A worker that has not read the newest table yet may still send a request where only the one before does.
        self._known = set(found) | ({one.id for one in table.endpoints} if table else set()) if self._settled() else names
        return found

    def _settled(self) -> bool:
        table, versions = self._workers.table, self._workers.versions().values()
        return table is not None and bool(versions) and all(each >= table.version for each in versions)

    @staticmethod
    def _secret(path: str) -> str:
        return Path(path).read_text(encoding="utf-8").strip()


def with_keys(table: Table, catalog: Catalog, before: Table | None, secret: Callable[[str], str]) -> Table:
    """The table with the keys of static upstreams, which the store does not have."""
    old = {one.id: one for one in (before.endpoints if before else ()) if one.static}
    endpoints = tuple(_with_key(one, catalog, old.get(one.id), secret) if one.static else one for one in table.endpoints)
    return replace(table, endpoints=endpoints)


def _with_key(one: RoutedEndpoint, catalog: Catalog, old: RoutedEndpoint | None, secret: Callable[[str], str]) -> RoutedEndpoint:
    name, _, number = one.id.removeprefix("static:").rpartition("/")
    model = catalog.get(name)
    listed = model.endpoints[int(number)] if model and number.isdecimal() and int(number) < len(model.endpoints) else None
    if listed is None or not listed.key_file:
        same = listed is None and old is not None and (old.host, old.port, old.base) == (one.host, one.port, one.base)
        return replace(one, key=old.key) if same and old is not None else one
    try:
        return replace(one, key=secret(listed.key_file))
    except (OSError, ValueError) as error:
        Follower.log.error("{id} is asked without a key: {error}", id=one.id, error=str(error))
        return one
