"""What a failure's cause is for: what is the profile's stops, what is the node's moves, and only what may be a node's counts for
its quarantine."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.fleet.causes import CLEAN, CONFIGURATION, NODE, RETRY, SOURCE, UNKNOWN
from llmgw.fleet.model import Catalog
from llmgw.fleet.records import NodeFailure
from llmgw.fleet.shard import Diagnosis, ShardState, WeightFiles
from llmgw.planning.lifecycle import in_quarantine
from llmgw.planning.reconcile import reconcile
from llmgw.planning.wallclock import moved
from llmgw.planning.world import Declined
from tests.test_planning_reconcile import NOW, PROFILE, model, node, report, shard, told, world


def fails(cause, before=None, nodes="a", text="no good", **more):
    """The plan when an attempt of m/1 on node a has failed for this cause."""
    record = evolve(before or shard(), state=ShardState.LOADING, url="", next_at=None, since=NOW - 5)
    why = Diagnosis(cause, text, "Change it.")
    said = report(state=ShardState.FAILED, attempt=record.attempt, diagnosis=why)
    known = {"nodes": {name: node(name) for name in nodes}, "told": {name: told() for name in nodes} | {"a": told(said)}}
    return reconcile(world(record, **(known | more)))


def again(outcome, seconds=1000.0, **more):
    """The next plan, so much later."""
    known = {"nodes": outcome.nodes, "shards": outcome.shards, "now": NOW + seconds}
    return reconcile(world(**(known | {"told": {name: told() for name in outcome.nodes}} | more)))


def test_what_is_the_profiles_is_tried_once_more_and_then_not_again():
    """F20: with what to change; the confirmation counts although it said something else."""
    first = fails(CONFIGURATION)
    record = first.shards["m/1/0"]
    assert (record.state, record.cause) == (ShardState.BACKOFF, CONFIGURATION)
    assert record.reason == "no good. Change it. Attempt 2 of 2, next in 10 s."
    last = fails(CONFIGURATION, record, text="still no good").shards["m/1/0"]
    assert last.state is ShardState.FAILED and len(last.crashes) == 2
    said = "still no good. Change it. At first it was: no good. Change it. Twice it was the profile's fault: not tried again"
    assert last.reason == f"{said} before the profile changes or `llmgw restart m`"


@pytest.mark.parametrize("why", ["it has served", "another cause came between", "the first is forgotten"])
def test_what_does_not_confirm_that_it_is_the_profiles(why):
    """An engine that ran out of memory after hours was right for hours."""
    record = shard(crashes=(NOW - 60,), cause=CONFIGURATION)
    if why == "it has served":
        record = evolve(record, served_since=NOW - 50)
    elif why == "another cause came between":
        record = evolve(record, cause=UNKNOWN)
    else:
        record = evolve(record, crashes=(NOW - 2000,))
    assert fails(CONFIGURATION, record).shards["m/1/0"].state is ShardState.BACKOFF


def test_an_order_that_a_node_declines_has_a_cause_too():
    """A mistyped flag is refused before anything starts; a device that is missing is the node's."""
    causes = {"invalid": CONFIGURATION, "weights_missing": SOURCE, "device_missing": NODE, "of tomorrow": UNKNOWN}
    for code, cause in causes.items():
        declined = {"m/1/0": Declined(1, code, "no --max-nun-seqs")}
        outcome = reconcile(world(shard(state=ShardState.PLACED, placed_revision=5), told={"a": told()}, declined=declined))
        assert outcome.shards["m/1/0"].cause == cause


def test_a_change_that_makes_no_other_engine_starts_it_anew_as_well():
    """The advice to raise C{start_timeout} helps nobody if the replica stays down after it was followed."""
    record = shard(state=ShardState.FAILED, crashes=(NOW - 9,) * 5, last_reason="too slow")
    same = reconcile(world(record, told={"a": told()}))
    assert same.shards["m/1/0"] == record and len(same.shards) == 1
    slow = model(profile=evolve(PROFILE, start_timeout=7200.0))
    assert slow.generation == model().generation
    changed = reconcile(world(record, models=[slow], told={"a": told()}))
    assert changed.shards["m/2/0"].state is ShardState.PLACED and changed.shards["m/2/0"].crashes == ()


def test_what_is_the_nodes_goes_to_another_at_once_and_costs_no_budget():
    """F12: its driver was updated. The node is not tried again for five minutes, and nor is the next one that is sick."""
    outcome = fails(NODE, nodes="ab")
    successor = outcome.shards["m/2/0"]
    assert (successor.allocation.node, successor.state, successor.crashes) == ("b", ShardState.PLACED, ())
    assert len(successor.node_failures) == 1 and successor.excluded == {"a": NOW + 300}
    assert outcome.nodes["a"].failures == (NodeFailure("m", NOW, "no good. Change it"),)
    on_b = evolve(
        successor, shard="m/1/0", number=1, allocation=evolve(successor.allocation, node="a"), excluded={"b": NOW + 100}
    )
    assert "m/2/0" not in fails(NODE, on_b, nodes="ab").shards


def test_what_is_the_nodes_is_tried_for_ever_where_there_is_no_other():
    """Each time later; no failure of a rollout either."""
    record, waits = shard(), []
    for _ in range(8):
        record = fails(NODE, record).shards["m/1/0"]
        waits.append(record.next_at - NOW)
    assert record.state is ShardState.BACKOFF and record.crashes == ()
    assert waits[:3] == [10.0, 20.0, 40.0] and waits[-1] == 300.0
    assert "That is its node's: it goes to another one where it fits, else the next attempt is in 5 m." in record.reason


@pytest.mark.parametrize(("cause", "count"), [(CONFIGURATION, 1), (SOURCE, 1), (CLEAN, 2), (RETRY, 3), (UNKNOWN, 3)])
def test_after_how_many_failures_another_node_is_tried(cause, count):
    """What is left of an engine is cleaned up once; a profile may suit another node's engine or devices."""
    for crashes in range(1, count + 1):
        before = shard(attempt=crashes, crashes=(NOW - 9,) * (crashes - 1), cause=cause if cause != CONFIGURATION else "")
        first = fails(cause, before, nodes="ab")
        assert "m/2/0" not in first.shards
        later = again(first)
        assert ("m/2/0" in later.shards) == (crashes == count), crashes
    assert later.shards["m/2/0"].allocation.node == "b" and later.shards["m/2/0"].cause == cause


def test_failures_that_another_node_saw_move_nobody_on():
    """Three on a, then one on b: b gets its three, too."""
    record = shard(crashes=(NOW - 9,) * 3, cause=UNKNOWN, attempt=1)
    assert "m/2/0" not in again(fails(UNKNOWN, record, nodes="ab")).shards


def test_a_failing_replica_asks_for_weights_elsewhere_and_waits_a_little_for_the_answer():
    """Nobody has looked on b yet: it is looked for there, the retry waits for the answer, but not for ever."""
    heavy = model(profile=evolve(PROFILE, weights="w"))
    record = shard(attempt=3, crashes=(NOW - 9,) * 2, profile=heavy.profile, generation=heavy.generation)
    more = {"models": [heavy], "weights": {("a", "w"): WeightFiles("w", True)}}
    first = fails(UNKNOWN, record, nodes="ab", **more)
    due = first.shards["m/1/0"].next_at - NOW
    asked = again(first, due + 1, **more)
    assert asked.sought["m"].searching and not asked.pending
    assert asked.shards["m/1/0"].state is ShardState.BACKOFF
    assert again(first, due + 11, **more).shards["m/1/0"].state is ShardState.PLACED
    found = more | {"weights": {("a", "w"): WeightFiles("w", True), ("b", "w"): WeightFiles("w", True)}}
    assert again(first, due + 2, **found).shards["m/2/0"].allocation.node == "b"


def three(cause, **more):
    """Three models have failed on node a."""
    models = [model(name) for name in "xyz"]
    records = [shard(model_name=name, state=ShardState.LOADING, placed_revision=5) for name in "xyz"]
    reports = [report(model_name=name, state=ShardState.FAILED, diagnosis=Diagnosis(cause, f"{name} broke")) for name in "xyz"]
    return reconcile(world(*records, catalog=Catalog(tuple(models)), told={"a": told(*reports)}, **more))


@pytest.mark.parametrize(
    ("cause", "sick"), [(CONFIGURATION, False), (SOURCE, False), (RETRY, True), (CLEAN, True), (NODE, True), (UNKNOWN, True)]
)
def test_only_what_may_be_the_nodes_counts_for_its_quarantine(cause, sick):
    """Three models with wrong profiles do not close the fleet to those with right ones."""
    outcome = three(cause)
    assert in_quarantine(outcome.nodes["a"], NOW) == sick
    texts = [event.text for event in outcome.events if event.kind == "quarantined"]
    said = "a: quarantined for 10 s: x, y, z failed there and nothing serves (x: x broke; y: y broke; z: z broke)"
    assert texts == ([said] if sick else [])


def test_a_quarantine_that_was_ended_does_not_come_back_for_the_same_failures():
    """What C{node reset} clears is all that it came from; the records of the failed shards are as they were."""
    outcome = three(UNKNOWN)
    reset = {"a": evolve(outcome.nodes["a"], quarantined_until=None, failures=())}
    assert not in_quarantine(again(outcome, 1, nodes=reset).nodes["a"], NOW + 1)


def test_no_node_is_closed_while_it_is_away_from_a_new_leader_with_an_engine_that_served():
    """Its old failures are in its record, that it serves is not; only when it is back and serves nothing is it closed."""
    nodes = {"a": evolve(three(UNKNOWN).nodes["a"], quarantined_until=None)}
    known = {"nodes": nodes, "now": NOW + 9}
    away = reconcile(world(shard(state=ShardState.UNKNOWN, served_since=NOW - 500), told={}, **known))
    assert not in_quarantine(away.nodes["a"], NOW + 9)
    back = reconcile(world(shard(state=ShardState.UNKNOWN, served_since=NOW - 500), told={"a": told(report())}, **known))
    assert not in_quarantine(back.nodes["a"], NOW + 9)
    gone = reconcile(world(shard(state=ShardState.UNKNOWN, served_since=NOW - 500), told={"a": told()}, **known))
    assert in_quarantine(gone.nodes["a"], NOW + 9)


def test_failures_are_forgotten_with_time_and_by_who_serves():
    """But not before the quarantine that they caused is over, so that it can be explained."""
    sick = three(UNKNOWN).nodes["a"]
    long = evolve(sick, quarantined_until=NOW + 3600)
    assert len(reconcile(world(nodes={"a": long}, models=[], now=NOW + 700)).nodes["a"].failures) == 3
    assert reconcile(world(nodes={"a": long}, models=[], now=NOW + 3601)).nodes["a"].failures == ()
    serves = reconcile(
        world(shard(model_name="x"), nodes={"a": sick}, models=[model("x")], told={"a": told(report(model_name="x"))})
    )
    assert [one.model for one in serves.nodes["a"].failures] == ["y", "z"]


def test_failures_of_nodes_follow_a_clock_that_was_set():
    """As all that is timed does."""
    (changed,) = moved({"a": node(failures=(NodeFailure("m", NOW, "x"),))}, {}, {}, 600.0)
    assert changed.failures[0].at == NOW + 600
