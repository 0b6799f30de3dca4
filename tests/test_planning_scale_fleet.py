"""Scaling by load and making room with the real controller on a virtual clock, over minutes and over its own restart."""

from __future__ import annotations

from attrs import evolve

from llmgw.fleet.model import Catalog, Scale
from llmgw.server.catalogs import Catalogs
from llmgw.server.operations import Operations
from llmgw.testing.simulate import Fleet, model

BUSY = Scale(1, 3, target=4, up_after=10.0, down_after=60.0)


def elastic(name="m", scale=BUSY):
    return evolve(model(name), replicas=scale)


def serving(devices=3, scale=BUSY):
    fleet = Fleet({"a": devices})
    fleet.lead([elastic(scale=scale)])
    fleet.until(lambda: fleet.ready("m") == 1, "one serves")
    fleet.run(20)
    return fleet


def fly(fleet, *counts):
    """So many requests on m/1, m/2, ..."""
    for number, count in enumerate(counts, 1):
        fleet.routers.flying[f"m/{number}"] = count


def wants(fleet, name="m"):
    return fleet.controller.demand.wanted.get(name)


def test_load_brings_replicas_and_idleness_takes_them_away_undisturbed():
    """Ten requests are three replicas after ten seconds; less load a minute later drains the idle one, and cuts nothing."""
    fleet = serving()
    fleet.routers.flying["m/1"], fleet.routers.queued["m"] = 4, 6
    fleet.run(8)
    assert len(fleet.engines("m")) == 1
    fleet.until(lambda: fleet.ready("m") == 3, "three serve", 30)
    assert fleet.says("m: wants 3 replicas instead of 1", "4 requests in flight and 6 waiting for 10 s, 4 per replica")
    fleet.routers.queued["m"] = 0
    fly(fleet, 2, 0, 3)
    fleet.run(50)
    assert fleet.ready("m") == 3
    fleet.until(lambda: fleet.ready("m") == 2, "one less", 30)
    assert set(fleet.routers.routed) == {"m/1", "m/3"}
    fleet.until(lambda: len(fleet.engines("m")) == 2, "ended")


def test_a_replica_that_leaves_finishes_its_streams():
    """With requests on every one the newest drains: its engine lives until they have ended."""
    fleet = serving()
    fleet.routers.flying["m/1"] = 12
    fleet.until(lambda: fleet.ready("m") == 3, "three serve", 40)
    fly(fleet, 1, 1, 1)
    fleet.until(lambda: fleet.ready("m") == 1, "one is enough", 90)
    fleet.run(30)
    assert len(fleet.engines("m")) == 3
    fly(fleet, 1, 0, 0)
    fleet.until(lambda: len(fleet.engines("m")) == 1, "ended")


def test_fewer_in_the_catalog_drain_the_one_with_the_fewest_requests():
    """The newest has three streams, an older one a single one: that one leaves, though nothing here varies with the load."""
    fleet = Fleet({"a": 3})
    fleet.lead([model("m", 3)])
    fleet.until(lambda: fleet.ready("m") == 3, "three serve")
    fly(fleet, 2, 1, 3)
    fleet.apply([model("m", 2)])
    fleet.until(lambda: set(fleet.routers.routed) == {"m/1", "m/3"}, "the second leaves", 10)


def kept(fleet, seconds):
    """A replica drains for about so long before it is stopped with a stream on it."""
    fleet.until(lambda: any("draining" in engine for engine in fleet.engines()), "one drains")
    fleet.run(seconds - 20)
    assert any("draining" in engine for engine in fleet.engines())
    fleet.until(lambda: not any("draining" in engine for engine in fleet.engines()), "its time is up", 25)


def test_a_models_own_drain_time_is_kept_at_scale_in_rollout_and_removal():
    """G1: three minutes instead of the fleet's one, also when it is set while the drain runs, and after the model is gone."""
    fleet = Fleet({"a": 3})
    fleet.lead([model("m", 2)])
    fleet.until(lambda: fleet.ready("m") == 2, "two serve")
    fly(fleet, 1, 1, 1, 1)
    fleet.apply([model("m", 1)])
    fleet.run(30)
    fleet.apply([evolve(model("m", 1), drain=180.0)])
    kept(fleet, 150)
    fleet.apply([evolve(model("m", 1, version=2), drain=180.0)])
    kept(fleet, 180)
    Catalogs(fleet.controller).apply(Catalog(), "test", allow_removals=True)
    kept(fleet, 180)


def test_a_drained_node_goes_by_its_own_deadline():
    """G1: what an operator says of the node is said of all on it."""
    fleet = Fleet({"a": 1, "b": 1})
    fleet.lead([evolve(model("m", 1), drain=600.0)])
    fleet.until(lambda: fleet.ready("m") == 1, "it serves")
    fly(fleet, 1)
    Operations(fleet.controller).drain(["a"], 60.0, False, True)
    kept(fleet, 60)


def test_an_unknown_load_changes_nothing():
    """While routers say nothing of what waits, neither a high nor a low count starts or ends anything."""
    fleet = serving()
    fleet.routers.flying["m/1"], fleet.routers.queued["m"] = 12, None
    fleet.run(200)
    assert len(fleet.engines("m")) == 1
    fleet.routers.queued["m"] = 0
    fleet.until(lambda: fleet.ready("m") == 3, "three serve", 40)
    fleet.routers.flying.clear()
    fleet.routers.queued["m"] = None
    fleet.run(300)
    assert fleet.ready("m") == 3


def test_a_restarted_server_takes_nothing_away_before_it_has_looked():
    """What runs stays for a whole window of its own, however idle; no replica is started anew."""
    fleet = serving()
    fleet.routers.flying["m/1"] = 12
    fleet.until(lambda: fleet.ready("m") == 3, "three serve", 40)
    fleet.routers.flying.clear()
    fleet.run(50)
    pids = fleet.pids()
    fleet.end()
    fleet.lead()
    fleet.run(50)
    assert fleet.ready("m") == 3 and fleet.pids() == pids
    fleet.until(lambda: fleet.ready("m") == 1, "one is enough", 30)


def test_what_engines_say_of_others_requests_counts():
    """Somebody asks an engine past our routers: it is as busy as it says, so it neither sleeps nor stays alone."""
    fleet = serving()
    fleet.agents["a"].running_requests = 12
    fleet.until(lambda: fleet.ready("m") == 3, "three serve", 40)


def test_a_cold_start_is_one_replica_first():
    """Many requests wait for a sleeping model: one wakes it, and only what then is too much for one brings more."""
    fleet = Fleet({"a": 3})
    fleet.lead([elastic(scale=evolve(BUSY, min=0, idle_after=100.0))])
    fleet.agents["a"].load = 40.0
    fleet.routers.queued["m"] = 12
    fleet.controller.demand.asked("m")
    fleet.run(30)
    assert len(fleet.engines("m")) == 1
    assert fleet.says("m: wants 1 replica instead of 0: a request waits for it")
    fleet.until(lambda: fleet.ready("m") == 3, "three serve", 120)


def test_a_slow_start_is_not_given_up_for_idleness():
    """The caller has left, the engine takes longer than idle_after: it gets ready, and its idle time begins then."""
    fleet = Fleet({"a": 1})
    fleet.lead([elastic(scale=Scale(0, 1, idle_after=20.0))])
    fleet.agents["a"].load = 60.0
    fleet.controller.demand.asked("m")
    fleet.until(lambda: fleet.ready("m") == 1, "ready after all", 80)
    fleet.run(15)
    assert fleet.ready("m") == 1
    fleet.until(lambda: fleet.engines("m") == [], "asleep", 20)


def test_a_model_that_cannot_be_placed_is_not_wanted_for_ever():
    """Nobody asks any more for five minutes: it no longer waits for room, so that nobody is pushed out for it later."""
    fleet = Fleet({"a": 1})
    fleet.lead([model("big", 1), elastic("m", Scale(0, 1))])
    fleet.until(lambda: fleet.ready("big") == 1, "full")
    fleet.controller.demand.asked("m")
    fleet.run(200)
    assert "m" in fleet.controller.outcome.pending
    fleet.until(lambda: "m" not in fleet.controller.outcome.pending, "forgotten", 120)
    assert wants(fleet) == 0


def test_two_models_share_a_device_by_turns_and_do_not_push_each_other():
    """Each sleeper gets its turn once the other has rested for a minute; asked for both at once, the one that serves stays."""
    fleet = Fleet({"a": 1})
    fleet.lead([elastic("x", Scale(0, 1)), elastic("y", Scale(0, 1))])
    fleet.controller.demand.asked("x")
    fleet.until(lambda: fleet.ready("x") == 1, "x serves")
    fleet.routers.flying["x/1"] = 1
    fleet.controller.demand.asked("y")
    fleet.run(120)
    assert fleet.ready("x") == 1
    fleet.routers.flying.clear()
    fleet.controller.demand.asked("y")
    fleet.run(55)
    assert fleet.ready("x") == 1
    fleet.until(lambda: fleet.ready("y") == 1, "y serves", 60)
    assert fleet.says("x/1", "gives its room to y")
    fleet.controller.demand.asked("x")
    fleet.run(50)
    assert fleet.ready("y") == 1 and not fleet.says("y/1: gives its room")
    fleet.until(lambda: fleet.ready("x") == 1, "x again", 60)


def test_all_this_is_shown():
    """C{status} has bounds, load, and why; C{explain}'s line is made of it."""
    fleet = serving()
    fleet.routers.flying["m/1"] = 6
    fleet.until(lambda: fleet.ready("m") == 2, "two serve", 40)
    data = fleet.controller.demand.data(elastic())
    assert (data["min"], data["max"], data["target"], data["in_flight"], data["waiting"]) == (1, 3, 4, 6, 0)
    assert data["why"] == "1 -> 2: at least 6 requests in flight and 0 waiting for 10 s, 4 per replica"
    assert fleet.controller.demand.data(model("fixed", 2)) is None
