"""The node's hardware, against a stub of pynvml that answers like NVML, in the real child process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest_twisted

from llmgw.agent.inventory import NodeInventory
from llmgw.agent.known_devices import KnownDevices
from llmgw.agent.system import infiniband, loopback

STUB = """
import json, os, time
class NVMLError(Exception):
    def __init__(self, value): super().__init__(f"NVML {value}"); self.value = value
PLAN = json.loads(os.environ["STUB"])
nvmlMemory_v2 = 2
def nvmlInit():
    if PLAN.get("hang"): time.sleep(600)
    if PLAN.get("init"): raise NVMLError(PLAN["init"])
def nvmlDeviceGetCount(): return len(PLAN["devices"])
def nvmlSystemGetDriverVersion(): return b"580.65"
def nvmlSystemGetCudaDriverVersion_v2(): return 13000
def nvmlDeviceGetHandleByIndex(i):
    d = PLAN["devices"][i]
    if d.get("handle"): raise NVMLError(d["handle"])
    return d
def need(d, what):
    if what in d.get("fails", {}): raise NVMLError(d["fails"][what])
def nvmlDeviceGetUUID(d): return d["uuid"]
def nvmlDeviceGetName(d): return b"Stub H100"
class Memory:
    def __init__(self, d): self.total, self.used, self.reserved, self.free = d["total"], d["used"], 100, 0
def nvmlDeviceGetMemoryInfo(d, version=None): need(d, "memory"); return Memory(d)
def nvmlDeviceGetCudaComputeCapability(d): need(d, "cc"); return (9, 0)
class P:
    def __init__(self, pid, m): self.pid, self.usedGpuMemory = pid, m
def nvmlDeviceGetComputeRunningProcesses_v3(d): return [P(*row) for row in d.get("processes", [])]
def nvmlDeviceGetFieldValues(d, f): need(d, "fields"); raise NVMLError(3)
class Bus:
    def __init__(self, d): self.busId = d.get("bus", "00000000:3B:00.0").encode()
def nvmlDeviceGetPciInfo(d): return Bus(d)
NVML_P2P_STATUS_OK = 0
def nvmlDeviceGetP2PStatus(a, b, index):
    need(a, "p2p")
    return 0 if b["uuid"] in a.get("peers", []) else 5
class c_nvmlGpuFabricInfo_t: state = 0
def byref(info): return info
def nvmlDeviceGetGpuFabricInfo(d, info): need(d, "fabric"); info.state = d.get("fabric", 0); return 0
def nvmlDeviceGetMigMode(d): return (1, 1) if d.get("mig") else (0, 0)
def nvmlDeviceGetMaxMigDeviceCount(d): return 7
def nvmlDeviceGetMigDeviceHandleByIndex(d, i):
    if i >= len(d["mig"]): raise NVMLError(6)
    return d["mig"][i]
"""

GPU = {"uuid": "GPU-a", "total": 80 * 2**30, "used": 7 * 2**30}


class Stubbed:
    """An inventory whose child finds the stub in place of pynvml."""

    def __init__(self, folder: Path, **options):
        from twisted.internet import reactor

        (folder / "pynvml.py").write_text(STUB)
        (folder / "kmsg").touch()
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}
        marker = options.pop("marker", lambda pid: None)
        self.clock = [1000.0]
        self.inventory = NodeInventory(
            reactor,
            options.pop("devices", "auto"),
            folder,
            marker,
            lambda: self.clock[0],
            self.environment,
            kmsg=folder / "kmsg",
            **options,
        )

    def take(self, **plan):
        self.environment["STUB"] = json.dumps({"devices": [], **plan})
        return self.inventory.take()


@pytest_twisted.ensureDeferred
async def test_devices_with_memory_and_processes(tmp_path):
    """Identity, memory, capability, and whose processes hold it."""
    mine = os.getpid()
    stubbed = Stubbed(tmp_path, marker=lambda pid: "m/1/0" if pid == mine else None)
    found = await stubbed.take(devices=[GPU | {"processes": [[mine, 5 * 2**30], [1, None]]}])
    (device,) = found.devices
    assert (device.uuid, device.name, device.memory_total, device.capability) == ("GPU-a", "Stub H100", 80 * 2**30, (9, 0))
    assert [(p.shard, p.memory) for p in device.processes] == [("m/1/0", 5 * 2**30), (None, None)]
    assert (found.driver, found.cuda, found.problem) == ("580.65", 13000, "")


@pytest_twisted.ensureDeferred
async def test_one_lost_gpu_makes_only_itself_a_problem(tmp_path):
    """The others are told as ever; a field that is not supported is unknown, not zero."""
    devices = [
        GPU | {"handle": 15},
        GPU | {"uuid": "GPU-b", "fails": {"memory": 3, "cc": 3}},
        GPU | {"uuid": "GPU-c", "fails": {"memory": 16}},
    ]
    lost, bare, sick = (await Stubbed(tmp_path).take(devices=devices)).devices
    assert "lost" in lost.problem and lost.index == 0
    assert (bare.problem, bare.memory_total, bare.capability) == ("", None, None)
    assert "reset" in sick.problem and sick.uuid == "GPU-c"


@pytest_twisted.ensureDeferred
async def test_mig_instances_are_devices(tmp_path):
    """With memory and UUID of their own, and their parent named."""
    mig = [{"uuid": "MIG-1", "total": 10, "used": 1}, {"uuid": "MIG-2", "total": 20, "used": 2}]
    found = (await Stubbed(tmp_path).take(devices=[GPU | {"mig": mig}])).devices
    assert [(d.uuid, d.parent, d.memory_total) for d in found[1:]] == [("MIG-1", "GPU-a", 10), ("MIG-2", "GPU-a", 20)]


@pytest_twisted.ensureDeferred
async def test_a_device_that_vanished_is_missing_since(tmp_path):
    """It is still told, and since when, until it is back."""
    stubbed = Stubbed(tmp_path)
    await stubbed.take(devices=[GPU])
    stubbed.clock[0] = 2000.0
    await stubbed.take(devices=[])
    stubbed.clock[0] = 3000.0
    (gone,) = (await stubbed.take(devices=[])).devices
    assert (gone.uuid, gone.missing_since, gone.memory_used) == ("GPU-a", 2000.0, None)
    (back,) = (await stubbed.take(devices=[GPU])).devices
    assert back.missing_since is None


@pytest_twisted.ensureDeferred
async def test_library_troubles_are_sentences(tmp_path):
    """Driver not loaded, driver updated, no library: each told, none fails the inventory."""
    for number, word in ((9, "not loaded"), (18, "rebooted"), (999, "NVML does not start")):
        found = await Stubbed(tmp_path).take(init=number)
        assert word in found.problem and found.devices == () and found.cpus > 0
    assert (await Stubbed(tmp_path).take(init=12)).problem == ""


@pytest_twisted.ensureDeferred
async def test_a_hanging_library_costs_the_news_and_nothing_else(tmp_path):
    """At the deadline the child is killed; what was known of the GPUs stays, with the problem named."""
    stubbed = Stubbed(tmp_path, deadline=1.5)
    await stubbed.take(devices=[GPU])
    found = await stubbed.take(hang=True)
    assert [device.uuid for device in found.devices] == ["GPU-a"]
    assert "no answer in 1.5 s" in found.problem


@pytest_twisted.ensureDeferred
async def test_only_the_devices_that_are_ours(tmp_path):
    """devices: none looks at nothing, a list takes the named ones."""
    both = [GPU, GPU | {"uuid": "GPU-b"}]
    assert (await Stubbed(tmp_path, devices="none").take(devices=both)).devices == ()
    assert [d.uuid for d in (await Stubbed(tmp_path, devices=("GPU-b",)).take(devices=both)).devices] == ["GPU-b"]


@pytest_twisted.ensureDeferred
async def test_this_machine_without_a_stub(tmp_path):
    """The real child on this machine: whatever it has, there are processors and memory."""
    from twisted.internet import reactor

    found = await NodeInventory(reactor, "auto", tmp_path, lambda pid: None, lambda: 0.0).take()
    assert found.cpus >= 1 and found.memory_total > 2**28 and found.disk_free


@pytest_twisted.ensureDeferred
async def test_h5_a_device_told_twice_is_one_device(tmp_path):
    """H5: by its UUID, whatever its index."""
    found = (await Stubbed(tmp_path).take(devices=[GPU, GPU | {"used": 9}])).devices
    assert [device.uuid for device in found] == ["GPU-a"]


@pytest_twisted.ensureDeferred
async def test_h8_a_vanished_device_is_missed_after_the_agent_began_anew_with_its_xid(tmp_path):
    """H8: since when stays, the kernel's log says why, and a device without a UUID is the one missing there."""
    lines = "3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    known = tmp_path / "devices.json"
    first = Stubbed(tmp_path, known=KnownDevices(known))
    await first.take(devices=[GPU])
    first.clock[0] = 2000.0
    await first.take(devices=[])
    (tmp_path / "kmsg").write_text("6,0,1,-;NVRM: loading\n" + lines)
    second = Stubbed(tmp_path, known=KnownDevices(known))
    second.clock[0] = 9000.0
    (gone,) = (await second.take(devices=[])).devices
    assert (gone.uuid, gone.missing_since) == ("GPU-a", 2000.0)
    assert gone.kernel_log == "Xid 79: GPU has fallen off the bus"
    (nameless,) = (await second.take(devices=[GPU | {"handle": 15}])).devices
    assert (nameless.uuid, nameless.missing_since) == ("GPU-a", 2000.0) and "lost" in nameless.problem


@pytest_twisted.ensureDeferred
async def test_a_kernel_log_that_cannot_be_read_is_said(tmp_path):
    """Of the device in question only, with the file and the reason."""
    stubbed = Stubbed(tmp_path)
    stubbed.environment["PATH"] = ""
    (tmp_path / "kmsg").unlink()
    await stubbed.take(devices=[GPU, GPU | {"uuid": "GPU-b"}])
    gone, well = sorted((await stubbed.take(devices=[GPU | {"uuid": "GPU-b"}])).devices, key=lambda device: device.uuid)
    assert f"cannot be read ({tmp_path / 'kmsg'}: No such file" in gone.kernel_log and "journal" in gone.kernel_log
    assert well.kernel_log == ""


@pytest_twisted.ensureDeferred
async def test_h7_instances_that_were_taken_apart_are_not_missed(tmp_path):
    """H7: while their parent is well; with the parent they are missed, too."""
    stubbed = Stubbed(tmp_path)
    await stubbed.take(devices=[GPU | {"mig": [{"uuid": "MIG-1", "total": 10, "used": 1}]}])
    found = (await stubbed.take(devices=[GPU | {"mig": [{"uuid": "MIG-2", "total": 10, "used": 1}]}])).devices
    assert [device.uuid for device in found] == ["GPU-a", "MIG-2"]
    assert {d.uuid for d in (await stubbed.take(devices=[])).devices if d.missing_since} == {"GPU-a", "MIG-2"}


@pytest_twisted.ensureDeferred
async def test_peers_and_the_switch_fabric_are_told(tmp_path):
    """Unknown where the driver does not say, which is not the same as none."""
    other = GPU | {"uuid": "GPU-b", "fabric": 2, "fails": {"p2p": 3}}
    one, two = (await Stubbed(tmp_path).take(devices=[GPU | {"peers": ["GPU-b"], "fabric": 3}, other])).devices
    assert (one.peers, one.fabric, two.peers, two.fabric) == (("GPU-b",), "completed", None, "in progress")


@pytest_twisted.ensureDeferred
async def test_the_systems_limits_are_told(tmp_path):
    """What engines trip over: files, locked memory, shared memory, compilers."""
    found = await Stubbed(tmp_path, devices="none").take()
    assert found.nofile > 0 and found.shm_free and found.kernel and found.compilers is not None
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 n1 # Debian\n10.0.0.2 n2\n")
    assert [loopback(hosts, name) for name in ("n1", "n2", "n3")] == [True, False, None]
    ports = tmp_path / "ib" / "mlx5_0" / "ports" / "1"
    ports.mkdir(parents=True)
    (ports / "state").write_text("4: ACTIVE\n")
    assert infiniband(tmp_path / "ib") and not infiniband(tmp_path / "none")
