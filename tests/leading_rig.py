"""Two real servers in the test's process over one real PostgreSQL: real leases and fleet ports; routers and agents simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest_twisted
from attrs import evolve
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from llmgw.config.server import Address, FleetSettings, TlsFiles
from llmgw.fleet.model import Model
from llmgw.fleet.timing import Timing
from llmgw.pki import certificate_text, key_text
from llmgw.testing.certificates import Fleet
from tests.server_rig import Rig, StillRouters

LEASE = {"lease": 3.0, "lease_renew": 0.6, "lease_deadline": 1.8, "store_timeout": 0.5}


class SlowRouters(StillRouters):
    """C{lag} versions are not routed by yet, as of a server whose workers are slow."""

    lag = 0
    servers = 1

    def versions(self) -> dict[int, int]:
        return {0: (self.table.version if self.table else 0) - self.lag}

    def share_limits(self, servers: int) -> None:
        self.servers = servers

    def used_today(self, tokens: Any, now: float) -> None:
        pass


def write_certificate(folder: Path, fleet: Fleet, name: str) -> TlsFiles:
    folder.mkdir(parents=True, exist_ok=True)
    pair = fleet.server(name)
    (folder / "ca.pem").write_bytes(certificate_text(fleet.authority.certificate))
    (folder / "server.pem").write_bytes(certificate_text(pair.certificate))
    (folder / "server.key").touch(mode=0o600)
    (folder / "server.key").write_bytes(key_text(pair.key))
    return TlsFiles(folder / "server.pem", folder / "server.key", folder / "ca.pem")


class SharedRig(Rig):
    """One server of several."""

    TIMING = Timing(heartbeat=0.5, lost_after=5.0, failover_grace=2.0, stop_grace=1.0, drain=5.0, backoff=0.2, **LEASE)

    def __init__(self, folder: Path, name: str, url: str, authority: Fleet, *models: Model) -> None:
        folder.mkdir()
        self.authority = authority
        super().__init__(folder, *models, fleet=False)
        address = Address("127.0.0.1", 0)
        tls = write_certificate(folder / "pki", authority, name)
        advertise = Address(f"{name}.example", 7443)
        self.settings = evolve(self.settings, name=name, store=url, fleet=FleetSettings(address, advertise, tls))
        self.make()

    def make(self) -> None:
        super().make()
        self.routers = SlowRouters(self.settings.state / "router")
        self.remake()

    def remake(self) -> None:
        from llmgw.admin.api import make_admin
        from llmgw.server.service import Server

        self.server = Server(self.settings, reactor, self.routers)  # type: ignore[arg-type]
        self.admin = make_admin(self.settings, self.server, reactor)

    def carry(self) -> None:
        if self.server.role == "leader":
            super().carry()

    def shown(self, name: str) -> dict[str, Any]:
        """What this one's status says of a server."""
        return {row["name"]: row for row in self.server.view.server()["servers"]}.get(name, {})


async def wait(found: Any, what: str, *rigs: Rig, seconds: float = 12.0) -> Any:
    """Wait for something while the links of all servers are carried."""
    deadline = reactor.seconds() + seconds
    while reactor.seconds() < deadline:
        for rig in rigs:
            rig.carry()
        if value := found():
            return value
        await deferLater(reactor, 0.02)
    raise AssertionError(f"{what}: not within {seconds} s; {[rig.server.view.server() for rig in rigs]}")


def stop_all(rigs: list[Any]) -> None:
    for rig in rigs:
        pytest_twisted.blockon(Deferred.fromCoroutine(rig.stop()))
