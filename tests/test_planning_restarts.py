"""Restarts by order, and an engine that was replaced on a node: over whole simulated fleets."""

from __future__ import annotations

import pytest
from attrs import define, evolve, field

from llmgw.fleet.node import Installation
from llmgw.fleet.shard import ShardReport, ShardState
from llmgw.planning.versions import outdated
from llmgw.server.operations import Operations, Outage, Unknown
from llmgw.testing.simagents import SimAgent
from llmgw.testing.simulate import Fleet, model
from tests.test_planning_rollout import least, serving
from tests.test_planning_rollout_orders import result


@define
class Upgraded(SimAgent):
    """A node whose engine can be replaced: an engine that runs keeps the version that it was started with."""

    installed: str = "1"
    versions: dict[int, str] = field(factory=dict)

    def facts(self):
        return evolve(SimAgent.facts(self), installations=(Installation("sim", "sim", version=self.installed),))

    def _reports(self):
        return tuple(map(self._with_version, SimAgent._reports(self)))

    def _with_version(self, report):
        version = self.versions.setdefault(report.pid, self.installed) if report.pid else None
        return evolve(report, installation="sim", version=version)


def upgraded(nodes, models, *where):
    """A fleet that serves; on the nodes C{where} another version was installed since, which their agents know."""
    fleet = Fleet(nodes)
    fleet.agents = {name: Upgraded(name, devices, fleet.random) for name, devices in nodes.items()}
    fleet.lead(models)
    fleet.until(lambda: all(fleet.ready(one.name) == one.replicas.min for one in models), "all models ready")
    fleet.run(10)
    for name in where:
        fleet.agents[name].installed = "2"
        fleet.cut.add(name)
    fleet.run(1)
    fleet.cut.clear()
    fleet.run(10)
    return fleet


def restart(fleet, model=None, node=None, outdated=True):
    """What C{llmgw restart [MODEL] [--node NODE] --outdated} does."""
    return result(Operations(fleet.controller).restart(model, node, None, False, outdated=outdated))


def test_an_engine_that_was_replaced_interrupts_nothing_by_itself():
    """Hours after an upgrade of both nodes everything runs as before."""
    fleet = upgraded({"a": 2, "b": 2}, [model("m", 2)], "a", "b")
    before = fleet.pids()
    fleet.run(3600)
    assert fleet.pids() == before


def test_outdated_replicas_are_restarted_in_the_whole_fleet_and_no_other_is():
    """Of three nodes two have a new engine: theirs are replaced, each when its successor is ready; the third's stays."""
    fleet = upgraded({"a": 2, "b": 2, "c": 2}, [model("m", 3)], "a", "b")
    before = fleet.pids()
    chosen = restart(fleet)
    assert len(chosen) == 2
    assert least(fleet, 90) == 3
    kept = before.items() & fleet.pids().items()
    assert {shard.partition("@")[2] for shard, _ in kept} == {"c"} and len(fleet.pids()) == 3
    assert restart(fleet) == [], "nothing is outdated any more, which is no error"


def test_outdated_is_narrowed_by_model_and_node():
    """One model's, one node's; a name that does not exist is still told of."""
    fleet = upgraded({"a": 4, "b": 4}, [model("m", 2), model("n", 2)], "a", "b")
    assert {name.partition("/")[0] for name in restart(fleet, "m")} == {"m"}
    fleet.run(90)
    (left,) = restart(fleet, "n", "b")
    assert left.startswith("n/")
    with pytest.raises(Unknown):
        restart(fleet, "x")
    with pytest.raises(Unknown, match="no node is called x"):
        restart(fleet, None, "x")


def test_a_restart_goes_through_a_nodes_replicas_one_by_one():
    """A new installation is taken up: of all models there never more than one replica is restarted at once."""
    fleet = serving({"a": 4}, [model("m", 1), model("n", 2)])
    before = fleet.pids()
    assert result(Operations(fleet.controller).restart(None, "a", None, False)) == ["m/1", "n/1", "n/2"]
    most = 0
    for _ in range(400):
        fleet.step()
        loading = [engine for engine in fleet.engines() if " ready " not in engine and " draining " not in engine]
        most = max(most, sum("starting" in engine or "loading" in engine for engine in loading))
        assert fleet.ready("m") == 1 and fleet.ready("n") == 2
    assert most == 1 and not before.items() & fleet.pids().items()


def test_only_engines_of_another_version_than_is_installed_are_outdated():
    """What runs with another version than is installed now; an unknown version says nothing, nor does what has ended."""

    def report(shard, version, state=ShardState.READY):
        return ShardReport(shard, "m", "g", 1, state, installation="vllm", version=version)

    reports = [report("m/2/0", "0.33"), report("m/1/0", "0.33"), report("m/3/0", "0.34"), report("m/4/0", None)]
    reports.append(report("m/5/0", "0.32", ShardState.STOPPED))
    assert outdated([Installation("vllm", "vllm", version="0.34")], reports) == {("vllm", "0.33"): ["m/1/0", "m/2/0"]}
    assert outdated([Installation("vllm", "vllm")], reports) == {}


def test_a_broken_installation_stops_at_the_first_replica():
    """Its successor does not get ready: every other replica there goes on as it was."""
    fleet = serving({"a": 4}, [model("m", 1), model("n", 2)])
    before = fleet.pids()
    fleet.agents["a"].doomed |= {"m", "n"}
    Operations(fleet.controller).restart(None, "a", None, False)
    fleet.run(600)
    assert before.items() <= fleet.pids().items()


def test_the_only_replica_is_restarted_with_leave_only():
    """Without room beside it; with room its successor is ready first."""
    fleet = serving({"a": 1}, [model("m", 1)])
    operations = Operations(fleet.controller)
    with pytest.raises(Outage, match="m/1: the only ready replica.*--allow-outage"):
        result(operations.restart("m", None, None, False))
    result(operations.restart("m", None, None, True))
    fleet.until(lambda: set(fleet.routers.routed) == {"m/2"}, "restarted")
    fleet = serving({"a": 2}, [model("m", 1)])
    result(Operations(fleet.controller).restart("m", None, 1, False))
    assert least(fleet, 30) == 1 and set(fleet.routers.routed) == {"m/2"}


def test_what_the_catalog_does_not_run_is_not_restarted():
    """A model that was left out of a later store's catalog runs on; a restart would leave it without a successor."""
    fleet = serving({"a": 3}, [model("m", 1), model("n", 1)])
    fleet.apply([model("n", 1)])
    fleet.run(2)
    with pytest.raises(Unknown):
        result(Operations(fleet.controller).restart("m", None, None, True))
    assert result(Operations(fleet.controller).restart(None, "a", None, False)) == ["n/1"]
