"""Cases of tests/test_fleet_cases.py and test_fleet_cases_nodes.py that only whole daemons show."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.end_to_end.fleet import fake_model, until


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


def test_c4_an_engine_goes_on_at_its_nodes_old_address_until_it_is_told(fleet):
    """Routed to where it still answers and remarked in status; `llmgw restart` has it listen at the new one."""
    fleet.write_server(fake_model("m", 1, "--host", "{host}"))
    path = fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    (first,) = fleet.ready()
    fleet.end("n1")
    path.write_text(path.read_text().replace("address: 127.0.0.1", "address: 127.0.0.2"))
    fleet.start_agent("n1")
    said = until(lambda: "m/1/0 listens at 127.0.0.1" in (text := fleet.llmgw("status", "n1")) and text, "remarked")
    assert "n1 is at 127.0.0.2 now" in said and "llmgw restart m --node n1" in said
    assert [shard["pid"] for shard in fleet.ready()] == [first["pid"]]
    until(lambda: fleet.ask()[0] == 200, "it answers where it was")
    fleet.llmgw("restart", "m", "--node", "n1", "--allow-outage")

    def moved():
        (replica,) = [one for one in fleet.status()["models"][0]["replicas"] if one["state"] == "ready"]
        return "127.0.0.2" in replica["endpoint"]

    until(moved, "it listens at the new address")
    until(lambda: fleet.ask()[0] == 200, "it answers")
    until(lambda: "listens at" not in fleet.llmgw("status", "n1"), "no remark is left")


FULL = """
  - name: m
    profile:
      engine: command
      argv:
        - sh
        - -c
        - 'test -e {room} || {{ echo "OSError: [Errno 28] No space left on device"; exit 1; }}; exec "$@"'
        - sh
        - {python}
        - -m
        - llmgw.testing.fake_engine
        - --port
        - "{{port}}"
      health: /health
      resources: {{devices: 0, host_memory: 16MiB}}
"""


def test_an_engine_that_meets_a_full_disk_serves_when_there_is_room(fleet):
    """Status says what is full and that it is tried again, no failure is counted; then there is room."""
    room = fleet.folder / "room"
    fleet.write_server(FULL.format(room=room, python=sys.executable))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    until(lambda: fleet.shards() and fleet.shards()[0]["state"] == "backoff", "it met the full disk")
    (shard,) = fleet.shards()
    assert "a disk of the node is full" in shard["reason"] and "tried again every 6 s until there is room" in shard["reason"]
    assert shard["crashes"] == 0 and "until there is room" in fleet.llmgw("status")
    room.touch()
    fleet.ready()
