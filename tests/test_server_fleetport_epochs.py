"""Agents that obey another leadership than ours, a store that hangs, a control plane that fails, a process that overslept."""

from __future__ import annotations

import pytest
from twisted.internet.defer import Deferred, fail

from llmgw.store.errors import StoreError
from llmgw.wire.messages import Accepted, Done
from tests.fleetlink import a_world, order
from tests.fleetport_peers import joined, joining


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def test_f12_an_agent_of_a_higher_epoch_raises_ours_before_it_is_taken(world):
    """A store that was restored begins too low: nothing is commanded under an epoch that the agent would refuse."""
    port = world.server()
    peer = joined(world, epoch=41, leader="cp9")
    assert port.leadership.outranked == [41]
    assert [(accepted.epoch, accepted.leader) for accepted in peer.of(Accepted)] == [(42, "cp1")]
    assert world.log.having("warn", "n1 obeys epoch 41 of cp9, ours is 7: raising it. If no other server leads, the store")


@pytest.mark.parametrize(("epoch", "leader", "raised"), [(7, "cp9", [7]), (7, "cp1", []), (6, "cp9", []), (7, "", [])])
def test_f12_an_epoch_is_raised_only_for_a_conflict(world, epoch, leader, raised):
    """The same epoch of another leader is one; a lower epoch, or ours, is none."""
    port = world.server()
    joined(world, epoch=epoch, leader=leader)
    assert port.leadership.outranked == raised


def slow(port):
    """Make raising wait for the test: returns the Deferreds that wait."""
    waiting = []
    real = port.leadership.outrank

    def outrank(epoch):
        waiting.append(Deferred())
        waiting[-1].addCallback(lambda _: real(epoch))
        return waiting[-1]

    port.leadership.outrank = outrank
    return waiting


def test_many_agents_of_a_higher_epoch_raise_it_once(world):
    """A whole fleet comes back to a restored store."""
    port = world.server()
    waiting = slow(port)
    peers = [joining(world, f"n{number}", epoch=41, leader="cp9") for number in range(20)]
    world.net.run(0.5)
    assert len(waiting) == 1 and not any(peer.of(Accepted) for peer in peers)
    waiting[0].callback(None)
    world.net.run(0.5)
    assert port.leadership.outranked == [41]
    assert {peer.of(Accepted)[0].epoch for peer in peers} == {42}


def test_a_store_that_hangs_refuses_all_that_wait_after_five_seconds(world):
    """Each is told why within its judgement's time, none is just cut, and nobody's try holds up those who come later."""
    port = world.server()
    waiting = slow(port)
    peers = [joining(world, f"n{number}", epoch=41, leader="cp9") for number in range(20)]
    world.net.run(6)
    assert len(waiting) == 1
    for number, peer in enumerate(peers):
        assert peer.word.reason == "starting"
        assert f"n{number} obeys epoch 41, and cp1 cannot raise its own above that: the store did not answer" in peer.word.text
    port.leadership.outrank = type(port.leadership).outrank.__get__(port.leadership)
    joined(world, "n1", epoch=41, leader="cp9")


def test_a_jump_that_nobody_believes_refuses_that_agent_alone(world):
    """An agent cannot burn the counter, nor keep others out by trying."""
    port = world.server()
    real = port.leadership.outrank
    text = "an agent says it has seen epoch 9000000000, more than 1000000 above ours, 7: not believed"
    port.leadership.outrank = lambda epoch: fail(StoreError(text, "epoch_jump")) if epoch > 10**6 else real(epoch)
    evil, good = joining(world, "evil", epoch=9 * 10**9), joining(world, "n1", epoch=8)
    world.net.run(1)
    assert evil.word.reason == "starting" and text in evil.word.text
    assert good.of(Accepted)[0].epoch == 9


@pytest.mark.parametrize("error", ["stale_epoch", "epoch_conflict"])
def test_an_order_that_is_refused_for_its_epoch_raises_ours(world, error):
    """Two refusals of one state are one raising; garbage in their place is none."""
    port, peer = world.server(), joined(world)
    port.desired("n1", [order()], 12)
    for epoch in (True, "9", None, 2.5):
        peer.say(Done("op1", False, error, {"epoch": epoch, "leader": "cp9"}))
    world.net.run(0.5)
    assert port.leadership.outranked == []
    waiting = slow(port)
    peer.say(*[Done("op1", False, error, {"epoch": 9, "leader": "cp9"})] * 3)
    world.net.run(0.5)
    assert len(waiting) == 1
    waiting[0].callback(None)
    world.net.run(0.5)
    assert port.leadership.outranked == [9] and port.leadership.epoch == 10
    assert not peer.lost and world.log.having("error", f"n1 refused our order: {error}")


def test_a_control_plane_that_fails_at_a_registration_refuses_it_and_stands(world, expect_failures):
    """Logged once with its traceback, told to the agent, noted; nothing is held, and the next try is as good as new."""
    expect_failures(ZeroDivisionError)
    port = world.server()
    port.members.on_joined = lambda node: 1 / 0
    peer = joining(world)
    world.net.until(lambda: peer.lost, 6)
    assert peer.word.reason == "starting" and "cp1 failed to take the registration of n1" in peer.word.text
    assert [refusal.text for refusal in port.refusals()] == [peer.word.text]
    assert (port.sessions(), port._doorway._waiting.total(), port.members.of("left")) == ({}, 0, [])
    port.members.on_joined = lambda node: None
    joined(world)


def test_a_control_plane_that_fails_at_a_message_loses_no_more_than_that(world, expect_failures):
    """Reports, outcomes and leaves: the link goes on, and others do."""
    expect_failures(ZeroDivisionError)
    port, peer, other = world.server(), joined(world, "n1"), joined(world, "n2")

    def broken(*_):
        raise ZeroDivisionError

    port.members.report = port.members.done = port.members.event = port.members.left = broken
    peer.say(Done("x", True))
    world.net.run(6)
    assert not peer.lost and len(port.sessions()) == 2
    peer.transport.abortConnection()
    world.net.run(1)
    assert list(port.sessions()) == ["n2"] and not other.lost
    joined(world, "n1")


def test_a_server_that_overslept_takes_no_agent_for_silent(world):
    """It was stopped or blocked for 40 s: what agents said meanwhile lies unread, so they get their time again."""
    port, peer = world.server(), joined(world)
    world.net.run(7, 0.5)
    world.net.advance(40)
    world.net.run(10, 0.5)
    assert not peer.lost and not port.members.of("left")


def test_an_agent_that_is_silent_after_the_server_overslept_is_dropped(world):
    """Its time is as long as ever, counted from when we could hear it."""
    port, peer = world.server(), joined(world)
    world.net.run(7, 0.5)
    peer.mute = True
    world.net.advance(40)
    begun = world.net.seconds()
    world.net.until(lambda: port.members.of("left"), 20)
    assert 5 < world.net.seconds() - begun < 15.5
