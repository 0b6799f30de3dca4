"""Rounds of dialing (I-A1 to I-A8): every address once, a named leader first, one line for all that failed, and then a wait."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.rounds import MOST_HINTS, Round
from llmgw.wire.messages import PROTOCOL, Done, Goaway, Inspect, Register, Report, Welcome
from tests.fleetlink import a_world
from tests.uplink_rig import ScriptedServer, dotted, link_to, mute, rounds

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def dialed(world):
    return [host for _, host, _ in world.net.dialed]


def welcome(world, name="cp1", epoch=7, **more):
    return Welcome(PROTOCOL, PROTOCOL, name, world.fleet.name, epoch, 5.0, **more)


def gaps(world):
    times = [when for when, _, _ in world.net.dialed]
    return [round(after - before, 1) for before, after in zip(times, times[1:], strict=False)]


def test_i_a1_every_address_is_tried_once_per_round_and_in_order(world):
    """Nothing listens anywhere: a, b, c, a wait, and again; never one of them twice in a round."""
    world.agent(servers=(A, B, C))
    world.net.until(lambda: len(rounds(world)) == 4)
    assert dialed(world) == [A, B, C] * 4
    assert [gap for gap in gaps(world) if gap] == [0.5, 1.0, 2.0]


def test_i_a1_a_standby_sends_the_agent_on_at_once(world):
    """A refusal costs no wait while there is another address."""
    ScriptedServer(world).refuses(leader="cp2")
    leader = ScriptedServer(world, B, "cp2")
    agent = world.agent(servers=(A, B))
    assert link_to(world, leader, agent) < 0.2
    assert rounds(world) == []


def test_i_a1_with_one_address_a_standby_is_asked_again_only_after_a_wait(world):
    """Nobody else is there to try; the line says try, not round, and the wait grows."""
    standby = ScriptedServer(world).refuses(leader="cp2")
    world.agent()
    world.net.until(lambda: len(rounds(world)) == 3)
    assert rounds(world)[0] == "10.0.0.1:7443 refused (standby, cp2 leads). Next try in 0.5 s."
    assert gaps(world) == [0.5, 1.0]
    assert all(link.heard == [] for link in standby.links)


def test_i_a1_a_named_leader_is_tried_next_and_only_once(world):
    """Of five addresses the first names the fourth: that is the second to be dialed, and not dialed again in its turn."""
    hosts = [f"10.0.0.{n}" for n in range(1, 6)]
    ScriptedServer(world).refuses(leader="cp4", addresses=["10.0.0.4:7443"])
    ScriptedServer(world, "10.0.0.4", "cp4").refuses("starting")
    world.agent(servers=hosts)
    world.net.until(lambda: rounds(world))
    assert dialed(world) == [hosts[0], hosts[3], hosts[1], hosts[2], hosts[4]]


def test_i_a1_a_leader_that_is_not_configured_is_reached_by_its_name(world):
    """The agent knows only the standby; the leader that it names shows a server's certificate of the fleet, which suffices."""
    ScriptedServer(world).refuses(leader="cp2", addresses=["10.0.0.2:7443"])
    leader = ScriptedServer(world, B, "cp2")
    agent = world.agent(servers=(A,))
    assert link_to(world, leader, agent) < 0.2


def test_i_a1_a_leader_that_was_learned_is_found_again_without_who_named_it(world):
    """The only configured server is gone for good; the link to the leader that it once named breaks, and comes back."""
    standby = ScriptedServer(world).refuses(leader="cp2", addresses=["10.0.0.2:7443"])
    leader = ScriptedServer(world, B, "cp2")
    agent = world.agent(servers=(A,))
    link_to(world, leader, agent)
    world.net.run(5)
    standby.port.stopListening()
    leader.link.transport.abortConnection()
    world.net.until(lambda: len(leader.links) == 2)
    link_to(world, leader, agent)
    assert dialed(world) == [A, B, A, B]


def test_i_a1_a_server_that_is_not_obeyed_does_not_take_the_learned_leaders_place(world):
    """An old leader comes back at the configured address and takes the agent, which refuses it and still knows whom it obeys."""
    old = ScriptedServer(world).refuses(leader="cp2", addresses=["10.0.0.2:7443"])
    leader = ScriptedServer(world, B, "cp2", epoch=8)
    agent = world.agent(servers=(A,))
    link_to(world, leader, agent)
    leader.refuses("starting")
    old.greeting = welcome(world)
    leader.link.transport.abortConnection()
    world.net.until(lambda: len(rounds(world)) == 2)
    assert "cp1 commands at epoch 7, this node obeys cp2 at epoch 8, 10.0.0.2:7443 refused (starting)" in rounds(world)[1]
    leader.greeting = welcome(world, "cp2", 8)
    link_to(world, leader, agent, 5)


def test_i_a1_a_learned_leader_is_forgotten_when_the_configuration_changes(world):
    """What an operator writes counts: after a reload only what is written, and what that names, is dialed."""
    leader = ScriptedServer(world)
    agent = world.agent(servers=(A,))
    link_to(world, leader, agent)
    leader.link.transport.abortConnection()
    leader.refuses()
    world.net.until(lambda: rounds(world))
    agent.reload(evolve(agent.settings, servers=dotted(B)))
    before = len(dialed(world))
    world.net.until(lambda: len(rounds(world)) == 3)
    assert set(dialed(world)[before:]) == {B}


def test_i_a1_servers_that_name_each_other_are_left_after_two_hints(world):
    """Two confused standbys and a chain of strangers: at most two names are followed in a round, then it waits."""
    hosts = [f"10.0.1.{n}" for n in range(1, 9)]
    for number, host in enumerate(hosts):
        ScriptedServer(world, host, f"s{number}").refuses(leader="next", addresses=[f"10.0.1.{number + 2}:7443", f"{A}:7443"])
    ScriptedServer(world).refuses(leader="s0", addresses=[f"{hosts[0]}:7443"])
    world.agent(servers=(A,))
    world.net.until(lambda: rounds(world))
    assert dialed(world) == [A, hosts[0], hosts[1]]
    assert rounds(world)[0].endswith(" Next round in 0.5 s.")


def test_i_a1_two_standbys_that_name_each_other_are_each_asked_once(world):
    """Who has been tried in this round is not tried again because somebody names it."""
    for host, name, other in ((A, "cp1", B), (B, "cp2", A)):
        ScriptedServer(world, host, name).refuses(leader="the other", addresses=[f"{other}:7443"])
    world.agent(servers=(A, B))
    world.net.until(lambda: rounds(world))
    assert dialed(world) == [A, B]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.lists(st.lists(st.integers(1, 12), max_size=3), max_size=30))
def test_i_a1_whatever_is_said_a_round_tries_everybody_once_and_at_most_two_more(configured, said):
    """The law of rounds, with any configuration and any names given by whoever refuses."""
    turn, tried = Round.over(dotted(*[f"10.0.0.{n}" for n in configured])), []
    said.extend([] for _ in range(30))
    while target := turn.next():
        tried.append(target.address.host)
        turn.failed(target, "connection refused")
        turn.hint(f"10.0.0.{n}:7443" for n in said.pop(0))
    assert len(tried) == len(set(tried)) <= len(set(configured)) + MOST_HINTS
    assert {f"10.0.0.{n}" for n in configured} <= set(tried)


def test_i_a1_nonsense_for_a_leader_is_ignored(world):
    """A name that is no address, and a thousand of them, change nothing."""
    ScriptedServer(world).refuses(addresses=["", ":", "nonsense", "10.0.0.9:0", "10.0.0.9:99999", "x" * 300 + ":1"] * 200)
    leader = ScriptedServer(world, B, "cp2")
    agent = world.agent(servers=(A, B))
    link_to(world, leader, agent)
    assert dialed(world) == [A, B]


def test_i_a2_no_address_can_hold_up_the_round(world):
    """3 s for TCP, 5 s for TLS, 5 s for the greeting, 15 s for the answer; then the leader is reached, 28 s at worst."""
    world.net.dead.add((A, 7443))
    mute(world, B)
    ScriptedServer(world, C, "cp3").greeting = None
    slow = ScriptedServer(world, "10.0.0.4", "cp4")
    slow.accepts = False
    leader = ScriptedServer(world, "10.0.0.5", "cp5")
    agent = world.agent(servers=(A, B, C, "10.0.0.4", "10.0.0.5"))
    link_to(world, leader, agent)
    assert gaps(world) == pytest.approx([3, 5, 5, 15], abs=0.2)


def test_i_a2_a_lost_link_is_dialed_again_at_once_but_not_by_all_at_the_same_instant(world):
    """Within the first half second; with a large fleet within the time that the server asked for, which is bounded."""
    server = ScriptedServer(world)
    agent = world.agent()
    for spread, most in ((0.0, 0.25), (20.0, 10.0), (1e9, 30.0)):
        server.greeting = welcome(world, spread=spread)
        link_to(world, server, agent)
        server.link.transport.abortConnection()
        world.net.until(lambda: "linked to" not in agent.status)
        count = len(server.links)
        world.net.until(lambda count=count: len(server.links) > count)  # Was too short to begin anew: this one lasts.
        link_to(world, server, agent)
        for _ in range(7):
            world.net.run(10)
            server.beat()
        world.net.run(0.1)
        server.link.transport.abortConnection()
        world.net.until(lambda: "linked to" not in agent.status)
        count = len(server.links)
        assert world.net.until(lambda count=count: len(server.links) > count) == pytest.approx(most, abs=0.1)


def test_i_a3_the_wait_grows_to_its_cap_and_neither_tcp_nor_tls_nor_welcome_resets_it(world):
    """A server that greets and never takes us is no success, however often: 1, 2, 4, 8, 15 s times the jitter, for ever."""
    server = ScriptedServer(world)
    server.accepts = False
    world.agent()
    world.net.until(lambda: len(rounds(world)) == 8, 300)
    waits = [line.rpartition("Next try in ")[2] for line in rounds(world)]
    assert waits == ["0.5 s.", "1 s.", "2 s.", "4 s.", "7 s.", "7 s.", "7 s.", "7 s."]


def test_i_a3_only_a_link_of_60_s_resets_the_wait(world):
    """Accepted and gone after 50 s counts as one more failure; after 60 s the waits begin anew."""
    server = ScriptedServer(world)
    agent = world.agent()
    for lives, wait in ((0, 0.5), (50, 1.0), (50, 2.0), (61, None), (0, 0.5)):
        link_to(world, server, agent)
        for _ in range(lives):
            world.net.run(1)
            server.beat()
        world.net.run(0.1)
        before = len(rounds(world))
        server.link.transport.abortConnection()
        world.net.until(lambda: "linked to" not in agent.status)
        assert len(rounds(world)) - before == (0 if wait is None else 1)
        if wait is not None:
            assert gap_after(world) == pytest.approx(wait, abs=0.1)


def gap_after(world):
    count, begun = len(world.net.dialed), world.net.seconds()
    world.net.until(lambda: len(world.net.dialed) > count)
    return world.net.seconds() - begun


def test_i_a3_a_thousand_agents_do_not_come_at_the_same_instant(world):
    """Full jitter: the wait is anything between nothing and its ceiling."""
    for jitter, wait in ((0.001, 0.0), (0.999, 1.0)):
        world.random = lambda jitter=jitter: jitter
        agent = world.agent(f"n{wait:.0f}", servers=("10.0.9.9",))
        world.net.until(lambda agent=agent: rounds(world, agent.settings.node))
        assert gap_after(world) == pytest.approx(wait, abs=0.06)
        world.stop(agent)


def test_i_a4_one_line_per_failed_round_names_every_address_and_its_reason(world):
    """The log has it once, and the status is the same text until the next round begins."""
    hosts = [f"10.0.0.{n}" for n in range(1, 8)]
    ScriptedServer(world).refuses(leader="cp9")
    world.net.dead.add((hosts[2], 7443))
    mute(world, hosts[3])
    ScriptedServer(world, hosts[4], "cp5").greeting = None
    ScriptedServer(world, hosts[5], "cp6").greeting = Welcome(9, 11, "cp6", world.fleet.name, 7, 5.0)
    ScriptedServer(world, hosts[6], "cp7").greeting = Welcome(1, 1, "cp7", "0000", 7, 5.0)
    agent = world.agent(servers=hosts)
    world.net.until(lambda: rounds(world))
    assert rounds(world) == [
        "no leader: 10.0.0.1:7443 refused (standby, cp9 leads), 10.0.0.2:7443 connection refused,"
        " 10.0.0.3:7443 no answer in 3 s, 10.0.0.4:7443: the TLS handshake was not done in 5 s,"
        " 10.0.0.5:7443: it said nothing in 5 s,"
        " 10.0.0.6:7443: it speaks versions 9 to 11 of the protocol, we speak 1,"
        f" 10.0.0.7:7443: it serves fleet 0000, our certificate is of fleet {world.fleet.name}. Next round in 0.5 s."
    ]
    assert agent.status == rounds(world)[0]


def test_i_a4_the_status_says_that_a_link_ended_and_why_until_the_next_try(world):
    """In the pause after a long link nobody reads that it is being dialed, or still there."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    for _ in range(61):
        world.net.run(1)
        server.beat()
    world.net.connections[-1][0].cut()
    world.net.run(0.1)
    assert agent.status.startswith("the link to 10.0.0.1:7443 ended after 1 m 1 s: the connection broke without a goodbye")


@pytest.mark.parametrize("reason", ["name_mismatch", "revoked", "wrong_fleet", "protocol", "no_such_reason"])
def test_i_a5_what_looks_permanent_is_tried_for_ever_at_the_cap(world, reason):
    """Somebody will put it right, and the engines need their agent meanwhile."""
    server = ScriptedServer(world).refuses(reason)
    agent = world.agent()
    world.net.until(lambda: len(server.links) == 9, 100)
    world.net.until(lambda: len(rounds(world)) == 9)
    assert rounds(world)[-1].startswith(f"10.0.0.1:7443 refused us: {reason}: ")
    assert rounds(world)[-1].endswith(" Next try in 7 s.")
    server.greeting = welcome(world)
    assert link_to(world, server, agent) <= 8


def test_i_a6_a_server_that_asks_for_time_gets_it_within_reason(world):
    """C{retry_after} is the least wait, a minute the most of it, and it holds only when nobody else wants us sooner."""
    server = ScriptedServer(world).refuses("starting", retry_after=20.0)
    agent = world.agent()
    world.net.until(lambda: rounds(world))
    assert rounds(world)[-1].endswith(" Next try in 20 s.")
    server.refuses("starting", retry_after=1e6)
    world.net.until(lambda: len(rounds(world)) == 2)
    assert rounds(world)[-1].endswith(" Next try in 1 m.")
    world.stop(agent)


def test_i_a6_the_refusal_arrives_and_the_agent_has_written_nothing(world):
    """Not a byte of ours can get in the way of why we are not taken."""
    server = ScriptedServer(world).refuses(leader="cp2")
    world.agent()
    world.net.until(lambda: len(rounds(world)) == 5)
    assert all("refused (standby, cp2 leads)" in line for line in rounds(world))
    assert [link.heard for link in server.links] == [[]] * 5


def test_i_a8_what_was_asked_is_answered_only_by_done(world):
    """A question that was sent is not a question that was heard: the answer carries its operation, and only on its own link."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    server.link.send(Inspect("op9", 7, "cp1", "m.gguf", "vllm"))
    world.net.run(0.1)
    assert server.link.of(Done) == [Done("op9", True, result={"of": "Inspect"})]


def test_a_server_that_sends_us_away_names_who_leads_and_is_believed(world):
    """A step-down after hours: the new leader is the first to be dialed, at once, and it is no error."""
    old, new = ScriptedServer(world), ScriptedServer(world, C, "cp3", epoch=8)
    agent = world.agent(servers=(A, B, C))
    link_to(world, old, agent)
    for _ in range(61):
        world.net.run(1)
        old.beat()
    old.link.send(Goaway("standby", "cp3", (f"{C}:7443",), "cp3 leads now"))
    world.net.run(0.05)
    assert link_to(world, new, agent, 2) <= 0.5
    assert dialed(world) == [A, C]
    assert world.log.having("info: n1: the link to 10.0.0.1:7443 ended after 1 m 1 s: sent us away: standby")


def test_f21_while_the_lead_changes_hands_the_wait_does_not_grow(world):
    """Ten short leaderships in a row; each time both servers stand by for a while. After a minute without any it grows."""
    servers = [ScriptedServer(world), ScriptedServer(world, B, "cp2", epoch=8)]
    agent = world.agent(servers=(A, B))
    for turn in range(10):
        leader, other = servers[turn % 2], servers[1 - turn % 2]
        other.refuses()
        leader.epoch, leader.greeting = 8 + turn, welcome(world, leader.name, 8 + turn)
        assert link_to(world, leader, agent, 3) <= 2.0
        leader.refuses()
        leader.link.send(Goaway("standby", "", (), "it leads no more"))
        world.net.run(3)
    before = len(rounds(world))
    world.net.run(120)
    assert rounds(world)[-1].endswith("Next round in 7 s.")
    assert len(rounds(world)) - before > 100


def test_a_reload_ends_the_wait_and_dials_the_new_addresses(world):
    """What was just put right is tried now, not in fifteen seconds; a link that is up stays."""
    agent = world.agent(servers=(B,))
    world.net.until(lambda: len(rounds(world)) == 5)
    server = ScriptedServer(world)
    agent.reload(evolve(agent.settings, servers=dotted(A)))
    assert link_to(world, server, agent) < 0.2
    agent.reload(agent.settings)
    world.net.run(3)
    assert len(server.links) == 1 and not server.link.over


def test_an_agent_that_runs_nothing_reports_an_empty_list(world):
    """No shards is news, in the registration and in each report."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    server.beat()
    world.net.run(0.1)
    (register,) = server.link.of(Register)
    assert register.shards == ()
    assert [report.shards for report in server.link.of(Report)] == [(), ()]


def test_a_bad_round_is_one_line_whatever_a_node_does(world, expect_failures):
    """A node whose registration fails is told about once per try, and the agent goes on to the next address."""
    expect_failures(ZeroDivisionError)
    servers = [ScriptedServer(world), ScriptedServer(world, B, "cp2")]
    agent = world.agent(servers=(A, B), start=False)
    agent.node.register = lambda fleet, local: 1 // 0
    world.stoppable.append(agent)
    agent.startService()
    world.net.until(lambda: rounds(world))
    failed = "our registration failed (see the log)"
    assert rounds(world) == [f"no leader: {A}:7443: {failed}, {B}:7443: {failed}. Next round in 0.5 s."]
    assert Counter(len(server.links) for server in servers) == {1: 2}
