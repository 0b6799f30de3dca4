"""Clocks that are 10 minutes off, or are set while the fleet runs: what takes time takes as long as before."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.server.operations import Operations
from llmgw.testing.simulate import Fleet, model
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
    assert fleet.says("the clock of cp is 600 s", "drains and retries take as long as before")


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


def other(fleet, ahead):
    """The server dies; another takes over, whose clock is C{ahead} seconds ahead."""
    fleet.end()
    fleet.wall_ahead = ahead
    fleet.run(15)
    fleet.lead()


@pytest.mark.parametrize("ahead", [600.0, -600.0])
def test_b2_a_server_with_another_clock_that_takes_over_grants_drains_what_they_had_left(ahead):
    """B2: 10 minutes ahead cut no stream, 10 minutes behind do not keep it for 10 minutes more; and back again."""
    fleet, began = draining(100.0)
    fleet.run(10)
    other(fleet, ahead)
    fleet.run(20)
    other(fleet, 0.0)
    fleet.run(20)
    assert "m/1/0@a draining 1" in fleet.engines()
    fleet.until(lambda: not any("m/1/0@a" in engine for engine in fleet.engines()), "its time is up", 60)
    assert 85 <= fleet.clock.seconds() - began <= 115
    assert fleet.says("the clock of cp", "600 s", "drains and retries take as long as before")


def test_b2_a_replica_that_leaves_keeps_its_time_over_a_takeover():
    """B2: fewer are wanted, the one that leaves has a request: it has its minute, whoever leads."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    fleet.routers.flying |= {"m/1": 1, "m/2": 1}
    apply(fleet, model("m", 1))
    fleet.until(lambda: any("draining" in engine for engine in fleet.engines()), "one drains")
    other(fleet, 600.0)
    fleet.run(20)
    assert any("draining" in engine for engine in fleet.engines())
    fleet.until(lambda: len(fleet.engines()) == 1, "its time is up", 60)


def crash(fleet):
    """The only engine falls, which is seen."""
    fleet.until(lambda: fleet.ready("m") == 1, "it serves")
    agent = fleet.agents["a"]
    agent.die(agent.engines["m/1/0"], fleet.clock.seconds(), "out of memory")
    fleet.until(lambda: fleet.ready("m") == 0, "it is seen to be down")


@pytest.mark.parametrize("ahead", [600.0, -600.0])
@pytest.mark.parametrize("taken_over", [True, False])
def test_b2_a_retry_comes_when_it_was_promised_and_no_failure_is_forgotten(ahead, taken_over):
    """B2: the fourth in half an hour waits its 80 s, the one 20 minutes later is the fifth, by whatever clock."""
    fleet = serving({"a": 1}, [model("m", 1)])
    for _ in range(4):
        crash(fleet)
    began = fleet.clock.seconds()
    if taken_over:
        other(fleet, ahead)
    else:
        fleet.wall_ahead = ahead
    fleet.until(lambda: fleet.engines() != [], "it is tried again")
    assert 50 <= fleet.clock.seconds() - began <= 110
    fleet.run(1320)
    crash(fleet)
    assert fleet.says("m/1/0", "5 failures in 30 m")


@pytest.mark.parametrize("ahead", [600.0, -600.0])
def test_b2_a_quarantine_lasts_as_long_as_it_was_to(ahead):
    """B2: ten seconds, also when another server, with another clock, takes over in them."""
    fleet = Fleet({"a": 3, "b": 0}, timing=evolve(Fleet.TIMING, backoff=1.0))
    models = [model(name) for name in ("x", "y", "z")]
    fleet.agents["a"].doomed |= {"x", "y", "z"}
    fleet.lead(models)
    fleet.until(lambda: fleet.says("quarantined for", "x, y, z failed there"), "quarantined", 20)
    fleet.agents["a"].doomed.clear()
    began = fleet.clock.seconds()
    fleet.end()
    fleet.wall_ahead = ahead
    fleet.run(3)
    fleet.lead()
    fleet.until(lambda: all(fleet.ready(name) == 1 for name in "xyz"), "served again", 60)
    assert 9 <= fleet.clock.seconds() - began <= 30
