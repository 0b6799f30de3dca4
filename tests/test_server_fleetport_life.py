"""A fleet port's own life: it stops in time whatever its peers do, changes certificates under live links, and tells of expiry."""

from __future__ import annotations

from datetime import timedelta

import pytest
from attrs import evolve

from llmgw.config.settings import Address, TlsFiles
from llmgw.errors import LlmgwError
from llmgw.server.fleetport import CannotListen
from llmgw.testing.certificates import Fleet
from llmgw.wire.messages import Goaway, Refused, Welcome
from tests.fleetlink import a_world, order
from tests.fleetport_peers import Tls, dial, joined, joining, registration


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


# Stopping.


def idle(world, port):
    return joined(world)


def idle_agent(world, port):
    world.agent("n1")
    world.linked(port)


def in_tcp(world, port):
    return dial(world)


def in_handshake(world, port):
    peer = dial(world)
    peer.transport.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    return peer


def in_greeting(world, port):
    return dial(world, Tls(world.fleet.node("n1")))


def in_judgement(world, port):
    joined(world).mute = True
    return joining(world, "n1", "i-2", "b-2")


def silent(world, port):
    joined(world).mute = True
    world.net.connections[0][0].silent = True


def not_reading(world, port):
    joined(world).stop()


def not_reading_much(world, port):
    joined(world).stop()
    port.desired("n1", [order(f"m/{number}/0", filler="x" * 200_000) for number in range(8)], 12)


def refused_and_not_reading(world, port):
    port.members.readiness = lambda: setattr(world.net.connections[0][0], "reading", False) or Refused("standby", "no")
    return dial(world, Tls(world.fleet.node("n1")))


def all_at_once(world, port):
    for number, bring in enumerate((idle, in_tcp, in_handshake, in_greeting)):
        bring(world, port)
        world.net.run(0.1 * number)
    world.net.connections[0][0].reading = False


PEERS = [
    idle,
    idle_agent,
    in_tcp,
    in_handshake,
    in_greeting,
    in_judgement,
    silent,
    not_reading,
    not_reading_much,
    refused_and_not_reading,
    all_at_once,
]


@pytest.mark.parametrize("bring", PEERS, ids=lambda bring: bring.__name__)
def test_f70_a_server_stops_within_two_seconds(world, bring):
    """Whatever its peers do or leave undone, and with time to spare; nothing of it is left, no timer and no connection."""
    port = world.server()
    bring(world, port)
    world.net.run(0.2)
    assert port._visitors
    assert world.stop(port) < 1
    assert (port._visitors, port.sessions(), world.net.listeners) == ({}, {}, {})
    assert all(server.disconnected for _, server in world.net.connections)
    for _, server in world.net.connections:
        server.other.reading = True
    timers = [call for call in world.net.getDelayedCalls() if "server" in str(call.func) or "llmgw.wire" in str(call.func)]
    assert not timers
    joins, leaves = port.members.of("joined"), port.members.of("left")
    assert [event[:2] for event in joins] == [event[:2] for event in leaves]


def test_a_server_without_peers_stops_at_once(world):
    """And no later than that a second time."""
    port = world.server()
    assert world.stop(port) == 0
    port.stopService()


def test_a_stop_tells_each_peer_in_its_own_words(world):
    """A session gets goaway; who was not accepted yet is refused as by a server that starts, and comes again."""
    port, linked = world.server(), joined(world, "n1")
    waiting = dial(world, Tls(world.fleet.node("n2")))
    world.net.run(0.1)
    world.stop(port)
    assert linked.word == Goaway("stopping", text="cp1 stops")
    assert waiting.word == Refused("starting", "cp1 stops")
    assert port.members.of("left") == [("n1", "7.1", "cp1 stops")]


def test_a_verdict_that_comes_after_the_stop_opens_no_session(world):
    """The holder that is asked dies with the server's stop; the newcomer must not be let in by that."""
    port, holder = world.server(), joined(world)
    holder.mute = True
    clone = joining(world, "n1", "i-2", "b-2")
    clone.stop()
    world.net.run(1)
    world.stop(port)
    assert port.members.of("joined") == [("n1", "7.1")]


def test_when_the_lead_passes_on_those_who_wait_are_told_who_leads(world):
    """An agent in mid-registration goes to the new leader as one with a session does."""
    port, linked = world.server(), joined(world, "n1")
    waiting = dial(world, Tls(world.fleet.node("n2")))
    world.net.run(0.1)
    port.close_all(Goaway("standby", "cp2", ("10.0.0.2:7443",), "cp2 leads now"))
    world.net.run(1.5)
    assert linked.word == Goaway("standby", "cp2", ("10.0.0.2:7443",), "cp2 leads now")
    assert waiting.word == Refused("standby", "cp2 leads now", "cp2", ("10.0.0.2:7443",))
    assert port.running and ("10.0.0.1", 7443) in world.net.listeners


# Not ready to lead.


def test_f22_a_standby_refuses_before_it_has_read_anything(world):
    """The first and only line is the refusal with who leads and where; not one byte of the agent's is looked at."""
    port = world.server()
    port.members.refusal = Refused("standby", "cp1 is a standby", "cp2", ("10.0.0.2:7443",), 2.0)
    peer = dial(world, Tls(world.fleet.node("n1")))
    peer.say(b"x" * 2**21)
    world.net.until(lambda: peer.lost, 6)
    assert peer.heard == [port.members.refusal]
    assert [(refusal.reason, refusal.text, refusal.node) for refusal in port.refusals()] == [
        ("standby", "cp1 is a standby", "n1")
    ]
    assert port.members.events == []


def test_readiness_is_asked_again_at_registration(world):
    """It stepped down between welcome and registration."""
    port = world.server()
    peer = dial(world, Tls(world.fleet.node("n1")))
    world.net.until(lambda: peer.of(Welcome), 1)
    port.members.refusal = Refused("standby", "cp1 is a standby", "cp2")
    peer.say(registration())
    world.net.until(lambda: peer.lost, 6)
    assert peer.word == port.members.refusal
    assert port.members.events == []


def test_a_lead_lost_while_an_agent_is_judged_refuses_it(world):
    """Leave is asked for at the moment of acceptance."""
    port = world.server()
    port.leadership.acting = False
    peer = joining(world)
    world.net.until(lambda: peer.lost, 6)
    assert peer.word == Refused("standby", "cp1 does not lead")
    assert port.members.events == []


# Certificates.


def renew(world, port, pair=None, fleet=None):
    """Write another certificate where the server's is, and tell it."""
    tls = world.files("cp1", pair or (fleet or world.fleet).server("cp1", ["10.0.0.1"]), fleet)
    port.reload(evolve(port.settings, tls=tls))
    return tls


def shown(peer):
    """The serial number of the certificate that the server showed to C{peer}."""
    return peer.transport.getPeerCertificate().to_cryptography().serial_number


def test_f68_a_new_certificate_is_for_new_links_and_ends_no_old_one(world):
    """The live link goes on under the certificate it was made with."""
    port, agent = world.server(), world.agent("n1")
    world.linked(port)
    before = joined(world, "n2")
    pair = world.fleet.server("cp1", ["10.0.0.1"])
    renew(world, port, pair)
    after = joined(world, "n3")
    assert shown(after) == pair.certificate.serial_number != shown(before)
    world.net.run(120, 1)
    assert not agent.node.of("disconnected") and not before.lost
    assert port.certificate_expires == pair.certificate.not_valid_after_utc.timestamp()


@pytest.mark.parametrize("fault", ["missing", "half", "other key", "other authority", "a node's", "other fleet"])
def test_f68_a_certificate_that_cannot_be_used_leaves_the_old_in_force(world, fault):
    """One sentence for the operator; links go on and new ones are made as before."""
    port = world.server()
    peer = joined(world, "n1")
    foreign = Fleet(name="07e207e207e2")
    made = {
        "other authority": lambda: foreign.server("cp1", ["10.0.0.1"]),
        "a node's": lambda: world.fleet.node("cp1"),
    }.get(fault, lambda: world.fleet.server("cp1", ["10.0.0.1"]))()
    whose = foreign if fault == "other fleet" else None
    made = foreign.server("cp1", ["10.0.0.1"]) if whose else made
    tls = world.files("next", made, whose)
    if fault == "missing":
        tls = TlsFiles(tls.certificate.with_name("nowhere.pem"), tls.key, tls.authority)
    elif fault == "half":
        tls.certificate.write_bytes(tls.certificate.read_bytes()[:200])
    elif fault == "other key":
        world.fleet.write(world.path / "x", "x", world.fleet.node("x"))
        tls.key.write_bytes((world.path / "x" / "x.key").read_bytes())
    with pytest.raises(LlmgwError) as raised:
        port.reload(evolve(port.settings, tls=tls))
    assert "\n" not in str(raised.value)
    assert shown(joined(world, "n2")) == shown(peer)
    assert not peer.lost


def test_a_change_of_the_authority_needs_a_while_with_both(world):
    """The bundle lets agents of both in; with the new one alone those of the old are refused, and live links stay."""
    port, old = world.server(), joined(world, "n1")
    new = Fleet(name=world.fleet.name)
    own = new.server("cp1", ["10.0.0.1"])
    tls = world.files("cp1", own, new)
    authority = tls.authority.read_bytes()
    first = world.fleet.write(world.path / "old", "x", world.fleet.node("x"))
    tls.authority.write_bytes(authority + first.authority.read_bytes())
    port.reload(evolve(port.settings, tls=tls))
    both = [joined(world, "n2"), joined(world, "n3", pair=new.node("n3"))]
    tls.authority.write_bytes(authority)
    port.reload(evolve(port.settings, tls=tls))
    late = dial(world, Tls(world.fleet.node("n4")))
    world.net.until(lambda: late.lost, 6)
    assert "which is not our authority" in port.refusals()[-1].text and "n4 (serial " in port.refusals()[-1].text
    joined(world, "n5", pair=new.node("n5"))
    world.net.run(60, 1)
    assert not any(peer.lost for peer in (old, *both))


def test_another_address_is_for_the_next_start(world):
    """A reload does not move the port, and says so."""
    port = world.server()
    port.reload(evolve(port.settings, listen=Address("10.0.0.1", 7444)))
    assert world.log.having("warn", "listen on 10.0.0.1:7444 takes effect at the next start")
    assert [*world.net.listeners] == [("10.0.0.1", 7443)]


def test_expiring_certificates_are_told_of_and_cut_no_link(world):
    """The node's and our own, once per stage; past the end, too, the link that is up goes on."""
    ahead = timedelta(0)
    wall = lambda: (world.fleet.now + ahead).timestamp() + world.net.seconds()  # noqa: E731
    port = world.server(pair=world.fleet.server("cp1", ["10.0.0.1"], days=40), wall=wall)
    peer = joined(world, "n1", pair=world.fleet.node("n1", days=20))
    world.net.run(3600, 5)
    assert not world.log.having("warn", "certificate")
    ahead = timedelta(days=19)
    world.net.run(2 * 3600, 5)
    assert len(world.log.having("n1's certificate: ", "expire")) == 1
    ahead = timedelta(days=45)
    world.net.run(2 * 3600, 5)
    assert world.log.having("n1's certificate: ", "expired")
    assert world.log.having("our own certificate (cp1 (serial ", "expired")
    assert not peer.lost and list(port.sessions()) == ["n1"]


def test_an_address_that_is_taken_is_one_sentence(world):
    """And nothing is left open."""
    world.server()
    second = world.server("cp2", pair=world.fleet.server("cp2", ["10.0.0.1"]), start=False)
    with pytest.raises(CannotListen, match=r"^fleet: cannot listen on 10\.0\.0\.1:7443: .*in use"):
        second.startService()
    assert not second.running
