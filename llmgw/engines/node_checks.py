"""Checks of a profile against what a node has and lacks, for every engine that runs on GPUs: each tells what to change there.

What is node-dependent is refused here only when it cannot work at all; what works badly or only maybe is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmgw.engines.case import Case
from llmgw.errors import Problem
from llmgw.fleet.node import Device
from llmgw.fleet.units import show_size

# Below the first nothing starts (it is what containers get by default), below the second it may not.
SHM_LEAST, SHM_GOOD = 128 * 2**20, 2**30
NOFILE = 65535
CACHES = 2 * 2**30
CUDA13_DRIVER = 580
BF16 = 80
# NVML's fabric states: 3 is completed, 0 not supported; between them CUDA answers error 802.
FABRIC_PENDING = ("not started", "in progress")


def library(case: Case) -> Iterator[Problem]:
    """V19: a driver that NVML cannot talk to, e.g. one that was updated under a running kernel module."""
    inventory = case.node.inventory if case.node else None
    if inventory and inventory.problem and not inventory.devices and case.profile.resources.devices != 0:
        yield Problem(f"{case.node.name if case.node else ''}: {inventory.problem}", "engine", "gpu_library")


def driver(case: Case, cuda13: bool) -> Iterator[Problem]:
    """V18: a build for CUDA 13 wants a driver of 580 or newer."""
    said = case.node.inventory.driver if case.node and case.profile.resources.devices != 0 else None
    major = int(said.partition(".")[0]) if said and said[:1].isdigit() else None
    if cuda13 and major is not None and major < CUDA13_DRIVER:
        whose = f"{case.engine} {case.installation.version}" if case.installation else case.engine
        text = f"driver {said} is too old for {whose} (CUDA 13): install {CUDA13_DRIVER} or newer"
        yield Problem(text, "engine", "driver_too_old")


def capability(case: Case, build: int, methods: Mapping[str, int]) -> Iterator[Problem]:
    """V15, V16, V17: the GPUs are too old for the build, for the quantization or for bfloat16.

    @param build: ten times the compute capability that the engine's build needs, C{methods} the same per quantization.
    """
    if case.node is None or case.profile.resources.devices == 0:
        return
    capable = [10 * d.capability[0] + d.capability[1] for d in case.node.inventory.devices if d.capability]
    if not capable:
        return
    best = max(capable)
    has = f"{best // 10}.{best % 10}"
    method = case.profile.arguments.get("quantization") or case.quantization
    need = methods.get(str(method).lower(), 0) if method else 0
    if best < build:
        text = f"{case.engine}'s build needs compute capability {build // 10}.{build % 10}, this node has {has}"
        yield Problem(text + ": place it on newer GPUs with place.labels", "engine", "capability")
    elif best < need:
        text = f"quantization {method} needs compute capability {need // 10}.{need % 10}, this node has {has}"
        yield Problem(text + ": use other weights or newer GPUs", "weights", "capability")
    # With auto the engine itself falls back to half where it must.
    elif best < BF16 and case.profile.arguments.get("dtype") == "bfloat16":
        text = f"bfloat16 needs compute capability 8.0, this node has {has}: set the argument dtype to half"
        yield Problem(text, "arguments.dtype", "capability")


def fabric(case: Case) -> Iterator[Problem]:
    """V20: GPUs behind NVSwitches cannot be used before the fabric manager has finished (CUDA error 802)."""
    pending = [device for device in case.devices if device.fabric in FABRIC_PENDING]
    if case.node and pending and len(pending) == len(case.devices):
        text = (
            f"the NVLink fabric of {case.node.name} is {pending[0].fabric}: start nvidia-fabricmanager of the driver's own "
            f"version ({case.node.inventory.driver or 'see nvidia-smi'})"
        )
        yield Problem(text, "engine", "fabric")


def shared_memory(case: Case) -> Iterator[Problem]:
    """V31: ranks on one node talk through /dev/shm."""
    if case.node is None:
        return
    free, tensor, name = case.node.inventory.shm_free, case.profile.parallel.tensor, case.node.name
    if tensor > 1 and free is not None and free < SHM_LEAST:
        text = f"{name} has {show_size(free)} free in /dev/shm, tensor {tensor} wants 1.0 GiB: enlarge it"
        yield Problem(text, "parallel.tensor", "shm")


def instances(case: Case) -> Iterator[Problem]:
    """V40: MIG instances cannot work together."""
    if case.node and case.profile.parallel.world > 1 and case.devices and all(map(_is_mig, case.devices)):
        text = f"{case.node.name} has MIG instances only, and those cannot work together: set `parallel` to one rank"
        yield Problem(text, "parallel.tensor", "mig")


def _is_mig(device: Device) -> bool:
    return device.parent is not None or device.uuid.startswith("MIG-")


def warnings(case: Case) -> Iterator[Problem]:
    """All that may go badly on this node."""
    if case.node is None:
        return
    for check in (_limits, _host_memory, _loopback, _peers, _compilers):
        yield from check(case)


def _limits(case: Case) -> Iterator[Problem]:
    assert case.node is not None
    inventory, name = case.node.inventory, case.node.name
    if inventory.nofile is not None and inventory.nofile < NOFILE:
        yield Problem(f"{name} allows {inventory.nofile} open files: set LimitNOFILE=65535 for llmgw-agent", "", "nofile")
    shm = inventory.shm_free
    if case.profile.parallel.tensor > 1 and shm is not None and SHM_LEAST <= shm < SHM_GOOD:
        yield Problem(f"{name} has only {show_size(shm)} free in /dev/shm; 1.0 GiB is wanted", "parallel.tensor", "shm")
    if inventory.disk_free is not None and inventory.disk_free < CACHES:
        yield Problem(f"{name} has {show_size(inventory.disk_free)} of disk free; compile caches want 2.0 GiB", "", "disk")
    if inventory.infiniband and inventory.memlock is not None and case.profile.parallel.nodes > 1:
        text = f"{name} lets engines lock {show_size(inventory.memlock)}, InfiniBand wants more: set LimitMEMLOCK=infinity"
        yield Problem(f"{text} for llmgw-agent", "parallel.nodes", "memlock")


def _host_memory(case: Case) -> Iterator[Problem]:
    """V33: with sleep mode the weights go to the host's memory."""
    assert case.node is not None
    sleeps = case.profile.arguments.get("enable-sleep-mode") or case.profile.arguments.get("enable-memory-saver")
    size = case.files.bytes if case.files else None
    available = case.node.inventory.memory_available
    if sleeps and size and available is not None and size // case.profile.parallel.nodes > available:
        text = f"asleep it keeps its weights ({show_size(size)}) in host memory, {case.node.name} has {show_size(available)} free"
        yield Problem(f"{text}: leave sleep mode out", "arguments", "host_memory")


def _loopback(case: Case) -> Iterator[Problem]:
    """V36: ranks find each other by the host's name or by a named interface."""
    assert case.node is not None
    named = case.node.fabrics and all(fabric.interface for fabric in case.node.fabrics)
    if case.profile.parallel.nodes > 1 and case.node.inventory.loopback and not named:
        text = (
            f"the host name of {case.node.name} resolves to a loopback address, where other ranks cannot reach it: name the "
            "interface in agent.yaml (fabrics: {NAME: {address: ..., interface: ...}}), or correct /etc/hosts"
        )
        yield Problem(text, "parallel.nodes", "loopback")


def _peers(case: Case) -> Iterator[Problem]:
    """V37: without direct access between GPUs every exchange goes through host memory."""
    assert case.node is not None
    known = [device for device in case.devices if device.peers is not None]
    if case.profile.parallel.tensor > 1 and len(known) > 1 and not any(device.peers for device in known):
        text = (
            f"the GPUs of {case.node.name} cannot reach each other directly (no NVLink, no P2P over PCIe), so tensor "
            f"{case.profile.parallel.tensor} will be slow: use pipeline instead, or replicas of fewer devices"
        )
        yield Problem(text, "parallel.tensor", "no_peer_access")


def _compilers(case: Case) -> Iterator[Problem]:
    """V39: kernels are compiled at the first start."""
    assert case.node is not None
    there = case.node.inventory.compilers
    if there is None or not case.devices or "gcc" in there:
        return
    text = f"{case.node.name} has no gcc in its PATH, and {case.engine} compiles kernels at its first start: install gcc"
    yield Problem(f"{text} (and CUDA's nvcc for FlashInfer's)", "engine", "compiler")
