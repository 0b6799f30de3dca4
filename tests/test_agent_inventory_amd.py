"""AMD's devices, against a stub of amdsmi that answers like it, in the real child process."""

from __future__ import annotations

import json
import os

import pytest_twisted

from llmgw.agent.inventory import NodeInventory

STUB = """
import json, os, time
class AmdSmiException(Exception): pass
PLAN = json.loads(open(os.environ["STUB"]).read() if os.environ["STUB"].startswith("/") else os.environ["STUB"])
def amdsmi_init():
    if PLAN.get("hang"): time.sleep(600)
    if PLAN.get("init"): raise AmdSmiException(PLAN["init"])
def amdsmi_get_processor_handles(): return PLAN["devices"]
def said(d, what):
    if what in d.get("fails", []): raise AmdSmiException(f"{what}: AMDSMI_STATUS_NOT_SUPPORTED")
    return d.get(what)
def amdsmi_get_gpu_device_uuid(d): return said(d, "uuid")
def amdsmi_get_gpu_device_bdf(d): return said(d, "bdf")
def amdsmi_get_gpu_asic_info(d): said(d, "asic"); return {"market_name": "Instinct MI300X", "target_graphics_version": "gfx942"}
def amdsmi_get_gpu_vram_usage(d): return said(d, "vram")
def amdsmi_get_gpu_total_ecc_count(d): return {"correctable_count": 4, "uncorrectable_count": said(d, "ecc") or 0}
def amdsmi_get_gpu_enumeration_info(d): return {"drm_card": 1, "hsa_id": 9, "hip_id": said(d, "hip"), "hip_uuid": "GPU-1"}
def amdsmi_get_gpu_driver_info(d): return {"driver_name": "amdgpu", "driver_version": "6.12.12"}
def amdsmi_get_gpu_process_list(d): return said(d, "processes") or []
"""
GPU = {"uuid": "amd-1", "bdf": "0000:c1:00.0", "vram": {"vram_total": 196592, "vram_used": 283}}


class Stubbed:
    """An inventory whose children find stubs: a machine with an AMD driver and no NVIDIA library."""

    def __init__(self, folder, **options):
        from twisted.internet import reactor

        (folder / "amdsmi.py").write_text(STUB)
        (folder / "pynvml.py").write_text("raise ImportError('none here')")
        (folder / "kfd").touch()
        (folder / "kmsg").write_text("4,1,2,-;amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!\n")
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}
        self.inventory = NodeInventory(
            reactor,
            options.pop("devices", "auto"),
            folder,
            lambda pid: "m/1/0" if pid == os.getpid() else None,
            lambda: 1000.0,
            self.environment,
            kfd=folder / "kfd",
            kmsg=folder / "kmsg",
            **options,
        )

    def take(self, **plan):
        self.environment["STUB"] = json.dumps({"devices": [], **plan})
        return self.inventory.take()


@pytest_twisted.ensureDeferred
async def test_devices_with_memory_and_processes(tmp_path):
    """Memory in bytes though amdsmi says MiB; what it does not know is unknown, and processes are ours or strangers'."""
    mine = {"pid": os.getpid(), "name": "engine", "memory_usage": {"vram_mem": 7}}
    stranger = {"pid": 1, "name": "init", "memory_usage": {"vram_mem": "N/A"}}
    found = await Stubbed(tmp_path).take(devices=[GPU | {"processes": [mine, stranger]}])
    (device,) = found.devices
    assert (device.uuid, device.kind, device.name, device.architecture) == ("amd-1", "amd", "Instinct MI300X", "gfx942")
    assert (device.memory_total, device.memory_used, device.bus) == (196592 * 2**20, 283 * 2**20, "0000:c1:00.0")
    assert [(p.pid, p.shard, p.memory) for p in device.processes] == [(os.getpid(), "m/1/0", 7), (1, None, None)]
    assert (found.driver, found.problem) == ("6.12.12", "")


@pytest_twisted.ensureDeferred
async def test_the_number_of_a_device_is_that_of_rocm(tmp_path):
    """Which may be another than amdsmi's; where amdsmi cannot tell it, its own is taken for it."""
    stubbed = Stubbed(tmp_path)
    ids = [1, 0, "N/A", 2**32 - 1]
    found = await stubbed.take(devices=[GPU | {"uuid": f"amd-{at}", "hip": hip} for at, hip in enumerate(ids)])
    assert [(device.index, device.hip) for device in found.devices] == [(0, 1), (1, 0), (2, 2), (3, 3)]
    (found,) = (await stubbed.take(devices=[GPU | {"fails": ["hip"]}])).devices[:1]
    assert found.hip == 0


@pytest_twisted.ensureDeferred
async def test_a_sick_gpu_is_a_problem_of_its_own(tmp_path):
    """With what the kernel says of it; the others are told as ever."""
    sick, silent, nameless, well = (
        await Stubbed(tmp_path).take(
            devices=[
                GPU | {"ecc": 3},
                GPU | {"uuid": "amd-2", "fails": ["vram"]},
                GPU | {"fails": ["uuid"]},
                GPU | {"uuid": "amd-4", "fails": ["asic"]},
            ]
        )
    ).devices
    assert sick.problem == "3 uncorrectable memory errors since the driver was loaded"
    assert sick.kernel_log == "GPU reset begin!"
    assert (silent.memory_total, "memory" in silent.problem) == (None, True)
    assert (nameless.uuid, "cannot read this GPU" in nameless.problem) == ("index-2", True)
    assert (well.problem, well.name) == ("", "unknown")


@pytest_twisted.ensureDeferred
async def test_library_troubles_are_sentences(tmp_path):
    """It does not start, hangs or is not installed: each told, none fails the inventory, and known devices stay."""
    stubbed = Stubbed(tmp_path, deadline=1.5)
    assert "amdsmi does not start: no driver" in (await stubbed.take(init="no driver")).problem
    await stubbed.take(devices=[GPU])
    found = await stubbed.take(hang=True)
    assert "amd GPUs" in found.problem and "no answer in 1.5 s" in found.problem
    assert [(device.uuid, device.missing_since) for device in found.devices] == [("amd-1", None)]
    (tmp_path / "amdsmi.py").write_text("raise ImportError('libamd_smi.so')")
    assert "install ROCm's amd-smi-lib" in (await stubbed.take()).problem


@pytest_twisted.ensureDeferred
async def test_without_an_amd_driver_nobody_is_asked(tmp_path):
    """So that its missing library is no problem on a machine with other GPUs or none."""
    stubbed = Stubbed(tmp_path)
    (tmp_path / "kfd").unlink()
    found = await stubbed.take(devices=[GPU], init="must not be asked")
    assert (found.devices, found.problem) == ((), "")
