"""What the node's hardware is: processors, memory, disk, and its GPUs by NVML in a child process.

A device that was seen and is missing is still told, with the time since when; a library that hangs or fails costs the GPUs'
news and nothing else. No GPU at all is normal.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cattrs
from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import implementer

from llmgw.agent import nvml_child
from llmgw.agent.child import ChildFailed, run_child
from llmgw.fleet.node import Device, DeviceProcess, Inventory
from llmgw.interfaces import IInventory

DEADLINE = 20.0


def memory() -> tuple[int, int | None]:
    """Total and available bytes of host memory; the cgroup's limit where it is lower."""
    with open("/proc/meminfo") as file:
        rows = dict(line.split(":", 1) for line in file)
    total, available = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return total, available
    return min(total, limit), min(available, limit)


def free_bytes(path: str) -> int | None:
    """What an unprivileged process can still write below C{path}."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


@implementer(IInventory)
class NodeInventory:
    """@param devices: C{auto}, C{none}, or the UUIDs this agent may use.

    @param disk: the folder whose free space counts.
    @param marker: the shard that a process belongs to, None for a stranger's.
    @param clock: wall time: since when a device is missing.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        devices: str | tuple[str, ...],
        disk: Path,
        marker: Callable[[int], str | None],
        clock: Callable[[], float],
        environment: Mapping[str, str] = os.environ,
        deadline: float = DEADLINE,
    ) -> None:
        self._reactor = reactor
        self._wanted = devices
        self._disk = disk
        self._marker = marker
        self._clock = clock
        self._environment = environment
        self._deadline = deadline
        self._last: dict[str, Device] = {}

    def take(self) -> Deferred[Inventory]:
        """The inventory now; never errbacks for what a device or library does."""
        return Deferred.fromCoroutine(self._take())

    async def _take(self) -> Inventory:
        total, available = memory()
        inventory = Inventory(
            cpus=len(os.sched_getaffinity(0)),
            memory_total=total,
            memory_available=available,
            shm_free=free_bytes("/dev/shm"),
            disk_free=free_bytes(str(self._disk)),
            nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            kernel=os.uname().release,
        )
        if self._wanted == "none":
            return inventory
        try:
            said = await self._ask()
        except ChildFailed as error:
            self.log.error("cannot look at the GPUs: {error}", error=str(error))
            return evolve(inventory, devices=tuple(self._last.values()), problem=f"cannot look at the GPUs: {error}")
        devices = self._with_missing([self._device(row) for row in said["devices"]])
        return evolve(
            inventory, devices=devices, driver=said.get("driver"), cuda=said.get("cuda"), problem=said.get("problem", "")
        )

    async def _ask(self) -> dict[str, Any]:
        argv = [sys.executable, nvml_child.__file__]
        output = await run_child(self._reactor, argv, self._environment, self._deadline)
        try:
            said: dict[str, Any] = json.loads(output.text)
        except ValueError:
            last = (output.text.strip().splitlines() or ["nothing"])[-1][:200]
            raise ChildFailed(f"NVML's child ended with status {output.status} and said: {last}") from None
        return said

    def _device(self, row: Mapping[str, Any]) -> Device:
        device = cattrs.structure(row, Device)
        return evolve(device, processes=tuple(self._marked(process) for process in device.processes))

    def _marked(self, process: DeviceProcess) -> DeviceProcess:
        return evolve(process, shard=self._marker(process.pid))

    def _with_missing(self, found: list[Device]) -> tuple[Device, ...]:
        """What was found and is ours to use, and behind it what was there before and is not any more."""
        ours = [d for d in found if self._wanted == "auto" or d.uuid in self._wanted or d.parent in self._wanted]
        now = {device.uuid: device for device in ours}
        for uuid, before in self._last.items():
            if uuid not in now and not uuid.startswith("index-"):
                since = before.missing_since or self._clock()
                now[uuid] = evolve(before, missing_since=since, processes=(), memory_used=None)
        self._last = now
        return tuple(now.values())
