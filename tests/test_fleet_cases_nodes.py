"""Cases that fleets of other programs have failed at: identity (C), ports (E), devices and their memory (H). Here is what the
server's own logic shows of them, with simulated nodes, and where the others are tested.

    C1   test_i_c8_a_clone_is_refused_while_the_holder_answers in test_server_fleetport_names.py
    C2   the same: a node is who its certificate says, whatever its hardware's id is; a copied disk is refused, never alternates
    C4   here, test_c4_an_engine_goes_on_at_its_nodes_old_address_until_it_is_told in end_to_end/test_fleet_cases.py, and
         test_c4_an_engine_whose_address_the_node_has_lost_is_unhealthy_and_not_ended in test_agent_causes.py
    C5   test_i_c8_a_silent_holder_gives_way_after_three_seconds in test_server_fleetport_names.py
    C6   test_a_certificate_that_tls_refuses_is_explained_on_both_sides in test_link_refusals.py; engines outlive every link
    C7   test_i_c8_a_clone_is_logged_by_the_agent_in_the_servers_words in test_server_fleetport_names.py; whose
         certificate has a name is that node
    C8   test_a_node_that_was_removed_is_told_so in test_link_refusals.py; a server starts no agent and shares no file with one
    E1   here; that a node refuses a port that somebody has is test_refusals in test_agent_node.py
    E3   test_address_in_use_is_said_in_a_sentence in test_router_workers.py, and of an engine's port here; metrics and
         admin.listen are opened only where set
    E4   test_fewer_replicas_drain_the_newest_after_the_routers_let_go in test_server_simulation_changes.py, and after every
         simulated step that no router routes to an engine that was told to stop
    E5   here; test_refusals in test_agent_node.py names the holder, test_death_of_the_engine_takes_what_it_left in
         test_agent_supervisor.py ends what held it
    H1   test_the_cache_of_one_request_of_public_models in test_engines_memory.py; test_unknown_weights_are_said in
         test_engines_memory.py: unknown is never 0
    H3   test_foreign_memory_is_respected_and_named_with_its_pid in test_planning_placement.py
    H4   test_h4_a_device_shows_every_holder_and_claim_beside_its_observed_use in test_server_devices.py, and here
    H5   here, and test_h5_a_device_told_twice_is_one_device in test_agent_inventory.py
    H7   test_mig_instances_are_devices in test_agent_inventory.py, test_sick_missing_and_parent_devices_are_not_used in
         test_planning_placement.py
    H8   test_h8_a_lost_device_is_cordoned_by_itself_until_it_is_well in test_server_devices.py,
         test_a_node_on_which_everything_fails_is_quarantined in test_server_simulation.py
    H9   here, and test_a_crash_loop_moves_once_then_fails_and_waits_for_an_operator in test_server_simulation.py; what context
         would have fitted is in F20 of test_engines_failures.py
    H10  test_two_engines_on_one_device_start_one_after_the_other in test_agent_turns.py
    H11  here
    H12  test_spread_takes_the_emptiest_node in test_planning_placement.py
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import pytest_twisted
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, gatherResults

from llmgw.fleet.model import Catalog
from llmgw.fleet.node import Device, Inventory
from llmgw.fleet.records import DeviceCordon
from llmgw.fleet.shard import ADDRESS_GONE, Allocation, ShardState
from llmgw.planning.fleetroom import ledger
from llmgw.planning.reconcile import explain
from llmgw.planning.world import Draft
from llmgw.testing.simagents import SimAgent
from llmgw.testing.simulate import Fleet, model
from llmgw.wire.messages import Done
from tests.server_rig import Rig
from tests.simulation_rig import serving
from tests.test_planning_reconcile import node, report, shard, told, world

TESTS = Path(__file__).parent
GIB = 2**30


@pytest.fixture
def rig_of(tmp_path):
    """Makes rigs; each is stopped at the end."""
    made = []

    async def make(*models, **more):
        rig = Rig(tmp_path, *models, **more)
        made.append(rig)
        await rig.start()
        return rig

    yield make
    for rig in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(rig.stop()))


def placed(fleet):
    """The shards that hold something."""
    return [record for record in fleet.controller.truth.shards.values() if record.allocation]


class PortInUse(dict):
    """The answers of an agent that cannot start any first attempt."""

    def get(self, operation, default=None):
        if operation.startswith("run:m/1/0:1:"):
            return Done(operation, False, "port_in_use", {"text": "port 20000 is in use by pid 5 left-over"})
        return super().get(operation, default)


def test_the_table_names_tests_that_exist():
    """A test that is renamed or deleted does not leave its case behind."""
    assert __doc__ is not None
    for file in set(re.findall(r"(?:end_to_end/)?test_\w+\.py", __doc__)):
        assert (TESTS / file).is_file(), file
    for name, file in re.findall(r"(test_\w+) in\s+((?:end_to_end/)?test_\w+\.py)", __doc__):
        assert f"def {name}(" in (TESTS / file).read_text(), name


@pytest_twisted.ensureDeferred
async def test_c4_a_node_that_comes_back_with_another_address_is_the_same_node(rig_of):
    """C4: its engines are kept and remarked, its address is the new one at once, and what starts next is told to use that. What
    nobody reaches any more, since the node has lost the old address, is started anew at the new one."""
    rig = await rig_of(model("m", 1))
    agent = rig.link("a", 2)
    await rig.ready("m")
    (pid,) = [engine.pid for engine in agent.running()]
    facts = evolve(agent.facts(), address="10.0.0.9")
    rig.server.controller.joined("a", "s-a", evolve(agent.register(), facts=facts))
    assert [node["address"] for node in rig.server.view.nodes()] == ["10.0.0.9"]
    await rig.server.catalogs.apply(Catalog((model("m", 2),)), "test")
    await rig.ready("m", 2)
    assert pid in [engine.pid for engine in agent.running()]
    assert agent.engines["m/2/0"].order.allocation.address == "10.0.0.9"
    (note,) = rig.server.view.nodes()[0]["notes"]
    assert "m/1/0 listens at a.sim, a is at 10.0.0.9 now" in note and "llmgw restart m --node a" in note
    engine = agent.engines["m/1/0"]
    engine.conditions = (ADDRESS_GONE,)
    await rig.until(lambda: agent.engines["m/1/0"].order.attempt == 2, "started anew")
    await rig.ready("m", 2)
    assert agent.engines["m/1/0"].order.allocation.address == "10.0.0.9"
    events = (await rig.get("/v1/events"))["events"]
    assert any("a.sim is no address of its node any more" in event["text"] for event in events)
    assert rig.server.view.nodes()[0]["notes"] == []


def test_e1_fifty_shards_at_once_get_fifty_blocks_of_ports_and_a_port_rests_before_it_is_used_again():
    """E1: none overlaps another's; the ports of those that ended are the last to be given again."""
    fleet = serving({"a": 0}, [model("m", 50, devices=0)])
    first = [port for record in placed(fleet) for port in record.allocation.ports]
    assert len(first) == len(set(first)) >= 50
    fleet.apply([model("m", 1, devices=0)])
    fleet.until(lambda: len(placed(fleet)) == 1, "one is left")
    fleet.apply([model("m", 2, devices=0)])
    fleet.until(lambda: fleet.ready("m") == 2, "two again")
    newest = max(placed(fleet), key=lambda record: record.number)
    assert not set(newest.allocation.ports) & set(first)


def test_e5_a_port_that_something_still_holds_is_not_tried_again():
    """E5: the node names the holder; the shard gets other ports, and its budget of crashes is untouched."""
    fleet = Fleet({"a": 0})
    fleet.agents["a"].answered = PortInUse()
    fleet.lead([model("m", 1, devices=0)])
    fleet.until(lambda: fleet.ready("m") == 1, "ready")
    (record,) = placed(fleet)
    assert record.allocation.ports == (20001,) and record.attempt == 2 and record.crashes == ()
    assert any("port 20000 is in use by pid 5" in event.text for event in fleet.store.events)


def test_h4_a_shard_that_failed_for_good_holds_no_device():
    """H4: another model gets what it had."""
    fleet = Fleet({"a": 1})
    fleet.agents["a"].doomed.add("m")
    fleet.lead([model("m", 1)])
    fleet.until(lambda: any(record.state is ShardState.FAILED for record in placed(fleet)), "failed", 2000)
    fleet.apply([model("m", 1), model("other", 1)])
    fleet.until(lambda: fleet.ready("other") == 1, "the other is ready")


class SameMachine(SimAgent):
    """An agent on the machine of agent a: it sees the same devices."""

    def facts(self):
        known = super().facts()
        devices = tuple(Device(f"a-gpu{index}", index, "SIM", 80 * GIB, memory_used=0) for index in range(self.devices))
        return evolve(known, inventory=evolve(known.inventory, devices=devices))


def test_h5_two_agents_of_one_machine_are_not_both_given_a_device():
    """H5: one has it, and what the other could run is refused with the reason and what to do."""
    fleet = Fleet({"a": 1, "b": 1})
    fleet.agents["b"] = SameMachine("b", 1, fleet.random, load=1.0)
    fleet.lead([model("m", 2)])
    fleet.until(lambda: fleet.ready("m") == 1, "one is placed")
    fleet.run(20)
    assert len([record for record in placed(fleet) if record.allocation.devices]) == 1
    explanation = explain(fleet.controller.world(), fleet.controller.outcome, "m")
    assert "a has this device, too: give each agent of a machine its own" in str(explanation)


@pytest.mark.parametrize(("holder", "other"), ["ab", "ba"])
def test_h5_a_device_of_two_agents_is_that_ones_who_has_engines_on_it(holder, other):
    """H5: so that no order of names takes it away from what runs."""
    device = (Device("GPU-x", 0, "H100", 80 * GIB),)
    inventory = Inventory(1, GIB, devices=device)
    nodes = {name: evolve(node(name), facts=evolve(node(name).facts, inventory=inventory)) for name in "ab"}
    held = shard(1, ShardState.READY, holder, allocation=Allocation(holder, devices=("GPU-x",), ports=(20001,)))
    room = ledger(Draft(world(held, nodes=nodes, told={holder: told(report()), other: told()})))
    assert room.candidate(holder).device_cordons == {}
    assert room.candidate(other).device_cordons["GPU-x"].startswith(f"{holder} has this device, too")


def test_h9_failures_are_counted_exactly_however_an_engine_ends():
    """H9: while it loads, when it serves, at somebody's hand while no server looked: one each, and none for a start anew."""
    fleet = serving({"a": 1}, [model("m", 1)])
    agent = fleet.agents["a"]

    def crashes():
        (record,) = placed(fleet)
        return len(record.crashes)

    def reach(state):
        fleet.until(lambda: getattr(agent.engines.get("m/1/0"), "state", None) is state, f"it is {state}")

    for number, state in enumerate((ShardState.READY, ShardState.LOADING, ShardState.READY), 1):
        reach(state)
        agent.die(agent.engines["m/1/0"], fleet.clock.seconds(), "killed by somebody")
        fleet.until(lambda number=number: crashes() == number, "counted")
    reach(ShardState.READY)
    fleet.end()
    agent.die(agent.engines["m/1/0"], fleet.clock.seconds(), "killed while no server looked")
    fleet.lead()
    fleet.until(lambda: crashes() == 4, "counted once")
    fleet.run(120)
    assert crashes() == 4 and fleet.ready("m") == 1


@pytest_twisted.ensureDeferred
async def test_h11_of_twenty_applies_at_once_for_the_last_device_one_is_placed_and_nineteen_explained(rig_of):
    """H11: through the server's own commits and its store."""
    rig = await rig_of()
    rig.link("a", 1)
    await rig.until(lambda: rig.server.view.nodes(), "known")
    names = [f"m{number}" for number in range(20)]
    await gatherResults([rig.server.catalogs.apply(Catalog((model(name, 1),)), "test") for name in names])
    await rig.until(lambda: sum(row["ready"] for row in rig.server.view.models()) == 1, "one is ready")
    rows = await rig.until(lambda: all(row["reason"] or row["ready"] for row in rows_of(rig)) and rows_of(rig), "explained")
    assert sorted(row["name"] for row in rows) == sorted(names)
    refused = [row for row in rows if not row["ready"]]
    assert len(refused) == 19
    assert {row["reason"] for row in refused} == {"0/1 nodes can run this: 1 too few devices (need 1, most free 0)"}
    holders = [record.shard for record in rig.server.controller.truth.shards.values() if record.allocation]
    assert len(holders) == 1


def rows_of(rig):
    return rig.server.view.models()


NODES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), min_size=1, max_size=4)
MODELS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 2), st.booleans()), min_size=1, max_size=4)


@given(NODES, MODELS, st.sets(st.tuples(st.sampled_from("abcd"), st.integers(0, 2)), max_size=4))
@settings(max_examples=25, deadline=None)
def test_whatever_is_wanted_refusals_are_true_and_no_two_claims_overlap(nodes, wanted, closed):
    """Through the server's loop: each refused node has a check whose need exceeds its have, the counts add up to the nodes, no
    device or port has two holders, and none that was closed has any."""
    fleet = Fleet(nodes)
    fleet.lead()
    fleet.run(1)
    uuids = {f"{name}-gpu{index}" for name, index in closed}
    for record in list(fleet.controller.truth.nodes.values()):
        cordons = {uuid: DeviceCordon("fan", 0.0, "alice") for uuid in uuids if uuid.startswith(record.name)}
        fleet.controller.change(lambda record=record, cordons=cordons: [evolve(record, device_cordons=cordons)])
    models = [model(f"m{n}", replicas, devices, count) for n, (replicas, devices, count, _) in enumerate(wanted)]
    fleet.apply(models)
    fleet.run(20)
    held = Counter(device for record in placed(fleet) for device in record.allocation.devices)
    ports = Counter((record.allocation.node, port) for record in placed(fleet) for port in record.allocation.ports)
    assert set((held | ports).values()) <= {1}
    assert not set(held) & uuids
    for one in models:
        why = explain(fleet.controller.world(), fleet.controller.outcome, one.name)
        if why is None:
            assert fleet.ready(one.name) == one.replicas.min
            continue
        assert why.looked == len(nodes) == sum(len(checks) for checks in why.counts().values())
        assert all(verdict.checks for verdict in why.verdicts)
        assert all(check.need > check.have for verdict in why.verdicts for check in verdict.checks)
