"""Links on which nothing is heard or nothing is read: the agent notices in time, says why, and goes on to its next address."""

from __future__ import annotations

import pytest

from llmgw.wire.link import MAX_WAITING
from llmgw.wire.messages import Event, Refused, Report
from tests.fleetlink import a_world
from tests.uplink_rig import ScriptedServer, link_to, rounds


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def lost(world):
    return world.log.having("n1: the link to ")


def test_f27_i_a7_a_server_that_falls_silent_is_left_after_three_heartbeats_for_the_next_address(world):
    """The connection is good and the server's process hangs: 15 s after its last word the agent tries the other one."""
    quiet, good = ScriptedServer(world), ScriptedServer(world, "10.0.0.2", "cp2", epoch=8)
    agent = world.agent(servers=("10.0.0.1", "10.0.0.2"))
    link_to(world, quiet, agent)
    world.net.run(4)
    quiet.beat()
    assert 14.9 <= world.net.until(lambda: lost(world)) <= 15.1
    assert lost(world) == ["error: n1: the link to 10.0.0.1:7443 ended after 19 s: nothing was heard from it in 15 s"]
    world.net.run(0.1)
    assert good.links and agent.status == "linked to 10.0.0.2:7443, cp2 leads (epoch 8)"
    assert agent.node.of("disconnected") == [("nothing was heard from it in 15 s",)]


def test_f26_i_a7_a_half_open_link_is_left_after_three_heartbeats(world):
    """A firewall forgot the connection: writes go nowhere and nobody tells. Both sides let go, each by its own timer."""
    port, agent = world.server(), world.agent(servers=("10.0.0.1", "10.0.0.2"))
    world.linked(port)
    world.net.run(120)
    client, server = world.net.connections[-1]
    client.silent = server.silent = True
    port.members.refusal = Refused("standby", "cp2 leads", "cp2")
    good = ScriptedServer(world, "10.0.0.2", "cp2", epoch=8)
    assert 9.9 <= world.net.until(lambda: lost(world)) <= 15.1
    assert lost(world)[0].startswith("error: n1: the link to 10.0.0.1:7443 ended after 2 m ")
    assert lost(world)[0].endswith(": nothing was heard from it in 15 s")
    assert agent.node.of("disconnected") == [("nothing was heard from it in 15 s",)]
    world.net.until(lambda: port.sessions() == {}, 6)
    assert link_to(world, good, agent, 2) <= 2
    assert rounds(world) == []  # That of the standby was no reason to wait.


def test_a_link_that_is_only_slow_is_kept(world):
    """Each word of the server's begins the three heartbeats anew; the agent's answers carry the beats' serials."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    for serial in range(1, 6):
        world.net.run(14.5)
        server.beat(serial)
    world.net.run(1)
    assert len(server.links) == 1 and lost(world) == []
    assert [report.beat for report in server.link.of(Report)] == [0, 1, 2, 3, 4, 5]


def test_a_server_that_does_not_read_is_left_with_a_reason_before_memory_grows(world):
    """What waits for it is bounded; then the link ends, both log and node are told why, and the next address is tried."""
    stuck, good = ScriptedServer(world), ScriptedServer(world, "10.0.0.2", "cp2", epoch=8)
    agent = world.agent(servers=("10.0.0.1", "10.0.0.2"))
    link_to(world, stuck, agent)
    client, server = world.net.connections[-1]
    server.reading = False
    event = Event("m/1/0", 1, "loading", "ready", "up", tail=("x" * 100_000,))
    for _ in range(100):
        agent.node.send(event)
    assert client.written < 2 * MAX_WAITING
    world.net.run(0.1)
    (line,) = lost(world)
    _, _, reason = line.partition("error: n1: the link to 10.0.0.1:7443 ended after 0.0 s: ")
    assert reason.startswith("it does not read: ") and reason.endswith(" wait for it")
    assert agent.node.of("disconnected") == [(reason,)]
    assert good.links and "linked to 10.0.0.2:7443" in agent.status


def test_a_server_that_reads_again_gets_all_that_waited_in_order(world):
    """A pause below the bound loses nothing."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    _, end = world.net.connections[-1]
    end.reading = False
    for number in range(30):
        agent.node.send(Event(f"m/{number}/0", 1, "loading", "ready", "x" * 100_000))
    world.net.run(3)
    assert server.link.of(Event) == []
    end.resume()
    world.net.run(1)
    assert [event.shard for event in server.link.of(Event)] == [f"m/{number}/0" for number in range(30)]
    assert lost(world) == []
