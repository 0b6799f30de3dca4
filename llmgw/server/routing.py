"""The routing table on its way to the routers, and their word that they no longer route to a replica.

A table that equals the one in force is not published again. A drain waits for the acknowledgement of every router; one that
does not answer in time is replaced by its owner, and its successor reads the new table.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.errors import LlmgwError
from llmgw.fleet.shard import ShardReport, ShardState, Wanted, replica_of
from llmgw.planning.loras import part, parting
from llmgw.planning.reconcile import Outcome
from llmgw.router.table import Table
from llmgw.server.doubts import Doubts
from llmgw.server.membership import Membership
from llmgw.server.routes import Known, address_of, build, parts_of
from llmgw.server.truth import Truth

SERVING = (ShardState.READY, ShardState.DRAINING)
QUIET = 30.0
BANNED = 60.0


class ServersBehind(LlmgwError):
    """Other servers that are there do not route by a table yet, so nothing that it takes away may end."""


class Routers(Protocol):
    """What is used of L{llmgw.server.workers.RouterWorkers}."""

    def publish(self, table: Table) -> int:
        """Have every worker route by this table; returns the version it got."""

    def when_routing(self, version: int, timeout: float) -> Deferred[Any]:
        """Fires when every worker routes by this version or a later one."""

    def in_flight(self, endpoint_id: str) -> int:
        """How many requests run on an endpoint, over all workers."""

    def load(self, endpoint_id: str) -> int:
        """How many requests an endpoint has, others' than ours included, as far as its engine tells."""

    def waiting(self, model: str) -> int | None:
        """How many requests wait for a model, over all workers; None while that is not known."""

    def reported(self, endpoint_id: str, requests: int | None) -> None:
        """How many requests an engine says it has, whoever sent them; None: it says nothing any more."""


class Routing:
    """The table in force.

    @ivar doubts: replicas whose requests fail.
    @ivar before: the last table, at first the one that was on disk.
    @ivar unrouted: replicas that are leaving, and adapters (see L{part}), and that no router sends requests to any more.
    @ivar problem: why the last table could not be given to the routers, empty if it could.
    @ivar draining: whether any replica is on its way out, so that its requests should be watched.
    """

    log = Logger()
    PATIENCE = 10.0

    def __init__(self, routers: Routers, news: Callable[[], None], steady: Callable[[], float] = time.monotonic) -> None:
        self._routers = routers
        self._news = news
        self._steady = steady
        self._told: dict[tuple[str, str], float] = {}
        self._denied: dict[tuple[object, ...], float] = {}
        self._secrets: dict[str, str] = {}
        self._waiting: set[str] = set()
        self._leaving: set[str] = set()
        self._parts: dict[str, list[str]] = {}
        self._published = False
        self.doubts = Doubts(steady, news)
        self.before: Table | None = None
        self.unrouted: set[str] = set()
        self.problem = ""

    @property
    def draining(self) -> bool:
        """See the class."""
        return bool(self._leaving)

    def forget_secrets(self) -> None:
        """Read key files again: they may have changed."""
        self._secrets.clear()
        self._published = False

    def idle(self) -> frozenset[str]:
        """Leaving replicas on which nothing runs any more."""
        there = self.unrouted & self._leaving
        return frozenset(one for one in there if not sum(map(self._routers.in_flight, self._parts.get(one, [one]))))

    def load(self, endpoint_id: str) -> int:
        """How many requests an endpoint has, whoever sent them."""
        return self._routers.load(endpoint_id)

    def failed(self, endpoint_id: str, kind: str, text: str, open: bool = False) -> None:
        """A request has failed at an endpoint. That is for breakers, but for a refused key: another engine has its port. C{open}:
        a breaker is.
        """
        now = self._steady()
        if open:
            self.doubts.failed(endpoint_id, text, again=kind == "still")
        if kind == "still":
            return
        if now - self._told.get((endpoint_id, kind), -QUIET) >= QUIET:
            self._told = {told: at for told, at in self._told.items() if now - at < QUIET} | {(endpoint_id, kind): now}
            self.log.warn("Requests to {id} fail: it {text}.", id=endpoint_id, text=text)
        if kind != "key" or self.before is None:
            return
        for one in self.before.endpoints:
            if one.id == endpoint_id and not one.static:
                self._denied[address_of(one)] = now + BANNED
                self._news()

    def denied(self) -> frozenset[tuple[object, ...]]:
        """Addresses that refused their own engine's key a moment ago (see L{address_of})."""
        now = self._steady()
        self._denied = {address: until for address, until in self._denied.items() if until > now}
        return frozenset(self._denied)

    @property
    def due(self) -> bool:
        """Whether an endpoint that was left out is to be tried again now."""
        return any(until <= self._steady() for until in self._denied.values())

    def heard(self, shards: Iterable[ShardReport], away: bool = False) -> None:
        """A node has reported these shards, or is C{away}: what their engines say of their load corrects the routers' counts."""
        for shard in shards:
            if shard.rank == 0 or shard.url:
                load, serves = shard.load, shard.state in SERVING and not away
                known = serves and load.running is not None
                id = shard.shard if shard.rank else replica_of(shard.shard)
                self._routers.reported(id, (load.running or 0) + (load.waiting or 0) if known else None)

    def publish(self, truth: Truth, members: Membership, outcome: Outcome | None, epoch: int) -> None:
        """Make the table from the truth and give it to the routers if it says anything new."""
        known = Known(
            truth.catalog,
            truth.nodes,
            truth.shards,
            truth.keys,
            members.report_of,
            {name: here.told for name, here in members.present.items()},
            reasons(outcome),
            epoch,
            self._secret,
            self.denied(),
        )
        table = build(known, self.before)
        if not self._published or self.before is None or not same(table, self.before):
            try:
                version = self._routers.publish(table)
            except (OSError, LlmgwError) as error:
                self.problem = f"the routing table cannot be written, the old one stays in force: {error}"
                self.log.error("{problem}", problem=self.problem)
                return
            self.problem = ""
            self.before = msgspec.structs.replace(table, version=version)
            self._published = True
        self._follow_leaving(truth)

    def when_current(self) -> Deferred[str]:
        """Fires with an empty text when every router routes by the table in force; after L{PATIENCE} with who does not."""
        if self.problem:
            return succeed(self.problem)
        version = self.before.version if self.before is not None else 0
        return self._routers.when_routing(version, self.PATIENCE).addCallbacks(lambda _: "", self._warn_late)

    def _secret(self, path: str) -> str:
        if path not in self._secrets:
            self._secrets[path] = Path(path).read_text(encoding="utf-8").strip()
        return self._secrets[path]

    def _follow_leaving(self, truth: Truth) -> None:
        """Wait for the word of all routers on each replica, and each adapter of one, that is leaving."""
        shards = [record for record in truth.shards.values() if record.allocation is not None]
        self._leaving = {replica_of(r.shard) for r in shards if r.wanted is not Wanted.RUN and r.state is not ShardState.SLEEPING}
        self._leaving |= {part(record.shard, one.name) for record in shards for one in parting(record)}
        self._parts = parts_of(r for r in shards if r.wanted is not Wanted.RUN)
        self.unrouted &= self._leaving
        self._waiting &= self._leaving
        fresh = self._leaving - self.unrouted - self._waiting
        if not fresh or self.before is None:
            return
        self._waiting |= fresh
        when = self._routers.when_routing(self.before.version, self.PATIENCE)
        when.addCallbacks(self._acknowledged, self._late, callbackArgs=(fresh,), errbackArgs=(fresh,))
        when.addErrback(lambda failure: self.log.failure("while waiting for routers", failure))

    def _late(self, failure: Failure, replicas: set[str]) -> None:
        """A worker that is silent for so long has been replaced, and its successor reads the table on disk.

        Of the workers of another server that is there nobody knows that: their word is waited for again.
        """
        self._warn_late(failure)
        if failure.check(ServersBehind):
            self._waiting -= replicas
            self._news()
        else:
            self._acknowledged(None, replicas)

    def _warn_late(self, failure: Failure) -> str:
        failure.trap(LlmgwError)
        self.log.warn("not every router has acknowledged the routing table: {error}", error=str(failure.value))
        return str(failure.value)

    def _acknowledged(self, _: object, replicas: set[str]) -> None:
        self._waiting -= replicas
        self.unrouted |= replicas & self._leaving
        self._news()


def same(one: Table, other: Table) -> bool:
    """Whether two tables route alike. What the routers' owner fills in does not count."""
    fields = operator.attrgetter("models", "keys", "epoch", "stopping")
    return fields(one) == fields(other) and [msgspec.structs.replace(e, row=0) for e in one.endpoints] == [
        msgspec.structs.replace(e, row=0) for e in other.endpoints
    ]


def reasons(outcome: Outcome | None) -> dict[str, str]:
    """By model, why it has fewer replicas than it should."""
    if outcome is None:
        return {}
    return dict(outcome.notes) | {model: pending.explanation.line() for model, pending in outcome.pending.items()}
