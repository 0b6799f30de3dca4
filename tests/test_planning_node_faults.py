"""What takes an engine down but is not its failure: its machine was restarted, or a disk of it is full. Over simulated fleets."""

from __future__ import annotations

import pytest

from llmgw.fleet.node import Fabric
from llmgw.fleet.shard import DISK_FULL, Diagnosis, ShardState
from llmgw.planning.reconcile import reconcile
from llmgw.planning.world import Declined
from llmgw.testing.simulate import Fleet, model
from tests.simulation_rig import serving
from tests.test_planning_reconcile import only, shard, told, world

FULL = Diagnosis(DISK_FULL, "vLLM: a disk of the node is full", "Free space where the engine writes.")


def reboot(fleet, name="a"):
    """A machine is gone for a moment, with all that ran there."""
    fleet.cut.add(name)
    fleet.run(2)
    fleet.agents[name].reboot()
    fleet.cut.clear()


def test_reboots_spend_no_crash_budget_and_quarantine_no_node():
    """Six within half an hour, of three models on one node: each is started again at once, and none is held to have failed."""
    fleet = serving({"a": 3}, [model(name) for name in "xyz"])
    for _ in range(6):
        reboot(fleet)
        fleet.until(lambda: all(fleet.ready(name) == 0 for name in "xyz"), "they are gone")
        fleet.until(lambda: all(fleet.ready(name) == 1 for name in "xyz"), "they are back", 20)
    assert all(record.crashes == () for record in fleet.controller.truth.shards.values())
    assert not fleet.says("quarantined") and fleet.says("x/1/0", "the machine was restarted", "no failure of its own")


def test_a_crash_after_a_reboot_counts_as_the_first():
    """What it did itself is its own."""
    fleet = serving({"a": 1}, [model("m", 1)])
    reboot(fleet)
    fleet.until(lambda: fleet.ready("m") == 1 and "m/1/0@a ready 2" in fleet.engines(), "back")
    agent = fleet.agents["a"]
    agent.die(agent.engines["m/1/0"], fleet.clock.seconds(), "it fell")
    fleet.until(lambda: fleet.says("it fell. Attempt 2 of 5"), "it has failed once")


def test_ranks_that_fall_since_another_ones_node_is_away_have_not_failed():
    """Rank 0 ends with its peer's machine: no failure of either, and both come back together."""
    fleet = Fleet({"a": 1, "b": 1})
    for agent in fleet.agents.values():
        agent.fabrics = (Fabric("rack"),)
    fleet.lead([model("g", 1, nodes=2)])
    fleet.until(lambda: fleet.ready("g") == 1, "the gang serves")
    for _ in range(6):
        fleet.cut.add("b")
        fleet.run(1)
        agent = fleet.agents["a"]
        agent.die(agent.engines["g/1/0"], fleet.clock.seconds(), "NCCL: remote process exited")
        fleet.run(5)
        fleet.agents["b"].reboot()
        fleet.cut.clear()
        fleet.until(lambda: fleet.ready("g") == 1, "the gang is back", 60)
    assert all(record.crashes == () for record in fleet.controller.truth.shards.values())


def test_a_full_disk_is_tried_again_for_ever_until_there_is_room():
    """An hour of it is no failed replica, nor does it quarantine the node; with room it serves within a minute or so."""
    fleet = Fleet({"a": 1})
    fleet.agents["a"].full = FULL
    fleet.lead([model("m", 1)])
    fleet.run(3600)
    (record,) = fleet.controller.truth.shards.values()
    assert (record.state, record.crashes) == (ShardState.BACKOFF, ())
    assert "a disk of the node is full" in record.reason and "tried again every 1 m until there is room" in record.reason
    assert record.attempt < 70
    fleet.agents["a"].full = None
    fleet.until(lambda: fleet.ready("m") == 1, "it serves", 70)


def test_a_full_disk_has_the_replica_moved_where_there_is_room():
    """Another node can run it: at the next try it goes there."""
    fleet = Fleet({"a": 1, "b": 1})
    fleet.agents["a"].full = FULL
    fleet.cut.add("b")
    fleet.lead([model("m", 1)])
    fleet.run(10)
    fleet.cut.clear()
    fleet.until(lambda: fleet.ready("m") == 1, "it serves elsewhere", 75)
    assert fleet.engines() == ["m/2/0@b ready 1"]


@pytest.mark.parametrize("earlier", [(), (1.0,)])
def test_an_order_that_an_agent_declines_for_its_disk_is_no_failure(earlier):
    """The agent's own check: its words, no crash, and when it is tried again."""
    declined = {"m/1/0": Declined(1, "disk_full", "10.0 MiB are free under /var/lib, 64.0 MiB are needed")}
    placed = shard(state=ShardState.PLACED, crashes=earlier)
    record = only(reconcile(world(placed, told={"a": told()}, declined=declined)))
    assert (record.state, record.crashes) == (ShardState.BACKOFF, earlier)
    assert record.reason.startswith("10.0 MiB are free under /var/lib") and record.next_at is not None
