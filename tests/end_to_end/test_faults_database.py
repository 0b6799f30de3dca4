"""Faults of the database and of the way to it under a fleet at work: away, cut off, slow, restarted, set back, pooled."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmgw.testing.postgres import PASSWORD, USER, Postgres
from tests.end_to_end.fleet import until
from tests.end_to_end.scene import Scene, lease, names, servers  # noqa: F401
from tests.ports import free_port
from tests.store_fixtures import needs_postgres

pytestmark = [needs_postgres, pytest.mark.slow]
THREE = pytest.mark.parametrize("names", [["cp1", "cp2", "cp3"]])
LONGER = pytest.mark.parametrize("lease", [6.0])


@pytest.fixture
def postgres():
    """One of its own, since no other test's could take what is done to it."""
    server = Postgres(free_port())
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("how", ["cut", "silent"])
@THREE
def test_f05_a_leader_cut_off_from_the_database_alone_gives_way(servers, how):  # noqa: F811
    """Its agents hear it well: it steps down by itself before anybody else leads, and orders nothing more."""
    scene = Scene(servers, nodes=3)
    wire = servers.wires[scene.leader]
    began = time.monotonic()
    if how == "cut":
        wire.cut()
    else:
        wire.silent = True
    found = servers.leader(scene.leader, above=scene.epoch)
    took = time.monotonic() - began
    old = servers.server(scene.leader)  # asked after the other one led: had it led on until now, there were two
    print(f"a new leader after {took:.2f} s")
    assert (old["role"], found[1]) == ("standby", scene.epoch + 1)
    assert took < scene.at_most
    for order in (["restart", "m"], ["key", "create", "x"]):
        assert "not lead" in servers.fleets[scene.leader].llmgw(*order, code=1)
    servers.linked(found[0])
    assert servers.fleets[scene.leader].ask()[0] == 200
    wire.heal()
    until(lambda: servers.server(scene.leader)["epoch"] == found[1], "it follows")
    scene.nothing_happened(found[0])


@pytest.mark.parametrize("away", [9.0, 60.0])
def test_f06_without_the_database_nobody_leads_and_all_route(servers, away):  # noqa: F811
    """PostgreSQL crashes and stays away: routers serve those with a key, orders are refused with why; then one leads again.

    Not a request is missing in the usage.
    """
    scene = Scene(servers, keyed=True)
    servers.postgres.stop("immediate")
    try:
        until(lambda: not servers.leaders(), "nobody leads", servers.lease * 2)
        time.sleep(away)  # away is what it is meant to be
        for fleet in servers.fleets.values():
            assert (fleet.ask(key=scene.key)[0], fleet.ask(key="llmgw-no")[0]) == (200, 401)
            assert any("who leads cannot be seen" in note for note in fleet.status()["server"]["notes"])
            assert "does not lead now" in fleet.llmgw("key", "create", "x", code=1)
    finally:
        servers.postgres.start()
    began = time.monotonic()
    leader, epoch = servers.leader(above=scene.epoch)
    took = time.monotonic() - began
    print(f"a leader {took:.2f} s after the database was back")
    assert epoch == scene.epoch + 1 and took < 10.0
    scene.nothing_happened(leader)
    asked = sum(client.whole for client in scene.clients.values()) + 2 * len(scene.clients)

    def used():
        (row,) = json.loads(servers.fleets[leader].llmgw("usage", "--json"))["usage"]
        return row["requests"]

    assert until(lambda: (count := used()) >= asked and count, "all requests are in the usage", 40.0) == asked


@LONGER
def test_f07_a_slow_database_is_borne_up_to_its_limit_and_given_up_beyond(servers):  # noqa: F811
    """Each statement late by 0.6 of the limit: leadership is kept. By twice the limit: lost once, and had back once."""
    scene = Scene(servers)
    limit = servers.lease * 2 / 15
    for wire in servers.wires.values():
        wire.delay = 0.6 * limit
    end = time.monotonic() + 2 * servers.lease
    while time.monotonic() < end:
        assert servers.leaders() == {scene.leader: scene.epoch}
        time.sleep(0.5)  # one look; how long it is slow is what is tested
    for wire in servers.wires.values():
        wire.delay = 2 * limit
    until(lambda: not servers.leaders(), "nobody leads", 2 * servers.lease)
    end = time.monotonic() + 2 * servers.lease
    while time.monotonic() < end:
        assert not servers.leaders() and all(fleet.ask()[0] == 200 for fleet in servers.fleets.values())
        time.sleep(0.5)  # as above
    for wire in servers.wires.values():
        wire.heal()
    leader, epoch = servers.leader(above=scene.epoch)
    assert epoch == scene.epoch + 1
    scene.nothing_happened(leader)


@LONGER
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_f11_a_restart_of_the_database_is_borne(servers, mode):  # noqa: F811
    """Away for less than a leader may go without renewing: the same one leads, under the same epoch, by the same links."""
    scene = Scene(servers)
    servers.postgres.stop(mode)
    servers.postgres.start()
    time.sleep(servers.lease)  # whatever comes of it has come by then
    assert servers.leaders() == {scene.leader: scene.epoch}
    until(lambda: servers.fleets[scene.leader].llmgw("key", "create", "x"), "orders are taken")
    scene.nothing_happened(scene.leader)
    assert servers.first.log("n1").count("linked to") == 1


@LONGER
def test_f12_a_database_set_back_repeats_an_epoch_and_is_outranked(servers, tmp_path):  # noqa: F811
    """A failover of PostgreSQL that lost the last seconds: two leaders of one epoch. Agents refuse the second until it rises."""
    scene = Scene(servers)
    database, copy = servers.postgres, tmp_path / "copy"
    database.signal(signal.SIGSTOP)
    shutil.copytree(database.data, copy, ignore=shutil.ignore_patterns("postmaster.pid"))
    database.signal(signal.SIGCONT)
    assert servers.leader() == (scene.leader, scene.epoch)
    scene.clients[scene.leader].leave()
    servers.fleets[scene.leader].end("server", signal.SIGKILL)
    second, epoch = servers.leader(scene.leader, above=scene.epoch)
    servers.linked(second)
    scene.clients[second].leave()
    servers.fleets[second].end("server", signal.SIGKILL)
    database.stop()
    set_back(database, copy)
    database.start()
    for client in scene.clients.values():
        client.join(20)
    fleet = servers.fleets[scene.leader]
    fleet.daemon("server", "server", fleet.folder / "server.yaml")
    _, raised = servers.leader(second, above=epoch, seconds=40.0)
    assert raised > epoch
    assert re.search(rf"n1 obeys epoch {epoch} of {second}@\S+, ours is {epoch}: raising it", fleet.log("server"))
    scene.nothing_happened(scene.leader)


def set_back(database: Postgres, copy: Path) -> None:
    """Its folder as it was then, with the owner it has now."""
    owner = database.data.stat()
    shutil.rmtree(database.data)
    shutil.copytree(copy, database.data)
    for path in (database.data, *database.data.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)
    database.data.chmod(0o700)


@pytest.fixture
def pooler(postgres, tmp_path):
    """pgbouncer as a pool of transactions, in front of that PostgreSQL; its port."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    if not Path(program).exists():
        pytest.skip("pgbouncer is not installed (apt-get install pgbouncer)")
    port, folder = free_port(), postgres.folder / "pooler"
    folder.mkdir(mode=0o755)
    (folder / "users").write_text(f'"{USER}" "{PASSWORD}"\n')
    (folder / "ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={postgres.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"auth_type = scram-sha-256\nauth_file = {folder / 'users'}\npool_mode = transaction\nunix_socket_dir =\n"
        "default_pool_size = 3\nserver_reset_query_always = 1\nserver_reset_query = DISCARD ALL\n"
    )
    with open(tmp_path / "pooler.log", "wb") as log:
        process = subprocess.Popen([program, str(folder / "ini")], stdout=log, stderr=log, **postgres.as_user)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def test_f16_a_transaction_pooler_may_stand_between(postgres, pooler, tmp_path):
    """Three connections for all of both servers, their sessions forgotten after each transaction: failover as without."""
    from tests.end_to_end.servers import Servers

    found = Servers(tmp_path, postgres, "cp1", "cp2")
    try:
        for wire in found.wires.values():
            wire.target = pooler
        scene = Scene(found)
        began = time.monotonic()
        found.fleets[scene.leader].end("server", signal.SIGKILL)
        assert found.leader(scene.leader, above=scene.epoch) == (scene.other, scene.epoch + 1)
        assert time.monotonic() - began < scene.at_most
        found.fleets[scene.other].llmgw("key", "create", "x")
        scene.nothing_happened(scene.other)
    finally:
        found.close()
