"""Scaling to zero where engines can sleep: on a virtual clock with the real controller, and through an agent's real parts."""

from __future__ import annotations

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.engines.command import Command
from llmgw.engines.vllm import Vllm
from llmgw.fleet.model import Profile, Scale
from llmgw.fleet.node import Fabric, Installation
from llmgw.fleet.shard import Allocation, ShardState, Wanted
from llmgw.testing.simulate import Fleet, model
from tests.agent_rig import FAKE, Rig, node_rigs, order, settle, until

SLEEPING, READY, STOPPED = ShardState.SLEEPING, ShardState.READY, ShardState.STOPPED


def napping(devices=1, *others):
    """A model at zero replicas whose engine sleeps."""
    fleet = Fleet({"a": devices})
    fleet.agents["a"].sleeps = True
    fleet.lead([evolve(model("m"), replicas=Scale(0, 1, idle_after=20.0)), *others])
    fleet.controller.demand.asked("m")
    fleet.until(lambda: fleet.ready("m") == 1, "it serves")
    fleet.until(lambda: states(fleet) == ["sleeping"], "asleep", 60)
    fleet.run(1)
    return fleet


def states(fleet, name="m"):
    return [str(engine.state) for agent in fleet.agents.values() for engine in agent.running() if engine.order.model == name]


def test_an_idle_model_sleeps_and_the_same_engine_is_woken():
    """Drained first, not routed while it sleeps, over a restart of the server, too; the next request wakes it, not another."""
    fleet = napping()
    pids = fleet.pids()
    assert fleet.says("m/1/0 a: ready -> draining: m wants 0; to sleep")
    assert fleet.says("m/1/0 a: draining -> sleeping")
    fleet.run(10)
    fleet.end()
    fleet.lead()
    fleet.run(60)
    assert states(fleet) == ["sleeping"] and fleet.ready("m") == 0
    fleet.controller.demand.asked("m")
    fleet.until(lambda: fleet.ready("m") == 1, "awake")
    assert fleet.pids() == pids and fleet.engines() == ["m/1/0@a ready 1"]
    fleet.until(lambda: states(fleet) == ["sleeping"], "asleep again", 60)
    assert fleet.pids() == pids


def test_a_request_on_it_keeps_it_awake():
    """What drains is not put to sleep under a stream; its engine sleeps when that has ended."""
    fleet = Fleet({"a": 1})
    fleet.agents["a"].sleeps = True
    fleet.lead([evolve(model("m"), replicas=Scale(0, 1, idle_after=20.0))])
    fleet.controller.demand.asked("m")
    fleet.until(lambda: fleet.ready("m") == 1, "it serves")
    fleet.until(lambda: states(fleet) == ["draining"] or fleet.ready("m") == 0, "it drains", 60)
    fleet.routers.flying["m/1"] = 1
    fleet.run(20)
    assert states(fleet) == ["draining"]
    fleet.routers.flying.clear()
    fleet.until(lambda: states(fleet) == ["sleeping"], "asleep")


@pytest.mark.parametrize("why", ["profile", "no replicas", "drain"])
def test_who_cannot_be_woken_any_more_is_stopped(why):
    """Another profile, no replicas at all, or a node that is emptied: the sleeper goes, with the reason."""
    fleet = napping()
    if why == "profile":
        fleet.apply([evolve(model("m", version=2), replicas=Scale(0, 1, idle_after=20.0))])
    elif why == "no replicas":
        fleet.apply([evolve(model("m"), replicas=Scale(0, 0))])
    else:
        record = fleet.controller.truth.nodes["a"]
        changes = [evolve(record, draining=True, cordoned=True, drain_deadline=fleet.clock.seconds() + 600)]
        fleet.controller.change(lambda: changes)
    fleet.until(lambda: fleet.engines() == [], "stopped", 60)
    words = {"profile": "its profile changed", "no replicas": "is to have no replicas", "drain": "a is drained"}[why]
    assert fleet.says("m/1/0 a: sleeping -> stopping", words)


def test_an_engine_over_several_nodes_is_stopped_instead_and_it_is_said():
    """Its ranks would have to sleep at once: idle_after ends it, says why, and the next request starts it anew."""
    fleet = Fleet({"a": 1, "b": 1})
    for agent in fleet.agents.values():
        agent.sleeps, agent.fabrics = True, (Fabric("rack"),)
    fleet.lead([evolve(model("m", nodes=2), replicas=Scale(0, 1, idle_after=20.0))])
    fleet.controller.demand.asked("m")
    fleet.until(lambda: fleet.ready("m") == 1, "it serves")
    fleet.until(lambda: fleet.engines() == [], "stopped", 60)
    assert fleet.says("m/1/0 a: ready -> draining: m wants 0; stopped, since an engine over 2 nodes is not put to sleep")
    fleet.controller.demand.asked("m")
    fleet.until(lambda: fleet.ready("m") == 1, "it serves again")


def test_a_sleeper_makes_room_for_others():
    """It has the device to itself though it sleeps; a model that wants one has it stopped, and then starts."""
    fleet = napping()
    fleet.run(60)
    fleet.apply([evolve(model("m"), replicas=Scale(0, 1, idle_after=20.0)), model("n")])
    fleet.until(lambda: fleet.ready("n") == 1, "the other serves", 60)
    assert states(fleet) == [] and fleet.says("m/1: gives its room to n/1")


def test_one_that_died_in_its_sleep_is_forgotten_and_another_started():
    """Nobody misses it before the next request, which gets a new one."""
    fleet = napping()
    (engine,) = fleet.agents["a"].running()
    fleet.agents["a"].die(engine, fleet.clock.seconds(), "it fell over")
    fleet.run(10)
    assert fleet.engines() == []
    fleet.controller.demand.asked("m")
    fleet.until(lambda: fleet.engines() == ["m/2/0@a ready 1"], "another", 60)


# Through an agent's real parts.


class Sleepy(Command):
    """A command engine that can sleep."""

    path = "/fake/sleep"

    def launch(self, *arguments):
        return evolve(super().launch(*arguments), sleep=self.path, wake="/fake/wake")


@pytest.fixture
def rig(reactor, tmp_path):
    found = Rig(reactor, tmp_path)
    found.checks.adapters = {"command": Sleepy()}
    yield found
    found.close()
    settle(reactor)


@pytest_twisted.ensureDeferred
async def test_an_engine_falls_asleep_and_wakes_in_one_process(rig):
    """It is asked to over HTTP, and the agent that adopts it in between knows that it sleeps."""
    shard = await rig.ready()
    assert shard.report().sleeps
    pid = shard.report().pid
    shard.drain()
    # Without the order it would be woken again at once.
    shard.order(evolve(shard.intent.order, wanted=Wanted.SLEEP))
    shard.sleep()
    await rig.reach(shard, SLEEPING)
    shard.leave()
    adopted = rig.adopt()
    assert adopted.state is SLEEPING and adopted.report().pid == pid
    adopted.order(evolve(adopted.intent.order, wanted=Wanted.RUN))
    adopted.wake()
    await rig.reach(adopted, READY)
    assert adopted.reason == "it is awake again" and (await rig.around.probe.works(adopted.intent)).serves


@pytest_twisted.ensureDeferred
async def test_one_that_does_not_fall_asleep_is_stopped(rig, monkeypatch):
    """The same as where engines cannot sleep at all."""
    monkeypatch.setattr(Sleepy, "path", "/fake/nothing")
    shard = await rig.ready()
    shard.sleep()
    await rig.reach(shard, STOPPED)
    assert "does not fall asleep" in shard.reason


@pytest.fixture
def rigs(reactor, tmp_path):
    with node_rigs(reactor, tmp_path) as make:
        yield make


@pytest_twisted.ensureDeferred
async def test_a_node_follows_the_orders_to_sleep_and_to_wake(rigs):
    """Each is answered when it has come about; an order to wake that comes while it falls asleep is followed afterwards."""
    node = rigs()
    node.node._checks.adapters = {"command": Sleepy()}
    await node.start()
    start = order(FAKE)
    node.order(start)
    await node.done(start.operation)
    nap = evolve(start, wanted=Wanted.SLEEP, operation="sleep:1")
    node.order(nap)
    assert (await node.done("sleep:1")).ok and node.reports()["m/1/0"].state is SLEEPING
    node.order(evolve(start, operation="run:2"))
    assert (await node.done("run:2")).ok and node.reports()["m/1/0"].state is READY
    node.order(evolve(nap, operation="sleep:3"))
    node.order(evolve(start, operation="run:4"))
    await until(node.reactor, lambda: node.events().count(("m/1/0", "sleeping", "ready")) == 2, "awake after all")
    assert node.reports()["m/1/0"].state is READY


def test_vllm_sleeps_only_where_its_profile_asks_for_it():
    """Its paths are the development mode's, which no key guards."""
    asks = Profile("vllm", "m", arguments={"enable-sleep-mode": True}, environment={"VLLM_SERVER_DEV_MODE": "1"})

    def paths(profile, nodes=1):
        allocation = Allocation("a", nodes=nodes, devices=("g",), ports=(20000, 20001, 20002), head="a", peers=("a", "b"))
        launch = Vllm().launch(profile, allocation, Installation("vllm", "vllm"), None, ("m",), "key")
        return launch.sleep, launch.wake

    assert paths(asks) == ("/sleep?level=1", "/wake_up")
    assert paths(evolve(asks, environment={})) == paths(evolve(asks, arguments={})) == ("", "")
    assert paths(asks, nodes=2) == ("", "")
