"""Several real servers over one real PostgreSQL: each in a folder of its own, as on a machine of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmgw.testing.postgres import Postgres
from tests.end_to_end.fleet import RealFleet, until
from tests.ports import free_port
from tests.tcp_proxy import Proxy

LEASE = 3.0
TIMING = "heartbeat: 500ms, stop_grace: 2s, drain: 10s, lost_after: 60s, failover_grace: 20s, backoff: 1s, lease: {lease}s"


class Servers:
    """C{names} are server certificates; the first fleet's folder has the authority, and the agents.

    @ivar wires: by server, its way to the database.
    """

    def __init__(self, folder: Path, postgres: Postgres, *names: str, lease: float = LEASE) -> None:
        self.postgres, self.lease, self.timing = postgres, lease, TIMING.format(lease=lease)
        self.url = postgres.database()
        self.wires = {name: Proxy(postgres.port, free_port()) for name in names}
        self.fleets: dict[str, RealFleet] = {}
        for name in names:
            (folder / name).mkdir()
            self.fleets[name] = RealFleet(folder / name)
        self.first = self.fleets[names[0]]
        for name in names:
            if not (self.first.folder / "pki" / f"{name}.pem").exists():
                self.first.pki("server", "pki", name, "--address", "127.0.0.1")
        for fleet in [*self.fleets.values()][1:]:
            shutil.copytree(self.first.folder / "pki", fleet.folder / "pki", dirs_exist_ok=True)

    def start(self, name: str, models: str, router: str = "", environment: dict[str, str] | None = None) -> None:
        fleet = self.fleets[name]
        path = fleet.write_server(models, router, self.timing)
        url = self.url.replace(f":{self.postgres.port}/", f":{self.wires[name].port}/")
        text = path.read_text().replace("sqlite:///state/llmgw.db", f"'{url}'")
        path.write_text(text.replace("pki/cp1.", f"pki/{name}.") + "state: state\n")
        fleet.daemon("server", "server", path, environment)

    def start_all(self, models: str, router: str = "") -> tuple[str, str]:
        """All at once, on an empty database; who leads, and one that does not."""
        for name in self.fleets:
            self.start(name, models, router)
        until(lambda: all(self.server(name) for name in self.fleets), "all answer", 40.0)
        leader, _ = self.leader()
        return leader, next(name for name in self.fleets if name != leader)

    def start_agent(self, name: str = "n1") -> None:
        addresses = ", ".join(f"'127.0.0.1:{fleet.fleet}'" for fleet in self.fleets.values())
        self.first.write_agent(name, servers=f"servers: [{addresses}]")
        self.first.start_agent(name)

    def server(self, name: str) -> dict:
        return self.fleets[name].status()["server"]

    def leaders(self, *besides: str) -> dict[str, int]:
        """Epoch by name of every server that says it leads."""
        found = {}
        for name in set(self.fleets) - set(besides):
            server = self.server(name)
            if server["role"] == "leader":
                found[name] = server["epoch"]
        return found

    def leader(self, *besides: str, above: int = 0, seconds: float = 20.0) -> tuple[str, int]:
        """The one leader, when there is one with an epoch above that."""

        def one():
            found = self.leaders(*besides)
            return [(name, epoch) for name, epoch in found.items() if epoch > above and len(found) == 1]

        return until(one, "a leader", seconds)[0]

    def linked(self, leader: str, seconds: float = 20.0) -> None:
        """Wait until the leader has a link to every node."""
        fleet = self.fleets[leader]

        def all_linked():
            nodes, log = fleet.status()["nodes"], fleet.log("server")
            return nodes and all(one["state"] == "ready" and f"{one['name']} is linked from" in log for one in nodes)

        until(all_linked, "linked", seconds)

    def close(self) -> None:
        for fleet in self.fleets.values():
            fleet.close()
        for wire in self.wires.values():
            wire.close()
