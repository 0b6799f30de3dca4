"""The case of tests/test_fleet_cases.py that only a whole agent shows."""

from __future__ import annotations

import os
from pathlib import Path

from tests.end_to_end.fleet import fake_model


def listening(pid):
    """The TCP and UNIX sockets on which a process listens."""
    mine = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        name = os.readlink(entry)
        if name.startswith("socket:["):
            mine.add(name[8:-1])
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    found = [row[1] for row in rows if row[3] == "0A" and row[9] in mine]
    units = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return found + [row[-1] for row in units if row[3] == "00010000" and row[6] in mine]


def test_j6_an_agent_has_no_endpoint_that_could_be_open(fleet):
    """It dials out and listens on nothing, also while it runs an engine; the server does, as the same look shows."""
    fleet.write_server(fake_model("m", 1))
    fleet.write_agent("n1")
    server = fleet.start_server()
    agent = fleet.start_agent("n1")
    fleet.ready()
    assert listening(agent.pid) == []
    assert len(listening(server.pid)) >= 3
