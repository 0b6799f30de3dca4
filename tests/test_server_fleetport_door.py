"""Who may wait at the fleet port and for how long: caps, slow peers, garbage, and what TLS takes; real TLS, injected clock."""

from __future__ import annotations

import pytest
from OpenSSL import SSL

from llmgw.wire.codec import encode
from llmgw.wire.messages import MAX_LINE, Accepted, Bye, Goaway, Refused, Report, Welcome
from tests.fleetlink import a_world
from tests.fleetport_peers import Tls, dial, joined, joining, registration


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def reasons(port):
    return [refusal.reason for refusal in port.refusals()]


def test_one_address_cannot_take_all_places(world):
    """The third that waits there is closed before TLS, and said so; another address gets in, and later this one again."""
    port = world.server()
    port._doorway.most_per_host = 2
    slow = [dial(world) for _ in range(2)]
    third = dial(world)
    world.net.run(0.1)
    assert third.lost and not third.raw and not any(peer.lost for peer in slow)
    (refusal,) = port.refusals()
    assert (refusal.reason, refusal.peer) == ("crowded", f"10.0.0.9:{third.end.getHost().port}")
    assert world.log.having("warn", f"cp1: refused {refusal.peer}: crowded: 2 peers of this address are waiting already")
    joined(world, "n1", host="10.0.0.8")
    world.net.run(6)
    assert all(peer.lost for peer in slow)
    joined(world, "n2")


def test_all_addresses_together_cannot_take_all_memory(world):
    """There is a bound on all that wait; it is free again when they have been dropped."""
    port = world.server()
    port._doorway.most = 4
    slow = [dial(world, host=f"10.0.1.{number}") for number in range(4)]
    late = dial(world, host="10.0.0.8")
    world.net.run(0.1)
    assert late.lost and port.refusals()[-1].text == "4 peers are waiting already"
    world.net.run(6)
    assert all(peer.lost for peer in slow)
    joined(world)


def test_accepted_agents_take_no_place_at_the_door(world):
    """A whole fleet behind one address links, though only one may wait at a time; those that go leave nothing behind."""
    port = world.server()
    port._doorway.most_per_host = 1
    peers = [joined(world, f"n{number}") for number in range(5)]
    for peer in peers:
        peer.transport.loseConnection()
    world.net.run(1)
    assert (port.sessions(), port._visitors) == ({}, {})
    assert port._doorway._waiting.total() == 0


def test_refused_peers_hold_their_place_until_they_are_gone(world):
    """One that does not read its refusal is aborted in 5 s; a loop of refusals cannot pile connections up."""
    port = world.server()
    port._doorway.most_per_host = 1
    refusal = Refused("standby", "cp1 is standby", "cp2")
    port.members.readiness = lambda: setattr(world.net.connections[0][0], "reading", False) or refusal
    dial(world, Tls(world.fleet.node("n1")))
    world.net.until(lambda: port.refusals(), 1)
    refused = dial(world)
    world.net.run(0.1)
    assert refused.lost and not world.net.connections[0][1].disconnected
    world.net.run(5)
    assert world.net.connections[0][1].disconnected
    again = dial(world)
    world.net.run(0.1)
    assert not again.lost


def test_f37_a_crowd_that_says_nothing_keeps_no_agent_out(world):
    """500 connections of two addresses: half get in and are dropped in time; a real agent links at once meanwhile."""
    port = world.server()
    crowd = [dial(world, host=f"10.0.2.{number % 2}") for number in range(500)]
    world.net.run(0.1)
    assert len(port._visitors) == 256
    agent = world.agent("n1")
    assert world.linked(port, seconds=2) < 1
    world.net.run(6, 0.5)
    assert all(peer.lost for peer in crowd)
    assert not agent.node.of("disconnected")
    assert len(world.log.having("warn", "cp1: refused 10.0.2.")) <= 50


def test_a_probe_of_the_port_is_no_refusal(world):
    """What a load balancer does each second does not fill the log."""
    port, peer = world.server(), None
    peer = dial(world)
    peer.transport.loseConnection()
    world.net.run(1)
    assert peer.lost and port.refusals() == [] and not world.log.having("warn")


class Slow:
    """Says C{data} one byte per second."""

    def __init__(self, world, peer, data, write):
        self.world, self.peer, self.data, self.write = world, peer, data, write
        self.step()

    def step(self):
        if self.data and not self.peer.lost:
            self.write(self.data[:1])
            self.data = self.data[1:]
            self.world.net.callLater(1, self.step)


def nothing(world):
    return dial(world)


def slow_hello(world):
    peer = dial(world)
    Slow(world, peer, b"\x16\x03\x01\x02\x00\x01\x00", peer.transport.write)
    return peer


def silent_tls(world):
    return dial(world, Tls(world.fleet.node("n1")))


def half_a_line(world):
    peer = silent_tls(world)
    world.net.until(lambda: peer.heard, 1)
    peer.say(encode(registration())[:200])
    return peer


def slow_line(world):
    peer = silent_tls(world)
    world.net.until(lambda: peer.heard, 1)
    Slow(world, peer, encode(registration())[:20], peer.say)
    return peer


@pytest.mark.parametrize(
    ("come", "reason", "text"),
    [
        (nothing, "tls", "the TLS handshake was not done in 5 s"),
        (slow_hello, "tls", "the TLS handshake was not done in 5 s"),
        (silent_tls, "link", "its registration was not done in 5 s"),
        (half_a_line, "link", "its registration was not done in 5 s"),
        (slow_line, "link", "its registration was not done in 5 s"),
    ],
)
def test_f36_a_slow_peer_is_dropped_at_its_deadline(world, come, reason, text):
    """Whatever it is slow at; the log says at what and whose certificate it showed, and an agent links meanwhile."""
    port, agent = world.server(), world.agent("n2")
    peer = come(world)
    world.net.until(lambda: peer.lost, 7)
    assert peer.lived == pytest.approx(5, abs=0.2)
    (refusal,) = port.refusals()
    assert refusal.reason == reason
    assert refusal.text.endswith(text)
    assert ("certificate n1 (serial " in refusal.text) == (reason == "link")
    assert world.log.having("warn", f"cp1: refused {refusal.peer}: {reason}: {refusal.text}")
    assert "n2" in port.sessions() and not agent.node.of("disconnected")
    assert [event for event in port.members.events if event[1] == "n1"] == []


BAD = {
    "garbage": (b"\x00\xff garbage\n", "not UTF-8"),
    "not json": (b"hello there\n", "not JSON"),
    "no object": (b"[1]\n", "not an object"),
    "2 MiB": (b"x" * (2 * MAX_LINE) + b"\n", "a line longer than 1048576 bytes"),
    "no end": (b"x" * (MAX_LINE + 1), "a line longer than 1048576 bytes"),
    "deep": (b"[" * 100000 + b"\n", "more than 32 levels deep"),
    "no type": (b'{"a":1}\n', "an object without a type"),
    "wrong type": (b'{"type":"register","protocol":"1"}\n', "a wrong register"),
}


@pytest.mark.parametrize(("line", "text"), BAD.values(), ids=BAD.keys())
def test_f33_f35_a_bad_line_instead_of_a_registration_is_one_refusal(world, line, text):
    """The peer is told, the log has the same words with the certificate's name, and nobody else notices."""
    port, agent = world.server(), world.agent("n2")
    world.linked(port, "n2")
    peer = dial(world, Tls(world.fleet.node("n1")))
    world.net.until(lambda: peer.heard, 1)
    peer.say(line)
    world.net.until(lambda: peer.lost, 6)
    assert peer.word.reason == "malformed" and text in peer.word.text
    (refusal,) = port.refusals()
    assert refusal.reason == "malformed"
    assert text in refusal.text and "certificate n1 (serial " in refusal.text and b"xxx" not in refusal.text.encode()
    assert not agent.node.of("disconnected")


OUT_OF_TURN = {
    "report": (Report(0, 0, ()), "report where register was due"),
    "bye": (Bye("x"), "bye where register was due"),
    "unknown": (b'{"type":"hallo"}\n', "unknown where register was due"),
}


@pytest.mark.parametrize(("message", "text"), OUT_OF_TURN.values(), ids=OUT_OF_TURN.keys())
def test_nothing_but_a_registration_is_taken_before_one(world, message, text):
    """An agent of a newer version, too, has to register first."""
    port = world.server()
    peer = dial(world, Tls(world.fleet.node("n1")))
    world.net.until(lambda: peer.heard, 1)
    peer.say(message)
    world.net.until(lambda: peer.lost, 6)
    assert peer.word.text == f"you sent {text}"
    assert f"it sent {text}" in port.refusals()[0].text


def test_more_than_a_registration_before_it_is_accepted_is_refused(world):
    """While the first of the name is asked, the newcomer has to wait."""
    port, first = world.server(), joined(world)
    first.mute = True
    second = joining(world, "n1", "i-2", "b-2")
    second.say(Report(0, 0, ()))
    world.net.until(lambda: second.lost, 6)
    assert second.word.reason == "malformed"
    world.net.run(5)
    assert [event[0] for event in port.members.events] == ["joined"]


@pytest.mark.parametrize(("line", "text"), BAD.values(), ids=BAD.keys())
def test_f35_a_bad_line_ends_a_live_link_with_its_reason(world, line, text):
    """Goaway says what was wrong, and so does the node's reason; the next link is taken as usual."""
    port, peer = world.server(), joined(world)
    peer.say(line)
    world.net.until(lambda: peer.lost, 6)
    assert isinstance(peer.word, Goaway) and peer.word.reason == "malformed" and text in peer.word.text
    ((_, _, reason),) = port.members.of("left")
    assert text in reason
    joined(world)


def test_f77_an_unknown_message_on_a_live_link_is_ignored(world):
    """A newer agent may say more than we understand."""
    port, peer = world.server(), joined(world)
    peer.say(b'{"type":"hallo","operation":"o1"}\n', Report(7, 11, ()))
    world.net.run(1)
    assert len(port.members.of("report")) == 1 and not peer.lost


def test_a_second_registration_ends_the_link(world):
    """A session is of one agent."""
    port, peer = world.server(), joined(world)
    peer.say(registration(instance="i-9"))
    world.net.until(lambda: peer.lost, 6)
    assert peer.word == Goaway("malformed", text="you sent register on an accepted link")
    assert port.sessions() == {}


TLS = {
    "no certificate": (lambda world: Tls(), "it showed no certificate"),
    "TLS 1.2": (lambda world: Tls(world.fleet.node("n1"), SSL.TLS1_2_VERSION), "it does not offer TLS 1.3"),
    "other ALPN": (lambda world: Tls(world.fleet.node("n1"), alpn=[b"h2"]), "TLS failed: "),
    "no ALPN": (lambda world: Tls(world.fleet.node("n1"), alpn=[]), "no offer to speak llmgw/1 (ALPN)"),
}


@pytest.mark.parametrize(("tls", "text"), TLS.values(), ids=TLS.keys())
def test_tls_is_1_3_with_a_certificate_and_our_protocol(world, tls, text):
    """Anything else is not even welcomed; the log says what was missing."""
    port = world.server()
    peer = dial(world, tls(world))
    world.net.until(lambda: peer.lost, 6)
    assert not peer.of(Welcome) and not peer.of(Accepted)
    assert text in port.refusals()[0].text
    joined(world)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b'{"type":"register"}\n', b"\x00" * 100, b"\x80\x2e\x01\x00\x02\x00\x15"]
)
def test_f35_what_is_no_tls_is_refused_without_a_traceback(world, data):
    """A browser, a plain-text agent, noise."""
    port = world.server()
    peer = dial(world)
    peer.transport.write(data)
    world.net.until(lambda: peer.lost, 6)
    assert reasons(port) == ["tls"]
    joined(world)


def test_no_session_is_resumed(world):
    """A resumed session would skip the judgement of the certificate: each link is a whole handshake."""
    world.server()
    tls = Tls(world.fleet.node("n1"))
    first = dial(world, tls)
    world.net.until(lambda: first.heard, 1)
    tls.session = first.transport.getHandle().get_session()
    again = dial(world, tls)
    world.net.until(lambda: again.heard, 1)
    assert again.of(Welcome) and not SSL._lib.SSL_session_reused(again.transport.getHandle()._ssl)
