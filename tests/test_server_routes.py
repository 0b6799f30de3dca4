"""The routing table: what is in it, what leaves it, and that not knowing takes nothing out of it."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.fleet.model import Catalog, Lora, Model, Profile, Scale, StaticEndpoint
from llmgw.fleet.node import Inventory, NodeFacts, NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import Allocation, ShardLora, ShardReport, ShardState, Wanted
from llmgw.planning.world import Told
from llmgw.router.table import RoutedModel, Table, endpoint
from llmgw.server.live import targets
from llmgw.server.routes import Known, build, parts_of
from llmgw.server.routing import same
from llmgw.store.records import KeyRecord

PROFILE = Profile("sim")


def node(name, state=NodeState.READY):
    return NodeRecord(name, facts=NodeFacts(name, f"{name}.sim", Inventory(1, 1)), state=state)


def shard(number=1, name="a", state=ShardState.READY, model="m", **more):
    known = {
        "attempt": 1, "allocation": Allocation(name, ports=(20000 + number,)), "served": (model,), "key": f"k{number}",
        "url": f"http://{name}.sim:{20000 + number}/v1", "nodes": (name,),
    }  # fmt: skip
    return ShardRecord(f"{model}/{number}/0", model, number, state=state, **(known | more))


def reported(number=1, state=ShardState.READY, **more):
    return ShardReport(f"m/{number}/0", "m", "g", 1, state, ports=(20000 + number,), **more)


def known(*shards, models=None, told=None, nodes=None, keys=(), reasons=None, secrets=None):
    told = told or {}
    listed = {name: Told({one.shard: one for one in reports}, 1, 1, True) for name, reports in told.items()}
    return Known(
        Catalog(tuple(models or [Model("m", ("alias",), profile=PROFILE)])),
        {one.name: one for one in (nodes or [node("a"), node("b")])},
        {one.shard: one for one in shards},
        {one.id: one for one in keys},
        lambda name, shard: listed[name].shards.get(shard) if name in listed else None,
        listed,
        reasons or {},
        7,
        secrets or (lambda path: "secret"),
    )


def routed(table, model="m"):
    return next(one.endpoints for one in table.models if one.name == model)


def test_a_ready_replica_is_an_endpoint_with_its_key():
    """Address, secret and the name it serves under come from the record, the limit from the report."""
    table = build(known(shard(), told={"a": [reported(limit=8)]}), None)
    (one,) = table.endpoints
    assert (one.id, one.host, one.port, one.key, one.model, one.limit) == ("m/1", "a.sim", 20001, "k1", "m", 8)
    assert table.models[0].aliases == ("alias",) and table.epoch == 7


def test_only_what_serves_is_routed():
    """Loading, draining, leaving and unhealthy replicas are not; what was ready on a node that is away is."""
    shards = [
        shard(1, state=ShardState.LOADING, url=""),
        shard(2, state=ShardState.DRAINING, wanted=Wanted.DRAIN),
        shard(3, state=ShardState.UNKNOWN),
        shard(4),
        shard(5, state=ShardState.UNKNOWN, url=""),
        shard(6, name="b"),
    ]
    table = build(known(*shards, told={"a": [reported(4, healthy=False)]}), None)
    assert routed(table) == ("m/3", "m/6")


def test_an_unhealthy_word_of_a_node_that_is_away_is_old():
    """Only a node with a link can take an endpoint out."""
    assert routed(build(known(shard(), told={}), None)) == ("m/1",)


def test_a_lost_nodes_endpoint_leaves_only_for_a_ready_successor():
    """It may still serve; when the replacement is ready it goes."""
    nodes = [node("a", NodeState.LOST), node("b")]
    lost = shard(1, state=ShardState.UNKNOWN)
    loading = shard(2, "b", ShardState.LOADING, url="")
    assert routed(build(known(lost, loading, nodes=nodes), None)) == ("m/1",)
    assert routed(build(known(lost, shard(2, "b"), nodes=nodes), None)) == ("m/2",)


def test_a_model_without_endpoints_stays_with_its_reason():
    """404 and 503 are different answers."""
    table = build(known(reasons={"m": "0/2 nodes can run this: 2 draining"}), None)
    assert table.models[0].reason == "0/2 nodes can run this: 2 draining" and routed(table) == ()


def test_a_sleeping_model_is_marked():
    """Zero replicas that may become one: a request wakes it."""
    models = [Model("m", profile=PROFILE, replicas=Scale(0, 2)), Model("off", profile=PROFILE, replicas=Scale(0, 0))]
    table = build(known(models=models), None)
    assert [one.on_demand for one in table.models] == [True, False]


def test_static_endpoints_have_their_key_and_share():
    """One that cannot be used is left out, the others stay."""
    static = (
        StaticEndpoint("http://10.0.0.9:8000/v1", "up", "/k", 3),
        StaticEndpoint("ftp://x/v1"),
        StaticEndpoint("http://h:1/v1", key_file="/none"),
    )

    def secrets(path):
        if path == "/none":
            raise FileNotFoundError(2, "No such file", path)
        return "secret"

    table = build(known(models=[Model("m", endpoints=static)], secrets=secrets), None)
    (one,) = table.endpoints
    assert (one.id, one.model, one.key, one.share, one.static) == ("static:m/0", "up", "secret", 3, True)


def test_keys_are_listed_unless_revoked():
    """By digest."""
    keys = [KeyRecord("a", "ann", "d1", 1.0, models=("m",), rpm=5), KeyRecord("b", "bob", "d2", 1.0, revoked=2.0)]
    (one,) = build(known(keys=keys), None).keys
    assert (one.id, one.digest, one.models, one.rpm) == ("a", "d1", ("m",), 5)


BEFORE = Table(
    version=9,
    models=(RoutedModel("m", endpoints=("m/1", "static:m/0")), RoutedModel("x", endpoints=("x/1",))),
    endpoints=(
        endpoint("m/1", "http://a.sim:20001/v1", model="m"),
        endpoint("static:m/0", "http://s:1/v1", model="m", static=True),
        endpoint("x/1", "http://b.sim:20005/v1", model="x"),
    ),
)


def test_a_leader_that_knows_less_goes_on_routing():
    """A lost store: the table on disk knows replicas, and a model, that no record does. They stay; static ones do not."""
    table = build(known(), BEFORE)
    assert routed(table) == ("m/1",) and routed(table, "x") == ("x/1",)


def test_an_inherited_endpoint_leaves_by_its_nodes_word():
    """The node at that address has reported and does not list it; a node that has not reported says nothing."""
    assert routed(build(known(told={"b": []}), BEFORE)) == ("m/1",)
    assert routed(build(known(told={"a": [reported()]}), BEFORE)) == ("m/1",)
    assert routed(build(known(told={"a": []}), BEFORE)) == ()
    assert routed(build(known(told={"a": [reported(state=ShardState.STOPPING)]}), BEFORE)) == ()


def test_an_inherited_endpoint_gives_way_to_a_ready_replica_and_to_its_own_record():
    """The successor is ready, or a record says what became of it."""
    assert routed(build(known(shard(2, "b")), BEFORE)) == ("m/2",)
    assert routed(build(known(shard(1, state=ShardState.BACKOFF, url="")), BEFORE)) == ()
    husk = evolve(shard(1, state=ShardState.STOPPED, url=""), allocation=None)
    assert routed(build(known(husk), BEFORE)) == ()


def unheard(rank=0, name="a", **more):
    """A rank of a store that is older than its engine: all that it knows is where it was to run."""
    known = {"state": ShardState.UNKNOWN, "url": "", "rank": rank, "nodes": ("a", "b")}
    return evolve(shard(1, name, **(known | more)), shard=f"m/1/{rank}")


SERVES = {"state": ShardState.READY}


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        (SERVES, True),
        ({}, True),
        ({"state": ShardState.LOADING}, True),
        ({"state": ShardState.LOADING, "name": "c"}, False),
        ({"state": ShardState.BACKOFF}, False),
        ({"state": ShardState.STOPPING, "wanted": Wanted.STOP}, False),
    ],
    ids=["serves", "is away", "loaded when last heard of", "loads", "has ended", "leaves"],
)
def test_an_endpoint_that_an_older_store_does_not_explain_stays_unless_a_rank_speaks_against_it(other, kept):
    """Rank 0 is on a node that is away and was never heard of; the other ranks have a word, too."""
    ranks = unheard(), unheard(1, **({"name": "b"} | other))
    assert routed(build(known(*ranks, told={"c": []}), BEFORE)) == (("m/1",) if kept else ())


@pytest.mark.parametrize("state", [ShardState.PLACED, ShardState.STARTING, ShardState.LOADING, ShardState.UNKNOWN])
def test_an_older_store_that_saw_it_start_takes_no_endpoint_before_its_node_speaks(state):
    """A new leader plans before any node is back; that it is away is found only later."""
    assert routed(build(known(shard(1, state=state, url="")), BEFORE)) == ("m/1",)
    assert routed(build(known(shard(1, state=state, url=""), told={"a": [reported(state=ShardState.LOADING)]}), BEFORE)) == ()


def test_a_rank_that_an_older_store_saw_start_takes_no_endpoint_of_rank_0_that_serves():
    """Rank 0 has said so; of the other nothing was heard since. Where both are known it is routed once."""
    head = shard(nodes=("a", "b"))
    links = {"a": [reported()]}
    assert routed(build(known(head, unheard(1, "b", state=ShardState.LOADING), told=links), BEFORE)) == ("m/1",)
    assert routed(build(known(head, unheard(1, "b"), told=links), BEFORE)) == ("m/1",)
    sick = {"a": [reported(healthy=False)]}
    assert routed(build(known(head, unheard(1, "b"), told=sick), BEFORE)) == ()


def test_an_unhealthy_rank_speaks_against_an_endpoint_of_rank_0_that_was_not_heard_of():
    """Its node has a link and says so now."""
    sick = evolve(reported(healthy=False), shard="m/1/1", rank=1)
    assert routed(build(known(unheard(), unheard(1, "b", **SERVES), told={"b": [sick]}), BEFORE)) == ()


def test_others_that_serve_take_no_endpoint_that_an_older_store_does_not_explain():
    """It may serve as well, and is one of the wanted ones; only where its node is lost a ready successor is enough."""
    both = Model("m", profile=PROFILE, replicas=Scale(2, 2))
    nodes = [node("a"), node("b", NodeState.LOST), node("c")]
    lost = shard(2, "b", ShardState.UNKNOWN)
    ranks = unheard(), unheard(1, "c", **SERVES)
    assert set(routed(build(known(*ranks, shard(3, "c"), nodes=nodes), BEFORE))) == {"m/1", "m/3"}
    found = build(known(*ranks, lost, shard(3, "c"), models=[both], nodes=nodes), BEFORE)
    assert set(routed(found)) == {"m/1", "m/2", "m/3"}, "one on a lost node is not one of two that serve for sure"
    away = [node("a", NodeState.LOST), node("c")]
    assert routed(build(known(*ranks, shard(3, "c"), nodes=away), BEFORE)) == ("m/3",)


def test_what_may_be_lost_keeps_no_endpoint_without_a_record_from_serving():
    """Two are wanted; of the two that have records one is on a lost node, so the one that no record knows is kept."""
    both = Model("m", profile=PROFILE, replicas=Scale(2, 2))
    lost = shard(2, "b", ShardState.UNKNOWN)
    nodes = [node("a"), node("b", NodeState.LOST)]
    assert set(routed(build(known(lost, shard(3, "a"), models=[both], nodes=nodes), BEFORE))) == {"m/1", "m/2", "m/3"}


def test_a_model_that_the_catalog_lacks_is_routed_while_its_replicas_are_wanted():
    """Absence from a catalog orders nothing."""
    other = shard(1, model="gone")
    assert routed(build(known(other), None), "gone") == ("gone/1",)
    leaving = evolve(other, wanted=Wanted.DRAIN, state=ShardState.DRAINING)
    assert [one.name for one in build(known(leaving), None).models] == ["m"]


def test_equal_tables_are_not_published_again():
    """Rows and versions are the routers' own."""
    one = build(known(shard()), None)
    other = build(known(shard()), None)
    assert same(one, other) and not same(one, build(known(shard(), reasons={"m": "x"}, models=[Model("n")]), None))


def test_ranks_that_serve_are_endpoints_of_their_replica():
    """With hybrid balancing every node's own; they come and go with the replica, and are inherited with it."""
    other = shard(1, "b", url="http://b.sim:21001/v1", rank=1, nodes=("a", "b"))
    other = evolve(other, shard="m/1/1")
    head = shard(1, nodes=("a", "b"))
    table = build(known(head, other), None)
    assert [(one.id, one.host) for one in table.endpoints] == [("m/1", "a.sim"), ("m/1/1", "b.sim")]
    assert routed(table) == ("m/1", "m/1/1")
    assert build(known(head, evolve(other, state=ShardState.LOADING)), table).endpoints == ()
    assert routed(build(known(head, evolve(other, url="")), None)) == ("m/1",), "a rank without HTTP is none"
    assert routed(build(known(), table)) == ("m/1", "m/1/1"), "a leader without records goes on with the table"
    assert parts_of([head, other]) == {"m/1": ["m/1", "m/1/1"]}


def test_adapters_are_models_on_the_replicas_that_have_them():
    """Under their own name to the engine; where no replica was started with one, its reason says what to do."""
    tuned = Lora("tuned", "loras/tuned")
    with_it = evolve(PROFILE, loras=(tuned,))
    model = Model("m", profile=with_it)
    table = build(known(shard(1, profile=with_it), shard(2, "b", profile=PROFILE), models=[model]), None)
    adapter = next(one for one in table.models if one.name == "tuned")
    assert (adapter.endpoints, adapter.served, adapter.reason) == (("m/1",), "tuned", "")
    assert routed(table) == ("m/1", "m/2")
    bare = build(known(shard(2, "b", profile=PROFILE), models=[model]), table)
    assert "has the adapter tuned loaded" in next(one.reason for one in bare.models if one.name == "tuned")
    gone = build(known(shard(1, profile=with_it)), table)
    assert "tuned" not in [one.name for one in gone.models], "an adapter leaves with its entry"
    assert [row["labels"]["model"] for row in targets(table)] == ["m", "m"], "its engines are its base's"


def test_a_request_for_an_adapter_waits_where_its_model_sleeps():
    """At zero replicas it wakes the model; where the model serves without the adapter, the caller is told at once."""
    model = Model("m", profile=evolve(PROFILE, loras=(Lora("tuned", "loras/tuned"),)), replicas=Scale(min=0, max=1))
    asleep = build(known(models=[model]), None)
    without = build(known(shard(1, profile=PROFILE), models=[model]), None)
    waits = [{one.name: one.on_demand for one in table.models} for table in (asleep, without)]
    assert waits == [{"m": True, "tuned": True}, {"m": True, "tuned": False}]


def test_an_adapter_goes_where_it_is_loaded_and_is_to_stay():
    """By what agents say, under the name that the engines know; not where it failed, nor where it is on its way out."""
    tuned = Lora("tuned", "loras/tuned")
    wanted, other = evolve(PROFILE, loras=(tuned,)), evolve(PROFILE, loras=())
    has = ShardLora("tuned", "loras/tuned", "m:tuned")
    failed, old = evolve(has, problem="adapter tuned: no"), evolve(has, weights="loras/older")

    def of(loras, profile=wanted):
        table = build(known(shard(1, profile=profile, loras=loras), models=[Model("m", profile=wanted)]), None)
        return next((one.endpoints, one.served) for one in table.models if one.name == "tuned")

    assert of((has,)) == (("m/1",), "m:tuned")
    for loras, profile in (((), wanted), ((failed,), wanted), ((has,), other), ((old,), wanted)):
        assert of(loras, profile) == ((), "tuned"), (loras, profile)
    still = evolve(PROFILE, loras=(Lora("tuned", "loras/older"),))
    assert of((old,), still) == (("m/1",), "m:tuned"), "other weights are wanted, but this replica has not had its turn"
