"""Two servers over one PostgreSQL: the leader is killed, stopped, suspended; clients and engines notice nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.end_to_end.fleet import until
from tests.end_to_end.servers import LEASE, Servers, model
from tests.store_fixtures import needs_postgres, postgres  # noqa: F401

pytestmark = needs_postgres
STREAM = ("--interval", "0.05", "--events", "400")
AT_MOST = LEASE + LEASE / 10 + 2.0  # the lease, a look at the row, and room for a busy machine


@pytest.fixture
def servers(tmp_path, request, postgres):  # noqa: F811
    found = Servers(tmp_path, postgres, "cp1", "cp2")
    try:
        yield found
    finally:
        found.close()
        if getattr(request.node, "failed", True):
            for log in sorted(tmp_path.glob("*/log/*.log")):
                print(f"--- {log}\n{log.read_text(errors='replace')[-6000:]}")


@pytest.fixture
def leading(servers):
    """cp1 leads, cp2 stands by, n1 runs one engine, and both routers serve it."""
    servers.start("cp1", model(*STREAM))
    servers.start("cp2", model(*STREAM))
    assert servers.leader() == ("cp1", 1)
    servers.start_agent()
    servers.fleets["cp1"].ready()
    until(lambda: servers.fleets["cp2"].ask()[0] == 200, "the standby routes")
    return servers


def pids(servers, leader):
    return {shard["id"]: (shard["pid"], shard["attempt"]) for shard in servers.fleets[leader].ready()}


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_f01_f02_a_new_leader_takes_over_and_nothing_else_happens(leading, number):
    """Crash: within the lease and a look. Graceful: within two seconds. Takes some seconds since a lease has to run out."""
    before, streams = pids(leading, "cp1"), leading.streams(400)
    began = time.monotonic()
    leading.fleets["cp1"].end("server", number)
    name, epoch = leading.leader("cp1", above=1)
    took = time.monotonic() - began
    print(f"a new leader after {took:.2f} s")
    assert (name, epoch) == ("cp2", 2)
    assert took < (2.0 if number == signal.SIGTERM else AT_MOST)
    leading.linked("cp2")
    for stream in streams:
        stream.whole()
    assert pids(leading, "cp2") == before


@pytest.mark.slow
def test_f03_a_leader_that_was_suspended_past_its_lease_stands_by(leading):
    """SIGSTOP for three leases, then SIGCONT: it commands nothing more, and follows. Takes three leases."""
    before, streams = pids(leading, "cp1"), leading.streams(400)
    process = leading.fleets["cp1"].running["server"]
    os.kill(process.pid, signal.SIGSTOP)
    leading.linked(leading.leader("cp1", above=1)[0])
    time.sleep(2 * LEASE)  # suspended is what it is meant to be
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: leading.server("cp1")["role"] == "standby" and leading.server("cp1")["epoch"] == 2, "cp1 stands by")
    assert leading.leaders() == {"cp2": 2}
    for stream in streams:
        stream.whole()
    assert pids(leading, "cp2") == before
    assert "stale_epoch" not in leading.first.log("n1")
