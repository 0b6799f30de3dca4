"""Faults at the server's door, through real daemons."""

from __future__ import annotations

import os
import resource
import socket
import time

from tests.end_to_end.fleet import fake_model, until


def processor_time(pid: int) -> float:
    """Seconds that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_f38_a_server_without_descriptors_keeps_its_links_and_does_not_spin(fleet):
    """A crowd takes the last one: who is linked stays so, nothing spins, and when the crowd has gone the next agent gets in.

    Takes 10 s: three daemons and an engine start, and it must be seen not to spin.
    """
    fleet.write_server(fake_model())
    for node in ("n1", "n2"):
        fleet.write_agent(node)
    pid = fleet.start_server().pid
    fleet.start_agent("n1")
    before = fleet.ready()[0]
    limit = len(os.listdir(f"/proc/{pid}/fd")) + 12
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    crowd = [socket.create_connection(("127.0.0.1", fleet.fleet), 5) for _ in range(40)]
    begun, used = time.monotonic(), processor_time(pid)
    fleet.start_agent("n2")
    until(lambda: time.monotonic() - begun > 2.5, "two and a half seconds")
    assert processor_time(pid) - used < 0.5 * (time.monotonic() - begun)
    assert fleet.log("server").count("n1 is gone") == 0
    for one in crowd:
        one.close()
    states = lambda: {node["name"]: node["state"] for node in fleet.status()["nodes"]}  # noqa: E731
    until(lambda: states() == {"n1": "ready", "n2": "ready"}, "both are linked", 30.0)
    assert fleet.log("n1").count("linked to") == 1
    assert (fleet.ready()[0]["pid"], fleet.ask()[0]) == (before["pid"], 200)
    assert len(fleet.log("server").splitlines()) < 300
