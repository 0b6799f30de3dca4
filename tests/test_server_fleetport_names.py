"""Two agents with one name (I-C8), over real TLS on a clock: one acts, both are told why, and an old session harms no new one."""

from __future__ import annotations

import pytest

from llmgw.wire.messages import Accepted, Done, Event, Goaway, Inspect, Refused, Report
from tests.fleetlink import a_world, shard
from tests.fleetport_peers import joined, joining


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def kinds(port):
    """What the control plane heard, reports left out."""
    return [event[:3] for event in port.members.events if event[0] in ("joined", "left")]


def test_i_c8_the_same_agent_replaces_its_old_link_at_once(world):
    """Half-open or not, it is the same instance on the same boot: nobody is asked and no time passes."""
    port, old = world.server(), joined(world)
    new = joined(world, host="10.0.0.8")
    assert new.lost is None
    assert kinds(port) == [("joined", "n1", "7.1"), ("left", "n1", "7.1"), ("joined", "n1", "7.2")]
    world.net.until(lambda: old.lost, 2)
    assert old.word == Goaway("replaced", text=old.word.text)
    assert f"10.0.0.8:{new.end.getHost().port}" in old.word.text
    assert world.log.having("info", "cp1: n1 is gone: ", old.word.text)


def test_f29_i_c8_the_same_agent_comes_back_while_its_old_link_is_stuck(world):
    """The old one reads nothing: it is replaced all the same, and aborted within a second."""
    port, old = world.server(), joined(world)
    old.stop()
    new = joined(world)
    assert port.sessions()["n1"].session == "7.2"
    world.net.run(1.5)
    assert world.net.connections[0][1].disconnected
    assert new.lost is None


@pytest.mark.parametrize(("instance", "boot"), [("i-2", "b-1"), ("i-1", "b-2"), ("i-2", "b-2")], ids=["instance", "boot", "both"])
def test_i_c8_a_clone_is_refused_while_the_holder_answers(world, instance, boot):
    """A copied certificate, a copied disk or both: the newcomer is told who holds the name; both sides log the same facts."""
    port, first = world.server(), joined(world)
    clone = joining(world, "n1", instance, boot, "10.0.0.66")
    world.net.until(lambda: clone.lost, 4)
    assert (clone.word.reason, clone.of(Accepted)) == ("name_in_use", [])
    (refusal,) = port.refusals()
    assert (refusal.reason, refusal.text, refusal.node) == ("name_in_use", clone.word.text, "n1")
    holder = port.sessions()["n1"]
    for part in (
        f"linked from 10.0.0.9:{first.end.getHost().port}",
        "since 20",
        "instance i-1, boot b-1)",
        f"{instance}, boot {boot}",
    ):
        assert part in refusal.text
    assert f"(serial {holder.serial[:8]}, instance i-1" in refusal.text and "certificate n1 (serial " in refusal.text
    assert world.log.having("warn", "cp1: refused 10.0.0.66:", refusal.text)
    assert kinds(port) == [("joined", "n1", "7.1")]
    world.net.run(30, 0.5)
    assert (first.lost, first.word) == (None, None)


def test_i_c8_a_clone_is_logged_by_the_agent_in_the_servers_words(world):
    """A real agent is refused, says so and backs off; the one that holds the name is not disturbed."""
    port, first = world.server(), world.agent("n1")
    world.linked(port)
    twin = world.agent("n1", state="twin")
    twin.node.instance = "i-2"
    world.net.until(lambda: port.refusals(), 10)
    refusal = port.refusals()[0]
    world.net.until(lambda: world.log.having("warn", "n1: 10.0.0.1:7443 refused us: name_in_use: ", refusal.text), 5)
    world.net.run(60, 0.5)
    assert 4 <= len(port.refusals()) <= 12, "it goes on to try, and never hammers"
    assert kinds(port) == [("joined", "n1", "7.1")]
    assert not first.node.of("disconnected")


def test_i_c8_a_silent_holder_gives_way_after_three_seconds(world):
    """It is stopped: asked, it does not answer, and the newcomer has the name. The log says why the first lost it."""
    port, first = world.server(), joined(world)
    first.stop()
    begun = world.net.seconds()
    second = joining(world, "n1", "i-2", "b-2", "10.0.0.66")
    world.net.until(lambda: second.of(Accepted), 5)
    assert world.net.seconds() - begun == pytest.approx(3, abs=0.2)
    assert kinds(port) == [("joined", "n1", "7.1"), ("left", "n1", "7.1"), ("joined", "n1", "7.2")]
    (line,) = world.log.having("info", "cp1: n1 is gone: ")
    assert f"replaced by a link from 10.0.0.66:{second.end.getHost().port}" in line
    assert "(instance i-2, boot b-2), after it did not answer in 3 s" in line


def test_i_c8_a_holder_that_dies_while_it_is_asked_gives_way_at_once(world):
    """The control plane hears that the old one left before it hears of the new one."""
    port, first = world.server(), joined(world)
    first.mute = True
    second = joining(world, "n1", "i-2", "b-2", "10.0.0.66")
    world.net.run(1)
    assert not second.of(Accepted)
    world.net.connections[0][1].cut()
    world.net.until(lambda: second.of(Accepted), 1)
    assert kinds(port) == [("joined", "n1", "7.1"), ("left", "n1", "7.1"), ("joined", "n1", "7.2")]


def test_i_c8_of_two_newcomers_for_a_silent_holder_one_gets_in(world):
    """The second is judged against the first, which answers."""
    port, holder = world.server(), joined(world)
    holder.stop()
    second = joining(world, "n1", "i-2", "b-2", "10.0.0.66")
    third = joining(world, "n1", "i-3", "b-3", "10.0.0.67")
    world.net.until(lambda: second.of(Accepted) and third.lost, 8)
    assert third.word.reason == "name_in_use"
    assert "from 10.0.0.66:" in third.word.text and "instance i-2" in third.word.text
    assert [event[0] for event in kinds(port)] == ["joined", "left", "joined"]


def test_i_c8_the_holder_itself_comes_back_while_a_clone_is_judged(world):
    """Its half-open link is asked in vain, but before the time is over it redials: the clone stays out."""
    port, old = world.server(), joined(world)
    old.stop()
    clone = joining(world, "n1", "i-2", "b-2", "10.0.0.66")
    world.net.run(1)
    back = joined(world)
    world.net.until(lambda: clone.lost, 9)
    assert clone.word.reason == "name_in_use"
    assert (back.lost, port.sessions()["n1"].session) == (None, "7.2")


def test_i_c8_a_clone_that_leaves_while_it_is_judged_takes_nothing(world):
    """The holder is silent, but whom should it give way to?"""
    port, holder = world.server(), joined(world)
    holder.mute = True
    clone = joining(world, "n1", "i-2", "b-2", "10.0.0.66")
    world.net.run(1)
    clone.transport.abortConnection()
    world.net.run(4)
    assert kinds(port) == [("joined", "n1", "7.1")]
    assert port.sessions()["n1"].session == "7.1"


def test_a_clone_whose_judgement_was_given_up_takes_nothing(world):
    """The server ended it while the holder was being asked: the late verdict opens no session and ends none."""
    port, holder = world.server(), joined(world)
    holder.mute = True
    clone = joining(world, "n1", "i-2", "b-2", "10.0.0.66")
    clone.stop()
    world.net.run(2.5)
    visitor = next(visitor for visitor in port._visitors if not visitor.session)
    visitor.end(Goaway("removed"), 5)
    world.net.run(1)
    assert kinds(port) == [("joined", "n1", "7.1")]
    assert holder.word is None


def test_a_late_message_of_an_old_session_never_reaches_the_new_one(world):
    """Reports, events and answers that were under way when the new session came are dropped, and its question fails."""
    port, old = world.server(), joined(world)
    failed = []
    port.ask("n1", Inspect("o1", 0, "", "m", "e"), 60).addBoth(failed.append)
    world.net.run(0.1)
    slow = world.net.connections[0][1]
    slow.reading = False
    late = [Report(7, 11, ()), Event("m/1/0", 1, "ready", "failed", "late"), Done("run:m/1/0:1:x", False), Done("o1", True)]
    old.say(*late)
    new = joined(world, host="10.0.0.8")
    new.say(Report(7, 11, (shard(),)))
    world.net.run(0.1)
    heard = len(port.members.events)
    slow.resume()
    world.net.run(0.5)
    assert port.members.events[heard:] == []
    assert port.members.events[-1] == ("report", "n1", "7.2", Report(7, 11, (shard(),)))
    assert "ended before it answered: replaced by a link from 10.0.0.8" in str(failed[0].value)
    assert old.lost and not new.lost


def test_a_session_is_heard_no_more_once_it_was_told_to_go(world):
    """Between the goaway and the end of the connection nothing of it counts, not even its own leave."""
    port, peer = world.server(), joined(world)
    peer.stop()
    port.close("n1", Goaway("removed", text="n1 was removed"))
    peer.say(Report(7, 11, ()))
    world.net.run(0.3)
    peer.end.resume()
    world.net.until(lambda: peer.lost, 2)
    assert port.members.of("report") == []
    assert port.members.of("left") == [("n1", "7.1", "n1 was removed")]
    assert peer.word == Goaway("removed", text="n1 was removed")


@pytest.mark.parametrize(
    ("claim", "reason", "said"),
    [
        ({"claim": "n2"}, "name_mismatch", "claimed n2"),
        ({"fleet": "07e207e207e2"}, "wrong_fleet", "n1 says it is of fleet 07e207e207e2, this is f1ee7f1ee700"),
        ({"protocol": 2}, "protocol", "speaks version 2 of the protocol, we speak 1"),
    ],
)
def test_a_claim_is_refused_with_the_certificates_name_and_the_claim(world, claim, reason, said):
    """The refusal's text is the log's, and it names the certificate as well as what was claimed."""
    port = world.server()
    peer = joining(world, "n1", **claim)
    world.net.until(lambda: peer.lost, 2)
    assert isinstance(peer.word, Refused)
    (refusal,) = port.refusals()
    assert (refusal.reason, refusal.text, refusal.node) == (reason, peer.word.text, "n1")
    assert "certificate n1 (serial " in refusal.text and said in refusal.text
    assert world.log.having("warn", f"cp1: refused {refusal.peer}: {reason}: {refusal.text}")
    assert port.members.events == []
