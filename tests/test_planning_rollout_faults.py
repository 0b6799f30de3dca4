"""Rollouts while servers die, links are cut, messages are lost and engines crash: by seed, over simulated fleets."""

from __future__ import annotations

import random

import pytest

from llmgw.testing.simulate import model
from tests.test_planning_rollout import NEW, OLD, doom, generations, rollout, serving
from tests.test_planning_rollout_orders import apply


@pytest.mark.parametrize("step", range(1, 60, 6))
def test_f16_a_rollout_goes_on_wherever_the_server_dies(step):
    """F16: killed and started again after so many quarters of a second: never fewer than two are routed, and it ends as done."""
    fleet = serving()
    fleet.apply([model("m", 2, version=2)])
    least = []
    for count in range(400):
        if count == step:
            fleet.end()
        if count == step + 8:
            fleet.lead()
        fleet.step()
        least.append(fleet.ready("m"))
    assert min(least) == 2 and rollout(fleet).state == "done" and generations(fleet) == {NEW}


@pytest.mark.parametrize("step", range(1, 80, 8))
def test_g4_a_rollback_goes_on_wherever_the_server_dies(step):
    """G4: no failure is forgotten or counted twice, and what serves keeps its process."""
    fleet = serving({"a": 2, "b": 2})
    doom(fleet)
    pids = fleet.pids()
    fleet.apply([model("m", 2, version=2)])
    for count in range(600):
        if count == step:
            fleet.end()
        if count == step + 8:
            fleet.lead()
        fleet.step()
        assert fleet.ready("m") == 2
    assert rollout(fleet).state == "rolled_back" and len(rollout(fleet).failures) == 3 and fleet.pids() == pids


def trouble(fleet, chance):
    """One fault, or none."""
    what, name = chance.random(), chance.choice(sorted(fleet.agents))
    agent = fleet.agents[name]
    if what < 0.25:
        fleet.cut ^= {name}
    elif what < 0.4 and agent.running():
        agent.die(chance.choice(agent.running()), fleet.clock.seconds(), "chance")
    elif what < 0.55:
        fleet.end()
        fleet.run(chance.random() * 10)
        fleet.lead()
    elif what < 0.65:
        fleet.store.failing = "" if fleet.store.failing else "full"


@pytest.mark.parametrize("seed", range(8))
def test_g4_a_bad_profile_is_never_routed_and_ends_rolled_back_whatever_fails_besides(seed):
    """G4 with faults: afterwards all replicas run the good profile, none the bad one, and the reason is kept."""
    chance = random.Random(seed)
    fleet = serving(dict.fromkeys("abcd", 2), [model("m", 4)], seed=seed)
    doom(fleet)
    fleet.loss = 0.1
    fleet.apply([model("m", 4, version=2)])
    for _ in range(20):
        trouble(fleet, chance)
        fleet.run(chance.random() * 20)
        bad = {e.order.shard.rpartition("/")[0] for a in fleet.agents.values() for e in a.running() if e.order.generation == NEW}
        assert not bad & set(fleet.routers.routed)
    fleet.cut.clear()
    fleet.store.failing, fleet.loss = "", 0.0
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back", 600)
    fleet.until(lambda: fleet.ready("m") == 4 and generations(fleet) == {OLD} and len(fleet.engines()) == 4, "all good", 900)


@pytest.mark.parametrize("seed", range(8))
def test_f16_a_good_profile_comes_into_force_whatever_fails_besides(seed):
    """F16 with faults: whether in the first or, rolled back by the faults, in a second rollout."""
    chance = random.Random(seed)
    fleet = serving(dict.fromkeys("abcd", 2), [model("m", 4)], seed=seed)
    fleet.loss = 0.1
    fleet.apply([model("m", 4, version=2)])
    for _ in range(20):
        trouble(fleet, chance)
        fleet.run(chance.random() * 20)
    fleet.cut.clear()
    fleet.store.failing, fleet.loss = "", 0.0
    fleet.run(60)
    if rollout(fleet).pinned:
        fleet.apply([model("m", 4, version=3)])
    fleet.until(lambda: rollout(fleet).state == "done", "done", 900)
    fleet.until(lambda: fleet.ready("m") == 4 and len(fleet.engines()) == 4 and OLD not in generations(fleet), "all new", 300)


def test_room_that_an_old_replica_made_is_for_its_successor():
    """Another model, earlier in the catalog, has waited for room: it does not get that one, or the changed model had nobody."""
    fleet = serving({"a": 2}, [model("m", 1), model("n", 1)])
    apply(fleet, model("m", 2), model("n", 1, version=2), allow_outage=True)
    fleet.until(lambda: fleet.says("n/1", "no room for its successor beside it"), "the old one goes first")
    fleet.until(lambda: fleet.ready("n") == 1 and "n/2" in fleet.routers.routed, "its successor serves", 60)
    assert fleet.ready("m") == 1
