"""What is said beforehand of a changed profile, by apply and by plan in the same words, against what then happens."""

from __future__ import annotations

import random

import pytest
from attrs import evolve

from llmgw.fleet.model import Catalog, Rollout
from llmgw.planning.forecast import forecast
from llmgw.planning.strategy import Way
from llmgw.testing.simulate import Fleet, model
from tests.test_planning_rollout import NEW, OLD, generations, least, serving
from tests.test_planning_rollout_orders import apply, order


def said(fleet, *models, without=()):
    """What plan says, which is checked to be what apply says."""
    found = forecast(fleet.controller.world(), Catalog(models), without)
    applied = apply(fleet, *models, dry_run=True)
    if not without:
        assert found.decided == applied.decisions
    return found.decided


def random_fleet(seed):
    """A fleet with a model m that serves, the change of it, and what the rest of the catalog is."""
    chance = random.Random(seed)
    fleet = Fleet({name: chance.randint(1, 2) for name in "abc"}, seed)
    count, strategy = chance.randint(1, 3), chance.choice(["auto", "auto", "surge", "replace"])
    other = model("n", chance.randint(0, 3))
    fleet.lead([model("m", count), other])
    fleet.run(40)
    fewer = chance.randint(1, count) if chance.random() < 0.3 else count
    changed = evolve(model("m", fewer, version=2, devices=chance.choice([1, 1, 1, 2])), rollout=Rollout(strategy=strategy))
    return fleet, changed, other


@pytest.mark.parametrize("seed", range(40))
def test_what_is_said_is_what_happens(seed):
    """Beside the old ones: never fewer serve. In their place: one fewer. An outage: nobody, with leave. Held: nothing changes."""
    fleet, changed, other = random_fleet(seed)
    decided = said(fleet, changed, other)
    before = min(fleet.ready("m"), changed.replicas.max)
    apply(fleet, changed, other, allow_outage=True)
    worst = least(fleet, 150)
    news = {g for g in generations(fleet) if g == changed.generation}
    if not decided:
        assert not before
    elif decided[0].way is Way.SURGE:
        assert worst == before and news and fleet.ready("m") >= before
    elif decided[0].way is Way.REPLACE:
        assert worst == before - 1 > 0 and news
    elif decided[0].way is Way.OUTAGE:
        assert worst == 0 and news
    else:
        assert decided[0].way is Way.HELD and worst == before and not news
    assert not news or OLD not in generations(fleet) or "in whose place a successor would not fit" in decided[0].text


def test_what_is_missing_for_want_of_room_does_not_hold_a_change():
    """Three wanted, room for two: both are replaced, one at a time, although the third cannot be placed."""
    fleet = Fleet({"a": 1, "b": 1})
    fleet.lead([model("m", 3)])
    fleet.until(lambda: fleet.ready("m") == 2, "two")
    (decision,) = said(fleet, model("m", 3, version=2))
    assert decision.way is Way.REPLACE and decision.replicas == 2
    apply(fleet, model("m", 3, version=2))
    assert least(fleet, 90) == 1
    assert generations(fleet) == {NEW} and fleet.ready("m") == 2


def test_fewer_replicas_are_told_from_changed_ones():
    """Three of them, one wanted: one is replaced, in the room that the others leave."""
    fleet = serving({"a": 1, "b": 1, "c": 1}, [model("m", 3)])
    (decision,) = said(fleet, model("m", 1, version=2))
    assert decision.way is Way.SURGE and decision.replicas == 1
    assert said(fleet, model("m", 0, version=2)) == ()
    apply(fleet, model("m", 1, version=2), allow_outage=False)
    assert least(fleet, 90) == 1 and generations(fleet) == {NEW}


def test_a_paused_rollout_is_said_to_stand_still():
    """Another profile applied meanwhile changes nothing before somebody resumes, and that is said."""
    fleet = serving({"a": 3, "b": 3}, [model("m", 2)])
    apply(fleet, model("m", 2, version=2))
    order(fleet, "pause")
    pids = fleet.pids()
    (decision,) = said(fleet, model("m", 2, version=3))
    assert decision.way is Way.HELD and decision.text.endswith("since the rollout is paused: llmgw rollout m --resume")
    apply(fleet, model("m", 2, version=3))
    fleet.run(60)
    assert pids.items() <= fleet.pids().items()
    assert "replaced one at a time" in order(fleet, "resume")


def test_a_plan_without_a_node_decides_by_the_nodes_that_are_left():
    """With b there is room beside them, without it there is none."""
    fleet = serving({"a": 1, "b": 1, "c": 1}, [model("m", 2)])
    (spare,) = set("abc") - {shard.partition("@")[2] for shard in fleet.pids()}
    changed = model("m", 2, version=2)
    (before,), (then,) = said(fleet, changed), said(fleet, changed, without=(spare,))
    assert before.way is Way.SURGE and before.text.endswith(f"(the first on {spare})") and then.way is Way.REPLACE


def test_a_change_that_waits_for_leave_refuses_no_other_apply():
    """Model m waits for leave; a new model n is none of its business."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 1), model("o", 1)])
    apply(fleet, model("m", 1, version=2), model("o", 1))
    done = apply(fleet, model("m", 1, version=2), model("o", 1), model("n", 1), allow_outage=False)
    assert done.decisions == () and [one.name for one in done.diff.added] == ["n"]
