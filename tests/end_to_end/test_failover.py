"""Two servers over one PostgreSQL: the leader is killed, stopped, suspended; clients and engines notice nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.end_to_end.fleet import fake_model, until
from tests.end_to_end.servers import LEASE, Servers
from tests.store_fixtures import needs_postgres, postgres  # noqa: F401

pytestmark = needs_postgres
AT_MOST = LEASE + LEASE / 10 + 2.0  # the lease, a look at the row, and room for a busy machine


@pytest.fixture
def names():
    return ["cp1", "cp2"]


@pytest.fixture
def servers(tmp_path, request, postgres, names):  # noqa: F811
    found = Servers(tmp_path, postgres, *names)
    try:
        yield found
    finally:
        found.close()
        if getattr(request.node, "failed", True):
            for log in sorted(tmp_path.glob("*/log/*.log")):
                print(f"--- {log}\n{log.read_text(errors='replace')[-6000:]}")


class Scene:
    """One leads, the others stand by, each node runs an engine, a client streams through each router."""

    def __init__(self, servers: Servers, events: int, nodes: int = 1) -> None:
        self.servers, self.nodes = servers, nodes
        models = fake_model("m", nodes, "--interval", "0.05", "--events", str(events), more="      place: {spread: true}\n")
        self.leader, self.other = servers.start_all(models)
        self.epoch = servers.server(self.leader)["epoch"]
        for number in range(nodes):
            servers.start_agent(f"n{number + 1}")
        self.before = self.pids(self.leader)
        for fleet in servers.fleets.values():
            until(lambda fleet=fleet: fleet.ask()[0] == 200, "every standby routes")
        self.streams = servers.streams(events)
        self.process = servers.fleets[self.leader].running["server"]

    def pids(self, leader: str):
        shards = self.servers.fleets[leader].ready("m", self.nodes, 30.0)
        return {shard["id"]: (shard["node"], shard["pid"], shard["attempt"]) for shard in shards}

    def nothing_happened(self, leader: str) -> None:
        """Not a stream cut, not an engine restarted."""
        self.servers.linked(leader)
        for stream in self.streams:
            stream.whole()
        assert self.pids(leader) == self.before


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_f01_f02_a_new_leader_takes_over_and_nothing_else_happens(servers, number):
    """Crash: within the lease and a look. Graceful: within two seconds. Takes 15 s: five daemons start, and a lease runs out."""
    scene = Scene(servers, 120)
    began = time.monotonic()
    scene.process.send_signal(number)
    found = servers.leader(scene.leader, above=scene.epoch)
    took = time.monotonic() - began
    print(f"a new leader after {took:.2f} s")
    assert found == (scene.other, scene.epoch + 1)
    assert took < (2.0 if number == signal.SIGTERM else AT_MOST)
    scene.nothing_happened(scene.other)


@pytest.mark.slow
def test_f03_a_leader_that_was_suspended_past_its_lease_stands_by(servers):
    """SIGSTOP for three leases, then SIGCONT: it commands nothing more, and follows. Takes three leases."""
    scene = Scene(servers, 400)
    os.kill(scene.process.pid, signal.SIGSTOP)
    servers.linked(servers.leader(scene.leader, above=scene.epoch)[0])
    time.sleep(2 * LEASE)  # suspended is what it is meant to be
    os.kill(scene.process.pid, signal.SIGCONT)

    def follows():
        server = servers.server(scene.leader)
        return (server["role"], server["epoch"]) == ("standby", scene.epoch + 1)

    until(follows, "it stands by")
    assert servers.leaders() == {scene.other: scene.epoch + 1}
    scene.nothing_happened(scene.other)
    assert "stale_epoch" not in servers.first.log("n1")


@pytest.mark.slow
def test_f04_a_short_suspension_changes_nothing(servers):
    """Half a lease: no other leader, no link dropped. Takes that long."""
    scene = Scene(servers, 160)
    os.kill(scene.process.pid, signal.SIGSTOP)
    time.sleep(min(LEASE / 2, 1.0))  # less than three heartbeats, or agents would rightly go
    os.kill(scene.process.pid, signal.SIGCONT)
    until(lambda: servers.leaders() == {scene.leader: scene.epoch}, "it leads on")
    scene.nothing_happened(scene.leader)
    assert servers.first.log("n1").count("linked to") == 1


@pytest.mark.slow
def test_f06_f11_without_the_database_nobody_leads_and_all_routes(servers):
    """PostgreSQL crashes and is away for three leases: routers serve, status says why; then one leads again by itself."""
    scene = Scene(servers, 400)
    servers.postgres.stop("immediate")
    try:
        until(lambda: not servers.leaders(), "nobody leads", LEASE * 2)
        time.sleep(2 * LEASE)  # away is what it is meant to be
        for fleet in servers.fleets.values():
            assert fleet.ask()[0] == 200
            assert any("who leads cannot be seen" in note for note in fleet.status()["server"]["notes"])
            assert "does not lead now" in fleet.llmgw("key", "create", "x", code=1)
    finally:
        servers.postgres.start()
    began = time.monotonic()
    leader, epoch = servers.leader(above=scene.epoch)
    print(f"a leader {time.monotonic() - began:.2f} s after the database was back")
    assert epoch == scene.epoch + 1
    scene.nothing_happened(leader)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["cp1", "cp2", "cp3"]])
def test_three_servers_lose_their_leader_twice(servers):
    """SIGKILL, and of the next one, too: the third leads, all nodes are its, and all clients have had their answers."""
    scene = Scene(servers, 400, nodes=3)
    gone = []
    for number in (1, 2):
        leader, epoch = servers.leader(*gone, above=scene.epoch + number - 2)
        servers.linked(leader, 30.0)
        servers.fleets[leader].end("server", signal.SIGKILL)
        gone.append(leader)
    (last,) = set(servers.fleets) - set(gone)
    assert servers.leader(*gone, above=epoch) == (last, scene.epoch + 2)
    scene.nothing_happened(last)
