"""Servers given by name: what DNS says is asked anew in each round, in threads that nobody waits for."""

from __future__ import annotations

import threading

import pytest
import pytest_twisted

from llmgw.agent.lookup import Lookup, LookupFailed
from tests.fleetlink import a_world
from tests.uplink_rig import Names, ScriptedServer, link_to, rounds

CP = "cp.example"


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def dialed(world):
    return [host for _, host, _ in world.net.dialed]


def test_every_address_of_a_name_is_tried_and_told_by_itself(world):
    """A name for three machines, of which the last leads: the certificate is checked against the name, not the address."""
    names = Names(world, **{CP: ["10.0.0.1", "fd00::2", "10.0.0.3"]})
    leader = ScriptedServer(world, "10.0.0.3", "cp3", addresses=[CP]).refuses()
    agent = world.agent(servers=(CP,), lookup=names.lookup)
    world.net.until(lambda: rounds(world))
    each = "cp.example:7443 (10.0.0.1) connection refused, cp.example:7443 (fd00::2) connection refused"
    assert rounds(world) == [f"no leader: {each}, cp.example:7443 (10.0.0.3) refused (standby). Next try in 0.5 s."]
    leader.greeting = ScriptedServer(world, "10.0.0.9", "cp9").greeting
    link_to(world, leader, agent)
    assert agent.status == "linked to cp.example:7443 (10.0.0.3), cp3 leads (epoch 7)"


def test_a_name_of_one_address_is_shown_as_configured(world):
    """Nothing is said of addresses where there is no choice."""
    names = Names(world, **{CP: ["10.0.0.1"]})
    world.agent(servers=(CP,), lookup=names.lookup)
    world.net.until(lambda: rounds(world))
    assert rounds(world) == ["cp.example:7443 connection refused. Next try in 0.5 s."]


def test_a_record_that_changes_is_followed_in_the_next_round(world):
    """The server moved: no restart, no reload."""
    names = Names(world, **{CP: ["10.0.0.1"]})
    server = ScriptedServer(world, "10.0.0.2", "cp2", addresses=[CP])
    agent = world.agent(servers=(CP,), lookup=names.lookup)
    world.net.until(lambda: len(rounds(world)) == 2)
    names.records[CP] = ["10.0.0.2"]
    link_to(world, server, agent)
    assert dialed(world) == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]


def test_a_name_without_a_record_costs_its_turn_and_no_more(world):
    """It does not exist, or it exists and has no address: the line says which, and the next address is tried at once."""
    names = Names(world, **{"empty.example": []})
    world.agent(servers=("none.example", "empty.example", "10.0.0.1"), lookup=names.lookup)
    world.net.until(lambda: rounds(world))
    assert rounds(world) == [
        "no leader: none.example:7443: the name was not found: Name or service not known,"
        " empty.example:7443: the name has no address, 10.0.0.1:7443 connection refused. Next round in 0.5 s."
    ]


def test_dns_that_never_answers_holds_up_no_other_address(world):
    """3 s, then the next; and however long that lasts there is one question under way for the name, not one per round."""
    names = Names(world, **{CP: ["10.0.0.1"]})
    names.mute.add(CP)
    server = ScriptedServer(world, "10.0.0.2", "cp2").refuses()
    agent = world.agent(servers=(CP, "10.0.0.2"), lookup=names.lookup)
    world.net.until(lambda: len(rounds(world)) == 5, 100)
    assert all("cp.example:7443: the name was not found in 3 s (DNS does not answer)" in line for line in rounds(world))
    assert len(server.links) == 5
    assert names.asked == [CP]
    server.greeting = ScriptedServer(world, "10.0.0.9", "cp9").greeting
    link_to(world, server, agent)


@pytest.mark.parametrize("takes", [3.4, 5.0, 11.0])
def test_dns_that_takes_longer_than_anybody_waits_is_used_all_the_same(world, takes):
    """A first name server that is dead costs 5 s per question. Its answer is there for whoever asks next."""
    names = Names(world, **{CP: ["10.0.0.1"]})
    names.mute.add(CP)
    server = ScriptedServer(world, addresses=[CP])
    agent = world.agent(servers=(CP,), lookup=names.lookup)
    world.net.run(takes)
    names.answer()
    assert link_to(world, server, agent) < 12
    assert names.asked == [CP]


def test_a_late_answer_that_is_old_by_now_is_not_believed(world):
    """An hour later the name may mean another machine."""
    names = Names(world, **{CP: ["10.0.0.1"]})
    names.mute.add(CP)
    first = []
    names.lookup.addresses(CP).addErrback(first.append)
    world.net.run(4)
    names.answer()
    world.net.run(3600, 60)
    names.mute.clear()
    names.records[CP] = ["10.0.0.2"]
    second = []
    names.lookup.addresses(CP).addCallback(second.append)
    world.net.run(0.1)
    assert first[0].check(LookupFailed) and second == [["10.0.0.2"]]


def test_no_thread_to_be_had_is_one_failed_address(world):
    """The machine is out of threads: said as such, and the others are tried."""
    names = Names(world)

    def begin(name, call):
        raise RuntimeError("can't start new thread")

    names.lookup._begin = begin
    agent = world.agent(servers=(CP, "10.0.0.1"), lookup=names.lookup)
    server = ScriptedServer(world).refuses()
    world.net.until(lambda: len(rounds(world)) == 2)
    assert "cp.example:7443: the name was not looked up: can't start new thread, 10.0.0.1:7443 refused" in rounds(world)[0]
    server.greeting = ScriptedServer(world, "10.0.0.9", "cp9").greeting
    link_to(world, server, agent)


def test_a_resolver_that_breaks_is_asked_again(world, expect_failures):
    """What nobody thought of is logged with its place, costs the turn, and does not leave the name unasked for ever."""
    expect_failures(ZeroDivisionError)
    names = Names(world)
    names.lookup._ask = lambda *args, **more: 1 // 0
    world.agent(servers=(CP,), lookup=names.lookup)
    world.net.until(lambda: len(rounds(world)) == 2)
    assert "cp.example:7443: the name was not found: ZeroDivisionError(" in rounds(world)[1]
    assert names.asked == [CP, CP]


def test_a_failure_while_dialing_is_one_failed_address(world, expect_failures):
    """Whatever goes wrong with one address, the others are tried, and dialing goes on."""
    expect_failures(ZeroDivisionError)
    names = Names(world)
    real = names.lookup.addresses
    names.lookup.addresses = lambda host: 1 // 0 if host == CP else real(host)
    server = ScriptedServer(world)
    agent = world.agent(servers=(CP, "10.0.0.1"), lookup=names.lookup)
    link_to(world, server, agent)
    server.refuses()
    server.link.transport.loseConnection()
    world.net.until(lambda: rounds(world))
    assert any("cp.example:7443: we could not dial: " in line for line in rounds(world))


@pytest.mark.parametrize("name", ["2130706433", "cp 1", "*.example"])
def test_a_name_that_can_be_in_no_certificate_is_one_failed_address(world, name):
    """The system may resolve it; the certificate's check then says no, in the round's line and nowhere else."""
    names = Names(world, **{name: ["10.0.0.1"]})
    server = ScriptedServer(world)
    world.agent(servers=(name,), lookup=names.lookup)
    world.net.until(lambda: len(rounds(world)) == 2)
    assert rounds(world)[0].startswith(f"{name}:7443: its certificate cp1 (serial ")
    assert rounds(world)[0].endswith(f" is not for {name} but for 10.0.0.1. Next try in 0.5 s.")
    assert all(link.heard == [] for link in server.links)


@pytest.mark.parametrize("name", ["a" * 64 + ".example", "cp..example"])
def test_a_name_that_is_none_is_told_by_the_system_itself(world, name):
    """No question goes out for it, and it is one failed address."""
    world.agent(servers=(name,), lookup=Lookup(world.net, begin=lambda name, call: call()))
    world.net.until(lambda: len(rounds(world)) == 2)
    assert rounds(world)[0].startswith(f"{name}:7443: the name was not found: ")


@pytest_twisted.ensureDeferred
async def test_the_systems_resolver_in_real_threads():
    """C{localhost} is found without the reactor's thread pool; a thread that hangs is a daemon, and only one per name."""
    from twisted.internet import reactor

    assert "127.0.0.1" in await Lookup(reactor).addresses("localhost")
    assert await Lookup(reactor).addresses("fd00::1") == ["fd00::1"]
    go_on = threading.Event()
    lookup = Lookup(reactor, lambda *args, **more: go_on.wait(10) and [(0, 0, 0, "", ("10.0.0.1", 0))], within=0.05)
    for _ in range(3):
        with pytest.raises(LookupFailed, match=r"^was not found in 0 s \(DNS does not answer\)$"):
            await lookup.addresses("hangs.example")
    (thread,) = [each for each in threading.enumerate() if each.name == "lookup hangs.example"]
    assert thread.daemon
    go_on.set()
    thread.join(5)
    assert await lookup.addresses("hangs.example") == ["10.0.0.1"]
