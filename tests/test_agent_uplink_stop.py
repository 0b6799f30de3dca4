"""The end of an agent's link side: below 2 s by the clock whatever the peer does, and nothing is dialed afterwards."""

from __future__ import annotations

import pytest

from llmgw.wire.messages import Bye, Event, Register
from tests.fleetlink import a_world, shard
from tests.uplink_rig import Names, ScriptedServer, link_to, mute, rounds


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def stops(world, agent, within):
    """Stop it, see that all of it has ended, and that it was no error to anybody."""
    before = len(world.net.dialed)
    took = world.stop(agent)
    assert took <= within < 2
    assert agent.status == "stopped"
    world.net.run(60)
    assert len(world.net.dialed) == before
    assert world.log.having("error: n1") == []
    return took


def test_an_idle_link_is_left_with_a_word_of_what_goes_on_running(world):
    """The server hears why and which engines are left; it is done at once, and no error."""
    port, agent = world.server(), world.agent()
    agent.node.shards = (shard("m/1/0"), shard("m/2/0"))
    world.linked(port)
    world.net.run(1)
    stops(world, agent, 0.1)
    assert port.members.of("left") == [("n1", "7.1", "the agent left: the agent stops")]
    assert agent.status == "stopped"


def test_the_bye_names_the_shards_left_running(world):
    """And an agent whose node cannot even list them still says goodbye."""
    server = ScriptedServer(world)
    agent = world.agent()
    agent.node.shards = (shard("m/1/0"),)
    link_to(world, server, agent)
    stops(world, agent, 0.2)
    assert server.link.of(Bye) == [Bye("the agent stops", ("m/1/0",))]


def test_a_node_that_fails_does_not_keep_the_agent(world, expect_failures):
    """Listing what runs raises: the goodbye goes out without it."""
    expect_failures(ZeroDivisionError)
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    agent.node.report = lambda beat=0: 1 // 0
    assert world.stop(agent) < 0.2
    assert server.link.of(Bye) == [Bye("the agent stops")]


def test_in_mid_handshake(world):
    """TCP is open and TLS unanswered."""
    mute(world)
    agent = world.agent()
    world.net.run(1)
    assert world.net.connections
    stops(world, agent, 1.1)


def test_before_tcp_is_there(world):
    """Nobody answers, not even with a refusal."""
    world.net.dead.add(("10.0.0.1", 7443))
    agent = world.agent()
    world.net.run(1)
    stops(world, agent, 0.1)


def test_connected_to_a_server_that_never_greets(world):
    """TLS is there, and then nothing; it does not answer the close either, since it is stopped."""
    server = ScriptedServer(world)
    server.greeting = None
    agent = world.agent()
    world.net.run(1)
    assert len(server.links) == 1
    world.net.connections[-1][1].reading = False
    stops(world, agent, 1.1)


def test_registered_with_a_server_that_never_answers(world):
    """The registration is on its way and stays there."""
    server = ScriptedServer(world)
    server.accepts = False
    agent = world.agent()
    world.net.until(lambda: server.links and server.link.of(Register))
    world.net.connections[-1][1].reading = False
    stops(world, agent, 1.1)


def test_a_stopped_server_with_a_full_write_buffer(world):
    """SIGSTOP at the other end: megabytes wait for it, the goodbye behind them; it is given one second."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    world.net.connections[-1][1].reading = False
    for _ in range(30):
        agent.node.send(Event("m/1/0", 1, "loading", "ready", "x" * 100_000))
    world.net.run(1)
    assert stops(world, agent, 1.1) >= 0.9


def test_a_half_open_link(world):
    """What we write is lost and nobody tells."""
    port, agent = world.server(), world.agent()
    world.linked(port)
    for end in world.net.connections[-1]:
        end.silent = True
    stops(world, agent, 1.1)


def test_in_the_middle_of_another_close(world):
    """The server broke the protocol and does not answer our close, which would have had five seconds."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    server.link.write(b"garbage\n")
    world.net.connections[-1][1].reading = False
    world.net.run(1)
    assert server.link.over is False  # It has not even read that we leave.
    assert world.stop(agent) < 1.2


def test_while_a_name_is_looked_up_that_dns_never_answers(world):
    """The thread is left behind; its answer, should it come after all, harms nobody."""
    names = Names(world, **{"cp1.example": ["10.0.0.1"]})
    names.mute.add("cp1.example")
    agent = world.agent(servers=("cp1.example",), lookup=names.lookup)
    world.net.run(1)
    stops(world, agent, 0.1)
    names.answer()
    world.net.run(5)
    assert world.net.dialed == []


def test_while_backing_off(world):
    """In the middle of the longest wait."""
    agent = world.agent()
    world.net.until(lambda: len(rounds(world)) == 6, 100)
    world.net.run(1)
    stops(world, agent, 0.1)


def test_in_the_pause_after_a_lost_link(world):
    """Where a large fleet spreads its redials."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    for _ in range(61):
        world.net.run(1)
        server.beat()
    server.link.transport.loseConnection()
    world.net.until(lambda: "linked" not in agent.status)
    world.log.lines.clear()
    stops(world, agent, 0.1)


def test_before_it_was_started(world):
    """A daemon that gives up while it starts stops all of its services."""
    agent = world.agent(start=False)
    assert world.stop(agent) == 0
