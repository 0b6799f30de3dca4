"""A real server in the test's process: real store, real fleet port and admin socket; router workers and agents are simulated."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock, deferLater
from twisted.internet.threads import deferToThread

from llmgw.admin.api import make_admin
from llmgw.cli.client import Client, Local
from llmgw.config.server import Address, FleetSettings, RouterSettings, ServerSettings, TlsFiles
from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.timing import Timing
from llmgw.pki import certificate_text, key_text
from llmgw.router.table import read_table, write_table
from llmgw.server.service import Server
from llmgw.testing.certificates import Fleet
from llmgw.testing.simagents import SimAgent
from llmgw.testing.simserver import SimRouters


class StillRouters(SimRouters):
    """Router workers without processes: their table is on disk, they route by it at once."""

    def __init__(self, folder: Path) -> None:
        self._time = Clock()
        super().__init__(self._time)
        self.delay = 0.0
        self.taken_over = 0
        self.path = folder / "table.json"
        self.stopped: list[bool] = []

    def listen(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.table = read_table(self.path)

    def start(self) -> None:
        pass

    def publish(self, table):
        version = super().publish(table)
        self._time.advance(0)
        write_table(self.path, self.table)
        return version

    def when_routing(self, version, timeout):
        return succeed(None)

    def certificates(self) -> None:
        pass

    def used_today(self, tokens, now) -> None:
        pass

    def metrics(self) -> Deferred[str]:
        return succeed("llmgw_router_up 1\n")

    def stop(self, at_once: bool) -> Deferred[None]:
        self.stopped.append(at_once)
        return succeed(None)


def write_pki(folder: Path, fleet: Fleet) -> TlsFiles:
    folder.mkdir(exist_ok=True)
    pair = fleet.server("cp1")
    (folder / "ca.pem").write_bytes(certificate_text(fleet.authority.certificate))
    (folder / "cp1.pem").write_bytes(certificate_text(pair.certificate))
    (folder / "cp1.key").touch(mode=0o600)
    (folder / "cp1.key").write_bytes(key_text(pair.key))
    return TlsFiles(folder / "cp1.pem", folder / "cp1.key", folder / "ca.pem")


class Rig:
    """One server."""

    TIMING = Timing(heartbeat=0.5, lost_after=5.0, failover_grace=2.0, stop_grace=1.0, drain=5.0, backoff=0.2)

    def __init__(self, folder: Path, *models: Model, fleet: bool = True) -> None:
        address = Address("127.0.0.1", 0)
        tls = write_pki(folder / "pki", Fleet()) if fleet else None
        self.settings = ServerSettings(
            path=folder / "server.yaml",
            name="cp1",
            router=RouterSettings(listen=address),
            fleet=FleetSettings(address, address, tls) if tls else None,
            socket=folder / "admin.sock",
            store=f"sqlite:///{folder / 'state' / 'llmgw.db'}",
            state=folder / "state",
            timing=self.TIMING,
            catalog=Catalog(models),
        )
        self.client = Client(Local(str(self.settings.socket)))
        self.agents: dict[str, SimAgent] = {}
        self.make()

    def make(self) -> None:
        self.routers = StillRouters(self.settings.state / "router")
        self.server = Server(self.settings, reactor, self.routers)  # type: ignore[arg-type]
        self.admin = make_admin(self.settings, self.server, reactor)

    async def start(self) -> None:
        up: Deferred[None] = Deferred()
        self.server.when_up(lambda: up.callback(None))
        self.server.startService()
        self.admin.startService()
        await up.addTimeout(10, reactor)

    async def stop(self) -> None:
        await self.admin.stopService()
        await self.server.stopService()

    async def get(self, path: str, /, **query: Any) -> Any:
        return await deferToThread(self.client.get, path, **query)

    async def post(self, path: str, /, **body: Any) -> Any:
        return await deferToThread(self.client.post, path, **body)

    def link(self, name: str, devices: int = 0, **more: Any) -> SimAgent:
        """A simulated node registers."""
        agent = self.agents.setdefault(name, SimAgent(name, devices, random.Random(1), load=0.1, grace=0.1, **more))
        self.server.controller.joined(name, f"s-{name}", agent.register())
        agent.say = lambda message: self._hear(name, message)
        return agent

    def _hear(self, name: str, message: Any) -> None:
        controller = self.server.controller
        if type(message).__name__ == "Done":
            controller.done(name, f"s-{name}", message)
        else:
            controller.report(name, f"s-{name}", message)

    def carry(self) -> None:
        """Be the link: hand every node its orders as they would be sent, and let its engines go on."""
        controller = self.server.controller
        from llmgw.planning.orders import orders

        wanted = orders(controller.truth.shards.values(), controller.truth.nodes, controller.routing.unrouted, self.TIMING)
        for name, agent in self.agents.items():
            agent.desired(
                controller.leadership.epoch, controller.leadership.leader, controller.truth.revision, wanted.get(name, ()),
                reactor.seconds(),
            )  # fmt: skip
            agent.step(reactor.seconds())

    async def until(self, found: Any, what: str = "", seconds: float = 8.0) -> Any:
        """Wait for something, with the links carried meanwhile."""
        deadline = reactor.seconds() + seconds
        while reactor.seconds() < deadline:
            self.carry()
            if value := found():
                return value
            await deferLater(reactor, 0.02)
        raise AssertionError(f"{what}: not within {seconds} s; {self.server.view.all()}")

    async def ready(self, model: str, count: int = 1) -> None:
        await self.until(lambda: self.row(model)["ready"] == count, f"{count} of {model} ready")

    def row(self, model: str) -> Any:
        return next(row for row in self.server.view.models() if row["name"] == model)
