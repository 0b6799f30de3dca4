"""Several servers over one PostgreSQL: the leader is killed, stopped, suspended; clients and engines notice nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from llmgw.testing.tiny_gguf import write_tiny_gguf
from tests.end_to_end.fleet import BIN, fake_model, until
from tests.end_to_end.load import Endless
from tests.end_to_end.scene import Scene, lease, names, servers  # noqa: F401
from tests.store_fixtures import needs_postgres, postgres  # noqa: F401

pytestmark = needs_postgres
THREE = pytest.mark.parametrize("names", [["cp1", "cp2", "cp3"]])
LLAMA = """
  - name: tiny
    profile:
      engine: llamacpp
      weights: tiny.gguf
      context: 256
      arguments: {parallel: 4, threads: 1}
      resources: {devices: 0, host_memory: 64MiB}
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_f01_f02_a_new_leader_takes_over_and_nothing_else_happens(servers, number):  # noqa: F811
    """Crash: within the lease and a look. Graceful: within two seconds. Takes 15 s: five daemons start, and a lease runs out."""
    scene = Scene(servers)
    if number == signal.SIGTERM:
        scene.clients[scene.leader].leave()  # its router takes nobody after a stop that is not half of a restart
    began = time.monotonic()
    scene.process.send_signal(number)
    found = servers.leader(scene.leader, above=scene.epoch)
    took = time.monotonic() - began
    print(f"a new leader after {took:.2f} s")
    assert found == (scene.other, scene.epoch + 1)
    assert took < (2.0 if number == signal.SIGTERM else scene.at_most)
    if number == signal.SIGTERM:
        assert scene.process.wait(3.0) == 0
        servers.linked(scene.other)
        assert time.monotonic() - began < 5.0  # the agent asked both at once, and waits a second if the other was not ready yet
    scene.nothing_happened(scene.other)


@pytest.mark.slow
@THREE
def test_f03_a_leader_that_was_suspended_past_its_lease_stands_by(servers):  # noqa: F811
    """SIGSTOP for three leases with an order in its socket, then SIGCONT: it obeys nobody, orders nothing, and follows."""
    scene = Scene(servers, nodes=3)
    os.kill(scene.process.pid, signal.SIGSTOP)
    fleet = servers.fleets[scene.leader]
    order = [BIN / "llmgw", "--socket", fleet.socket, "restart", "m"]
    with subprocess.Popen(order, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ordered:
        leader, epoch = servers.leader(scene.leader, above=scene.epoch)
        servers.linked(leader)
        time.sleep(2 * servers.lease)  # suspended is what it is meant to be
        os.kill(scene.process.pid, signal.SIGCONT)
        said = ordered.communicate(timeout=20)[0]
    assert ordered.returncode and ("not leader" in said or "does not lead" in said), said
    until(lambda: servers.server(scene.leader)["role"] == "standby", "it stands by")
    until(lambda: servers.server(scene.leader)["epoch"] == epoch, "it knows the epoch")
    assert servers.leaders() == {leader: epoch}
    scene.nothing_happened(leader)
    assert f"lease: stepping down from epoch {scene.epoch}" in fleet.log("server")


@pytest.mark.slow
def test_f04_a_short_suspension_changes_nothing(servers):  # noqa: F811
    """Less than three heartbeats and less than what is left of the lease: no other leader, no link dropped."""
    scene = Scene(servers)
    os.kill(scene.process.pid, signal.SIGSTOP)
    time.sleep(min(servers.lease / 3, 1.0))  # suspended is what it is meant to be
    os.kill(scene.process.pid, signal.SIGCONT)
    until(lambda: servers.leaders() == {scene.leader: scene.epoch}, "it leads on")
    scene.nothing_happened(scene.leader)
    assert servers.first.log("n1").count("linked to") == 1


@pytest.mark.slow
@THREE
def test_f01_three_servers_lose_their_leader_twice_with_a_real_engine(servers):  # noqa: F811
    """SIGKILL, and of the next one, too: the third leads, all nodes are its, and llama.cpp's clients have had all answers."""
    (servers.first.folder / "models").mkdir()
    write_tiny_gguf(servers.first.folder / "models" / "tiny.gguf")
    scene = Scene(servers, nodes=3, more=LLAMA)
    (tiny,) = servers.fleets[scene.leader].ready("tiny")
    until(lambda: all(fleet.ask("tiny")[0] == 200 for fleet in servers.fleets.values()), "all route it")
    clients = [Endless(fleet.router, "tiny", 100) for fleet in servers.fleets.values()]
    gone, epoch, times = [], 0, []
    for _ in range(2):
        leader, epoch = servers.leader(*gone, above=epoch)
        servers.linked(leader, 30.0)
        began = time.monotonic()
        servers.fleets[leader].end("server", signal.SIGKILL)
        gone.append(leader)
        servers.leader(*gone, above=epoch)
        times.append(time.monotonic() - began)
    (last,) = set(servers.fleets) - set(gone)
    print(f"new leaders after {times} s")
    assert max(times) < scene.at_most
    scene.nothing_happened(last)
    for client in clients:
        client.end()
    (after,) = servers.fleets[last].ready("tiny")
    assert (after["pid"], after["attempt"]) == (tiny["pid"], tiny["attempt"])


AHEAD = "import time\nreal = time.time\ntime.time = lambda: real() + 600.0\n"


@pytest.mark.slow
def test_b2_a_leader_whose_clock_is_ten_minutes_ahead_cuts_no_drain(servers):  # noqa: F811
    """B2: a node drains for a minute at most while a stream of 15 s runs there; the server dies, the next has another clock."""
    models = fake_model("m", 1, "--interval", "0.05", "--events", "300")
    servers.timing = servers.timing.replace("drain: 10s", "drain: 60s")
    leader, other = servers.start_all(models)
    servers.fleets[other].end("server")
    (servers.fleets[other].folder / "sitecustomize.py").write_text(AHEAD)
    servers.start(other, models, environment={"PYTHONPATH": str(servers.fleets[other].folder)})
    until(lambda: servers.server(other), "it answers")
    servers.start_agent()
    fleet = servers.fleets[leader]
    fleet.ready()
    stream = fleet.stream(tokens=300)
    until(lambda: len(stream.pieces) > 40, "it streams, and the other server has been told")
    fleet.llmgw("drain", "n1", "--deadline", "60s", "--allow-outage")
    until(lambda: fleet.shards()[0]["state"] == "draining", "it drains")
    fleet.running["server"].kill()
    assert servers.leader(leader)[0] == other
    servers.linked(other)
    assert stream.is_alive()
    stream.whole()
    assert "is 600 s ahead of the one before it" in servers.fleets[other].log("server")
