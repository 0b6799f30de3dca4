"""The control plane over whole fleets on a virtual clock. What must hold at every step stands in llmgw/testing/simulate.py."""

from __future__ import annotations

import random

import pytest
from attrs import evolve

from llmgw.fleet.node import Fabric
from llmgw.fleet.shard import ShardState
from llmgw.server.operations import Operations
from llmgw.testing.simulate import Fleet, model
from tests.simulation_rig import serving


def test_models_are_placed_started_and_routed():
    """From a catalog to routes, on different nodes."""
    fleet = serving()
    assert fleet.engines("m") == ["m/1/0@a ready 1", "m/2/0@b ready 1"]


def test_a_restarted_server_restarts_nothing():
    """kill -9 of the server: the same pids, the same attempts, and no route is missing in between."""
    fleet = serving()
    pids = fleet.pids()
    for _ in range(5):
        fleet.end()
        fleet.run(3)
        fleet.lead()
        fleet.run(10)
    assert fleet.pids() == pids and fleet.ready("m") == 2


def test_a_lost_store_adopts_what_matches():
    """D3, I-C3: a new, empty store stops nothing, starts no second copy, and the routes stay."""
    fleet = serving()
    pids = fleet.pids()
    fleet.end()
    fleet.forget()
    fleet.lead([model("m", 2)], fresh=True)
    fleet.run(90)
    assert fleet.pids() == pids and fleet.ready("m") == 2
    assert fleet.says("adopted")


def test_a_lost_store_with_another_profile_serves_until_the_successor_is_ready():
    """The generation does not match: the engine is an orphan, left running and routed; nothing is stopped by itself."""
    fleet = serving(models=[model("m", 1)])
    pids = fleet.pids()
    fleet.end()
    fleet.forget()
    fleet.lead([model("m", 1, version=2)], fresh=True)
    fleet.run(20)
    assert fleet.pids() == pids and fleet.routers.routed.keys() == {"m/1"}
    fleet.until(lambda: "m/2" in fleet.routers.routed, "the successor")
    assert pids.items() <= fleet.pids().items(), "the orphan goes on"
    assert [orphan.report.shard for orphan in fleet.controller.outcome.orphans] == ["m/1/0"]


def test_an_older_store_believes_the_fleet():
    """A restored backup knows an earlier attempt: the node is right."""
    fleet = serving(models=[model("m", 1)])
    backup = dict(fleet.store.records), fleet.store.catalog
    engine = fleet.agents["a"].engines["m/1/0"]
    fleet.agents["a"].die(engine, fleet.clock.seconds(), "oops")
    fleet.until(lambda: fleet.engines() == ["m/1/0@a ready 2"], "a second attempt")
    pids = fleet.pids()
    fleet.end()
    fleet.store.records, fleet.store.catalog = backup
    fleet.lead()
    fleet.run(120)
    assert fleet.pids() == pids and fleet.ready("m") == 1


def test_an_older_store_that_knows_a_replica_elsewhere_takes_no_route():
    """A restored backup has the name on a node that is away and never said anything: what the routers route to may serve."""
    fleet = serving(models=[model("m", 1)])
    older = fleet.older()
    record = older.records["shard", "m/1/0"]
    elsewhere = evolve(record.allocation, node="b", address="b.sim", ports=(20050,))
    older.records["shard", "m/1/0"] = evolve(record, state=ShardState.UNKNOWN, url="", key="", allocation=elsewhere)
    fleet.end()
    fleet.store, fleet.cut = older, {"a", "b"}
    fleet.lead()
    fleet.run(20)
    assert fleet.routers.routed == {"m/1": ("a.sim", 20000)}


def test_an_older_store_that_has_not_heard_of_a_gang_takes_no_route():
    """A restored backup from before the gang was ready: rank 0's node is away, rank 1 says that it serves."""
    fleet = Fleet({"a": 1, "b": 1})
    for agent in fleet.agents.values():
        agent.fabrics = (Fabric("rack"),)
    fleet.lead([model("g", nodes=2)])
    fleet.until(lambda: len(fleet.engines("g")) == 2, "both ranks started")
    older = fleet.older()
    fleet.until(lambda: fleet.ready("g") == 1, "ready")
    pids, head = fleet.pids(), next(name for name, agent in fleet.agents.items() if "g/1/0" in agent.engines)
    fleet.end()
    fleet.store, fleet.cut = older, {head}
    fleet.lead()
    fleet.run(40)
    assert fleet.ready("g") == 1 and fleet.pids() == pids
    fleet.cut = set()
    fleet.run(10)
    assert fleet.ready("g") == 1 and fleet.pids() == pids


def test_a_machine_set_up_anew_starts_no_rank_of_a_replica_that_leaves():
    """It has lost its rank while the store took nothing; then the replica is ordered away, before routers have let go of it."""
    fleet = Fleet({"a": 1, "b": 1})
    for agent in fleet.agents.values():
        agent.fabrics = (Fabric("rack"),)
    fleet.lead([model("g", nodes=2)])
    fleet.until(lambda: fleet.ready("g") == 1, "ready")
    fleet.store.failing, fleet.routers.delay = "the disk is full", 5.0
    lost = next(agent for agent in fleet.agents.values() if "g/1/1" in agent.engines)
    fleet.port.unlink(lost.name, "the machine went down")
    lost.wipe()
    fleet.run(5)
    fleet.store.failing = ""
    fleet.apply([model("g", 0, nodes=2)])
    fleet.until(lambda: not fleet.engines() and "g/1/1" not in fleet.controller.truth.shards, "all gone", 60)
    assert not any(operation.startswith("run:") for operation in lost.effects)


def test_a_lost_store_begins_its_epochs_anew_and_no_node_is_told_an_operation_twice():
    """The first node that comes is new and remembers none; the others' epochs are outranked before they are told anything."""
    fleet = serving(models=[model("m", 1), model("n", 1)])
    fleet.end()
    fleet.forget()
    fleet.cut, fleet.lenient = {"b"}, True
    fleet.agents["a"].wipe()
    fleet.agents["a"].epochs.clear()
    fleet.lead([model("n", 1), model("m", 1)], fresh=True)
    fleet.until(lambda: len(fleet.agents["a"].running()) == 2, "started on the new machine")
    assert fleet.leadership.epoch == 1 and all(":1:1." in operation for operation in fleet.agents["a"].effects)
    fleet.cut = set()
    fleet.run(60)
    assert fleet.leadership.epoch > 1


def test_a_crash_is_retried_with_backoff_and_its_reason_kept():
    """The next attempt has a higher number and other ports; first and last reason are both known."""
    fleet = serving(models=[model("m", 1)])
    agent = fleet.agents["a"]
    port = agent.engines["m/1/0"].order.allocation.ports
    agent.die(agent.engines["m/1/0"], fleet.clock.seconds(), "out of memory")
    fleet.run(2)
    record = fleet.controller.truth.shards["m/1/0"]
    assert record.state is ShardState.BACKOFF and "out of memory. Attempt 2 of 5" in record.reason
    assert fleet.ready("m") == 0
    fleet.until(lambda: fleet.ready("m") == 1, "ready again")
    assert agent.engines["m/1/0"].order.attempt == 2 and agent.engines["m/1/0"].order.allocation.ports != port


def test_a_crash_loop_moves_once_then_fails_and_waits_for_an_operator():
    """H9, T10: five failures in half an hour, counted over a server restart, and no sixth by itself."""
    fleet = Fleet({"a": 1, "b": 1})
    for agent in fleet.agents.values():
        agent.doomed.add("m")
    fleet.lead([model("m", 1)])
    fleet.run(60)
    fleet.end()
    fleet.lead()
    fleet.run(900)
    (record,) = [r for r in fleet.controller.truth.shards.values() if r.allocation]
    assert record.state is ShardState.FAILED and len(record.crashes) == 5
    assert "llmgw restart m" in record.reason
    assert record.allocation.node == "b", "after three failures another node was tried"
    assert fleet.engines() == []


def test_a_short_ready_does_not_reset_the_budget():
    """Ready, then dead, five times: failed."""
    fleet = serving({"a": 1}, [model("m", 1)])
    for _ in range(5):
        fleet.until(lambda: fleet.ready("m") == 1, "ready", 400)
        engine = fleet.agents["a"].engines["m/1/0"]
        fleet.agents["a"].die(engine, fleet.clock.seconds(), "died at the first request")
        fleet.run(2)
    assert fleet.controller.truth.shards["m/1/0"].state is ShardState.FAILED


def test_an_empty_report_lets_go_of_a_shard():
    """A node that was set up anew runs nothing: it is believed, and the shard is started again."""
    fleet = serving({"a": 1}, [model("m", 1)])
    fleet.cut.add("a")
    fleet.run(2)
    fleet.agents["a"].wipe()
    fleet.cut.clear()
    fleet.until(lambda: fleet.engines() == ["m/1/0@a ready 2"], "started again")


def test_a_lost_link_moves_nothing_before_lost_after():
    """B4, B10: unreachable is not lost; the route stays, and the same engine is there on return."""
    fleet = serving(models=[model("m", 1)])
    pids = fleet.pids()
    fleet.cut.add("a")
    fleet.run(50)
    assert fleet.controller.truth.nodes["a"].state == "unreachable"
    assert fleet.ready("m") == 1 and fleet.pids() == pids
    fleet.cut.clear()
    fleet.run(5)
    assert fleet.controller.truth.nodes["a"].state == "ready" and fleet.pids() == pids


def test_a_lost_node_is_replaced_and_its_copy_reconciled_on_return():
    """T4: the replacement serves before the lost one's route goes; on return the original is kept, the other drained."""
    fleet = serving(models=[model("m", 1)])
    fleet.cut.add("a")
    fleet.until(lambda: "m/2" in fleet.routers.routed, "a replacement", 120)
    fleet.run(1)
    assert set(fleet.routers.routed) == {"m/2"}
    fleet.cut.clear()
    fleet.until(lambda: fleet.engines() == ["m/1/0@a ready 1"], "one copy")
    fleet.run(5)
    assert set(fleet.routers.routed) == {"m/1"}


def test_the_brake_holds_when_half_of_the_nodes_vanish():
    """T3, I-C6: it is probably us; nobody is lost, nothing is replaced, one sentence says so."""
    fleet = serving(dict.fromkeys("abcdef", 1), [model("m", 4)])
    pids = fleet.pids()
    fleet.cut |= set("abc")
    fleet.run(400)
    assert {fleet.controller.truth.nodes[name].state for name in "abc"} == {"unreachable"}
    assert fleet.pids() == pids and fleet.ready("m") == 4
    assert fleet.controller.outcome.holding.brake
    fleet.cut.clear()
    fleet.run(10)
    assert fleet.pids() == pids and not fleet.controller.outcome.holding.brake


def test_a_new_leader_gives_nobody_up_in_its_grace():
    """I-C7: nodes that have not come back yet are not lost before lost_after, counted from the new leadership."""
    fleet = serving(dict.fromkeys("abcde", 1), [model("m", 5)])
    pids = fleet.pids()
    fleet.end()
    fleet.cut |= {"a", "b"}
    fleet.run(600)
    fleet.lead()
    fleet.run(40)
    assert {fleet.controller.truth.nodes[name].state for name in "ab"} == {"unreachable"}
    fleet.cut.clear()
    fleet.run(10)
    assert fleet.pids() == pids


def test_a_stalled_store_changes_nothing():
    """B3, B14: no order, no route and no engine changes while the store takes nothing; afterwards all goes on."""
    fleet = serving(models=[model("m", 1)])
    pids = fleet.pids()
    fleet.store.failing = "the disk is full"
    fleet.apply([model("m", 2)])
    fleet.cut.add("b")
    fleet.run(600)
    assert fleet.pids() == pids and fleet.ready("m") == 1
    assert fleet.controller.commits.failing == "the disk is full"
    assert "nothing is changed: the disk is full" in fleet.refusals[0]
    fleet.store.failing = ""
    fleet.cut.clear()
    fleet.apply([model("m", 2)])
    fleet.until(lambda: fleet.ready("m") == 2, "the second replica")
    assert fleet.controller.commits.failing == ""


def test_a_leader_without_leave_orders_nothing():
    """I-L6: may_act is asked at emission, also where what was said a minute ago is said again."""
    fleet = serving(models=[model("m", 1)])
    pids = fleet.pids()
    fleet.leadership.held = False
    fleet.apply([model("m", 0)])
    fleet.run(70)
    assert fleet.pids() == pids and fleet.refusals == ["cp does not lead now"]


def test_the_wall_clock_decides_nothing():
    """B2: the server's clock jumps by an hour either way; no node is lost, no engine restarted."""
    fleet = serving()
    pids = fleet.pids()
    for ahead in (3600, -3600, 0):
        fleet.wall_ahead = ahead
        fleet.cut.add("a")
        fleet.run(20)
        fleet.cut.clear()
        fleet.run(20)
    assert fleet.pids() == pids and fleet.ready("m") == 2


def test_a_gang_falls_and_rises_together():
    """F58: one rank dies; the other is stopped, and both start again with one attempt and a new rendezvous port."""
    fleet = Fleet({"a": 2, "b": 2})
    for agent in fleet.agents.values():
        agent.fabrics = (Fabric("rack"),)
    fleet.lead([model("g", 1, devices=2, nodes=2)])
    fleet.until(lambda: fleet.ready("g") == 1, "the gang serves")
    agent = fleet.agents["b"]
    agent.die(agent.engines["g/1/1"], fleet.clock.seconds(), "rank 1 fell")
    fleet.run(5)
    assert fleet.ready("g") == 0 and fleet.engines() == []
    fleet.until(lambda: fleet.engines() == ["g/1/0@a ready 2", "g/1/1@b ready 2"], "both again")
    (record,) = [r for r in fleet.controller.truth.shards.values() if r.rank == 0]
    assert len(record.crashes) == 1


def test_a_reboot_restarts_what_ran_there():
    """All engines of a machine are gone at once; each is started again, once."""
    fleet = serving()
    fleet.cut.add("a")
    fleet.run(2)
    fleet.agents["a"].reboot()
    fleet.cut.clear()
    fleet.until(lambda: fleet.engines() == ["m/1/0@a ready 2", "m/2/0@b ready 1"], "again")


def test_numbers_of_replicas_never_come_back():
    """Up and down again: a name means one copy for ever."""
    fleet = serving(models=[model("m", 1)])
    seen = set(fleet.pids())
    for count in (2, 1, 2, 0, 1):
        fleet.apply([model("m", count)])
        fleet.until(lambda: fleet.ready("m") == count and len(fleet.engines()) == count, f"{count} replicas")
        seen |= set(fleet.pids())
    assert [record.number for record in fleet.controller.truth.shards.values()] == [max(int(s.split("/")[1]) for s in seen)]


def test_a_node_on_which_everything_fails_is_quarantined():
    """H8: three different models fail there and none serves: nothing goes there for a while, and it comes back by itself."""
    fleet = Fleet({"a": 3})
    models = [model(name) for name in ("x", "y", "z")]
    fleet.agents["a"].doomed |= {"x", "y", "z"}
    fleet.lead(models)
    fleet.until(lambda: fleet.says("quarantined", "x, y, z failed there"), "quarantined", 20)
    fleet.apply([*models, model("w")])
    fleet.run(1)
    assert "quarantined" in fleet.controller.outcome.pending["w"].explanation.line()
    fleet.agents["a"].doomed.clear()
    fleet.until(lambda: all(fleet.ready(name) for name in "wxyz" if name != "w"), "served again", 120)


def test_a_failing_model_alone_quarantines_nothing():
    """Three failures of one model are the model's."""
    fleet = serving({"a": 2}, [model("m", 1)])
    fleet.agents["a"].doomed.add("x")
    fleet.apply([model("m", 1), model("x", 1)])
    fleet.run(200)
    assert not fleet.says("quarantined")


def test_another_machine_under_a_lost_nodes_name_waits_for_a_reset():
    """It may be a copy of the name while the lost one's engines still run; an operator decides."""
    fleet = serving(models=[model("m", 1)])
    fleet.cut.add("a")
    fleet.until(lambda: fleet.controller.truth.nodes["a"].state == "lost", "lost", 120)
    other = evolve(fleet.agents["a"].register(), instance="another")
    certificate = fleet.port.sessions()["b"]
    assert fleet.controller.judge(fleet.agents["a"].register(), certificate) is None
    refused = fleet.controller.judge(other, certificate)
    assert refused.reason == "name_in_use" and "llmgw node reset a" in refused.text
    Operations(fleet.controller).reset("a")
    fleet.run(1)
    assert fleet.controller.judge(other, certificate) is None


@pytest.mark.parametrize("seed", range(12))
def test_chaos(seed):
    """Links, servers, stores, engines and machines fail at random; the invariants hold, and afterwards all is as wanted."""
    chance = random.Random(seed)
    fleet = Fleet(dict.fromkeys("abcd", 2), seed=seed)
    models = [model("m", 2), model("n", 2, devices=1), model("big", 1, devices=2)]
    fleet.lead(models)
    fleet.loss = 0.1
    for _ in range(60):
        what, name = chance.random(), chance.choice("abcd")
        agent = fleet.agents[name]
        if what < 0.2:
            fleet.cut ^= {name}
        elif what < 0.35 and agent.running():
            engine = chance.choice(agent.running())
            agent.die(engine, fleet.clock.seconds(), "chance")
        elif what < 0.45:
            fleet.end()
            fleet.run(chance.random() * 20)
            fleet.lead()
        elif what < 0.5:
            agent.reboot()
        elif what < 0.6:
            fleet.store.failing = "" if fleet.store.failing else "full"
        elif what < 0.75:
            models = [
                model(m.name, chance.randint(0, 2), m.profile.resources.devices, version=chance.randint(1, 2)) for m in models
            ]
            fleet.store.failing = ""
            fleet.apply(models)
        fleet.run(chance.random() * 30)
    fleet.cut.clear()
    fleet.store.failing, fleet.loss = "", 0.0
    models = [model("m", 1, version=3), model("n", 1, version=3), model("big", 1, devices=2, version=3)]
    fleet.apply(models)
    fleet.until(lambda: all(fleet.ready(one.name) == 1 for one in models) and len(fleet.engines()) == 3, "all as wanted", 1500)
