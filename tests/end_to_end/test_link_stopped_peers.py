"""SIGTERM while the other end of the link is stopped by SIGSTOP: its kernel takes what is sent, and nobody answers."""

from __future__ import annotations

import signal

from tests.end_to_end.fleet import fake_model, until


def test_a_stopped_peer_keeps_neither_agent_nor_server(fleet):
    """An agent whose server is stopped ends in time, and so does a server with a stopped agent; neither hears a goodbye."""
    fleet.write_server(fake_model(replicas=0), timing="heartbeat: 5s")  # so that no link ends for its silence meanwhile
    for node in ("n1", "n2"):
        fleet.write_agent(node)
    server = fleet.start_server()
    for node in ("n1", "n2"):
        fleet.start_agent(node)
    until(lambda: [node["state"] for node in fleet.status()["nodes"]] == ["ready", "ready"], "both nodes are linked")
    server.send_signal(signal.SIGSTOP)
    fleet.ends_in_time("n1")
    server.send_signal(signal.SIGCONT)
    fleet.running["n2"].send_signal(signal.SIGSTOP)
    fleet.ends_in_time("server")
    fleet.running["n2"].send_signal(signal.SIGCONT)
    until(lambda: "n2: the link to" in fleet.log("n2"), "the agent that goes on tells how its link ended")
    fleet.ends_in_time("n2")
