"""What operators order while replicas change: apply, pause, resume, undo, restart, drain; over whole simulated fleets."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.fleet.model import Catalog, Rollout
from llmgw.planning.strategy import Way, decide
from llmgw.planning.world import Draft
from llmgw.server.catalogs import Catalogs
from llmgw.server.operations import Conflict, Operations, Outage, Unknown
from llmgw.server.rollouts import Rollouts
from llmgw.testing.simulate import Fleet, model
from tests.test_planning_rollout import NEW, OLD, doom, generations, least, rollout, serving


def result(deferred):
    """What a Deferred has by now; its error is raised."""
    found = []
    deferred.addBoth(found.append)
    assert found, "not yet"
    if hasattr(found[0], "raiseException"):
        found[0].raiseException()
    return found[0]


def apply(fleet, *models, **options):
    """What C{llmgw apply} does."""
    return result(Catalogs(fleet.controller).apply(Catalog(models), "test", **options))


def order(fleet, action, outage=False):
    """What C{llmgw rollout m --ACTION} does."""
    return result(Rollouts(fleet.controller).order("m", action, outage))


def decided(fleet, *models):
    """The one decision of an apply that is only tried."""
    (decision,) = apply(fleet, *models, dry_run=True).decisions
    return decision


def test_apply_says_beforehand_that_there_is_room():
    """The line names the way, and the rollout takes it."""
    fleet = serving()
    done = apply(fleet, model("m", 2, version=2), allow_outage=False)
    assert [decision.way for decision in done.decisions] == [Way.SURGE]
    said = "change m: arguments.version 1 -> 2: 2 replicas replaced one at a time, each successor ready before the old one drains"
    assert done.lines[0].startswith(said)
    assert rollout(fleet).state == "running", "whoever looks right after the apply sees that it is not done"
    assert least(fleet, 60) == 2 and generations(fleet) == {NEW}


def test_g6_apply_says_beforehand_that_there_is_none():
    """G6: the shortage is named in the same words as by explain."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    decision = decided(fleet, model("m", 2, version=2))
    assert decision.way is Way.REPLACE
    assert decision.text == (
        "2 replicas replaced one at a time: an old one stops before its successor starts (2 too few devices (need 1, most free "
        "0)), at least 1 serving"
    )


def test_g6_apply_says_beforehand_that_a_successor_fits_nowhere():
    """G6: nothing will change, and why."""
    fleet = serving({"a": 1}, [model("m", 1)])
    decision = decided(fleet, model("m", 1, devices=4))
    assert decision.way is Way.HELD and "1 replica kept as they are, since a successor fits nowhere" in decision.text


def test_two_models_are_not_promised_the_same_room():
    """One spare device: the first surges, the second cannot."""
    fleet = serving({"a": 3}, [model("m", 1), model("n", 1)])
    decisions = apply(fleet, model("m", 1, version=2), model("n", 1, version=2), dry_run=True).decisions
    assert [decision.way for decision in decisions] == [Way.SURGE, Way.OUTAGE]


def test_apply_refuses_an_outage_unless_it_is_allowed():
    """One replica, no spare device: refused with a sentence and nothing changed; with leave it is done."""
    fleet = serving({"a": 1}, [model("m", 1)])
    revision, pids = fleet.controller.truth.catalog_revision, fleet.pids()
    with pytest.raises(Outage, match="m/1 is the only replica that serves and has to stop.*--allow-outage"):
        apply(fleet, model("m", 1, version=2), allow_outage=False)
    fleet.run(5)
    assert fleet.controller.truth.catalog_revision == revision and fleet.pids() == pids
    apply(fleet, model("m", 1, version=2), allow_outage=True)
    fleet.until(lambda: rollout(fleet).state == "done", "done")
    assert generations(fleet) == {NEW}


def test_a_catalog_taken_without_asking_takes_down_no_only_replica():
    """A start or SIGHUP cannot be answered: the catalog is taken, the replica stays, and resume with leave goes on."""
    fleet = serving({"a": 1}, [model("m", 1)])
    apply(fleet, model("m", 1, version=2))
    fleet.run(30)
    assert generations(fleet) == {OLD} and fleet.ready("m") == 1
    order(fleet, "resume", outage=True)
    fleet.until(lambda: rollout(fleet).state == "done", "done")
    assert generations(fleet) == {NEW}


def test_a_paused_rollout_stands_still_over_restarts_and_failures():
    """One of three has changed: no further one does, over a server's death, too; one that crashes comes back as it was."""
    fleet = serving({"a": 2, "b": 2}, [model("m", 3)])
    apply(fleet, model("m", 3, version=2))
    fleet.until(lambda: "m/4" in fleet.routers.routed, "the first successor")
    order(fleet, "pause")
    fleet.run(20)
    before = fleet.pids()
    fleet.run(60)
    fleet.end()
    fleet.lead()
    fleet.run(60)
    assert fleet.pids() == before and generations(fleet) == {OLD, NEW}
    assert f"paused with 1 of {len(before)} replicas changed" in fleet.controller.outcome.notes["m"]
    name = next(name for name in before if not name.startswith("m/4/"))
    agent = fleet.agents[name.rpartition("@")[2]]
    agent.die(agent.engines[name.partition("@")[0]], fleet.clock.seconds(), "chance")
    fleet.until(lambda: fleet.ready("m") == len(before) == len(fleet.engines()), "back")
    assert generations(fleet) == {OLD, NEW}
    order(fleet, "resume")
    fleet.until(lambda: rollout(fleet).state == "done", "done")
    fleet.until(lambda: generations(fleet) == {NEW}, "all changed")


def test_a_pause_keeps_the_successor_that_has_begun_to_load():
    """Loading took long enough: it serves beside the old ones until the rollout goes on."""
    fleet = serving()
    apply(fleet, model("m", 2, version=2))
    fleet.until(lambda: any("m/3/0" in engine and "loading" in engine for engine in fleet.engines()), "it loads")
    pids = fleet.pids()
    order(fleet, "pause")
    fleet.run(30)
    assert fleet.pids() == pids and set(fleet.routers.routed) == {"m/1", "m/2", "m/3"}
    order(fleet, "resume")
    fleet.until(lambda: rollout(fleet).state == "done", "done")
    assert "m/3" in fleet.routers.routed


def test_undo_goes_back_from_the_middle_and_from_the_end():
    """The profile before is in force again, one replica at a time, until resume goes forward."""
    fleet = serving()
    apply(fleet, model("m", 2, version=2))
    fleet.until(lambda: rollout(fleet).state == "done", "done")
    fleet.run(5)
    assert "undone" in order(fleet, "undo")
    assert least(fleet, 60) == 2 and generations(fleet) == {OLD}
    fleet.end()
    fleet.lead()
    fleet.run(30)
    assert generations(fleet) == {OLD} and rollout(fleet).state == "undone"
    order(fleet, "resume")
    fleet.run(8)
    order(fleet, "undo")
    assert least(fleet, 60) == 2 and generations(fleet) == {OLD}


def test_the_same_catalog_applied_again_says_that_the_model_stays_where_it_is():
    """Nothing changes, and what would try the profile again is said; it is no second rollout."""
    fleet = serving(models=[model("m", 1)])
    doom(fleet)
    apply(fleet, model("m", 1, version=2))
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back")
    nothing, stays = apply(fleet, model("m", 1, version=2)).lines
    assert nothing == "nothing changes" and stays.startswith("m stays as it is: rolled back to profile")
    assert stays.endswith("llmgw rollout m --resume")
    fleet.run(60)
    assert generations(fleet) == {OLD} and fleet.ready("m") == 1


def test_resume_tries_a_rolled_back_profile_again_with_a_fresh_budget():
    """What made it fail is mended: it comes into force."""
    fleet = serving(models=[model("m", 1)])
    doom(fleet)
    apply(fleet, model("m", 1, version=2))
    fleet.until(lambda: rollout(fleet).state == "rolled_back", "rolled back")
    for agent in fleet.agents.values():
        agent.doomed.clear()
    order(fleet, "resume")
    assert rollout(fleet).failures == ()
    fleet.until(lambda: rollout(fleet).state == "done", "done")


def test_orders_that_make_no_sense_are_refused_with_a_sentence():
    """Nothing to pause, to resume, to undo; no such model."""
    fleet = serving(models=[model("m", 1)])
    for action, said in (("pause", "not changing"), ("resume", "no rollout that waits"), ("undo", "no profile to go back to")):
        with pytest.raises(Conflict, match=said):
            order(fleet, action)
    with pytest.raises(Unknown, match="runs no model x; it runs: m"):
        Rollouts(fleet.controller).show("x")


def test_rollout_shows_how_far_it_is():
    """Numbers and a line per replica, for people; the same for programs."""
    fleet = serving()
    apply(fleet, model("m", 2, version=2))
    fleet.until(lambda: "m/3" in fleet.routers.routed, "the first successor")
    shown = Rollouts(fleet.controller).show("m")
    assert shown["text"] == f"m: running: 1 of 2 replicas run profile {NEW}; 1 serves with {OLD}, the one before"
    assert (shown["changed"], shown["wanted"], shown["back"]) == (1, 2, OLD)
    assert any(line.startswith("  m/3  ") and line.endswith(f"profile {NEW}  ready") for line in shown["lines"])


def test_g1_force_waits_for_no_successor_but_for_requests():
    """G1: the replica drains at once although nothing else serves; what runs there ends before the engine does."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 1)])
    fleet.routers.flying["m/1"] = 1
    result(Operations(fleet.controller).drain(["a"], None, True, False))
    fleet.run(2)
    assert "m/1/0@a draining 1" in fleet.engines()
    fleet.run(20)
    assert "m/1/0@a draining 1" in fleet.engines()
    fleet.routers.flying.clear()
    fleet.until(lambda: fleet.says("a: drained"), "drained")
    fleet.until(lambda: fleet.ready("m") == 1, "served again")


def test_f14_a_cordoned_node_whose_agent_ends_shows_its_shards_as_unknown():
    """F14: not as ready; it stays cordoned, and what its engines serve stays routed."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    result(Operations(fleet.controller).cordon(["a"], True))
    fleet.agents["a"].alive = False
    fleet.run(20)
    record = next(r for r in fleet.controller.truth.shards.values() if r.allocation.node == "a")
    assert record.state == "unknown" and fleet.ready("m") == 2
    assert fleet.controller.truth.nodes["a"].cordoned


def test_f14_g2_a_drain_of_a_node_that_is_away_waits_for_it_over_restarts():
    """F14, G2: recorded at once, kept over a restart of the server, carried out when the node is back."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 1)])
    fleet.cut.add("a")
    fleet.run(2)
    result(Operations(fleet.controller).drain(["a"], 600.0, False, False))
    fleet.end()
    fleet.lead()
    fleet.until(lambda: "m/2" in fleet.routers.routed, "elsewhere")
    fleet.cut.clear()
    fleet.until(lambda: fleet.engines() == ["m/2/0@b ready 1"], "only there")
    assert fleet.controller.truth.nodes["a"].draining


def test_a_node_that_runs_something_is_removed_by_force_only():
    """The sentence says what runs there and what to do."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 1)])
    with pytest.raises(Conflict, match=r"a still runs m/1/0: first llmgw drain a --wait"):
        result(Operations(fleet.controller).remove("a"))
    Operations(fleet.controller).drain(["a"], None, False, False)
    fleet.until(lambda: fleet.says("a: drained"), "drained")
    result(Operations(fleet.controller).remove("a"))
    fleet.run(5)
    assert fleet.controller.truth.nodes["a"].state == "removed" and fleet.ready("m") == 1


def test_a_lost_node_is_removed_without_force():
    """It has been given up already; its replicas are elsewhere."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 1)])
    fleet.cut.add("a")
    fleet.until(lambda: fleet.controller.truth.nodes["a"].state == "lost", "lost", 120)
    result(Operations(fleet.controller).remove("a"))
    fleet.run(30)
    assert fleet.controller.truth.nodes["a"].state == "removed" and set(fleet.routers.routed) == {"m/2"}


def test_g5_one_replica_that_does_not_stop_holds_nobody_else():
    """G5: it is seen as stopping, and the rollout goes on round it."""
    fleet = serving({"a": 2, "b": 2}, [model("m", 2)])
    fleet.agents["a"].grace = 1e9
    apply(fleet, model("m", 2, version=2))
    fleet.until(lambda: fleet.ready("m") == 2 and set(fleet.routers.routed) == {"m/3", "m/4"}, "both changed")
    fleet.until(lambda: "m/1/0@a stopping 1" in fleet.engines(), "it got its order")
    fleet.run(100)
    assert fleet.controller.truth.shards["m/1/0"].state == "stopping" and rollout(fleet).state == "done"


@pytest.mark.parametrize("step", range(0, 24, 2))
def test_g7_a_removal_ends_as_gone_wherever_the_server_dies(step):
    """G7: killed and started again at each quarter of a second of a removal: nothing is left, half or whole."""
    fleet = serving({"a": 2}, [model("m", 2), model("n", 0)])
    result(Catalogs(fleet.controller).apply(Catalog((model("n", 0),)), "test", allow_removals=True))
    fleet.run(step * 0.25 or 0.25)
    fleet.end()
    fleet.run(1)
    fleet.lead()
    fleet.until(lambda: not fleet.engines(), "stopped")
    fleet.until(lambda: not [r for r in fleet.controller.truth.shards.values() if r.allocation], "gone")
    assert "m" not in fleet.controller.truth.rollouts and not fleet.routers.routed


def returned(policy):
    """A fleet whose node a was lost, replaced and came back, and what is routed then at most at once."""
    fleet = serving({"a": 1, "b": 1, "c": 1}, [evolve(model("m", 1), reconcile=policy)])
    fleet.cut.add("a")
    fleet.until(lambda: "m/2" in fleet.routers.routed, "a replacement", 120)
    fleet.run(30)
    fleet.cut.clear()
    most = 0
    for _ in range(200):
        fleet.step()
        most = max(most, fleet.ready("m"))
        assert fleet.ready("m") >= 1
    return fleet, most


@pytest.mark.parametrize(("policy", "stays"), [("keep_original", "m/1"), ("keep_replacement", "m/2"), ("longest_running", "m/1")])
def test_d3_a_returning_node_is_reconciled_by_the_models_policy(policy, stays):
    """D3: one copy stays, the other is drained, and never are two routed."""
    fleet, most = returned(policy)
    assert set(fleet.routers.routed) == {stays} and len(fleet.engines()) == 1 and most == 1


def test_d3_a_restart_makes_a_copy_young():
    """D3: of three copies of two wanted the one that was restarted last leaves, although its number is the lowest."""
    fleet = serving(dict.fromkeys("abcd", 1), [evolve(model("m", 2), reconcile="longest_running")])
    fleet.cut.add("b")
    fleet.until(lambda: "m/3" in fleet.routers.routed, "a replacement", 120)
    fleet.agents["a"].die(fleet.agents["a"].engines["m/1/0"], fleet.clock.seconds(), "chance")
    fleet.run(1)
    fleet.until(lambda: set(fleet.routers.routed) == {"m/1", "m/3"}, "restarted")
    fleet.run(5)
    fleet.cut.clear()
    fleet.run(30)
    assert set(fleet.routers.routed) == {"m/2", "m/3"}, "the two that have run longest"


def test_d3_the_original_serves_until_the_replacement_that_is_kept_does():
    """D3: keep_replacement, which is still loading when the node comes back: never none is routed, never both."""
    fleet = serving({"a": 1, "b": 1}, [evolve(model("m", 1), reconcile="keep_replacement")])
    fleet.agents["b"].load = 60.0
    fleet.cut.add("a")
    fleet.until(lambda: "m/2/0@b loading 1" in fleet.engines(), "a replacement loads", 120)
    fleet.cut.clear()
    fleet.run(10)
    assert set(fleet.routers.routed) == {"m/1"}
    assert least(fleet, 120) == 1 and set(fleet.routers.routed) == {"m/2"} and len(fleet.engines()) == 1


def test_d3_no_copy_that_serves_leaves_for_one_that_does_not():
    """D3: keep_replacement, but the replacement has failed by then: the original serves on."""

    def fail(fleet):
        agent = next(agent for agent in fleet.agents.values() if "m/2/0" in agent.engines)
        agent.die(agent.engines["m/2/0"], fleet.clock.seconds(), "chance")
        fleet.run(1)

    fleet = serving({"a": 1, "b": 1}, [evolve(model("m", 1), reconcile="keep_replacement")])
    fleet.cut.add("a")
    fleet.until(lambda: "m/2" in fleet.routers.routed, "a replacement", 120)
    fail(fleet)
    fleet.cut.clear()
    fleet.until(lambda: set(fleet.routers.routed) == {"m/1"}, "the original")
    assert least(fleet, 60) == 1 and fleet.engines() == ["m/1/0@a ready 1"]


def test_a_surge_only_model_is_decided_as_held():
    """rollout.strategy surge without room: said beforehand."""
    fleet = serving({"a": 1, "b": 1}, [model("m", 2)])
    decision = decided(fleet, evolve(model("m", 2, version=2), rollout=Rollout(strategy="surge")))
    assert decision.way is Way.HELD and "rollout.strategy is surge" in decision.text


def test_a_model_that_does_not_serve_needs_no_decision():
    """Nothing is replaced, so nothing is said of replacing."""
    fleet = Fleet({"a": 1})
    fleet.lead([model("m", 0)])
    fleet.run(2)
    assert apply(fleet, model("m", 0, version=2), dry_run=True).decisions == ()
    decision = decide(Draft(fleet.controller.world()), "m")
    assert decision.way is Way.START and decision.text == "nothing of it serves that has to be replaced"


def test_a_change_that_fits_nowhere_says_that_the_old_ones_serve():
    """The command counts who serves with the profile before, and says why nobody has the new one."""
    fleet = serving({"a": 2}, [model("m", 2)])
    apply(fleet, model("m", 2, devices=3, version=2))
    fleet.run(10)
    shown = Rollouts(fleet.controller).show("m")
    assert f"m: running: 0 of 2 replicas run profile {shown['generation']}; 2 serve with {OLD}, the one before" in shown["text"]
    assert shown["serving_before"] == 2
    assert "its successor fits nowhere; it stays as it is" in shown["lines"][-1]
