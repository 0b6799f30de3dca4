"""A model's failures outlive its replicas: whoever scales to zero and back gets no fresh budget, and all who ask are told why."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.fleet.model import Scale
from llmgw.fleet.shard import Diagnosis, ShardState, Wanted
from llmgw.planning.budget import may_leave, remembered, rest
from llmgw.planning.reconcile import reconcile
from llmgw.planning.replicas import Replica
from llmgw.planning.wallclock import moved
from llmgw.planning.world import Declined, Draft
from tests.test_planning_reconcile import NOW, PROFILE, model, node, report, shard, told, world

SLEEPER = model(replicas=1)
SLEEPER = evolve(SLEEPER, replicas=Scale(0, 2, idle_after=3.0))


def failing(count=2, **more):
    """m/1 rests after so many failures."""
    known = {"crashes": tuple(NOW - 5 + n for n in range(count)), "first_reason": "first", "last_reason": "last. Mend it"}
    return shard(**({"state": ShardState.BACKOFF, "next_at": NOW + 30} | known | more))


def plan(records, now=NOW, demand=0, models=(SLEEPER,), **more):
    """What follows from these records."""
    known = {"told": {"a": told()}, "demand": {"m": demand}} | more
    return reconcile(world(*records, models=list(models), now=now, **known))


def asleep(*records, **more):
    """The records once nobody wants the model any more and its engines have ended."""
    leaving = plan(records, **more)
    return plan(leaving.shards.values(), NOW + 1, **more)


def test_the_next_replica_has_what_the_last_one_left_of_the_budget():
    """It waits as that would have waited, then goes on counting; the husk has handed its failures on."""
    gone = asleep(failing(3))
    (husk,) = gone.shards.values()
    assert husk.allocation is None and husk.crashes == failing(3).crashes
    assert gone.notes["m"] == "m/1 failed 3 times, last: last. Mend it; a request starts it again"
    early = plan([husk], NOW + 30, demand=1)
    assert list(early.shards) == ["m/1/0"] and early.wake == pytest.approx(7)
    assert "m/1 failed 3 times, last: last. Mend it; it waits" in early.notes["m"]
    (again,) = plan([husk], NOW + 37.5, demand=1).shards.values()
    assert (again.number, again.state, again.crashes) == (2, ShardState.PLACED, husk.crashes)
    assert (again.first_reason, again.last_reason) == ("first", "last. Mend it")


def test_who_asks_while_the_last_one_is_still_leaving_gets_no_fresh_budget_either():
    """And when that has ended, its failures do not count twice."""
    leaving = plan([failing(3)]).shards["m/1/0"]
    assert leaving.wanted is Wanted.STOP and leaving.remembered
    seen = {"a": told(report(state=ShardState.LOADING))}
    assert list(plan([leaving], NOW + 1, demand=1, told=seen).shards) == ["m/1/0"]
    later = plan([leaving], NOW + 60, demand=1, told=seen)
    assert later.shards["m/2/0"].crashes == leaving.crashes
    after = plan(later.shards.values(), NOW + 61, demand=1)
    assert after.shards["m/2/0"].crashes == leaving.crashes and "m/1/0" not in after.shards


def test_a_spent_budget_stays_where_everybody_sees_it():
    """Nothing of it runs, so it takes nothing from anybody; but a model that is to have no replicas at all has none."""
    spent = failing(5, next_at=None, state=ShardState.FAILED)
    assert plan([spent]).shards == {"m/1/0": spent} == plan([spent], demand=1).shards
    none = evolve(SLEEPER, replicas=Scale(0, 0))
    assert plan([spent], models=[none]).shards["m/1/0"].wanted is Wanted.STOP
    (husk,) = asleep(spent, models=[none]).shards.values()
    assert husk.crashes == ()


def test_of_several_a_failed_one_leaves_first():
    """Where others of the model are wanted, it is no use to anybody."""
    replicas = [Replica("m", 1, (evolve(failing(5), state=ShardState.FAILED),)), Replica("m", 2, (shard(2),))]
    assert may_leave(SLEEPER, 1, replicas) == replicas
    assert may_leave(SLEEPER, 0, replicas) == replicas[1:]


@pytest.mark.parametrize("why", ["another profile", "long ago", "an ordered restart"])
def test_what_begins_with_a_fresh_budget(why):
    """A husk tells of a generation and of a while."""
    (husk,) = asleep(failing(3)).shards.values()
    changed, now = SLEEPER, NOW + 100
    if why == "another profile":
        changed = evolve(SLEEPER, profile=evolve(PROFILE, arguments={"x": 1.0}))
    elif why == "long ago":
        now = NOW + 1900
    else:
        (husk,) = asleep(failing(3, replace="restart ordered by me")).shards.values()
    (fresh,) = plan([husk], now, demand=1, models=[changed]).shards.values()
    assert fresh.number == 2 and fresh.crashes == ()


def test_of_two_that_left_each_is_remembered_and_the_worse_one_comes_first():
    """The older one's husk would otherwise go, since only the newest number has to be remembered."""
    first, second = (
        failing(4),
        evolve(failing(2), shard="m/2/0", number=2, allocation=evolve(failing().allocation, ports=(20002,))),
    )
    gone = asleep(first, second, models=[SLEEPER])
    assert sorted(len(one.crashes) for one in gone.shards.values()) == [2, 4]
    back = plan(gone.shards.values(), NOW + 400, demand=2)
    assert sorted(len(one.crashes) for one in back.shards.values()) == [2, 4]
    assert sorted(back.shards) == ["m/3/0", "m/4/0"]


def test_a_husks_failures_follow_a_clock_that_was_set():
    """Set back, they would make nobody wait for hours."""
    (husk,) = asleep(failing(3)).shards.values()
    (changed,) = moved({}, {husk.shard: husk}, {}, 600.0)
    assert changed.crashes == tuple(at + 600 for at in husk.crashes)
    draft = Draft(world(husk, models=[SLEEPER], now=NOW - 7200))
    assert rest(draft, remembered(draft, SLEEPER)) == 0.0


def test_the_first_reason_stands_beside_the_last_one_where_it_is_another():
    """A port in use is what is left of an engine that died of its tokenizer."""
    why = Diagnosis("retry", "a port is in use")
    record = shard(state=ShardState.LOADING, crashes=(NOW - 9,), first_reason="the tokenizer is broken", last_reason="x")
    first = reconcile(world(record, told={"a": told(report(state=ShardState.FAILED, diagnosis=why))})).shards["m/1/0"]
    assert first.reason == "a port is in use. At first it was: the tokenizer is broken. Attempt 3 of 5, next in 20 s."
    declined = {"m/1/0": Declined(1, "port_in_use", "port 9 is in use")}
    resting = reconcile(world(evolve(record, state=ShardState.PLACED), told={"a": told()}, declined=declined)).shards["m/1/0"]
    assert resting.reason == "port 9 is in use; trying other ports. At first it was: the tokenizer is broken"
    assert node("a").failures == ()
