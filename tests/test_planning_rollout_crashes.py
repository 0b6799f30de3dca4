"""What crashes while a profile is changed, and machines that restart meanwhile: over whole simulated fleets."""

from __future__ import annotations

from llmgw.testing.simulate import model
from tests.test_planning_rollout import NEW, OLD, doom, generations, least, rollout, serving
from tests.test_planning_rollout_orders import apply


def crash(fleet, shard):
    """The engine of this shard ends."""
    agent = next(agent for agent in fleet.agents.values() if shard in agent.engines)
    agent.die(agent.engines[shard], fleet.clock.seconds(), "chance")


def slow(fleet, seconds):
    """From now on engines take so long to load."""
    for agent in fleet.agents.values():
        agent.load = seconds


def reboot(fleet, name, wiped=False):
    """A machine restarts; it may have lost its state folder."""
    fleet.cut.add(name)
    fleet.run(1)
    (fleet.agents[name].wipe if wiped else fleet.agents[name].reboot)()
    fleet.cut.clear()
    fleet.run(1)


def test_an_old_replica_that_crashes_while_the_first_successor_loads_comes_back_as_it_was():
    """Nobody knows yet whether the new profile works; the old one is known to. Then both are replaced."""
    fleet = serving({"a": 2, "b": 2}, [model("m", 2)])
    slow(fleet, 60)
    apply(fleet, model("m", 2, version=2))
    fleet.run(5)
    (home,) = [agent for agent in fleet.agents.values() if "m/3/0" not in agent.engines]
    (old,) = home.engines
    home.load = 5
    crash(fleet, old)
    fleet.until(lambda: f"{old}@{home.name} ready 2" in fleet.engines(), "it serves again", 30)
    assert generations(fleet) == {OLD, NEW}
    fleet.until(lambda: rollout(fleet).state == "done", "done")
    fleet.until(lambda: generations(fleet) == {NEW}, "both replaced")


def test_a_bad_profile_takes_no_capacity_that_crashes_meanwhile():
    """Between its failures both old replicas crash: at the end both serve, of the old profile."""
    fleet = serving({"a": 2, "b": 2}, [model("m", 2)])
    doom(fleet)
    apply(fleet, model("m", 2, version=2))
    fleet.run(4)
    for shard in ("m/1/0", "m/2/0"):
        crash(fleet, shard)
        fleet.run(2)
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back")
    fleet.until(lambda: fleet.ready("m") == 2, "both")
    assert {engine.partition("@")[0] for engine in fleet.engines()} == {"m/1/0", "m/2/0"}


def test_an_old_replica_whose_successor_fits_nowhere_comes_back_after_a_crash():
    """The change is held; that one crash must not end the model."""
    fleet = serving({"a": 1}, [model("m", 1)])
    apply(fleet, model("m", 1, devices=4))
    fleet.run(5)
    crash(fleet, "m/1/0")
    fleet.until(lambda: fleet.engines() == ["m/1/0@a ready 2"], "it serves as before", 40)
    assert "its successor fits nowhere" in fleet.controller.outcome.notes["m"]


def test_a_mended_profile_takes_the_place_of_what_crashes_again_and_again():
    """No room beside it and the old one down: the first of the new profile takes its place without waiting."""
    fleet = serving({"a": 1}, [model("m", 1)])
    doom(fleet, OLD)
    crash(fleet, "m/1/0")
    fleet.run(30)
    apply(fleet, model("m", 1, version=2))
    fleet.until(lambda: fleet.ready("m") == 1, "the new profile serves", 30)
    assert generations(fleet) == {NEW}


def test_a_machine_that_restarts_is_no_failure_of_the_new_profile():
    """Its node restarts three times in a rollout, once with its state folder lost; then the rollout ends as done."""
    fleet = serving({"a": 2, "b": 2, "c": 2}, [model("m", 3)])
    apply(fleet, model("m", 3, version=2))
    for wiped in (False, True, False):
        fleet.until(lambda: fleet.ready("m") >= 3 and NEW in generations(fleet), "a successor is there")
        (node, *_) = [name for name, agent in fleet.agents.items() if any(e.order.generation == NEW for e in agent.running())]
        reboot(fleet, node, wiped)
        assert rollout(fleet).failures == () and rollout(fleet).state in ("running", "done")
    fleet.until(lambda: rollout(fleet).state == "done" and fleet.ready("m") == 3, "done")
    fleet.until(lambda: generations(fleet) == {NEW}, "all changed")


def test_a_profile_that_fails_on_a_machine_that_restarted_is_still_to_blame():
    """What starts there again and dies by itself counts."""
    fleet = serving({"a": 2}, [model("m", 1)])
    slow(fleet, 60)
    apply(fleet, model("m", 1, version=2))
    fleet.run(5)
    doom(fleet)
    reboot(fleet, "a")
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back", 400)
    assert len(rollout(fleet).failures) == 3
    assert least(fleet, 60) == 1 or fleet.ready("m") == 1
