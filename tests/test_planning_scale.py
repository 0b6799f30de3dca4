"""How many replicas a load asks for, and who makes room for whom: pure, with the smallest worlds that show it."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.fleet.model import Catalog, Model, Place, Profile, Resources, Scale
from llmgw.fleet.node import Device, DeviceProcess, Installation, Inventory, NodeFacts, NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import Allocation, ShardReport, ShardState, Wanted
from llmgw.fleet.timing import Timing
from llmgw.interfaces import Needs
from llmgw.planning.autoscale import Load, advise, needed, target_of
from llmgw.planning.forecast import forecast
from llmgw.planning.reconcile import explain, reconcile
from llmgw.planning.world import Told, World

SCALE = Scale(1, 4, target=8)
NOW = 10_000.0


def loads(*requests, every=1.0, **more):
    """A sample each second up to now; the last one is now's."""
    return [Load(NOW - every * (len(requests) - 1 - i), n, 0 if n is not None else None, **more) for i, n in enumerate(requests)]


def count(samples, current, scale=SCALE):
    return advise(scale, samples, NOW, current).count


@pytest.mark.parametrize(
    ("requests", "wants"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (33, 4), (900, 4)], ids=lambda value: str(value)
)
def test_what_a_load_needs(requests, wants):
    """So many replicas that none has more than the target, within the bounds; running and waiting count alike."""
    assert needed(SCALE, Load(NOW, requests)) == needed(SCALE, Load(NOW, 0, requests)) == wants


def test_the_target_is_the_catalogs_else_the_engines():
    """What the catalog says, else what one engine runs at once, else a number of ours."""
    assert target_of(SCALE, Load(NOW, limit=4)) == 8
    assert target_of(Scale(1, 4), Load(NOW, limit=4)) == 4
    assert target_of(Scale(1, 4), Load(NOW)) == 32


def test_more_only_after_all_of_the_window_wanted_more():
    """Eleven samples are ten seconds: one that was content in between puts it off; as many as the least wanted."""
    assert count(loads(*[20] * 11), 1) == 3
    assert count(loads(*[20] * 10), 1) == 1
    assert count(loads(*[20] * 5, 8, *[20] * 5), 1) == 1
    assert count(loads(*[40] * 10, 20), 1) == 3


def test_fewer_only_after_all_of_the_longer_window_did_with_fewer():
    """Five minutes; one sample that needed the replica keeps it, and the most that was needed is kept."""
    assert count(loads(*[0] * 301), 3) == 1
    assert count(loads(*[0] * 300), 3) == 3
    assert count(loads(*[0] * 150, 20, *[0] * 150), 3) == 3
    assert count(loads(*[0] * 150, 12, *[0] * 150), 3) == 2


@pytest.mark.parametrize("current", [1, 3])
def test_an_unknown_load_changes_nothing(current):
    """Neither more nor fewer while one sample of the window is not known, or nobody looked for a while, or nobody ever did."""
    high, low = loads(*[50] * 400), loads(*[0] * 400)
    assert count(high, 1) == 4 and count(low, 3) == 1
    for samples in (high, low):
        unknown = [*samples[:-5], evolve(samples[-5], in_flight=None), *samples[-4:]]
        assert count(unknown, current) == current
        assert count([load for load in samples if not NOW - 300 < load.at < NOW - 2], current) == current
        assert count([evolve(load, at=load.at - 60) for load in samples], current) == current
    assert count([], current) == current


def test_why_is_said_with_the_numbers():
    """The sentence names load, window and target; no change has none."""
    samples = [evolve(load, waiting=4) for load in loads(*[20] * 11)]
    assert advise(SCALE, samples, NOW, 1).why == "at least 20 requests in flight and 4 waiting for 10 s, 8 per replica"
    assert advise(SCALE, loads(*[9] * 301), NOW, 3).why == "at most 9 requests in flight and 0 waiting for 5 m, 8 per replica"
    assert advise(SCALE, samples, NOW, 3).why == ""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.none() | st.integers(0, 60), max_size=40), st.integers(1, 4))
def test_law_bounds_and_rest(requests, current):
    """It stays within the bounds, and right after a change the same samples ask for no other one."""
    scale = evolve(SCALE, up_after=4.0, down_after=12.0)
    samples = loads(*requests)
    then = count(samples, current, scale)
    assert 1 <= then <= 4
    assert count(samples, then, scale) == then
    if then != current:
        known = [needed(scale, load) for load in samples if load.known]
        assert min(known) <= then <= max(known)


# Making room.

GIB = 2**30
PROFILE = Profile("sim", resources=Resources(devices=1, device_memory=10 * GIB), place=Place())


def sleeper(name, low=0, high=1, devices=1):
    profile = evolve(PROFILE, resources=evolve(PROFILE.resources, devices=devices), arguments={"name": name})
    return Model(name, replicas=Scale(low, high), profile=profile)


def fleet(nodes, running, models, **more):
    """A world of nodes with so many devices each; C{running} places ready replicas: C{(MODEL, NODE, DEVICE)}."""
    shards = {}
    for name, node, device in running:
        generation = next(model.generation for model in models if model.name == name)
        number = sum(record.model == name for record in shards.values()) + 1
        record = ShardRecord(
            f"{name}/{number}/0", name, number, nodes=(node,), generation=generation, attempt=1, state=ShardState.READY,
            since=NOW - 900, profile=PROFILE, url=f"http://{node}:1/v1", placed_revision=1, operation=f"{name}{number}",
            allocation=Allocation(node, devices=(f"{node}{device}",), memory=10 * GIB, ports=(20000 + len(shards),)),
        )  # fmt: skip
        shards[record.shard] = record
    known = {
        "now": NOW, "epoch": 1, "revision": 9, "timing": Timing(), "catalog": Catalog(tuple(models)), "leading_for": 999.0,
        "reckon": lambda profile, files: Needs(profile.resources.devices, 10 * GIB),
        "nodes": {name: machine(name, count, shards) for name, count in nodes.items()},
        "told": {name: Told(reports(name, shards), 1, 8, True) for name in nodes}, "reported": frozenset(nodes), "shards": shards,
        "unused": {name: 600.0 for name, _, _ in running},
    }  # fmt: skip
    return World(**(known | more))


def reports(node, shards):
    """What a node says of its ready shards."""
    return {
        shard: ShardReport(shard, r.model, r.generation, 1, ShardState.READY, url=r.url, devices=r.allocation.devices)
        for shard, r in shards.items()
        if r.allocation.node == node
    }


def machine(name, count, shards):
    """Its engines' memory is seen on the devices, as NVML tells it."""
    held = {uuid: r.shard for r in shards.values() if r.allocation.node == name for uuid in r.allocation.devices}
    devices = []
    for i in range(count):
        uuid = f"{name}{i}"
        ours = (DeviceProcess(100 + i, "engine", 10 * GIB, held[uuid]),) if uuid in held else ()
        devices.append(Device(uuid, i, "SIM", 16 * GIB, memory_used=10 * GIB * len(ours), processes=ours))
    facts = NodeFacts(name, name, Inventory(8, 64 * GIB, 60 * GIB, tuple(devices)), installations=(Installation("sim", "sim"),))
    return NodeRecord(name, facts=facts, state=NodeState.READY)


def gone(outcome):
    """The replicas that were ordered away."""
    return sorted(shard.rpartition("/")[0] for shard, record in outcome.shards.items() if record.wanted is not Wanted.RUN)


def test_the_least_recently_used_makes_room_and_only_that():
    """Three idle ones, one is needed: the one that was used longest ago drains, with its reason; its model wants none now."""
    models = [sleeper("a"), sleeper("b"), sleeper("c"), sleeper("new")]
    running = [("a", "n", 0), ("b", "n", 1), ("c", "n", 2)]
    demand = dict.fromkeys("abc", 1) | {"new": 1}
    world = fleet({"n": 3}, running, models, demand=demand, unused={"a": 100.0, "b": 900.0, "c": 300.0})
    outcome = reconcile(world)
    assert gone(outcome) == ["b/1"] and outcome.gave == {"b": 1}
    assert outcome.shards["b/1/0"].state is ShardState.DRAINING
    assert outcome.shards["b/1/0"].reason == "gives its room to new: it is the least recently used, unused for 15 m"
    assert [event.text for event in outcome.events if event.kind == "gave_way"] == [
        "b/1: gives its room to new/1; unused for 15 m"
    ]
    assert outcome.notes["new"] == "b/1, idle and of min 0, makes room for it"
    after = reconcile(evolve(world, shards=outcome.shards, demand={**demand, "b": 0}))
    assert gone(after) == ["b/1"] and after.notes["new"] == "waiting for the room of b/1"


def test_only_as_many_as_are_needed_where_they_help():
    """Two devices of one node are needed: the older replica on the other node would not help, so it stays."""
    models = [sleeper("far"), sleeper("x"), sleeper("y"), sleeper("new", devices=2)]
    running = [("far", "m", 0), ("x", "n", 0), ("y", "n", 1)]
    demand = {"far": 1, "x": 1, "y": 1, "new": 1}
    world = fleet({"m": 1, "n": 2}, running, models, demand=demand, unused={"far": 9999.0, "x": 200.0, "y": 300.0})
    assert gone(reconcile(world)) == ["x/1", "y/1"]


@pytest.mark.parametrize("why", ["busy", "just used", "just started", "min 1", "use not known", "would not help"])
def test_who_never_makes_room(why):
    """Requests in flight, used or started within a minute, wanted by the catalog, or in vain."""
    models = [sleeper("a", low=int(why == "min 1"), high=2), sleeper("new", devices=2 if why == "would not help" else 1)]
    more = {
        "busy": {"load": Counter({"a/1": 1}).__getitem__},
        "just used": {"unused": {"a": 59.0}},
        "use not known": {"unused": {}},
    }.get(why, {})
    world = fleet({"n": 1}, [("a", "n", 0)], models, demand={"a": 1, "new": 1}, **more)
    if why == "just started":
        world = evolve(world, shards={name: evolve(record, since=NOW - 59) for name, record in world.shards.items()})
    outcome = reconcile(world)
    assert gone(outcome) == [] and outcome.gave == {} and "new" in outcome.pending
    assert gone(reconcile(fleet({"n": 1}, [("a", "n", 0)], [sleeper("a"), sleeper("new")], demand={"a": 1, "new": 1}))) == ["a/1"]


def test_the_next_look_is_when_somebody_may_go():
    """Its minute is over in 12 s: the plan says so, instead of waiting for whatever else happens."""
    world = fleet({"n": 1}, [("a", "n", 0)], [sleeper("a"), sleeper("new")], demand={"a": 1, "new": 1}, unused={"a": 48.0})
    assert reconcile(world).wake == 12.0
    assert reconcile(evolve(world, demand={"a": 1})).wake is None


def test_a_successor_beside_an_old_replica_pushes_nobody_out():
    """One more for a moment, as a change would like it, is no reason to put another model to sleep."""
    models = [sleeper("a"), sleeper("m", low=1)]
    world = fleet({"n": 2}, [("a", "n", 0), ("m", "n", 1)], models, demand={"a": 1})
    changed = evolve(models[1], profile=evolve(models[1].profile, context=4096))
    outcome = reconcile(evolve(world, catalog=Catalog((models[0], changed))))
    assert "a/1" not in gone(outcome) and outcome.gave == {}


def test_a_model_with_min_1_gets_room_too():
    """Wanted by the catalog and wanted by requests are alike; the newest of several idle replicas of a model goes first."""
    models = [sleeper("a", high=2), sleeper("m", low=1)]
    outcome = reconcile(fleet({"n": 2}, [("a", "n", 0), ("a", "n", 1)], models, demand={"a": 2}))
    assert gone(outcome) == ["a/2"] and outcome.gave == {"a": 1}


def test_a_plan_says_who_would_make_room():
    """C{llmgw plan} of a catalog with one model more: an idle one stops, with the reason; the world is left as it was."""
    models = [sleeper("a"), sleeper("b")]
    world = fleet({"n": 2}, [("a", "n", 0), ("b", "n", 1)], models, demand={"a": 1, "b": 1}, unused={"a": 90.0, "b": 120.0})
    found = forecast(world, Catalog((*models, sleeper("m", low=1))))
    assert found.whole and world.demand == {"a": 1, "b": 1}
    assert found.reasons == {"b/1": "gives its room to m: it is the least recently used, unused for 2 m"}
    serving = {name: record.allocation.devices for name, record in found.after.shards.items() if record.allocation}
    assert serving == {"a/1/0": ("n0",), "m/1/0": ("n1",)}


def test_a_device_whose_memory_is_not_back_after_a_stop_is_held_with_the_pid_named():
    """The engine is gone, a process that it left holds 12 of 16 GiB: nothing is placed there, and the refusal names it."""
    world = fleet({"n": 1}, [], [sleeper("m", low=1)])
    left = DeviceProcess(4711, "python3", 12 * GIB, None)
    device = Device("n0", 0, "SIM", 16 * GIB, memory_used=12 * GIB, processes=(left,))
    facts = world.nodes["n"].facts
    held = evolve(facts, inventory=evolve(facts.inventory, devices=(device,)))
    outcome = reconcile(evolve(world, nodes={"n": evolve(world.nodes["n"], facts=held)}))
    assert outcome.shards == {}
    told = explain(evolve(world, nodes=outcome.nodes), outcome, "m").lines()
    assert any("12.0 GiB held by pid 4711 python3, not ours" in line for line in told)
    assert reconcile(world).shards.keys() == {"m/1/0"}


@pytest.mark.parametrize(
    ("loads", "leave"), [((1, 0, 1), ["a/2"]), ((9, 7, 8), ["a/2"]), ((0, 0, 0), ["a/3"]), ((2, 9, 2), ["a/3"])]
)
@pytest.mark.parametrize("high", [3, 2])
def test_of_replicas_that_serve_the_one_with_the_fewest_requests_leaves_first(loads, leave, high):
    """Of equals the newest; also where the catalog itself says that there shall be fewer, and none of it varies with the load."""
    models = [sleeper("a", low=2 if high == 2 else 1, high=high)]
    running = [("a", "n", 0), ("a", "n", 1), ("a", "n", 2)]
    load = Counter(dict(zip(("a/1", "a/2", "a/3"), loads, strict=True)))
    world = fleet({"n": 3}, running, models, demand={"a": 2}, load=load.__getitem__)
    assert gone(reconcile(world)) == leave
    assert reconcile(world).shards[f"{leave[0]}/0"].wanted is Wanted.DRAIN
