"""A fleet of several servers in the middle of its work, and what may not have happened to it whatever was done to a server.

One leads, the others stand by, each node runs an engine, and a client streams through each router without a pause.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.end_to_end.fleet import fake_model, until
from tests.end_to_end.load import Endless
from tests.end_to_end.servers import LEASE, Servers

LINKED = re.compile(r"linked to \S+, (\S+) leads \(epoch (\d+)\)")


@pytest.fixture
def names():
    return ["cp1", "cp2"]


@pytest.fixture
def lease():
    return LEASE


@pytest.fixture
def servers(tmp_path, request, postgres, names, lease):
    found = Servers(tmp_path, postgres, *names, lease=lease)
    try:
        yield found
    finally:
        found.close()
        if getattr(request.node, "failed", True):
            for log in sorted(tmp_path.glob("*/log/*.log")):
                print(f"--- {log}\n{log.read_text(errors='replace')[-6000:]}")


class Scene:
    """C{keyed}: routers want a key, which is C{key}.

    @ivar at_most: how long a new leader may take after a crash: the lease, a look at the row, and room for a busy machine."""

    def __init__(self, servers: Servers, nodes: int = 1, more: str = "", keyed: bool = False) -> None:
        self.servers, self.nodes = servers, [f"n{number + 1}" for number in range(nodes)]
        self.at_most = servers.lease * 1.1 + 2.0
        spread = "      place: {spread: true}\n"
        models = fake_model("m", nodes, "--interval", "0.05", "--events", "60", more=spread) + more
        self.leader, self.other = servers.start_all(models, ", keys: required" if keyed else "")
        created = servers.fleets[self.leader].llmgw("key", "create", "c", "--json") if keyed else "{}"
        self.key = json.loads(created).get("key", "")
        for node in self.nodes:
            servers.start_agent(node)
        self.before = self.pids(self.leader)
        for fleet in servers.fleets.values():
            until(lambda fleet=fleet: fleet.ask(key=self.key)[0] == 200, "every standby routes")
        self.clients = {name: Endless(fleet.router, key=self.key) for name, fleet in servers.fleets.items()}
        for client in self.clients.values():
            until(client.streams, "a client streams")
        self.leader, self.epoch = servers.leader()
        self.process = servers.fleets[self.leader].running["server"]

    def pids(self, leader: str):
        shards = self.servers.fleets[leader].ready("m", len(self.nodes), 30.0)
        return {shard["id"]: (shard["node"], shard["pid"], shard["attempt"]) for shard in shards}

    def nothing_happened(self, leader: str) -> None:
        """Not a stream cut, not an engine restarted, and nobody of an old epoch obeyed."""
        self.servers.linked(leader)
        for client in self.clients.values():
            client.end()
        assert self.pids(leader) == self.before
        self.obeyed_in_order(leader)

    def obeyed_in_order(self, leader: str) -> None:
        """No agent ever went back to an older epoch or took two leaders for one; each ended with this one on its disk."""
        first = self.servers.first
        for node in self.nodes:
            obeyed = self.obeyed(node)
            assert [epoch for epoch, _ in obeyed] == sorted(epoch for epoch, _ in obeyed)
            assert len(set(obeyed)) == len({epoch for epoch, _ in obeyed})
            fence = json.loads((first.folder / "state" / node / "fence.json").read_bytes())
            assert (fence["epoch"], fence["leader"].partition("@")[0]) == (self.servers.server(leader)["epoch"], leader)

    def obeyed(self, node: str) -> list[tuple[int, str]]:
        """Epoch and holder of each leadership that took this node, in order."""
        return [(int(epoch), who) for who, epoch in LINKED.findall(self.servers.first.log(node))]
