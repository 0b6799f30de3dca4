"""Adapters of engines that run, on a virtual clock with the real controller: loaded, unloaded, swapped, or a replica replaced."""

from __future__ import annotations

from attrs import evolve

from llmgw.fleet.model import Lora, Scale
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import Allocation, ShardLora, ShardState
from llmgw.planning.loras import ordered, part
from llmgw.planning.strategy import Way, decisions
from llmgw.testing.simulate import Fleet, model

TUNED, OTHER = Lora("tuned", "loras/tuned"), Lora("other", "loras/other")


def base(*loras, replicas=1, **more):
    made = model("m", replicas=replicas, **more)
    return evolve(made, profile=evolve(made.profile, loras=loras))


def leading(*models, nodes=2, **agents):
    """A fleet whose first models serve; C{agents} are attributes of every agent."""
    fleet = Fleet({f"n{number}": 1 for number in range(nodes)})
    for agent in fleet.agents.values():
        for name, value in agents.items():
            setattr(agent, name, value)
    fleet.lead(models)
    fleet.until(lambda: fleet.ready("m") == models[0].replicas.min, "it serves")
    fleet.run(2)
    return fleet


def routed(fleet, name="tuned"):
    return next((one.endpoints for one in fleet.routers.routing.models if one.name == name), None)


def has(fleet):
    """By shard, the adapters that its engine has."""
    engines = [engine for agent in fleet.agents.values() for engine in agent.running()]
    return {engine.order.shard: [(one.name, one.weights) for one in engine.loras if not one.problem] for engine in engines}


def test_an_adapter_is_loaded_into_engines_that_run_and_unloaded():
    """The same processes throughout; routed where it is loaded, unloaded only when no router routes to it; over a new leader."""
    fleet = leading(base(replicas=2))
    pids = fleet.pids()
    fleet.apply([base(TUNED, replicas=2)])
    fleet.until(lambda: routed(fleet) == ("m/1", "m/2"), "routed to both", 10)
    assert fleet.says("m/1/0: adapter tuned is loaded")
    fleet.end()
    fleet.lead()
    assert routed(fleet) == ("m/1", "m/2"), "the record knows before any agent has reported"
    fleet.run(10)
    fleet.routers.delay = 5.0
    fleet.apply([base(replicas=2)])
    fleet.run(4)
    assert set(map(tuple, has(fleet).values())) == {(("tuned", "loras/tuned"),)}, "a router may still ask for it"
    fleet.until(lambda: list(has(fleet).values()) == [[], []], "unloaded", 30)
    fleet.run(2)
    assert routed(fleet) is None and fleet.says("m/2/0: adapter tuned is unloaded")
    assert fleet.pids() == pids and fleet.ready("m") == 2


def test_weights_change_under_a_name_one_replica_after_the_other():
    """Some replica has the adapter at every moment, and each has the new weights in the end."""
    fleet = leading(base(TUNED, replicas=2))
    fleet.until(lambda: routed(fleet) == ("m/1", "m/2"), "routed to both")
    pids = fleet.pids()
    fleet.apply([base(Lora("tuned", "loras/newer"), replicas=2)])
    for _ in range(80):
        fleet.step()
        assert routed(fleet), has(fleet)
    assert set(map(tuple, has(fleet).values())) == {(("tuned", "loras/newer"),)} and fleet.pids() == pids


def test_weights_that_cannot_be_loaded_stop_at_the_first_replica():
    """The other goes on with those that it has; status has the reason."""
    fleet = leading(base(TUNED, replicas=2), spoilt={"loras/bad": ("adapter tuned: loras/bad is not on the node", False)})
    fleet.until(lambda: routed(fleet) == ("m/1", "m/2"), "routed to both")
    fleet.apply([base(Lora("tuned", "loras/bad"), replicas=2)])
    fleet.run(30)
    assert len(routed(fleet)) == 1 and fleet.ready("m") == 2
    assert "loras/bad is not on the node" in fleet.controller.outcome.notes["m"]
    assert fleet.says("adapter tuned: loras/bad is not on the node")


def test_an_adapter_that_fails_harms_nothing_and_is_said():
    """It is listed with a reason, its neighbour is served, and the base model, too; nothing is started anew for it."""
    fleet = leading(base(), spoilt={"loras/tuned": ("adapter tuned: it is garbled", False)})
    pids = fleet.pids()
    fleet.apply([base(TUNED, OTHER)])
    fleet.until(lambda: routed(fleet, "other") == ("m/1",), "the good one", 10)
    fleet.run(30)
    assert routed(fleet) == () and fleet.pids() == pids and fleet.ready("m") == 1
    assert "m/1 serves without an adapter: adapter tuned: it is garbled" in fleet.controller.outcome.notes["m"]
    for agent in fleet.agents.values():
        agent.spoilt.clear()
    fleet.until(lambda: routed(fleet) == ("m/1",), "mended", 20)
    assert "m" not in fleet.controller.outcome.notes


def test_what_an_engine_cannot_take_replaces_its_replica():
    """Beside the old one, which serves until its successor is ready; what was said before, with the reason."""
    for agents in ({"fixed": "it was started without adapters"}, {"spoilt": {"loras/tuned": ("its rank is 64", True)}}):
        fleet = leading(base(), **agents)
        world = evolve(fleet.controller.world(), catalog=evolve(fleet.controller.truth.catalog, models=(base(TUNED),)))
        [decision] = decisions(world)
        assert decision.way is (Way.SURGE if "fixed" in agents else Way.LOAD), decision
        fleet.apply([base(TUNED)])
        ready = []
        for _ in range(200):
            fleet.step()
            ready.append(fleet.ready("m"))
        assert min(ready) >= 1 and routed(fleet) == ("m/2",), fleet.describe()
        assert fleet.says("m/1/0", "draining", "it was started without adapters" if "fixed" in agents else "its rank is 64")


def test_an_adapter_that_leaves_never_replaces_a_replica():
    """Also where it cannot be unloaded: it is no longer listed, and stays in its engine until that ends."""
    fleet = leading(base(TUNED), fixed="only at its start")
    fleet.until(lambda: routed(fleet) == ("m/1",), "served")
    pids = fleet.pids()
    fleet.apply([base()])
    fleet.run(30)
    assert routed(fleet) is None and fleet.pids() == pids


def test_the_only_replica_is_not_stopped_for_an_adapter():
    """Without room beside it, it serves on, and the note says with which command it would go first."""
    fleet = leading(base(), nodes=1, fixed="it was started without adapters")
    fleet.apply([base(TUNED)])
    fleet.run(30)
    assert fleet.ready("m") == 1 and fleet.engines() == ["m/1/0@n0 ready 1"]
    assert "llmgw restart m --replica 1 --allow-outage" in fleet.controller.outcome.notes["m"]


def test_an_engine_that_crashed_comes_back_with_all_adapters():
    """The next attempt is of the profile as it is by then."""
    fleet = leading(base())
    fleet.apply([base(TUNED, OTHER)])
    fleet.until(lambda: routed(fleet) == ("m/1",), "loaded", 10)
    [(agent, engine)] = [(agent, engine) for agent in fleet.agents.values() for engine in agent.running()]
    agent.die(engine, fleet.clock.seconds(), "it fell over")
    fleet.until(lambda: fleet.engines() == [f"m/1/0@{agent.name} ready 2"], "again", 60)
    fleet.run(2)
    assert has(fleet) == {"m/1/0": [("tuned", "loras/tuned"), ("other", "loras/other")]} and routed(fleet) == ("m/1",)
    assert sum("adapter tuned is loaded" in event.text for event in fleet.store.events) == 2, "each attempt is a new engine"


def test_replicas_at_zero_are_left_alone():
    fleet = leading(base())
    fleet.apply([evolve(base(TUNED), replicas=Scale(0, 0))])
    fleet.until(lambda: fleet.engines() == [], "gone", 120)
    assert routed(fleet) == ()


def test_orders_name_what_may_still_be_asked_for():
    """And not the other weights of the same name meanwhile."""
    new = Lora("tuned", "loras/newer")
    profile = evolve(base(new, OTHER).profile)
    record = ShardRecord(
        "m/1/0", "m", 1, profile=profile, allocation=Allocation("n1"), state=ShardState.READY,
        loras=(ShardLora("tuned", "loras/tuned"), ShardLora("other", "loras/other", problem="no")),
    )  # fmt: skip
    assert ordered(record, ()).loras == (OTHER, TUNED)
    assert ordered(record, {part("m/1/0", "tuned")}).loras == (new, OTHER)
    assert ordered(evolve(record, loras=None), ()).loras == (new, OTHER)
    assert record.profile.generation("m") == base().profile.generation("m"), "adapters never make another generation"
