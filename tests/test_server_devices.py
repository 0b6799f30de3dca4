"""Devices closed to new replicas: by an operator, by themselves, over restarts; through a real server with a real store."""

from __future__ import annotations

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.defer import Deferred

from llmgw.cli.client import Refused
from llmgw.fleet.node import DeviceProcess
from llmgw.testing.simulate import model
from tests.server_rig import Rig

GIB = 2**30


@pytest.fixture
def rig_of(tmp_path):
    """Makes rigs; each is stopped at the end."""
    made = []

    async def make(*models, **more):
        rig = Rig(tmp_path, *models, **more)
        made.append(rig)
        await rig.start()
        return rig

    yield make
    for rig in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(rig.stop()))


def say(rig, name, *devices):
    """The node reports these devices."""
    agent = rig.agents[name]
    inventory = evolve(agent.facts().inventory, devices=devices)
    rig.server.controller.report(name, f"s-{name}", evolve(agent.report(), inventory=inventory))


def devices(rig):
    return {device["uuid"]: device for device in rig.server.view.nodes()[0]["devices"]}


@pytest_twisted.ensureDeferred
async def test_h8_a_cordoned_device_takes_nothing_and_stays_cordoned_over_a_restart(rig_of):
    """H8: what runs on it goes on, placement and its explanation name who closed it and why, and uncordon ends it."""
    rig = await rig_of(model("m", 2))
    rig.link("a", 2)
    await rig.ready("m", 2)
    await rig.post("/v1/cordon", nodes=["a"], device="a-gpu1", reason="fan is loud")
    assert rig.row("m")["ready"] == 2
    await rig.stop()
    rig.make()
    await rig.start()
    rig.link("a", 2)
    await rig.until(lambda: devices(rig)["a-gpu1"]["cordon"], "still cordoned")
    found = devices(rig)["a-gpu1"]
    assert found["problem"] == "cordoned by an operator: fan is loud" and found["shards"] == ["m/2/0"]
    assert found["cordon"]["since"] > 1e9
    rig.agents["a"].die(rig.agents["a"].engines["m/2/0"], 0.0, "it broke")
    await rig.post("/v1/restart", model="m", replica=2, allow_outage=True)
    await rig.until(lambda: rig.row("m")["ready"] == 1 and "fan is loud" in rig.row("m")["reason"] + explained(rig), "explained")
    await rig.post("/v1/uncordon", nodes=["a"], device="a-gpu1")
    await rig.ready("m", 2)
    assert devices(rig)["a-gpu1"]["cordon"] is None


def explained(rig):
    """All that explain says of m."""
    from llmgw.planning.reconcile import explain

    controller = rig.server.controller
    why = explain(controller.world(), controller.outcome, "m") if controller.outcome else None
    return "\n".join(why.lines()) if why else ""


@pytest_twisted.ensureDeferred
async def test_h8_a_lost_device_is_cordoned_by_itself_until_it_is_well(rig_of):
    """H8: with the reason and since when, in status, events and explain; nobody can open it meanwhile, and it opens by itself."""
    rig = await rig_of(model("m", 1))
    agent = rig.link("a", 2)
    await rig.ready("m")
    first, second = agent.facts().inventory.devices
    say(rig, "a", first, evolve(second, missing_since=1000.0, kernel_log="Xid 79: GPU has fallen off the bus"))
    cordon = await rig.until(lambda: devices(rig)["a-gpu1"]["cordon"], "cordoned by itself")
    assert cordon == {"reason": "missing (Xid 79: GPU has fallen off the bus)", "since": 1000.0, "by": ""}
    problem = "missing since 1970-01-01 00:16 UTC (Xid 79: GPU has fallen off the bus)"
    assert devices(rig)["a-gpu1"]["problem"] == problem
    with pytest.raises(Refused, match="opens by itself when it is well"):
        await rig.post("/v1/uncordon", nodes=["a"], device="a-gpu1")
    await rig.server.catalogs.apply(type(rig.settings.catalog)((model("m", 2),)), "test")
    await rig.until(lambda: "gpu 1: missing (Xid 79" in explained(rig), "explained")
    say(rig, "a", first, second)
    await rig.ready("m", 2)
    assert devices(rig)["a-gpu1"]["cordon"] is None
    texts = [event["text"] for event in (await rig.get("/v1/events"))["events"] if event["kind"] == "device"]
    assert "is cordoned by itself: missing (Xid 79" in texts[0] and "is well again" in texts[1]


@pytest_twisted.ensureDeferred
async def test_h8_an_engine_whose_device_is_lost_is_not_tried_there_again(rig_of):
    """H8: it starts on another device of the node at once; where there is none, it waits and says for what."""
    rig = await rig_of(model("m", 1))
    agent = rig.link("a", 2)
    await rig.ready("m")
    first, second = agent.facts().inventory.devices
    (engine,) = agent.running()
    lost = next(device for device in (first, second) if device.uuid in engine.order.allocation.devices)
    say(rig, "a", *(evolve(one, missing_since=1000.0) if one is lost else one for one in (first, second)))
    agent.die(engine, 0.0, "CUDA error: device lost")
    await rig.until(lambda: [one for one in agent.running() if lost.uuid not in one.order.allocation.devices], "moved")
    await rig.ready("m")
    say(rig, "a", *(evolve(one, missing_since=1000.0) for one in (first, second)))
    agent.die(agent.running()[0], 0.0, "CUDA error: device lost")
    await rig.until(lambda: "is not started again where it was: gpu" in str(rig.server.controller.outcome.notes), "waits")
    attempts = [record.attempt for record in rig.server.controller.truth.shards.values() if record.allocation]
    say(rig, "a", first, second)
    await rig.ready("m")
    assert attempts == [1]


@pytest_twisted.ensureDeferred
async def test_an_operators_cordon_outlives_the_devices_recovery(rig_of):
    """It was closed by somebody, so somebody opens it."""
    rig = await rig_of()
    agent = rig.link("a", 1)
    (device,) = agent.facts().inventory.devices
    await rig.until(lambda: rig.server.view.nodes(), "known")
    await rig.post("/v1/cordon", nodes=["a"], device="a-g")
    say(rig, "a", evolve(device, problem="the GPU is lost"))
    await rig.until(lambda: "lost" in devices(rig)["a-gpu0"]["problem"], "sick")
    say(rig, "a", device)
    await rig.until(lambda: "lost" not in devices(rig)["a-gpu0"]["problem"], "well")
    assert devices(rig)["a-gpu0"]["cordon"]["by"] == "an operator"


@pytest_twisted.ensureDeferred
async def test_a_wrong_device_is_refused_with_those_there_are(rig_of):
    """As are several nodes at once, and a beginning that fits several."""
    rig = await rig_of()
    rig.link("a", 2)
    await rig.until(lambda: rig.server.view.nodes(), "known")
    for body, said in (
        ({"nodes": ["a"], "device": "GPU-x"}, "has no device GPU-x; known: a-gpu0, a-gpu1"),
        ({"nodes": ["a"], "device": "a-"}, "several devices that begin with a-"),
        ({"nodes": ["a", "b"], "device": "a-gpu0"}, "a device is of one node"),
    ):
        with pytest.raises(Refused, match=said):
            await rig.post("/v1/cordon", **body)


@pytest_twisted.ensureDeferred
async def test_h4_a_device_shows_every_holder_and_claim_beside_its_observed_use(rig_of):
    """H4: claimed by our shards, used by them and by a stranger with its pid; a failed shard claims nothing."""
    rig = await rig_of(model("m", 1))
    agent = rig.link("a", 1)
    await rig.ready("m")
    (device,) = agent.facts().inventory.devices
    stranger = DeviceProcess(8123, "python3", 6 * GIB)
    say(rig, "a", evolve(device, memory_used=10 * GIB, memory_reserved=GIB, processes=(stranger,)))
    found = await rig.until(lambda: devices(rig)["a-gpu0"]["foreign"] and devices(rig)["a-gpu0"], "foreign use")
    assert found["foreign"] == [{"pid": 8123, "name": "python3", "memory": 6 * GIB}]
    assert (found["memory_total"], found["memory_reserved"], found["memory_used"]) == (80 * GIB, GIB, 10 * GIB)
    assert found["shards"] == ["m/1/0"] and found["memory_claimed"]
    await rig.server.catalogs.apply(type(rig.settings.catalog)((model("m", 0),)), "test")
    await rig.until(lambda: not devices(rig)["a-gpu0"]["shards"], "given back")
    assert devices(rig)["a-gpu0"]["memory_claimed"] == 0
