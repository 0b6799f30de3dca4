"""Plans: what a changed catalog or lost nodes would lead to, as a pure function of a small world."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.fleet.model import Catalog, Resources
from llmgw.fleet.node import Device, DeviceProcess, Installation, Inventory, NodeFacts, NodeState
from llmgw.fleet.records import NodeRecord
from llmgw.fleet.shard import ShardState
from llmgw.interfaces import Needs
from llmgw.planning.forecast import forecast
from llmgw.planning.plan import searching, steps
from llmgw.planning.reconcile import reconcile
from llmgw.planning.world import Told
from tests.test_planning_reconcile import PROFILE, model, world

GIB = 2**30
GPU = evolve(PROFILE, resources=Resources(devices=1, device_memory=40 * GIB))


def node(name, gpus=2, used=0, processes=()):
    devices = tuple(
        Device(f"{name}-{i}", i, "GPU", 80 * GIB, memory_used=used, processes=processes if i == 0 else ()) for i in range(gpus)
    )
    facts = NodeFacts(
        name, name, Inventory(8, 64 * GIB, devices=devices), (20000, 20099), installations=(Installation("sim", "sim"),)
    )
    return NodeRecord(name, facts=facts, state=NodeState.READY)


def settled(*models, nodes=("a", "b"), gpus=2, **more):
    """A world in which these models have been started and serve."""
    known = {
        "nodes": {name: node(name, gpus) for name in nodes},
        "told": {name: Told({}, 7, 9, complete=True) for name in nodes},
        "reckon": lambda profile, files: Needs(profile.resources.devices or 0, profile.resources.device_memory),
    }
    began = world(models=[], **(known | more))
    return evolve(forecast(began, Catalog(models)).after, catalog=Catalog(models))


def plan(now, *models, without=(), facts=None):
    found = forecast(now, Catalog(models) if models else now.catalog, without)
    assert found.whole
    return [(step.kind, step.model, step.text) for step in steps(found, facts or {})]


def test_nothing_changes_nothing():
    """The catalog in force over a fleet that serves is no step at all, and the world is left as it was."""
    now = settled(model("m", 2, GPU))
    shards = dict(now.shards)
    assert plan(now) == []
    assert now.shards == shards and not reconcile(now).events


def test_a_new_model_starts_where_it_would_be_placed():
    """The place is the planner's own: what applying it then does."""
    now, new = settled(model("m", 1, GPU)), model("n", 2, GPU)
    made = plan(now, *now.catalog.models, new)
    assert made == [("start", "n", "2 replicas (a gpu 1, b gpu 0)")]
    real = reconcile(evolve(now, catalog=Catalog((*now.catalog.models, new))))
    placed = {(s.allocation.node, s.allocation.devices) for s in real.shards.values() if s.model == "n"}
    assert placed == {("a", ("a-1",)), ("b", ("b-0",))}


def test_a_changed_profile_replaces_one_at_a_time():
    """With room beside them at least as many serve as before; the words say what changes and where the new ones go."""
    now = settled(model("m", 2, GPU))
    changed = model("m", 2, evolve(GPU, context=4096))
    [(kind, name, text)] = plan(now, changed, facts={"m": "context none -> 4096"})
    assert (kind, name) == ("change", "m")
    assert text == (
        "context none -> 4096: 2 replicas replaced one at a time, each successor ready before the old one drains "
        "(the first on b) (b gpu 0, b gpu 1), at least 2 serving"
    )


def test_without_room_beside_them_fewer_serve():
    """Two of two devices: one old replica goes first, and the other serves meanwhile."""
    now = settled(model("m", 2, GPU), nodes=("a",))
    [(kind, _, text)] = plan(now, model("m", 2, evolve(GPU, context=4096)))
    assert kind == "change" and text.count("at least 1 serving") == 1 and "an old one stops before its successor starts" in text


def test_memory_of_what_ends_is_free_again():
    """Also where the device shows the processes of the engine that has ended."""
    now = settled(model("m", 1, GPU), nodes=("a",), gpus=1)
    held = DeviceProcess(5, "engine", 70 * GIB, "m/1/0")
    now = evolve(now, nodes={"a": evolve(now.nodes["a"], facts=node("a", 1, 70 * GIB, (held,)).facts)})
    made = plan(now, model("m", 0, GPU), model("n", 1, GPU))
    assert [step[:2] for step in made] == [("stop", "m"), ("start", "n")]
    assert made[1][2] == "1 replica (a gpu 0)"


def test_what_does_not_fit_waits_with_the_reason_and_what_would_help():
    """The same explanation as explain gives, for the world as it would be then."""
    now = settled(model("m", 1, GPU), nodes=("a",), gpus=1)
    [(kind, name, text)] = plan(now, *now.catalog.models, model("big", 1, evolve(GPU, resources=Resources(devices=2))))
    assert (kind, name) == ("wait", "big")
    assert text == "1 replica: 0/1 nodes can run this: 1 too few devices (need 2, most free 0)"


def test_fewer_replicas_stop_and_a_removed_model_goes():
    """Which, where, and why."""
    now = settled(model("m", 2, GPU), model("n", 1, GPU))
    made = plan(now, model("m", 1, GPU))
    assert made[0][:2] == ("stop", "m") and "m wants 1" in made[0][2]
    assert made[1] == ("remove", "n", "1 replica drained")
    made = plan(now, model("m", 2, GPU), model("wide", 1, evolve(GPU, resources=Resources(devices=2))))
    assert made[0] == ("start", "wide", "1 replica (b gpu 0,1)"), "in the room that n leaves"


def test_nodes_that_die_move_their_replicas():
    """llmgw plan --without: what finds another place moves, with where from and where to."""
    now = settled(model("m", 2, GPU))
    where = {record.allocation.node for record in now.shards.values()}
    assert where == {"a"}, "packed on one node"
    made = plan(now, without=("a",))
    assert [step[:2] for step in made] == [("move", "m")] * 2
    assert made[0][2] == "m/1 a gpu 0 -> b gpu 0, as m/3: a is lost"


def test_nodes_that_die_with_nothing_to_take_over():
    """What is lost, what waits, and nothing that the world cannot hold."""
    now = settled(model("m", 2, GPU), nodes=("a", "b"), gpus=1)
    made = plan(now, without=("b",))
    assert [step[:2] for step in made] == [("lose", "m"), ("wait", "m")]
    assert "0/2 nodes can run this" in made[1][2] and "1 lost" in made[1][2]


def test_half_of_the_fleet_may_die_in_a_plan():
    """The brake that guards against wrong news is not asked: the question is what if."""
    now = settled(model("m", 2, GPU), nodes=("a", "b", "c", "d"))
    made = plan(now, without=("a", "b", "c"))
    assert [step[:2] for step in made] == [("move", "m")] * 2


def test_failed_replicas_stay_failed():
    """A forecast says what llmgw would do, not that an engine that failed would work."""
    now = settled(model("m", 1, GPU))
    (record,) = now.shards.values()
    failed = evolve(record, state=ShardState.FAILED, reason="broken")
    told = {name: Told({}, 7, 9, complete=True) for name in now.told}
    now = evolve(now, shards={record.shard: failed}, told=told)
    assert plan(now) == []
    found = forecast(now, now.catalog)
    assert found.least == {"m": 0}
    assert [one.state for one in found.after.shards.values()] == [ShardState.FAILED]


def test_a_change_that_is_too_long_to_follow_says_so():
    """Bounded, whatever the planner does."""
    now = settled(model("m", 2, GPU))
    found = forecast(now, Catalog((model("m", 2, evolve(GPU, context=4096)),)), rounds=2)
    assert not found.whole


@pytest.mark.parametrize("nodes", [("a",), ("a", "b")])
def test_nodes_that_were_not_searched_are_told(nodes):
    """So that the caller can ask them and look again."""
    now = settled(model("m", 1, GPU), nodes=nodes)
    heavy = model("w", 1, evolve(GPU, weights="w.gguf"))
    found = forecast(now, Catalog((*now.catalog.models, heavy)))
    assert searching(found) == {(name, "w.gguf", "sim") for name in nodes}
