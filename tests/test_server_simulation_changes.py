"""What operators and users change, over whole fleets on a virtual clock: numbers of replicas, profiles, drains, sleep."""

from __future__ import annotations

from attrs import evolve

from llmgw.fleet.model import Scale
from llmgw.fleet.node import Fabric
from llmgw.server.operations import Operations
from llmgw.testing.simulate import Fleet, model
from tests.simulation_rig import serving


def test_fewer_replicas_drain_the_newest_after_the_routers_let_go():
    """G1: routes first, then what runs there ends, then the engine."""
    fleet = serving()
    fleet.routers.flying |= {"m/1": 3, "m/2": 3}
    fleet.apply([model("m", 1)])
    fleet.run(10)
    assert set(fleet.routers.routed) == {"m/1"} and "m/2/0@b draining 1" in fleet.engines()
    fleet.routers.flying.clear()
    fleet.until(lambda: fleet.engines() == ["m/1/0@a ready 1"], "drained")


def test_a_drain_ends_at_its_deadline():
    """A request that never ends does not hold the device for ever."""
    fleet = serving()
    fleet.routers.flying |= {"m/1": 1, "m/2": 1}
    fleet.apply([model("m", 1)])
    fleet.run(fleet.timing.drain - 5)
    assert len(fleet.engines()) == 2
    fleet.until(lambda: len(fleet.engines()) == 1, "stopped", 20)
    assert fleet.says("m/2/0", "its time to drain is up")


def test_a_drain_waits_for_slow_routers():
    """The engine hears nothing before the routers have acknowledged."""
    fleet = serving()
    fleet.routers.delay = 8.0
    fleet.apply([model("m", 1)])
    fleet.run(7)
    assert fleet.engines() == ["m/1/0@a ready 1", "m/2/0@b ready 1"]
    fleet.until(lambda: len(fleet.engines()) == 1, "drained")


def test_a_changed_profile_is_rolled_one_at_a_time_with_room():
    """The new one is ready before an old one drains; never fewer than wanted serve."""
    fleet = serving({"a": 2, "b": 2}, [model("m", 2)])
    least = []
    fleet.apply([model("m", 2, version=2)])
    for _ in range(400):
        fleet.step()
        least.append(fleet.ready("m"))
    assert min(least) == 2
    assert fleet.engines() == ["m/3/0@a ready 1", "m/4/0@b ready 1"]


def test_a_changed_profile_without_room_replaces_in_place_and_says_so():
    """G6: no spare device: one at a time, one always serves, and an event says why one went first."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    least = []
    fleet.apply([model("m", 2, version=2)])
    for _ in range(400):
        fleet.step()
        least.append(fleet.ready("m"))
    assert min(least) == 1 and fleet.ready("m") == 2
    assert fleet.says("no room for its successor beside it")
    assert {engine.order.generation for a in fleet.agents.values() for engine in a.running()} == {
        model("m", version=2).generation
    }


def test_a_change_that_fits_nowhere_leaves_the_old_serving():
    """A successor that no device could take is no reason to stop anything."""
    fleet = serving({"a": 1}, [model("m", 1)])
    pids = fleet.pids()
    fleet.apply([model("m", 1, devices=4)])
    fleet.run(60)
    assert fleet.pids() == pids and fleet.ready("m") == 1
    assert "it stays as it is" in fleet.controller.outcome.notes["m"]


def test_a_change_while_a_node_is_away_reaches_it_once():
    """B15: v1 became v2 during the disconnect; after the return v2 runs once and v1 is gone."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 1)])
    fleet.cut.add("a")
    fleet.run(2)
    fleet.apply([model("m", 1, version=2)])
    fleet.until(lambda: "m/2" in fleet.routers.routed, "the successor elsewhere")
    fleet.cut.clear()
    fleet.until(lambda: fleet.engines() == ["m/2/0@b ready 1"], "only the new one")


def test_a_model_deleted_while_its_node_is_away_is_stopped_on_return():
    """D3: replicas: 0 is an order that waits."""
    fleet = serving({"a": 1}, [model("m", 1)])
    fleet.cut.add("a")
    fleet.run(100)
    fleet.apply([model("m", 0)])
    fleet.run(5)
    assert fleet.engines() == ["m/1/0@a ready 1"]
    fleet.cut.clear()
    fleet.until(lambda: fleet.engines() == [], "stopped")
    assert len(fleet.agents["a"].stopped) == 1


def test_absence_from_the_catalog_stops_nothing():
    """A model that a catalog does not name any more goes on, and stays routed."""
    fleet = serving(models=[model("m", 1), model("n", 1)])
    pids = fleet.pids()
    fleet.apply([model("n", 1)])
    fleet.run(120)
    assert fleet.pids() == pids and fleet.ready("m") == 1


def test_an_emptied_node_says_that_it_is_drained():
    """The end of a drain is an event, and what runs elsewhere is another number."""
    fleet = serving()
    Operations(fleet.controller).drain(["a"], None, False, False)
    fleet.until(lambda: fleet.says("a: drained, nothing of ours runs there"), "drained")
    assert fleet.engines() == ["m/2/0@b ready 1", "m/3/0@b ready 1"]


def test_several_nodes_drained_at_once_make_nothing_hop():
    """All are closed before anything moves."""
    fleet = serving({"a": 1, "b": 1, "c": 2}, [model("m", 2)])
    Operations(fleet.controller).drain(["a", "b"], None, False, False)
    fleet.until(lambda: all("@c" in engine for engine in fleet.engines()), "moved")
    assert set(fleet.pids()) == {"m/1/0@c", "m/3/0@c"}, "one moved, once"


def test_a_removed_node_leaves_no_half_of_a_gang():
    """The other rank is stopped, and the gang starts where it can."""
    fleet = Fleet({"a": 2, "b": 2, "c": 2})
    for agent in fleet.agents.values():
        agent.fabrics = (Fabric("rack"),)
    fleet.lead([model("g", 1, devices=2, nodes=2)])
    fleet.until(lambda: fleet.ready("g") == 1, "the gang serves")
    gone = next(agent for agent in fleet.agents.values() if "g/1/1" in agent.engines)
    Operations(fleet.controller).remove(gone.name, force=True)
    gone.alive = False
    gone.engines.clear()
    fleet.until(lambda: fleet.ready("g") == 1 and "g/2" in fleet.routers.routed, "elsewhere")
    assert all(engine.startswith("g/2/") for engine in fleet.engines())


def sleepy(low, high):
    return evolve(model("z"), replicas=Scale(low, high, idle_after=60.0))


def test_a_sleeping_model_wakes_for_a_request_and_sleeps_again_when_idle():
    """The router's demand starts it; while anything runs on it it stays; a minute after the last request it goes."""
    fleet = Fleet({"a": 1})
    fleet.lead([sleepy(0, 1)])
    fleet.run(30)
    assert fleet.engines() == [] and fleet.routers.routing.models[0].on_demand
    fleet.controller.demand.asked("z")
    fleet.until(lambda: fleet.ready("z") == 1, "awake")
    fleet.routers.flying["z/1"] = 1
    fleet.run(200)
    assert fleet.ready("z") == 1
    fleet.routers.flying.clear()
    fleet.run(50)
    assert fleet.ready("z") == 1
    fleet.until(lambda: fleet.engines() == [], "asleep", 30)


def test_a_restarted_server_lets_no_model_sleep_that_may_be_in_use():
    """What ran was asked for by somebody; it gets its whole idle time again."""
    fleet = Fleet({"a": 1})
    fleet.lead([sleepy(0, 1)])
    fleet.controller.demand.asked("z")
    fleet.until(lambda: fleet.ready("z") == 1, "awake")
    fleet.run(50)
    fleet.end()
    fleet.lead()
    fleet.run(50)
    assert fleet.ready("z") == 1
    fleet.until(lambda: fleet.engines() == [], "asleep", 30)
