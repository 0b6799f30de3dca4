"""llmgw-server put together: sockets, router workers, store, leadership, fleet port, controller; and their order.

The router comes first: its sockets are bound and its workers route by the table on disk before the store is even opened, so a
database that is away delays orders, not answers. What nobody but an operator can change (an address in use, a store locked by
another server, a bad certificate) ends the daemon with one sentence; what may pass by itself is tried again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from attrs import evolve
from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.config.server import ServerSettings
from llmgw.config.storeurl import POSTGRESQL_NOT_YET
from llmgw.daemon import give_up
from llmgw.errors import LlmgwError
from llmgw.fleet.shard import replica_of
from llmgw.server import live
from llmgw.server.catalogs import Catalogs
from llmgw.server.controller import Controller
from llmgw.server.fleetport import FleetPort
from llmgw.server.keys import Keys
from llmgw.server.metrics import fleet_metrics
from llmgw.server.operations import Operations
from llmgw.server.status import Status
from llmgw.server.usage import UsageSpool
from llmgw.server.workers import RouterWorkers
from llmgw.store.errors import StoreError
from llmgw.store.lease import SqliteLeadership
from llmgw.store.lockfile import LockFile
from llmgw.store.sql import SqlStore
from llmgw.wire.tls import TlsIdentity, read_identity

PASSING = ("full", "unreachable", "timeout", "busy", "failed")
AGAIN = 5.0
STOP_WITHIN = 1.8


class Server(Service):
    """The daemon.

    @param workers: other router workers than the settings' own, for tests.
    @ivar controller: the control plane; also where there is no fleet, since keys and the catalog go through it.
    """

    log = Logger()

    def __init__(self, settings: ServerSettings, reactor: Any, workers: RouterWorkers | None = None) -> None:
        self.setName("server")
        self._reactor = reactor
        self._at_once = False
        self._up: list[Callable[[], None]] = []
        self._is_up = False
        self._starting: Deferred[None] | None = None
        self._identity: TlsIdentity | None = None
        self._lock = LockFile(settings.state / "server.lock")
        self.settings = settings
        self.workers = workers or RouterWorkers(reactor, settings.router, settings.state)
        self.port: FleetPort | None = None
        self._build("", settings.name)

    def _build(self, fleet: str, name: str) -> None:
        """Make what depends on who we are, which only the certificate knows."""
        settings = self.settings
        addresses = (str(settings.fleet.advertise),) if settings.fleet else ()
        self.store = SqlStore(settings.store, self._reactor, fleet, name)
        self.leadership = SqliteLeadership(self.store, addresses)
        self.controller = Controller(
            self._reactor, name, settings.timing, self.store, self.leadership, self.workers, random.SystemRandom()
        )
        self.leadership.watch(self.controller.epoch_moved)
        self.usage = UsageSpool(self.store, self._reactor, self.controller.clocks.wall)
        self.catalogs = Catalogs(self.controller)
        self.keys = Keys(self.controller)
        self.operations = Operations(self.controller)
        expires = lambda: self.port.certificate_expires if self.port else None  # noqa: E731
        self.view = Status(self.controller, lambda: self.role, self.workers.in_flight, expires, settings.warnings)

    # What the tap asks.

    @property
    def role(self) -> str:
        """C{leader}, C{standby} or C{router}."""
        if self.settings.fleet is None:
            return "router"
        return "leader" if self.controller.leading and self.leadership.may_act() else "standby"

    def status(self) -> str:
        """One line for C{systemctl status}."""
        return self.view.line()

    def when_up(self, ready: Callable[[], None]) -> None:
        """Call C{ready} once everything that should listen does."""
        self._up.append(ready)

    def interrupted(self) -> None:
        """SIGINT: the router stops accepting at once."""
        self._at_once = True

    def metrics(self) -> Deferred[str]:
        """The Prometheus text of routers and control plane."""
        return self.workers.metrics().addCallback(lambda text: text + fleet_metrics(self.view.all()))

    async def top(self) -> dict[str, Any]:
        """What the routers are doing, replica by replica, with what the engines say of themselves."""
        text = await self.workers.metrics()
        reports = [report for here in self.controller.members.present.values() for report in here.told.shards.values()]
        loads = {replica_of(report.shard): report.load for report in reports if report.shard.endswith("/0")}
        return live.top(text, self.workers.table, loads, self.controller.clocks.wall())

    def reload(self, settings: ServerSettings) -> None:
        """SIGHUP: take the catalog and the certificates of a new file; the rest needs a restart.

        @raise LlmgwError: a certificate cannot be used; then nothing is taken.
        """
        if self.port is not None and settings.fleet is not None:
            self.port.reload(settings.fleet)
        self.workers.certificates()
        self.controller.routing.forget_secrets()
        fixed = evolve(settings, catalog=self.settings.catalog, warnings=self.settings.warnings)
        if fixed != self.settings:
            self.log.warn("only models, secrets and certificates are reloaded; the other changes need a restart")
        self._take_catalog(settings, "SIGHUP")

    def _take_catalog(self, settings: ServerSettings, origin: str) -> None:
        applied = self.catalogs.apply(settings.catalog, origin)
        applied.addCallback(lambda done: self.log.info("{origin}: {what}", origin=origin, what="; ".join(done.lines)))
        applied.addErrback(self._refused, origin)

    def _refused(self, failure: Failure, origin: str) -> None:
        failure.trap(LlmgwError)
        self.log.error("{origin}: the catalog in force stays: {error}", origin=origin, error=str(failure.value))

    # Starting.

    def startService(self) -> None:
        """Begin; what cannot work is said in one sentence, and the daemon ends."""
        super().startService()
        try:
            self._listen()
        except (LlmgwError, OSError) as error:
            self.cannot_start(error)
            return
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._cannot)

    def _listen(self) -> None:
        if not self.settings.store.startswith("sqlite:"):
            raise LlmgwError(POSTGRESQL_NOT_YET)
        self.settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Before the router: it would take over the sockets of the server whose folder this is.
        self._lock.take()
        if self.settings.fleet is not None:
            self._identity = read_identity(self.settings.fleet.tls, "server")
            self._build(self._identity.own.fleet, self._identity.own.name)
        self.workers.listen()
        self.workers.on_demand = self.controller.demand.asked
        self.workers.on_usage = self.usage.add
        self.controller.routing.before = self.workers.table
        self.workers.start()

    def _cannot(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if not failure.check(LlmgwError):
            self.log.failure("while starting", failure)
        self.cannot_start(failure.value)

    def cannot_start(self, why: object) -> None:
        """End the daemon with one sentence.

        Its router ends with it, unless there was one before: that one must outlive a fault that the next start may not have.
        """
        self._at_once = not self.workers.taken_over
        give_up(self._reactor, f"llmgw-server cannot start: {why}")

    async def _start(self) -> None:
        opened = await self._open()
        await self.leadership.start()
        snapshot = await self.store.load()
        self.controller.begin(snapshot, opened.fresh)
        await self._first_catalog()
        self._serve_fleet()
        self.controller.go()
        self.usage.start()
        self._starting = None
        self._is_up = True
        for ready in self._up:
            ready()
        self.log.info("{name} is up: {status}", name=self.controller.name, status=self.status())

    async def _open(self) -> Any:
        """Open the store; wait for one that is only away."""
        while True:
            try:
                return await self.store.open()
            except StoreError as error:
                if error.code not in PASSING:
                    raise
                self.log.error("the store cannot be opened, the router goes on with its last table: {error}", error=str(error))
                self.controller.commits.failing = str(error)
            await deferLater(self._reactor, AGAIN)

    def _serve_fleet(self) -> None:
        settings, fleet = self.settings, self.settings.fleet
        if fleet is None or self._identity is None:
            return
        own = self._identity.own
        self.port = FleetPort(self._reactor, fleet, own.name, own.fleet, self.leadership, settings.timing, self.controller)
        self.controller.attach(self.port)
        self.port.startService()

    async def _first_catalog(self) -> None:
        """The start of a server on SQLite makes its file's models a revision."""
        await self.keys.recover(self.workers.table)
        try:
            done = await self.catalogs.apply(self.settings.catalog, f"start with {self.settings.path}", lenient=True)
        except StoreError:
            raise
        except LlmgwError as error:
            self.log.error("the catalog in force stays: {error}", error=str(error))
            self.controller.remarks = (*self.controller.remarks, f"{self.settings.path} was not taken: {error}")
        else:
            self.log.info("catalog {number}: {what}", number=done.revision, what="; ".join(done.lines))

    # Stopping.

    def stopService(self) -> Deferred[None]:
        """Let go of everything, in less than two seconds whatever the others do. Engines and router workers go on."""
        super().stopService()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self.controller.end()
        port = self.port.stopService() if self.port is not None and self.port.running else None
        released = self.leadership.release() if self.leadership.may_act() else None
        first = [self.workers.stop(self._at_once), *(each for each in (port, released) if each is not None)]
        first.append(self.usage.stop())
        await self._bounded(DeferredList(first, consumeErrors=True), "the links and the lease")
        await self._bounded(self.store.close(), "the store")
        self._lock.release()

    async def _bounded(self, work: Deferred[Any], what: str) -> None:
        work.addTimeout(STOP_WITHIN / 2, self._reactor)
        try:
            await work
        except Exception as error:  # nothing may keep the daemon from ending
            self.log.warn("stopping {what}: {error}", what=what, error=str(error) or type(error).__name__)


def make_server(settings: ServerSettings, reactor: Any) -> Server:
    """The server's service. Nothing is opened before it starts."""
    return Server(settings, reactor)
