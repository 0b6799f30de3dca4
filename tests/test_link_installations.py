"""What an agent finds out of its installations after it has registered, such as versions, reaches the leader by a report."""

from __future__ import annotations

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.fleet.node import Installation, Inventory, NodeFacts
from llmgw.server.membership import Membership
from llmgw.wire.messages import Register, Report
from tests.agent_rig import node_rigs

ASKED = Installation("vllm", "vllm", ("/opt/vllm",))
KNOWN = evolve(ASKED, version="0.34.0")


class Equipment:
    """A node on which an engine has been asked for its version."""

    def __init__(self):
        self.inventory, self.found = Inventory(1, 2**30), (ASKED,)

    def installations(self):
        return self.found


@pytest.fixture
def rigs(reactor, tmp_path):
    with node_rigs(reactor, tmp_path) as make:
        yield make


@pytest_twisted.ensureDeferred
async def test_a_report_carries_installations_when_they_are_others_than_registered(rigs):
    """Once, and not with each heartbeat."""
    equipment = Equipment()
    node = rigs(equipment=equipment).node
    assert node.register("fleet", "127.0.0.1").facts.installations == (ASKED,)
    assert node.report().installations is None
    equipment.found = (KNOWN,)
    assert [node.report().installations for _ in range(2)] == [(KNOWN,), None]
    assert node.register("fleet", "127.0.0.1").facts.installations == (KNOWN,)
    assert node.report().installations is None


def test_the_leader_takes_them_as_news_and_keeps_the_rest():
    """A plan follows; a report without them changes nothing of them."""
    news = []
    members = Membership(lambda: 0.0, lambda: news.append(1))
    facts = NodeFacts("n1", "10.0.0.1", Inventory(1, 2**30), installations=(ASKED,), labels={"pool": "a"})
    members.joined("n1", "s1", Register(1, "n1", "i", "b", 0, "", facts, ()), None)
    members.report("n1", "s1", Report(0, 0, ()))
    news.clear()
    members.report("n1", "s1", Report(0, 0, (), installations=(KNOWN,)))
    assert news and members.present["n1"].facts == evolve(facts, installations=(KNOWN,))
    news.clear()
    members.report("n1", "s1", Report(0, 0, ()))
    assert not news and members.present["n1"].facts.installations == (KNOWN,)
