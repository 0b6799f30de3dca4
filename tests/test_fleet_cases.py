"""Cases that fleets of other programs have failed at: states that nobody leaves (A), mass loss and reconnects (B), logs, upgrades
and secrets (J). Here is what the simulator shows of them, and where the others are tested.

    A1   test_fleet_cases_engines.py
    A2   test_fleet_cases_engines.py
    A3   here
    A4   here
    A5   here, any order of reports in test_planning_reconcile.py, and after every simulated step that nothing illegal was planned
    A6   here
    A7   does not apply: nothing dials a node but routers; its agent dials out and probes its engines itself
    A9   test_fleet_cases_engines.py
    A10  test_fleet_cases_engines.py
    A11  test_fleet_cases_engines.py
    B1   here, and test_a_bad_round_is_one_line_whatever_a_node_does in test_agent_uplink_rounds.py
    B2   test_the_wall_clock_decides_nothing in test_server_simulation.py,
         test_b2_a_rollout_over_nodes_and_a_server_with_other_clocks_fails_nobody in test_server_simulation_clocks.py
    B3   here
    B4   test_f01_f02_a_new_leader_takes_over_and_nothing_else_happens in end_to_end/test_failover.py
    B5   test_f03_a_leader_that_was_suspended_past_its_lease_stands_by in end_to_end/test_failover.py
    B6   figures of many agents are measured by bench/fleet.py, not asserted in a timed test
    B7   here for the records; the router's day is test_router_soak.py
    B8   test_b8_a_hundred_agents_come_back_spread_after_a_minute_without_a_server in test_link_large_fleets.py
    B9   does not apply: see A7
    B10  here
    B12  test_fleet_cases_engines.py
    B14  test_a_stalled_store_changes_nothing in test_server_simulation.py
    B15  test_a_change_while_a_node_is_away_reaches_it_once in test_server_simulation_changes.py
    J1   test_fleet_cases_engines.py
    J2   test_fleet_cases_engines.py; a log has no writer that could end: the engine writes into the file itself
    J4   test_a_newer_schema_is_refused_and_an_older_one_migrated in test_store_sql.py; there is no release yet to keep a file of
    J5   test_server_fleetport_names.py refuses another protocol by its version; fields unknown to the older side are ignored
    J6   end_to_end/test_fleet_cases.py: an agent has no endpoint
    J7   does not apply: routers on other machines have to reach engines, so each has a random key instead, which
         test_no_engine_key_is_seen_anywhere in end_to_end/test_operations.py and the manual are about
    J8   test_no_engine_key_is_seen_anywhere in end_to_end/test_operations.py
    J9   here
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.fleet.model import Scale
from llmgw.fleet.node import Fabric, IllegalTransition
from llmgw.fleet.shard import ShardState, move_shard
from llmgw.testing.simulate import Fleet, model
from tests.simulation_rig import serving

TESTS = Path(__file__).parent
SOURCES = sorted((TESTS.parent / "llmgw").rglob("*.py"))


def test_the_table_names_tests_that_exist():
    """A test that is renamed or deleted does not leave its case behind."""
    assert __doc__ is not None
    for file in set(re.findall(r"[\w/]*test_\w+\.py", __doc__)):
        assert (TESTS / file).is_file(), file
    for name, file in re.findall(r"(test_\w+) in\s+((?:end_to_end/)?test_\w+\.py)", __doc__):
        assert f"def {name}(" in (TESTS / file).read_text(), name


@pytest.mark.parametrize("fault", ["store", "answer of the store", "message"])
def test_a3_a_placement_whose_order_is_lost_is_sent_again_and_starts_one_engine(fault):
    """Between placing and sending the store is away, its answer is lost, or the order is: one engine, and no state for ever."""
    fleet = Fleet({"a": 1})
    fleet.lead([model("m", 0)])
    fleet.run(2)
    if fault == "message":
        fleet.loss = 1.0
    fleet.apply([model("m", 1)])
    fleet.store.stalled, fleet.store.lossy = fault == "store", fault == "answer of the store"
    fleet.run(40)
    assert fleet.engines() == []
    fleet.store.lossy, fleet.loss = False, 0.0
    fleet.store.resume()
    if fault == "answer of the store":
        fleet.apply([model("m", 1)])
    fleet.until(lambda: fleet.ready("m") == 1, "it serves", 90)
    assert [engine.split()[0].split("@")[0][-2:] for engine in fleet.engines()] == ["/0"] and len(fleet.engines()) == 1


@pytest.mark.parametrize("seconds", [0.05, 0.3, 0.6, 1.0])
def test_a4_a_link_lost_just_after_the_order_leaves_one_engine(seconds):
    """The link ends while the order is taken, acknowledged or followed; after the reconnect it runs, without a second copy."""
    fleet = Fleet({"a": 2})
    fleet.lead([model("m", 0)])
    fleet.run(2)
    fleet.apply([model("m", 1)])
    fleet.clock.advance(seconds)
    fleet.cut.add("a")
    fleet.run(10)
    fleet.cut.clear()
    fleet.until(lambda: fleet.ready("m") == 1, "it serves")
    assert len(fleet.engines()) == 1


def test_a5_a_state_never_goes_back_to_waiting_for_its_start():
    """What starts, loads or serves is not placed again, and does not wait for a place again, without having ended."""
    for now in (ShardState.STARTING, ShardState.LOADING, ShardState.READY, ShardState.DRAINING, ShardState.STOPPING):
        for then in (ShardState.PLACED, ShardState.PENDING):
            with pytest.raises(IllegalTransition, match=f"that is {now} cannot become {then}"):
                move_shard(now, then)


def test_a6_a_restarted_server_places_what_waits_within_five_seconds():
    """A model was applied while no node was there; the server is restarted, and a node with room comes back."""
    fleet = Fleet({"a": 1})
    fleet.cut.add("a")
    fleet.lead([model("m", 1)])
    fleet.run(60)
    fleet.end()
    fleet.run(5)
    fleet.lead()
    fleet.run(10)
    fleet.cut.clear()
    fleet.until(lambda: fleet.engines() != [], "placed", 5)


def test_b1_what_raises_while_the_fleet_is_looked_after_stops_no_clock(expect_failures):
    """Tick and plan raise for a while; it is logged, what was applied meanwhile is planned after all, and the tick goes on."""
    fleet = Fleet({"a": 4})
    elastic = evolve(model("z"), replicas=Scale(1, 2, target=1, up_after=2.0))
    fleet.lead([model("m", 1), elastic])
    fleet.until(lambda: fleet.ready("m") == fleet.ready("z") == 1, "all ready")
    controller = fleet.controller
    look, world = controller.demand.look, controller.world
    controller.demand.look = controller.world = lambda *_: 1 / 0
    fleet.apply([model("m", 2), elastic])
    fleet.run(5)
    assert fleet.ready("m") == 1
    controller.demand.look, controller.world = look, world
    expect_failures(ZeroDivisionError)
    fleet.until(lambda: fleet.ready("m") == 2, "two serve", 10)
    fleet.routers.flying["z/1"] = 2
    fleet.until(lambda: fleet.ready("z") == 2, "scaled", 20)


def test_b3_a_store_that_stalls_for_ten_minutes_loses_no_node():
    """Twenty nodes; three replicas are added while the store hangs and half of the links flap: nothing is stopped or replaced."""
    nodes = [f"n{i:02}" for i in range(20)]
    fleet = serving(dict.fromkeys(nodes, 1), [model("m", 12)])
    pids, routes = fleet.pids(), fleet.routers.routed
    fleet.store.stalled = True
    fleet.apply([model("m", 15)])
    for _ in range(20):
        fleet.cut = set(fleet.random.sample(nodes, 10))
        fleet.run(30)
    assert fleet.pids() == pids and fleet.routers.routed == routes
    fleet.cut = set()
    fleet.store.resume()
    fleet.until(lambda: fleet.ready("m") == 15, "three more")
    assert pids.items() <= fleet.pids().items()
    assert not fleet.says("-> lost")


def test_b7_links_that_come_and_go_leave_nothing_behind():
    """Three hundred reconnects: no record, route, wait or shard more than before."""
    fleet = serving()
    fleet.run(10)

    def held():
        controller = fleet.controller
        books = (controller.truth.nodes, controller.truth.shards, controller.members.present, controller.members.last)
        return [len(book) for book in books], len(fleet.clock.calls)

    before, pids = held(), fleet.pids()
    for _ in range(300):
        fleet.port.unlink("a", "flapping")
        fleet.run(0.5)
    fleet.run(20)
    after = held()
    assert after[0] == before[0] and after[1] <= before[1] + 2 and fleet.pids() == pids


def test_b10_a_follower_that_was_away_for_a_minute_is_well_again_at_once():
    """A replica of two nodes: the link of rank 1's node is gone for 60 s; it goes on serving, and is ready on return."""
    fleet = Fleet({"a": 2, "b": 2})
    fleet.timing = fleet.timing.__class__(heartbeat=5.0, lost_after=300.0, failover_grace=30.0)
    for agent in fleet.agents.values():
        agent.fabrics = (Fabric("rack"),)
    fleet.lead([model("g", 1, devices=2, nodes=2)])
    fleet.until(lambda: fleet.ready("g") == 1, "the gang serves")
    follower = next(name for name, agent in fleet.agents.items() if "g/1/1" in agent.engines)
    pids = fleet.pids()
    fleet.cut.add(follower)
    fleet.run(60)
    assert fleet.ready("g") == 1
    assert fleet.controller.truth.shards["g/1/1"].state is ShardState.UNKNOWN
    fleet.cut.clear()
    fleet.until(lambda: fleet.controller.truth.shards["g/1/1"].state is ShardState.READY, "ready again", 5)
    assert fleet.pids() == pids and fleet.ready("g") == 1


def test_the_crash_budget_outlives_servers_and_agents():
    """A crash before each restart of server or agent: the fifth is the last, though it was ready in between each time."""
    fleet = serving({"a": 1}, [model("m", 1)])
    for crash in range(1, 6):
        (engine,) = fleet.agents["a"].running()
        fleet.agents["a"].die(engine, fleet.clock.seconds(), f"crash {crash}")
        fleet.run(3)
        if crash % 2:
            fleet.end()
            fleet.lead()
        else:
            fleet.cut.add("a")
            fleet.run(1)
            fleet.cut.clear()
        if crash < 5:
            fleet.until(lambda: fleet.ready("m") == 1, f"ready after crash {crash}", 400)
            fleet.run(20)
    fleet.run(600)
    (record,) = fleet.controller.truth.shards.values()
    assert (record.state, len(record.crashes), fleet.engines()) == (ShardState.FAILED, 5, [])
    assert record.first_reason == "crash 1" and "5 failures in 30 m" in record.reason


def test_j9_nothing_that_is_received_is_unpickled():
    """Nobody imports what makes code of data."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, f"{path}:{node.lineno}"
