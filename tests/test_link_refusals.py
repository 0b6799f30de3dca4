"""Who is not let in, over real mutual TLS: both logs say why with the same facts, and the agent backs off and tries on."""

from __future__ import annotations

from datetime import timedelta

import pytest
from attrs import evolve

from llmgw.server import fleetport
from llmgw.testing.certificates import CLIENT, Fleet
from llmgw.wire.messages import Refused
from llmgw.wire.tls import read_identity
from tests.fleetlink import Node, a_world

AGENT, SERVER = "10.0.0.5", "10.0.0.1:7443"


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def refused(world, port, agent, seconds=60.0):
    """Wait for the first failed round; returns (the agent's lines, the server's refusals)."""
    world.net.until(lambda: world.log.having("warn", f"{agent.settings.node}: ", "Next "), seconds)
    assert port.sessions() == {}
    return world.log.having("warn", f"{agent.settings.node}: ", "Next "), port.refusals()


def test_a_name_that_is_not_the_certificates_is_named_in_both_logs(world):
    """The agent says what its certificate and its configuration say and what to do; the server says both names."""
    port, agent = world.server(), world.agent("n1", claim="n2")
    (line, *_), (refusal, *_) = refused(world, port, agent)
    serial = agent._tls.own.serial[:8]
    assert line == (
        f"warn: n2: {SERVER} refused us: name_mismatch: our certificate says n1 (serial {serial}), our configuration says n2."
        " Set `node: n1` or use n2's certificate. Next try in 0.5 s."
    )
    assert (refusal.reason, refusal.node, refusal.text) == (
        "name_mismatch",
        "n1",
        f"certificate n1 (serial {serial}), claimed n2",
    )
    assert world.log.having(f"cp1: refused {refusal.peer}: name_mismatch: certificate n1 (serial {serial}), claimed n2")
    assert port.members.events == []


CASES = {
    "expired": (lambda fleet: fleet.expired("n1"), ["it says that our certificate n1", "has expired"], ["n1", "expired on"]),
    "not yet valid": (
        lambda fleet: fleet.not_yet_valid("n1"),
        ["our certificate n1", "valid only from", "our clock says"],
        ["n1", "is valid only from", "our clock says"],
    ),
    "other authority": (
        lambda fleet: Fleet(name="07e207e207e2").node("n1"),
        ["does not know the authority that issued our certificate n1", "llmgw fleet 07e207e207e2"],
        ["certificate n1", "issued by CN=llmgw fleet 07e207e207e2, which is not our authority"],
    ),
    "serverAuth only": (
        lambda fleet: fleet.wrong_purpose("n1"),
        ["it says that our certificate n1", "not for this side"],
        ["not for this side of a link"],
    ),
}


@pytest.mark.parametrize(("make", "agents", "servers"), CASES.values(), ids=CASES.keys())
def test_a_certificate_that_tls_refuses_is_explained_on_both_sides(world, make, agents, servers):
    """The agent gets only an alert and adds the facts of its own certificate; the server has the whole reason."""
    port, agent = world.server(), world.bad_agent("n1", make(world.fleet))
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert all(part in line for part in agents), line
    assert refusal.reason == "tls"
    assert all(part in refusal.text for part in servers), refusal.text
    assert world.log.having("warn", "cp1: refused 10.0.0.5:", *servers)
    assert agent.node.events == []


@pytest.mark.parametrize(
    ("make", "reason", "text"),
    [
        (lambda fleet: fleet.two_names("n1", "n2"), "certificate", "carries 2 URIs (llmgw://f1ee7f1ee700/node/n1, llmgw:"),
        (lambda fleet: fleet.nameless("n1"), "certificate", "carries no URI"),
        (
            lambda fleet: fleet.leaf([fleet.uri("server", "n1")], [CLIENT]),
            "certificate",
            "its extended key usage is not serverAuth",
        ),
        (lambda fleet: fleet.leaf(["llmgw://0000/node/n1"]), "wrong_fleet", "is of fleet 0000, this is f1ee7f1ee700"),
    ],
    ids=["two names", "no name", "wrong role", "wrong fleet"],
)
def test_a_certificate_without_our_identity_is_refused_before_anything_is_read(world, make, reason, text):
    """The refusal is a message, so the agent's log has the very words of the server's."""
    port, agent = world.server(), world.bad_agent("n1", make(world.fleet))
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert refusal.reason == reason
    assert text in refusal.text
    assert f"{SERVER} refused us: {reason}: {refusal.text}" in line
    assert agent.node.events == []


def test_f25_a_server_with_another_authority_is_not_taken(world):
    """The agent names the issuer; the server hears that it is not trusted."""
    port, agent = world.server(fleet=Fleet(name="07e207e207e2")), world.agent("n1")
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert f"{SERVER}: its certificate cp1 (serial" in line
    assert "issued by CN=llmgw fleet 07e207e207e2, which is not our authority" in line
    assert refusal.reason == "tls"
    assert "it does not know the authority that issued our certificate cp1" in refusal.text


def test_a_server_at_an_address_that_is_not_in_its_certificate_is_not_taken(world):
    """A machine that took another's address cannot lead; the agent says for which addresses it could."""
    port = world.server(pair=world.fleet.server("cp1", ["10.0.0.9"]))
    agent = world.agent("n1")
    (line, *_), _ = refused(world, port, agent)
    assert f"{SERVER}: its certificate cp1" in line
    assert "is not for 10.0.0.1 but for 10.0.0.9" in line
    assert agent.node.events == []


def test_a_node_does_not_pass_for_a_server(world, monkeypatch):
    """A stolen node certificate listening at the server's address commands nobody: TLS refuses its purpose."""
    pair = world.fleet.leaf([world.fleet.uri("node", "evil")], addresses=["10.0.0.1"])
    real = read_identity(world.files("cp1", world.fleet.server("cp1", ["10.0.0.1"])), "server")
    monkeypatch.setattr(fleetport, "read_identity", lambda files, role: evolve(real, chain=[pair.certificate], key=pair.key))
    port, agent = world.server(), world.agent("n1")
    (line, *_), _ = refused(world, port, agent)
    assert "its certificate evil" in line
    assert "not for this side of a link" in line
    assert agent.node.events == []


def test_an_expired_server_is_not_taken_and_both_clocks_are_given(world):
    """The agent's log tells when it ended and what our clock says."""
    old = Fleet(now=world.fleet.now - timedelta(days=2), name=world.fleet.name)
    old.authority = world.fleet.authority
    pair = old.server("cp1", ["10.0.0.1"], days=1)
    port, agent = world.server(pair=pair), world.agent("n1")
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert "its certificate cp1" in line
    assert "expired on" in line
    assert "it says that our certificate cp1" in refusal.text


@pytest.mark.parametrize("reason", ["standby", "starting"])
def test_a_server_that_is_not_ready_refuses_before_reading_anything(world, reason):
    """The agent writes nothing at all before it is greeted, so there is nothing to read either."""
    port = world.server()
    port.members.refusal = Refused(reason, f"cp1 is {reason}", "cp2", retry_after=0.0)
    agent = world.agent("n1")
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert line == f"warn: n1: {SERVER} refused ({reason}, cp2 leads). Next try in 0.5 s."
    assert refusal.reason == reason
    assert agent.node.events == []
    assert port.members.events == []


def test_a_node_that_was_removed_is_told_so(world):
    """The control plane's own judgement goes to both logs in the same words."""
    port = world.server()
    port.members.verdict = Refused("revoked", "n1 was removed on 2026-11-01: llmgw node reset n1 lets it in again")
    agent = world.agent("n1")
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert f"refused us: revoked: certificate {agent._tls.own}: n1 was removed on 2026-11-01: llmgw node reset n1 lets" in line
    assert refusal.reason == "revoked"
    assert port.members.events == []
    port.members.verdict = None
    world.linked(port)
    assert [event[0] for event in port.members.events][:1] == ["joined"]


def test_facts_of_another_node_are_refused(world):
    """A registration is about the node that it names, and about no other."""
    node = Node("n1")
    node.facts = evolve(node.facts, name="other")
    port, agent = world.server(), world.agent("n1", node=node)
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert refusal.reason == "malformed"
    assert "n1 registered the facts of other" in line


def test_a_broken_control_plane_refuses_and_stays_up(world, expect_failures):
    """An exception while judging is our fault, logged once, and told to the agent as such."""
    expect_failures(ZeroDivisionError)
    port = world.server()

    def judge(register, certificate):
        raise ZeroDivisionError

    port.members.judge = judge
    agent = world.agent("n1")
    (line, *_), (refusal, *_) = refused(world, port, agent)
    assert "refused (starting)" in line
    assert "failed while judging n1 (see its log)" in refusal.text


def test_refusals_keep_the_last_50_and_the_log_does_not_drown(world):
    """A node that is refused for ever leaves 50 entries; at most 50 lines in 10 s, then a count."""
    port = world.server()
    for number in range(200):
        port._note(f"10.0.0.9:{number}", "tls", "text")
    assert [refusal.peer for refusal in port.refusals()] == [f"10.0.0.9:{n}" for n in range(150, 200)]
    assert len(world.log.having("refused 10.0.0.9:")) == 50
    world.net.run(11, step=1)
    port._note("10.0.0.9:1", "tls", "text")
    assert world.log.having("150 more refusals were not logged")
