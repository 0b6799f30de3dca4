"""A changed profile comes into force, or the model goes back to the last good one: over whole simulated fleets."""

from __future__ import annotations

from attrs import evolve

from llmgw.fleet.model import Rollout
from llmgw.fleet.node import Fabric
from llmgw.testing.simulate import Fleet, model


def serving(nodes=None, models=None, **more):
    """A fleet whose models are all ready."""
    fleet = Fleet(nodes or {"a": 2, "b": 2}, **more)
    models = models or [model("m", 2)]
    fleet.lead(models)
    fleet.until(lambda: all(fleet.ready(one.name) == one.replicas.min for one in models), "all models ready")
    fleet.run(1)
    return fleet


def rollout(fleet, name="m"):
    """The record of the model's change."""
    return fleet.controller.truth.rollouts[name]


def generations(fleet):
    """What the live engines run."""
    return {engine.order.generation for agent in fleet.agents.values() for engine in agent.running()}


def least(fleet, seconds, name="m"):
    """How many replicas were routed at the worst moment of the next seconds."""
    found = []
    for _ in range(round(seconds * 4)):
        fleet.step()
        found.append(fleet.ready(name))
    return min(found)


OLD, NEW = model("m").generation, model("m", version=2).generation


def doom(fleet, generation=NEW):
    """Engines of this generation die while they load."""
    for agent in fleet.agents.values():
        agent.doomed.add(generation)


def test_f16_a_rollout_with_room_never_serves_less_and_ends_as_done():
    """F16: the new one is ready before an old one drains; the record says running, then done, and what was good before."""
    fleet = serving()
    assert rollout(fleet).state == "done"
    fleet.apply([model("m", 2, version=2)])
    fleet.run(1)
    assert rollout(fleet).state == "running" and rollout(fleet).back == model("m").profile
    assert least(fleet, 60) == 2
    assert generations(fleet) == {NEW}
    assert rollout(fleet).state == "done" and fleet.says("m: rollout done")


def test_g4_a_failing_rollout_stops_rolls_back_and_says_why():
    """G4: bad v2, four replicas: after three failed attempts all of v1 serve, with their pids; the reason is the engine's."""
    fleet = serving({"a": 2, "b": 2, "c": 1}, [model("m", 4)])
    pids = fleet.pids()
    doom(fleet)
    fleet.apply([model("m", 4, version=2)])
    assert least(fleet, 120) == 4
    assert rollout(fleet).state == "rolled_back"
    assert "after 3 failed attempts" in rollout(fleet).reason and "it was doomed" in rollout(fleet).reason
    assert fleet.says("m: rolled back to profile", "llmgw rollout m --resume")
    assert "rolled back" in fleet.controller.outcome.notes["m"]
    said = len(fleet.store.events)
    least(fleet, 1800)
    assert fleet.pids() == pids, "what is healthy is never touched after that, and nothing new is tried"
    assert len(fleet.store.events) == said, "nor is anything said again"


def test_g4_a_failure_in_mid_rollout_goes_back_one_at_a_time():
    """G4: half of the replicas had changed; all return to the good profile, each by a ready successor."""
    fleet = serving({"a": 3, "b": 3}, [model("m", 4)])
    fleet.apply([model("m", 4, version=2)])
    fleet.until(lambda: sum(" ready " in e for e in fleet.engines()) >= 5, "one has changed")
    doom(fleet)
    assert least(fleet, 200) >= 4
    fleet.until(lambda: generations(fleet) == {OLD}, "all are back")
    assert fleet.ready("m") == 4 and rollout(fleet).state == "rolled_back"


def test_g4_in_place_a_rollback_brings_the_old_profile_back():
    """G6, G4: without spare devices an old one had to go first; after the failures the old profile takes its place again."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    doom(fleet)
    fleet.apply([model("m", 2, version=2)])
    assert least(fleet, 120) == 1
    fleet.until(lambda: fleet.ready("m") == 2, "two again")
    assert generations(fleet) == {OLD} and rollout(fleet).state == "rolled_back"


def test_g6_in_place_never_two_at_once():
    """G6: three replicas, no spare device: one at a time is missing, never two, while the successor loads."""
    fleet = serving({"a": 1, "b": 1, "c": 1}, [model("m", 3)])
    fleet.apply([model("m", 3, version=2)])
    assert least(fleet, 90) == 2 and generations(fleet) == {NEW}


def test_a_rollback_survives_restarts_of_the_server_and_ends_with_the_next_apply():
    """The pin is in the store: a restarted server does not try the bad profile again; another apply does what it says."""
    fleet = serving(models=[model("m", 1)])
    doom(fleet)
    fleet.apply([model("m", 1, version=2)])
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back")
    fleet.run(5)
    pids = fleet.pids()
    for _ in range(2):
        fleet.end()
        fleet.run(2)
        fleet.lead()
        fleet.run(60)
    assert fleet.pids() == pids
    fleet.apply([model("m", 2, version=2)])
    fleet.until(lambda: fleet.ready("m") == 2, "more replicas, of the pinned profile")
    assert generations(fleet) == {OLD}
    fleet.apply([model("m", 2, version=3)])
    fleet.until(lambda: rollout(fleet).state == "done", "the third profile")
    fleet.until(lambda: generations(fleet) == {model("m", version=3).generation}, "and only that")


def gang(fleet, version=1):
    """A model whose one replica spans two nodes, served."""
    for agent in fleet.agents.values():
        agent.fabrics = (Fabric("rack"),)
    fleet.lead([model("m", 1, devices=2, nodes=2, version=version)])
    fleet.until(lambda: fleet.ready("m") == 1, "the gang serves")
    fleet.run(1)
    return fleet


def test_f16_a_replica_over_two_nodes_is_rolled_out_whole():
    """F16: both ranks of the successor are ready before both of the old one go."""
    fleet = gang(Fleet({"a": 4, "b": 4}))
    fleet.apply([model("m", 1, devices=2, nodes=2, version=2)])
    assert least(fleet, 60) == 1
    assert [engine.partition("@")[0] for engine in fleet.engines()] == ["m/2/0", "m/2/1"]
    assert rollout(fleet).state == "done"


def test_g4_ranks_that_fall_together_are_one_failure():
    """G4 with a gang: three attempts of two ranks are three failures, and the old ranks keep their processes."""
    fleet = gang(Fleet({"a": 4, "b": 4}))
    pids = fleet.pids()
    doom(fleet, model("m", devices=2, nodes=2, version=2).generation)
    fleet.apply([model("m", 1, devices=2, nodes=2, version=2)])
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back")
    assert [attempt.rpartition(":")[2] for attempt in rollout(fleet).failures] == ["1", "2", "3"]
    assert least(fleet, 60) == 1 and fleet.pids() == pids


def test_failures_are_counted_over_a_restart_of_the_server():
    """Two failures before and one after make three."""
    fleet = serving(models=[model("m", 1)])
    doom(fleet)
    fleet.apply([model("m", 1, version=2)])
    fleet.until(lambda: len(rollout(fleet).failures) == 2, "two failures")
    fleet.end()
    fleet.lead()
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "the third")
    assert len(rollout(fleet).failures) == 3


def test_the_budget_is_the_catalogs():
    """rollout.failures: 1 goes back at the first."""
    fleet = serving(models=[model("m", 1)])
    doom(fleet)
    fleet.apply([evolve(model("m", 1, version=2), rollout=Rollout(failures=1))])
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back", 20)
    assert "after 1 failed attempt with" in rollout(fleet).reason


def test_a_model_that_never_served_has_nothing_to_go_back_to():
    """The first profile fails: the crash budget holds, nothing is rolled back."""
    fleet = Fleet({"a": 1})
    fleet.agents["a"].doomed.add("m")
    fleet.lead([model("m", 1)])
    fleet.run(600)
    assert not fleet.controller.truth.rollouts and not fleet.says("rolled back")


def test_a_crash_of_an_old_replica_is_no_failure_of_the_new_profile():
    """Only attempts with the new profile count."""
    fleet = serving({"a": 2, "b": 2}, [model("m", 2)])
    for agent in fleet.agents.values():
        agent.load = 60.0
    fleet.apply([model("m", 2, version=2)])
    fleet.run(5)
    for name in ("m/1/0", "m/2/0"):
        agent = next(agent for agent in fleet.agents.values() if name in agent.engines)
        agent.die(agent.engines[name], fleet.clock.seconds(), "chance")
    fleet.run(5)
    assert rollout(fleet).failures == () and rollout(fleet).state == "running"
    fleet.until(lambda: rollout(fleet).state == "done", "done")


def test_g6_surge_waits_for_room_and_replace_lets_one_go_first():
    """G6: the catalog's strategy is kept to: surge touches nothing without room, replace goes in place although there is room."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    pids = fleet.pids()
    fleet.apply([evolve(model("m", 2, version=2), rollout=Rollout(strategy="surge"))])
    fleet.run(5)
    assert fleet.pids() == pids and "waits for room beside it" in fleet.controller.outcome.notes["m"]
    fleet = serving({"a": 2, "b": 2}, [model("m", 2)])
    fleet.apply([evolve(model("m", 2, version=2), rollout=Rollout(strategy="replace"))])
    assert least(fleet, 60) == 1 and generations(fleet) == {NEW}


def test_g6_the_only_replica_is_not_taken_down_without_leave():
    """G6: no spare device and one replica: it goes on serving, and what to type is said."""
    fleet = serving({"a": 1}, [model("m", 1)])
    pids = fleet.pids()
    fleet.apply([model("m", 1, version=2)])
    fleet.run(60)
    assert fleet.pids() == pids
    assert "llmgw rollout m --resume --allow-outage" in fleet.controller.outcome.notes["m"]


def test_a_profile_that_dies_with_its_first_requests_is_rolled_back_after_the_end():
    """Ready, so the rollout was done; then dead again and again: it goes back. Much later a crash is only a crash."""
    fleet = serving({"a": 2}, [model("m", 1)])
    fleet.apply([model("m", 1, version=2)])
    fleet.run(1)
    for _ in range(3):
        fleet.until(lambda: rollout(fleet).state == "done" and fleet.ready("m") == 1, "ready")
        engine = next(engine for engine in fleet.agents["a"].running() if engine.order.generation == NEW)
        fleet.agents["a"].die(engine, fleet.clock.seconds(), "out of memory at the first request")
        fleet.run(1)
    assert rollout(fleet).state == "rolled_back"
    fleet.until(lambda: fleet.ready("m") == 1 and generations(fleet) == {OLD}, "the old profile")
    fleet.apply([model("m", 1, version=3)])
    fleet.until(lambda: rollout(fleet).state == "done", "done")
    fleet.run(200)
    for _ in range(4):
        fleet.until(lambda: fleet.ready("m") == 1, "ready")
        engine = fleet.agents["a"].running()[0]
        fleet.agents["a"].die(engine, fleet.clock.seconds(), "chance")
        fleet.run(1)
    assert rollout(fleet).state == "done"


def test_a_budget_above_the_crash_budget_is_spent_with_that():
    """rollout.failures: 100, but a replica is not tried a sixth time: then the rollout has failed, too."""
    fleet = serving({"a": 2}, [model("m", 1)])
    doom(fleet)
    fleet.apply([evolve(model("m", 1, version=2), rollout=Rollout(failures=100))])
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back", 900)
    assert len(rollout(fleet).failures) == 5
