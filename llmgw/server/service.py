"""llmgw-server put together: sockets, router workers, store, leadership, fleet port; and their order.

The router comes first: its sockets are bound and its workers route by the table on disk before the store is even opened, so a
database that is away delays orders, not answers. The fleet port comes with it, and tells agents to wait or where to go until this
server leads. What nobody but an operator can change (an address in use, a store locked by another server, a bad certificate)
ends the daemon with one sentence; what may pass by itself is tried again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from attrs import evolve, fields
from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.config.server import ServerSettings
from llmgw.daemon import give_up
from llmgw.errors import LlmgwError
from llmgw.fleet.shard import replica_of
from llmgw.server import live
from llmgw.server.catalogs import Catalogs
from llmgw.server.company import Company
from llmgw.server.controller import Clocks, Controller
from llmgw.server.fleetport import FleetPort
from llmgw.server.https import HttpsCertificate
from llmgw.server.keys import Keys
from llmgw.server.metrics import fleet_metrics
from llmgw.server.operations import Operations
from llmgw.server.reception import Reception
from llmgw.server.status import Status
from llmgw.server.succession import PASSING, Succession
from llmgw.server.tenure import Proposal, Tenure
from llmgw.server.term import Surroundings, Term
from llmgw.server.usage import UsageSpool
from llmgw.server.workers import RouterWorkers
from llmgw.store.errors import StoreError
from llmgw.store.leadership import make_leadership
from llmgw.store.lockfile import LockFile
from llmgw.store.records import Opened
from llmgw.store.sql import SqlStore
from llmgw.wire.tls import read_identity

AGAIN = 5.0
# The interpreter's own end takes a few tenths more, and all of it has to be less than two seconds.
STOP_WITHIN = 1.4


class Server(Service):
    """The daemon.

    @param workers: other router workers than the settings' own, for tests.
    @ivar company: the other servers of the store; None over SQLite, where there are none.
    """

    log = Logger()

    def __init__(self, settings: ServerSettings, reactor: Any, workers: RouterWorkers | None = None) -> None:
        self.setName("server")
        self._reactor = reactor
        self._at_once = False
        self._up: list[Callable[[], None]] = []
        self._is_up = False
        self._starting: Deferred[None] | None = None
        self._lock = LockFile(settings.state / "server.lock")
        self.settings = settings
        self.workers = workers or RouterWorkers(reactor, settings.router, settings.state)
        self.port: FleetPort | None = None
        self.https = HttpsCertificate(settings.router.tls, reactor, Clocks().wall)
        self._build("", settings.name)

    def _build(self, fleet: str, name: str) -> None:
        """Make what depends on who we are, which only the certificate knows."""
        settings = self.settings
        addresses = (str(settings.fleet.advertise),) if settings.fleet else ()
        self.store = SqlStore(settings.store, self._reactor, fleet, name)
        self.leadership = make_leadership(self.store, settings.timing, self._reactor, random.SystemRandom(), addresses)
        here = Surroundings(
            self._reactor, name, settings.timing, self.store, self.leadership, random.SystemRandom(), Clocks(), self._admin_of
        )
        self.reception = Reception(name, self.leadership)
        self.company = None if settings.store.startswith("sqlite:") else Company(here, self.workers, settings)
        self.succession = Succession(
            here, self.reception, lambda: self._stand(here), lambda: self._lead(here), self._proposal,
            lambda: self.workers.table, self._cannot,
        )  # fmt: skip
        self.leadership.watch(self.succession.moved)
        self.usage = UsageSpool(self.store, self._reactor, here.clocks.wall, settings.state / "usage.json")

    def _stand(self, here: Surroundings) -> Term:
        return Term(here, self.workers) if self.company is None else self.company.stand_by()

    def _lead(self, here: Surroundings) -> Tenure:
        return Tenure(here, self.workers if self.company is None else self.company.shared_routers(), self.port)

    def _proposal(self) -> Proposal:
        return Proposal(self.settings.catalog, str(self.settings.path), rules=self.company is None)

    def _admin_of(self, holder: str) -> str:
        return self.company.admin_of(holder) if self.company is not None else ""

    # What the tap and the admin API ask.

    @property
    def controller(self) -> Controller:
        """The control plane, which is another one with each leadership; also where there is no fleet, since keys and the
        catalog go through it.
        """
        return self.succession.term.controller

    @property
    def catalogs(self) -> Catalogs:
        """The catalog of the term in force."""
        return self.succession.term.catalogs

    @property
    def keys(self) -> Keys:
        """The keys of the term in force."""
        return self.succession.term.keys

    @property
    def operations(self) -> Operations:
        """What operators order, to the term in force."""
        return self.succession.term.operations

    @property
    def view(self) -> Status:
        """What people ask to see, as of now."""
        expires = lambda: self.port.certificate_expires if self.port else None  # noqa: E731
        warnings = (*self.settings.warnings, *(self.company.warnings() if self.company else ()))
        servers = self.company.servers if self.company else list
        return Status(self.controller, lambda: self.role, self._in_flight, self.https, expires, warnings, servers)

    def _in_flight(self, endpoint: str) -> int:
        """Over all servers, as last told."""
        return self.workers.in_flight(endpoint) + (self.company.peers.in_flight(endpoint) if self.company else 0)

    @property
    def role(self) -> str:
        """C{leader}, C{standby} or C{router}."""
        if self.settings.fleet is None and self.company is None:
            return "router"
        return "leader" if self.succession.leading else "standby"

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

    def reload(self, settings: ServerSettings) -> Deferred[None]:
        """SIGHUP: take the certificates of a new file, and where we lead its catalog; the rest needs a restart.

        What the file says of revoked certificates is the admin port's to take. The Deferred fails with what is not in force now.

        @raise LlmgwError: a certificate cannot be used; then nothing is taken.
        """
        self.https.read()
        if self.port is not None and settings.fleet is not None:
            self.port.reload(settings.fleet)
        self.workers.certificates()
        self.controller.routing.forget_secrets()
        old = self.settings
        admin = evolve(settings.admin, revoked=old.admin.revoked) if settings.admin and old.admin else settings.admin
        fixed = evolve(settings, catalog=old.catalog, warnings=old.warnings, admin=admin)
        changed = [each.name for each in fields(ServerSettings) if getattr(fixed, each.name) != getattr(old, each.name)]
        if self.company is not None:
            self.company.file = settings.catalog
            self.company.follower.again()
        return Deferred.fromCoroutine(self._take_catalog(settings, changed))

    async def _take_catalog(self, settings: ServerSettings, changed: list[str]) -> None:
        """C{changed} are settings that only a restart changes."""
        if self.company is None or self.succession.leading:
            try:
                done = await self.catalogs.apply(settings.catalog, "SIGHUP")
            except LlmgwError as error:
                raise LlmgwError(f"the catalog in force stays: {error}") from None
            self.log.info("SIGHUP: {what}", what="; ".join(done.lines))
        if changed:
            what = f"{', '.join(changed)} changed: that takes a restart of llmgw-server, which cuts no stream"
            raise LlmgwError(f"{what}; models, secrets and certificates are in force")

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
        fleet = self.settings.fleet
        self.settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Before the router: it would take over the sockets of the server whose folder this is.
        self._lock.take()
        self.https.start()
        if fleet is not None:
            own = read_identity(fleet.tls, "server").own
            self._build(own.fleet, own.name)
            timing = self.settings.timing
            self.port = FleetPort(self._reactor, fleet, own.name, own.fleet, self.leadership, timing, self.reception)
        self.workers.listen()
        self.workers.on_demand = self._asked
        self.workers.on_usage = self.usage.add
        self.workers.on_failure = self._request_failed
        self.workers.on_recovered = self._recovered
        self.workers.on_ended = self._worker_ended
        self.usage.on_today = self.workers.used_today
        self.workers.start()
        if self.port is not None:
            self.succession.port = self.port
            self.port.startService()

    def _request_failed(self, endpoint: str, kind: str, text: str, open: bool = False) -> None:
        self.controller.routing.failed(endpoint, kind, text, open)

    def _worker_ended(self, number: int, pid: int | None, why: str) -> None:
        self.controller.notes.add(
            "router_worker", f"router worker {number} of {self.controller.name} (pid {pid}) was replaced: {why}"
        )

    def _recovered(self, endpoint: str) -> None:
        self.controller.routing.doubts.recovered(endpoint)

    def _asked(self, model: str) -> None:
        """A client waits for a model that sleeps: a standby passes it on."""
        self.controller.demand.asked(model)
        if self.company is not None:
            self.company.asked(model)

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
        self.succession.fresh = opened.fresh
        await self._contend()
        await self.succession.begun()
        if not self.running:
            return
        self.usage.start()
        self._starting = None
        self._is_up = True
        for ready in self._up:
            ready()
        self.log.info("{name} is up: {status}", name=self.controller.name, status=self.status())

    async def _open(self) -> Opened:
        """Open the store; wait for one that is only away."""
        while True:
            try:
                opened: Opened = await self.store.open()
                return opened
            except StoreError as error:
                if error.code not in PASSING:
                    raise
                self.log.error("the store cannot be opened, the router goes on with its last table: {error}", error=str(error))
                self.controller.commits.failing = str(error)
            await deferLater(self._reactor, AGAIN)

    async def _contend(self) -> None:
        """Ask for the lead. Among several servers one is up when it has asked, and is none the worse for not getting it."""
        if self.company is None:
            await self.leadership.start()
            return
        self.company.start(self.succession)
        self.reception.stand_by()
        try:
            await self.leadership.start()
        except StoreError as error:
            self.log.error("who leads is not known yet: {error}", error=str(error))

    # Stopping.

    def stopService(self) -> Deferred[None]:
        """Let go of everything, in less than two seconds whatever the others do. Engines and router workers go on."""
        super().stopService()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self.succession.end()
        released = self.leadership.release() if self.leadership.may_act() or self.company is not None else None
        port = self.port.stopService() if self.port is not None and self.port.running else None
        first = [self.workers.stop(self._at_once), *(each for each in (port, released) if each is not None)]
        first.append(self.usage.stop())
        self.https.stop()
        if self.company is not None:
            first.append(self.company.stop())
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
