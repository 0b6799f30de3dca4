"""What is said on an agent's links: how each ends and is told, and that nothing of an old one reaches the node or the new one."""

from __future__ import annotations

import pytest
from attrs import evolve
from twisted.internet.defer import Deferred, fail

from llmgw.errors import LlmgwError
from llmgw.fleet.node import Fabric, Installation, Inventory
from llmgw.wire.link import NO_GOODBYE
from llmgw.wire.messages import (
    Accepted,
    Beat,
    Bye,
    Desired,
    Done,
    Event,
    FetchLog,
    Goaway,
    Inspect,
    Refused,
    Register,
    Report,
    Welcome,
)
from tests.fleetlink import a_world, order, shard
from tests.uplink_rig import ScriptedServer, link_to, rounds


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


@pytest.fixture
def server(world):
    return ScriptedServer(world)


@pytest.fixture
def agent(world, server):
    found = world.agent()
    link_to(world, server, found)
    return found


def desired(revision=1, *orders, part=1, parts=1):
    return Desired(7, "cp1", revision, part, parts, orders or (order(),))


def again(world, server, agent):
    """Wait for the link after this one."""
    count = len(server.links)
    world.net.until(lambda: len(server.links) > count and "linked" in agent.status)


# How a link ends.


def cut(world, server):
    world.net.connections[-1][0].cut()


def hang_up(world, server):
    server.link.transport.loseConnection()


def fall_silent(world, server):
    world.net.run(15)


def say(line):
    return lambda world, server: server.link.write(line)


def tell(message):
    return lambda world, server: server.link.send(message)


LONG = "a line longer than 1048576 bytes"
FAULTS = {
    "cut": (cut, f"the connection broke {NO_GOODBYE}"),
    "hung up": (hang_up, "it closed the connection"),
    "silence": (fall_silent, "nothing was heard from it in 15 s"),
    "garbage": (say(b"garbage\n"), "it sent a line that is not JSON (Expecting value at character 0)"),
    "2 MiB": (say(b"x" * 2 * 2**20 + b"\n"), f"it sent {LONG}"),
    "2 MiB without an end": (say(b"x" * 2 * 2**20), f"it sent {LONG}"),
    "UTF-16": (say('{"type":"beat"}\n'.encode("utf-16")), "it sent a line that is not UTF-8 (byte 0)"),
    "deep": (say(b'{"type":"beat","x":' + b"[" * 50_000 + b"\n"), "it sent JSON that is more than 32 levels deep"),
    "no object": (say(b"[1]\n"), "it sent a line that is JSON but not an object"),
    "no type": (say(b"{}\n"), "it sent an object without a type"),
    "half a beat": (say(b'{"type":"beat"}\n'), "it sent a wrong beat: required field missing @ beat.serial"),
    "wrong type": (
        say(b'{"type":"beat","serial":"1","epoch":7}\n'),
        "it sent a wrong beat: invalid value for type, expected int @ beat.serial",
    ),
    "a second welcome": (tell(Welcome(1, 1, "cp1", "f1ee7f1ee700", 7, 5.0)), "it sent welcome where an order was due"),
    "a second accepted": (tell(Accepted("s2", 7, "cp1", 1)), "it sent accepted where an order was due"),
    "a late refusal": (tell(Refused("revoked", "gone")), "it sent refused where an order was due"),
}


@pytest.mark.parametrize(("fault", "cause"), FAULTS.values(), ids=FAULTS.keys())
def test_a_link_that_fails_is_an_error_with_its_cause_and_is_dialed_again(world, server, agent, fault, cause):
    """Nobody asks a link that was just cut off whether the agent is stopping: it is not, so this is no clean close."""
    fault(world, server)
    world.net.run(0.2)
    (line,) = world.log.having("n1: the link to ")
    assert line.startswith("error: n1: the link to 10.0.0.1:7443 ended after ")
    assert cause in line
    assert len(line) < 300
    (reason,) = agent.node.of("disconnected")[0]
    assert reason.startswith(cause)
    if cause.startswith("it sent"):
        assert server.link.of(Bye)[0].reason.startswith(f"you {cause.removeprefix('it ')}")
    if len(server.links) == 1:
        again(world, server, agent)
    assert "linked to 10.0.0.1:7443" in agent.status


def test_only_a_real_end_reads_as_a_clean_close(world, server, agent):
    """Stopped by its own service, the agent leaves no line of trouble at all, and the node learns that we left."""
    world.net.run(3)
    world.stop(agent)
    assert server.link.of(Bye) == [Bye("the agent stops")]
    assert agent.node.of("disconnected") == [("we left: the agent stops",)]
    assert agent.status == "stopped"
    assert world.log.having("n1: the link to ") == rounds(world) == world.log.having("error: ") == []


def test_a_link_that_breaks_while_another_is_being_made_is_no_end_of_the_agent(world, server, agent):
    """Lost, and the next one lost in its handshake, and the next before its greeting: each is told, and the agent goes on."""
    cut(world, server)
    world.net.until(lambda: len(world.net.connections) == 2)
    cut(world, server)
    world.net.until(lambda: len(rounds(world)) == 2)
    server.greeting, welcome = None, server.greeting
    world.net.until(lambda: len(world.net.connections) == 3 and len(server.links) == 3)
    world.net.run(0.3)
    cut(world, server)
    world.net.until(lambda: len(rounds(world)) == 3)
    server.greeting = welcome
    again(world, server, agent)
    assert all("the connection broke without a goodbye" in line for line in rounds(world))


@pytest.mark.parametrize(
    ("message", "what"),
    [(Beat(1, 7), "beat"), (Goaway("standby"), "goaway"), (desired(), "desired"), (Accepted("s", 7, "cp1", 1), "accepted")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_comes_before_its_time_is_refused(world, server, message, what):
    """The server's first word is welcome or refused; the answer to a registration is accepted or refused."""
    server.greeting = message
    agent = world.agent()
    world.net.until(lambda: rounds(world))
    assert rounds(world) == [f"10.0.0.1:7443: it sent {what} where welcome was due. Next try in 0.5 s."]
    assert agent.node.events == []


@pytest.mark.parametrize("heartbeat", [0.0, -5.0, 0.01, 3601.0, 1e300])
def test_a_heartbeat_that_makes_no_sense_is_refused(world, server, heartbeat):
    """One that never comes would keep a dead link for ever, one of 0 would end each at once."""
    server.greeting = evolve(server.greeting, heartbeat=heartbeat)
    agent = world.agent()
    world.net.until(lambda: rounds(world))
    assert f"it sent a heartbeat of {heartbeat} s" in rounds(world)[0]
    assert agent.node.events == []


# What is known on a live link.


def test_an_unknown_type_is_answered_unsupported_and_the_link_stays(world, server, agent):
    """A newer server may know more than we do; with its operation if it has one, and unknown keys are not even noticed."""
    server.link.write(
        b'{"type":"act","operation":"op1","what":"sing"}\n{"type":"hum"}\n{"type":"beat","serial":4,"epoch":7,"x":1}\n'
    )
    world.net.run(0.1)
    text = {"text": "this agent does not know act"}
    assert server.link.of(Done)[0] == Done("op1", False, "unsupported", text)
    assert [done.operation for done in server.link.of(Done)] == ["op1", ""]
    assert server.link.of(Report)[-1].beat == 4
    assert server.link.over is False


def test_the_registration_carries_the_whole_node_and_a_new_one_refreshes_it(world):
    """Inventory, labels, fabrics, installations and shards; after a change and a lost link the server has the new ones."""
    port, agent = world.server(), world.agent(start=False)
    world.stoppable.append(agent)
    agent.node.shards = (shard("m/1/0"),)
    agent.startService()
    world.linked(port)
    first = port.members.registers["n1"]
    assert (first.facts, first.shards) == (agent.node.facts, agent.node.shards)
    assert (first.node, first.instance, first.boot, first.fleet) == ("n1", "i-1", "b-1", world.fleet.name)
    agent.node.facts = evolve(
        agent.node.facts,
        inventory=Inventory(16, 2**37),
        labels={"pool": "b"},
        fabrics=(Fabric("rack4"),),
        installations=(Installation("vllm", "vllm", version="0.34.0"), Installation("llamacpp", "llamacpp")),
    )
    agent.node.shards = ()
    world.net.connections[-1][0].cut()
    world.net.until(lambda: len(port.members.of("joined")) == 2)
    second = port.members.registers["n1"]
    assert (second.facts, second.shards) == (agent.node.facts, ())
    assert (second.epoch, second.leader) == (7, "cp1")


def test_questions_are_answered_in_any_order_and_a_failure_is_an_answer(world, server, agent, expect_failures):
    """A slow one holds up no other; an expected error is told in its words, another one as ours, and logged."""
    expect_failures(ZeroDivisionError)
    slow = Deferred()
    answers = {"slow": lambda: slow, "bad": lambda: fail(LlmgwError("no such weights")), "worse": lambda: 1 // 0}
    agent.node.answer = lambda message: answers[message.operation]()
    server.link.send(
        *[Inspect(operation, 7, "cp1", "m.gguf", "vllm") for operation in answers], FetchLog("bad", 7, "cp1", "s", 0, 0, 1)
    )
    world.net.run(0.1)
    slow.callback(Done("slow", True, result={"big": "x" * 2**21}))
    world.net.run(0.1)
    text = {"text": "the agent failed (see its log)"}
    assert server.link.of(Done) == [
        Done("bad", False, "failed", {"text": "no such weights"}),
        Done("worse", False, "failed", text),
        Done("bad", False, "failed", {"text": "no such weights"}),
        Done("slow", False, "unsendable", {"text": "the result does not fit the protocol"}),
    ]


@pytest.mark.parametrize("where", ["desired", "report"])
def test_a_node_that_fails_at_one_message_harms_no_other(world, server, agent, expect_failures, where):
    """It is logged; the link stays, and what was not applied is not reported as applied."""
    expect_failures(ZeroDivisionError)
    setattr(agent.node, where, lambda *args: 1 // 0)
    server.link.send(desired(5))
    server.beat(1)
    world.net.run(0.1)
    delattr(agent.node, where)
    server.beat(2)
    world.net.run(0.1)
    assert (server.link.of(Report)[-1].beat, server.link.of(Report)[-1].revision) == (2, 5 if where == "report" else 0)
    assert server.link.over is False


@pytest.mark.parametrize("where", ["accepted", "connected", "report"])
def test_a_node_that_fails_at_the_acceptance_ends_the_link_with_a_word(world, server, expect_failures, where):
    """The server hears whose fault it was; when the node is well again, the next try is taken."""
    expect_failures(ZeroDivisionError)
    agent = world.agent(start=False)
    world.stoppable.append(agent)
    setattr(agent.node, where, lambda *args: 1 // 0)
    agent.startService()
    world.net.until(lambda: rounds(world))
    assert server.link.of(Bye) == [Bye("the agent failed (see its log)")]
    assert "we left: the agent failed (see its log). Next try in" in rounds(world)[0]
    assert len(agent.node.of("disconnected")) == 1
    delattr(agent.node, where)
    link_to(world, server, agent)


# Old links.


@pytest.mark.parametrize("last", [b"garbage\n", b"x" * (2**20 + 1) + b"\n"], ids=["garbage", "too long"])
def test_what_comes_behind_a_broken_line_is_not_obeyed(world, server, agent, last):
    """Even in the same packet: after the first mistake nothing of that link is believed."""
    from llmgw.wire.codec import encode

    server.link.write(last + encode(desired()))
    world.net.run(0.1)
    server.link.send(desired(2))
    world.net.run(0.1)
    assert agent.node.of("desired") == []


def test_what_comes_behind_the_servers_goodbye_is_not_obeyed(world, server, agent):
    """A leader that stepped down commands nothing more, whatever was still in its queue."""
    server.link.send(Goaway("standby", text="cp2 leads"), desired())
    world.net.run(0.1)
    assert agent.node.of("desired") == []


def test_orders_that_cross_our_goodbye_are_not_obeyed(world, server, agent):
    """The agent has said that it leaves; the server, which has not read it yet, commands on, and the link is still open."""
    server_end = world.net.connections[-1][1]
    server_end.reading = False
    over = []
    agent.stopService().addCallback(over.append)
    world.stoppable.remove(agent)
    server.link.send(desired(), Inspect("i", 7, "cp1", "m", "vllm"))
    world.net.run(0.2)
    assert over == []
    server_end.resume()
    world.net.until(lambda: over)
    assert agent.node.of("desired") == [] and server.link.of(Done) == []


def test_an_old_link_that_wakes_up_after_the_new_one_is_there_is_not_heard(world, server, agent):
    """The network was split and heals: what the old connection still carries comes too late, the new one is untouched."""
    client, end = world.net.connections[-1]
    client.silent = True
    end.reading = False
    old = server.link
    world.net.run(14.9)
    again(world, server, agent)
    client.silent = False
    old.send(desired(9), Beat(99, 7))
    end.resume()
    world.net.run(1)
    assert agent.node.of("desired") == []
    server.link.send(desired(1))
    server.beat(3)
    world.net.run(0.1)
    assert [message.revision for (message,) in agent.node.of("desired")] == [1]
    assert [report.beat for report in server.link.of(Report)] == [0, 0, 3]


def test_half_a_desired_state_is_not_completed_by_another_link(world, server, agent):
    """Part 1 came before the loss, part 2 after it: between them the leader may have changed its mind."""
    server.link.send(desired(5, order("m/1/0"), part=1, parts=2))
    world.net.run(0.1)
    cut(world, server)
    again(world, server, agent)
    server.link.send(desired(5, order("m/2/0"), part=2, parts=2))
    world.net.run(0.1)
    assert agent.node.of("desired") == []
    server.link.send(desired(5, order("m/1/0"), part=1, parts=2), desired(5, order("m/2/0"), part=2, parts=2))
    world.net.run(0.1)
    ((whole,),) = agent.node.of("desired")
    assert [one.shard for one in whole.orders] == ["m/1/0", "m/2/0"]


def test_the_answer_to_an_old_links_question_goes_nowhere(world, server, agent):
    """Whoever asked has given up; the new link's operations are not mixed up with it."""
    slow = Deferred()
    agent.node.answer = lambda message: slow
    server.link.send(Inspect("op1", 7, "cp1", "m.gguf", "vllm"))
    world.net.run(0.1)
    old_send = agent.node.send
    cut(world, server)
    again(world, server, agent)
    slow.callback(Done("op1", True))
    old_send(Event("m/1/0", 1, "loading", "ready", "late"))
    world.net.run(0.1)
    assert [type(message) for message in server.link.heard] == [Register, Report]
    assert server.links[0].of(Done) == []


def test_what_was_applied_is_remembered_over_links(world, server, agent):
    """A new link's first report says what the node has, so that a server knows what an empty list means."""
    server.link.send(desired(5))
    world.net.run(0.1)
    cut(world, server)
    again(world, server, agent)
    world.net.run(0.1)
    (report,) = server.link.of(Report)
    assert (report.epoch, report.revision) == (7, 5)
