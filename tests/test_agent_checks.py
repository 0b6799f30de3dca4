"""What an agent adds to a launch from what it sees on its node."""

from __future__ import annotations

import pytest
from attrs import evolve
from twisted.internet.defer import Deferred

from llmgw.agent.checks import Checks
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Profile, Resources
from llmgw.fleet.node import Device, DeviceProcess, Installation, Inventory
from llmgw.fleet.shard import Allocation, ShardOrder, Wanted, WeightFiles
from llmgw.interfaces import Flags
from tests.agent_rig import settings
from tests.ports import free_port

GIB = 2**30
STRANGER = DeviceProcess(8123, "python3", 20 * GIB)
OURS = DeviceProcess(8124, "VLLM::EngineCore", 70 * GIB, shard="old/1/0")


class Equipment:
    def __init__(self, *devices):
        self.inventory = Inventory(8, 64 * GIB, devices=devices)

    def installations(self):
        return (Installation("vllm", "vllm", ("vllm",), "0.33.0"),)

    async def flags(self, installation):
        return Flags()

    async def weights(self, weights):
        return WeightFiles(weights, True, "/m", format="safetensors", config={"architectures": ["X"]})


def device(uuid, total=80 * GIB, **given):
    return Device(uuid, 0, "H100", total, **given)


def launch(tmp_path, resources, allocation, *devices):
    profile = Profile("vllm", "m", resources=resources)
    allocation = evolve(allocation, ports=(free_port(),))
    order = ShardOrder("m/1/0", "m", "g", 1, Wanted.RUN, "op", profile, allocation, ("m",))
    checks = Checks(settings(tmp_path), {"vllm": vllm}, Equipment(*devices), list, lambda: None, lambda: "k", lambda: 0.0)
    (tmp_path / "state").mkdir(exist_ok=True)
    prepared = []
    Deferred.fromCoroutine(checks.prepare(order)).addCallback(prepared.append)
    argv = list(prepared[0].launch.argv)
    name = "--gpu-memory-utilization"
    return argv[argv.index(name) + 1] if name in argv else None


@pytest.mark.parametrize(
    ("resources", "memory", "devices", "share"),
    [
        (Resources(device_memory=20 * GIB), 20 * GIB, [device("GPU-a")], "0.250"),
        (Resources(share=True), 20 * GIB, [device("GPU-a", 40 * GIB)], "0.500"),
        (Resources(), 20 * GIB, [device("GPU-a")], None),
        (Resources(), None, [device("GPU-a", processes=(STRANGER,))], "0.740"),
        (Resources(), None, [device("GPU-a", processes=(OURS,))], None),
        (Resources(device_memory=20 * GIB), 20 * GIB, [device("GPU-a", None)], None),
    ],
    ids=["claimed", "shared", "alone", "beside a stranger", "after one of ours", "size unknown"],
)
def test_an_engine_is_told_its_part_of_the_device(tmp_path, resources, memory, devices, share):
    """A claim becomes a fraction of what this node's device has; strangers' memory is left alone; our own is no stranger's."""
    assert launch(tmp_path, resources, Allocation("n1", devices=("GPU-a",), memory=memory), *devices) == share


def test_the_smallest_device_counts(tmp_path):
    """One fraction goes for all ranks."""
    allocation = Allocation("n1", devices=("GPU-a", "GPU-b"), memory=20 * GIB)
    both = device("GPU-a"), device("GPU-b", 40 * GIB)
    assert launch(tmp_path, Resources(device_memory=20 * GIB, devices=1), allocation, *both) == "0.500"


def test_h8_nothing_is_started_on_a_device_that_is_missing_or_sick(tmp_path):
    """H8: whatever the leader believes, who may not have heard of it yet; the refusal names the device and why."""
    for gone, why in ((device("GPU-a", missing_since=1.0), "missing"), (device("GPU-a", problem="it is lost"), "it is lost")):
        order = ShardOrder("m/1/0", "m", "g", 1, Wanted.RUN, "op", Profile("vllm", "m"), Allocation("n1", devices=("GPU-a",)))
        checks = Checks(settings(tmp_path), {"vllm": vllm}, Equipment(gone), list, lambda: None, lambda: "k", lambda: 0.0)
        (tmp_path / "state").mkdir(exist_ok=True)
        refused = []
        Deferred.fromCoroutine(checks.prepare(order)).addErrback(refused.append)
        assert refused[0].value.code == "device_sick"
        assert str(refused[0].value) == f"device GPU-a (gpu 0): {why}"
