"""A plan against what then happens: whole simulated fleets, changed and damaged as the plan said they would be."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from llmgw.fleet.model import Catalog
from llmgw.planning.forecast import forecast
from llmgw.planning.plan import steps
from llmgw.planning.replicas import group
from llmgw.testing.simulate import Fleet, model
from tests.simulation_rig import serving
from tests.test_planning_rollout_orders import apply


def places(shards, nodes):
    """Where the replicas of each model are that count, without those on lost nodes."""
    replicas = [replica for found in group(shards.values()).values() for replica in found if not replica.leaving]
    kept = [replica for replica in replicas if all(nodes[name].state == "ready" for name in replica.nodes)]
    return {(one.id, one.generation, one.nodes, one.shards[0].allocation.devices) for one in kept}


def foretold(fleet, models, without=(), **options):
    """The places that a plan expects, and its steps."""
    found = forecast(fleet.controller.world(), Catalog(tuple(models)), without, **options)
    assert found.whole
    return places(found.after.shards, found.after.nodes), steps(found, {})


def now(fleet):
    return places(fleet.controller.truth.shards, fleet.controller.truth.nodes)


def a_model(chance, name, most=3):
    version, devices = chance.randint(1, 2), chance.randint(1, 2)
    return model(name, chance.randint(0, most), devices=devices, version=version, spread=chance.random() < 0.5)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_plan_foretells_is_what_apply_brings(seed):
    """A random change of one model, or a new one, with and without room: the same replicas on the same devices.

    Where several change at once, and now and then with one, places also depend on which engine ends first, and no plan knows
    that; with these seeds they do not.
    """
    chance = random.Random(seed)
    fleet = Fleet({name: chance.randint(1, 3) for name in "abcd"}, seed)
    models = [a_model(chance, name) for name in "mn"]
    fleet.lead(models)
    fleet.run(120)
    models = [*models, a_model(chance, "o")] if chance.random() < 0.3 else [a_model(chance, "m"), models[1]]
    expected, _ = foretold(fleet, models, outage=True)
    apply(fleet, *models, allow_outage=True)
    fleet.run(400)
    assert now(fleet) == expected


def counted(found):
    """How many replicas of each profile, wherever they are."""
    return Counter((replica.rpartition("/")[0], generation) for replica, generation, _, _ in found)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_plan_foretells_of_several_models_is_how_many_there_are(seed):
    """Up to four models change at once, or are new: as many replicas of each profile as the plan said, and what it said waits.

    The fleet has room for one change at a time at least. Where more is wanted than fits, who gets room that comes free depends on
    which of several engines ends first, and no plan knows that.
    """
    chance = random.Random(seed)
    fleet = Fleet({name: chance.randint(2, 4) for name in "abcd"}, seed)
    fleet.lead([a_model(chance, name, 2) for name in "mno"])
    fleet.run(120)
    models = [a_model(chance, name, 2) for name in "mnop"[: chance.randint(3, 4)]]
    expected, found = foretold(fleet, models, outage=True)
    apply(fleet, *models, allow_outage=True)
    fleet.run(300)
    assert counted(now(fleet)) == counted(expected)
    waits = {step.model for step in found if step.kind == "wait"}
    assert waits == fleet.controller.outcome.pending.keys() | fleet.controller.outcome.notes.keys()


@pytest.mark.parametrize("seed", range(6))
def test_what_a_plan_foretells_of_nodes_that_die_is_what_comes(seed):
    """One of five nodes dies for good; its replicas turn up where the plan said, as the numbers that it said."""
    chance = random.Random(seed)
    fleet = Fleet({name: chance.randint(2, 3) for name in "abcde"}, seed)
    models = [model(name, chance.randint(1, 2), spread=chance.random() < 0.5) for name in "mno"]
    fleet.lead(models)
    fleet.run(120)
    dead = chance.choice("abcde")
    expected, _ = foretold(fleet, models, (dead,))
    fleet.cut.add(dead)
    fleet.run(300)
    assert now(fleet) == expected


def test_an_only_replica_waits_for_leave_in_the_plan_too():
    """Without it nothing moves; with it the replica is replaced, and the plan says that nobody serves meanwhile."""
    fleet = serving({"a": 1}, [model("m", 1)])
    changed = [model("m", 1, version=2)]
    before, found = foretold(fleet, changed)
    assert before == now(fleet) and [step.kind for step in found] == ["wait"] and "--allow-outage" in found[0].text
    after, found = foretold(fleet, changed, outage=True)
    assert after != before and [step.kind for step in found] == ["change"]
    assert found[0].text.endswith("served by nobody on the way")
