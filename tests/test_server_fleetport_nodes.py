"""From agent to controller over real TLS: what a server knows of a node follows what its agent says, or its silence."""

from __future__ import annotations

from random import Random

import pytest
from attrs import evolve

from llmgw.config.catalog import dump_catalog
from llmgw.fleet.model import Catalog
from llmgw.fleet.node import Fabric, Installation
from llmgw.fleet.timing import Timing
from llmgw.server.controller import Clocks, Controller
from llmgw.server.membership import MOST_NAMED
from llmgw.server.reckoning import Reckoner
from llmgw.store.records import CatalogRevision
from llmgw.testing.memorystore import MemoryStore
from llmgw.testing.simagents import SimAgent
from llmgw.testing.simserver import SimLeadership, SimRouters
from llmgw.testing.simulate import model
from llmgw.wire.messages import PROTOCOL, Done, Event, Goaway, Report
from tests.fleetlink import Node, a_world
from tests.fleetport_peers import joined

TIMING = Timing(heartbeat=5.0, lost_after=60.0, failover_grace=5.0)


def unstamped(message):
    """What a node leaves for its uplink to fill in."""
    return evolve(message, epoch=0, revision=0) if isinstance(message, Report) else message


class SimNode(Node):
    """A node whose engines are a simulated agent's, behind a real uplink."""

    def __init__(self, world, name="n1"):
        super().__init__(name)
        self.world = world
        self.sim = SimAgent(name, 1, Random(1), load=1.0)
        self.sim.say = lambda message: self.send and self.send(unstamped(message))
        self.facts = self.sim.facts()

    def register(self, fleet, local_address):
        return evolve(self.sim.register(), protocol=PROTOCOL, instance=self.instance, boot=self.boot, facts=self.facts)

    def disconnected(self, reason):
        super().disconnected(reason)
        self.send = None

    def desired(self, message):
        super().desired(message)
        self.sim.desired(message.epoch, message.leader, message.revision, message.orders, self.world.net.seconds())

    def report(self, beat=0):
        return unstamped(self.sim.report())


class Rig:
    """A leader over one catalog, and its fleet port."""

    def __init__(self, world):
        self.world, clock = world, world.net
        self.store = MemoryStore()
        self.store._take(CatalogRevision(1, dump_catalog(Catalog((model("m", 1),))), 0.0, "test"))
        self.leadership = SimLeadership(7, "cp1")
        clocks = Clocks(lambda: 1.8e9 + clock.seconds(), clock.seconds)
        self.controller = Controller(
            clock, "cp1", TIMING, self.store, self.leadership, SimRouters(clock), Random(1), clocks, Reckoner({})
        )
        self.port = world.server(members=self.controller, leadership=self.leadership)
        self.controller.attach(self.port)
        self.controller.begin(self.store.snapshot(7), False)
        self.controller.go()
        self.nodes = []

    def agent(self, name="n1", **more):
        node = SimNode(self.world, name)
        self.nodes.append(node)
        return self.world.agent(name, node=node, **more)

    def until(self, found, seconds=60):
        def look():
            for node in self.nodes:
                node.sim.step(self.world.net.seconds())
            return found()

        return self.world.net.until(look, seconds)

    def node(self, name="n1"):
        return self.controller.truth.nodes[name]

    def shard(self):
        """The state and attempt of the only shard."""
        found = [(str(record.state), record.attempt) for record in self.controller.truth.shards.values()]
        return found[0] if found else None

    def ready(self):
        self.until(lambda: self.shard() and self.shard()[0] == "ready")


@pytest.fixture
def rig(tmp_path):
    for world in a_world(tmp_path):
        made = Rig(world)
        yield made
        made.controller.end()


def test_f27_a_node_that_misses_three_heartbeats_is_unreachable_and_says_why(rig):
    """Its engine is taken for unknown, not for dead; it comes back under the same session rules and all is as before."""
    agent = rig.agent()
    rig.ready()
    client = rig.world.net.connections[0][0]
    rig.world.net.run(3)
    agent.node.send(agent.node.report())
    rig.world.net.run(0)
    begun = rig.world.net.seconds()
    client.reading, client.silent = False, True
    rig.world.net.dead.add(("10.0.0.1", 7443))
    rig.until(lambda: rig.node().state == "unreachable", 25)
    assert rig.world.net.seconds() - begun == pytest.approx(15, abs=0.3)
    assert rig.node().reason == "nothing was heard from it in 15 s"
    assert rig.shard() == ("unknown", 1)
    assert rig.world.log.having("info", "cp1: n1 is gone: nothing was heard from it in 15 s")
    rig.world.net.dead.clear()
    client.reading = True
    rig.until(lambda: rig.node().state == "ready" and rig.shard() == ("ready", 1), 40)
    assert agent.node.sim.running()[0].order.attempt == 1


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda rig, agent: rig.world.stop(agent), "the agent left: the agent stops"),
        (lambda rig, agent: rig.world.net.connections[0][1].cut(), "the connection broke"),
        (lambda rig, agent: rig.port.close("n1", Goaway("maintenance", text="n1 is sent away")), "n1 is sent away"),
    ],
    ids=["bye", "cut", "goaway"],
)
def test_a_node_whose_link_ends_is_unreachable_with_the_reason(rig, leave, reason):
    """Its agent's own leave, a broken line, our goaway: status tells them apart."""
    agent = rig.agent()
    rig.ready()
    rig.world.net.dead.add(("10.0.0.1", 7443))
    leave(rig, agent)
    rig.until(lambda: rig.node().state == "unreachable", 5)
    assert reason in rig.node().reason


def test_an_agent_that_reports_an_empty_list_is_believed(rig):
    """The server lets go of the shard that it thought was there, says why, and starts it anew."""
    agent = rig.agent()
    rig.ready()
    agent.node.sim.engines.clear()
    rig.until(lambda: rig.shard()[0] == "backoff", 10)
    assert any("n1 no longer has it; exit status unknown" in event.text for event in rig.store.events)
    rig.until(lambda: rig.shard() == ("ready", 2), 60)


def test_an_agent_that_comes_back_with_nothing_is_believed(rig):
    """Its machine was set up anew while it was away: same name, same place, no engines."""
    agent = rig.agent()
    rig.ready()
    rig.world.stop(agent)
    rig.nodes.clear()
    rig.world.agent("n1", node=(fresh := SimNode(rig.world)), state="anew")
    fresh.instance = "i-9"
    rig.nodes.append(fresh)
    rig.until(lambda: rig.shard() == ("ready", 2), 60)
    assert [engine.order.attempt for engine in fresh.sim.running()] == [2]


def test_a_registration_without_shards_ends_nothing_before_the_first_report(rig):
    """What a registration does not list may still come: only a whole report that is as new as the placement counts."""
    rig.agent()
    rig.ready()
    old = rig.world.net.connections[0][1]
    old.reading = False
    joined(rig.world, "n1", "i-1", "b-1", pair=rig.world.fleet.node("n1")).mute = True
    rig.world.net.run(4)
    assert rig.shard()[0] != "backoff"


def test_a_reconnecting_agent_refreshes_all_that_the_server_knows(rig):
    """Inventory, labels, fabrics and installations are those of the newest registration."""
    agent = rig.agent()
    rig.until(lambda: "n1" in rig.controller.truth.nodes)
    facts = evolve(
        agent.node.facts,
        labels={"pool": "b"},
        fabrics=(Fabric("rack4", "10.9.0.5"),),
        installations=(Installation("vllm-next", "vllm", version="0.34.0"),),
        ports=(21000, 21099),
    )
    facts = evolve(facts, inventory=evolve(facts.inventory, cpus=96, devices=()))
    agent.node.facts = facts
    rig.world.net.connections[0][1].cut()
    rig.until(lambda: rig.node().facts == facts, 20)
    assert rig.controller.members.present["n1"].facts == facts


def test_a_report_refreshes_the_inventory_without_a_new_link(rig):
    """A device that fell off the bus is known at once."""
    agent = rig.agent()
    rig.until(lambda: "n1" in rig.controller.truth.nodes)
    inventory = evolve(agent.node.facts.inventory, devices=())
    agent.node.send(Report(0, 0, (), inventory))
    rig.until(lambda: rig.node().facts.inventory == inventory, 5)


def test_a_report_at_a_transition_says_as_of_which_orders_it_is_true(rig):
    """Else its list could not tell the server that a shard is gone: the uplink stamps each report, also those between beats."""
    agent = rig.agent()
    rig.ready()
    told = rig.controller.members.present["n1"].told
    assert (told.epoch, told.revision) == (7, agent.node.of("desired")[-1][0].revision)
    agent.node.send(Report(0, 0, ()))
    rig.until(lambda: rig.shard()[0] == "backoff", 4)


def test_a_node_speaks_for_no_shard_of_another(rig):
    """A node that was taken over can neither decline another's order nor put words into its engine's mouth."""
    agent = rig.agent()
    rig.ready()
    evil = joined(rig.world, "evil")
    (record,) = rig.controller.truth.shards.values()
    evil.say(
        Done(f"run:{record.shard}:{record.attempt}:7.1", False, "problems", {"text": "no such flag"}),
        Done(record.operation, False, "problems", {"text": "no such flag"}),
        Event(record.shard, record.attempt, "ready", "failed", "it fell", tail=("evil words",)),
    )
    rig.world.net.run(5)
    agent.node.sim.die(agent.node.sim.engines[record.shard], rig.world.net.seconds(), "its own words")
    rig.until(lambda: rig.shard()[0] == "backoff", 10)
    said = [event for event in rig.store.events if event.subject == record.shard]
    assert "its own words" in said[-1].text and "no such flag" not in said[-1].text
    assert all("evil words" not in event.tail for event in said)


def test_what_a_node_says_of_shards_is_bounded(rig):
    """Events and refusals of shards that nobody has are not kept for ever."""
    rig.until(lambda: rig.controller.leading)
    peer = joined(rig.world, "evil")
    for number in range(3000):
        peer.say(
            Event(f"x/{number}/0", 1, "ready", "failed", "", tail=("x",) * 100),
            Done(f"run:x/{number}/0:1:7.1", False, "problems"),
        )
    rig.world.net.run(1)
    members = rig.controller.members
    assert len(members._tails["evil"]) == len(members._declined["evil"]) == MOST_NAMED
    assert "evil" in rig.port.sessions()
