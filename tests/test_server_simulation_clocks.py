"""Clocks that are 10 minutes off, or are set while the fleet runs: what takes time takes as long as before."""

from __future__ import annotations

import pytest

from llmgw.server.operations import Operations
from llmgw.testing.simulate import model
from tests.simulation_rig import serving
from tests.test_planning_rollout import NEW, generations, least, rollout
from tests.test_planning_rollout_orders import apply, result


def draining(deadline):
    """A node whose only replica drains with a request on it that does not end, and when it began."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 1)])
    fleet.routers.flying["m/1"] = 1
    result(Operations(fleet.controller).drain(["a"], deadline, False, True))
    fleet.until(lambda: "m/1/0@a draining 1" in fleet.engines(), "it drains")
    return fleet, fleet.clock.seconds()


@pytest.mark.parametrize("jump", [600.0, -600.0])
def test_b2_a_drain_takes_as_long_as_ordered_when_the_clock_is_set_meanwhile(jump):
    """B2: 10 minutes ahead cut no stream, 10 minutes back do not keep it for 10 minutes more; it is said that it was set."""
    fleet, began = draining(100.0)
    fleet.run(10)
    fleet.wall_ahead = jump
    fleet.run(60)
    assert "m/1/0@a draining 1" in fleet.engines()
    fleet.until(lambda: not any("m/1/0@a" in engine for engine in fleet.engines()), "its time is up", 60)
    assert 85 <= fleet.clock.seconds() - began <= 115
    assert fleet.says("the clock of cp was set 600 s", "drains go on as long as before")


def test_b2_a_replica_that_leaves_keeps_its_time_when_the_clock_is_set():
    """B2: fewer replicas are wanted, the one that leaves has a request: it has its minute."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    fleet.routers.flying |= {"m/1": 1, "m/2": 1}
    apply(fleet, model("m", 1))
    fleet.until(lambda: any("draining" in engine for engine in fleet.engines()), "one drains")
    fleet.wall_ahead = 600.0
    fleet.run(40)
    assert any("draining" in engine for engine in fleet.engines())
    fleet.until(lambda: len(fleet.engines()) == 1, "its time is up", 40)


def test_b2_a_clock_that_is_set_while_the_store_is_away_is_followed_when_it_is_back():
    """B2: nothing is forgotten, and nothing is done twice."""
    fleet, began = draining(100.0)
    fleet.store.failing = "disk full"
    fleet.wall_ahead = 600.0
    fleet.run(20)
    fleet.store.failing = ""
    fleet.run(20)
    assert "m/1/0@a draining 1" in fleet.engines()
    fleet.until(lambda: not any("m/1/0@a" in engine for engine in fleet.engines()), "its time is up", 90)
    assert 85 <= fleet.clock.seconds() - began <= 115


@pytest.mark.parametrize("ahead", [600.0, -600.0])
def test_b2_a_rollout_over_nodes_and_a_server_with_other_clocks_fails_nobody(ahead):
    """B2: every agent's clock differs, the server's is set in the middle; it ends as done and never serves less."""
    fleet = serving({"a": 2, "b": 2}, [model("m", 2)])
    fleet.agents["a"].ahead, fleet.agents["b"].ahead = ahead, -ahead
    apply(fleet, model("m", 2, version=2))
    assert least(fleet, 6) == 2
    fleet.wall_ahead = ahead
    assert least(fleet, 90) == 2
    assert generations(fleet) == {NEW} and rollout(fleet).state == "done"
