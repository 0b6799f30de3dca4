"""What the node's hardware is: processors, memory, disk, and its GPUs, which NVML and amdsmi tell in child processes.

A device that was seen and is missing is still told, with the time since when and what the kernel's log says of it; a library
that hangs or fails costs its GPUs' news and nothing else. No GPU at all is normal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cattrs
from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import implementer

from llmgw.agent import amdsmi_child, kernel_log, nvml_child
from llmgw.agent.child import ChildFailed, run_child
from llmgw.agent.kernel_log import bus_of
from llmgw.agent.known_devices import KnownDevices
from llmgw.agent.system import system_facts
from llmgw.fleet.node import Device, DeviceProcess, Inventory
from llmgw.interfaces import IInventory

DEADLINE = 20.0
# The AMD driver's device: without it amdsmi is not asked, with it that amdsmi is missing is worth a word.
KFD = Path("/dev/kfd")
KMSG = Path("/dev/kmsg")


@implementer(IInventory)
class NodeInventory:
    """@param devices: C{auto}, C{none}, or the UUIDs this agent may use.

    @param disk: the folder whose free space counts.
    @param marker: the shard that a process belongs to, None for a stranger's.
    @param clock: wall time: since when a device is missing.
    @param known: the devices that this node has had.
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
        known: KnownDevices | None = None,
        kfd: Path = KFD,
        kmsg: Path = KMSG,
    ) -> None:
        self._reactor = reactor
        self._wanted = devices
        self._disk = disk
        self._marker = marker
        self._clock = clock
        self._environment = environment
        self._deadline = deadline
        self._known = known or KnownDevices()
        self._kfd = kfd
        self._kmsg = kmsg

    def take(self) -> Deferred[Inventory]:
        """The inventory now; never errbacks for what a device or library does."""
        return Deferred.fromCoroutine(self._take())

    async def _take(self) -> Inventory:
        inventory = Inventory(**system_facts(self._disk, self._environment))
        if self._wanted == "none":
            return inventory
        self._known.load()
        said = [await self._ask(nvml_child, "nvidia")]
        if self._kfd.exists():
            said.append(await self._ask(amdsmi_child, "amd"))
        found = [self._device(row) for each in said for row in each["devices"]]
        devices = await self._explained(self._known.seen(filter(self._ours, found), self._clock()))
        return evolve(
            inventory,
            devices=devices,
            driver=next((each["driver"] for each in said if each.get("driver")), None),
            cuda=said[0].get("cuda"),
            problem="; ".join(each["problem"] for each in said if each.get("problem")),
        )

    async def _ask(self, library: ModuleType, kind: str) -> dict[str, Any]:
        """What a library's child says; of one that fails, what was known before, with the problem."""
        try:
            return await self._read([sys.executable, str(library.__file__)])
        except ChildFailed as error:
            text = f"cannot look at the {kind} GPUs: {error}"
            self.log.error("{text}", text=text)
            unstructured = cattrs.unstructure([device for device in self._known.last.values() if device.kind == kind])
            return {"devices": unstructured, "problem": text}

    async def _read(self, argv: list[str], deadline: float | None = None) -> dict[str, Any]:
        output = await run_child(self._reactor, argv, self._environment, deadline or self._deadline)
        try:
            said: dict[str, Any] = json.loads(output.text)
        except ValueError:
            last = (output.text.strip().splitlines() or ["nothing"])[-1][:200]
            raise ChildFailed(f"{Path(argv[1]).stem} ended with status {output.status} and said: {last}") from None
        return said

    def _device(self, row: Mapping[str, Any]) -> Device:
        device = cattrs.structure(row, Device)
        return evolve(device, processes=tuple(self._marked(process) for process in device.processes))

    def _marked(self, process: DeviceProcess) -> DeviceProcess:
        return evolve(process, shard=self._marker(process.pid))

    def _ours(self, device: Device) -> bool:
        return self._wanted == "auto" or device.uuid in self._wanted or device.parent in self._wanted

    async def _explained(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """The same with what the kernel's log says of those that are not well; it is not read while all are."""
        if all(not device.problem and device.missing_since is None for device in devices):
            return devices
        try:
            said = await self._read([sys.executable, str(kernel_log.__file__), str(self._kmsg)])
        except ChildFailed as error:
            said = {"faults": {}, "problem": f"the kernel's log cannot be read: {error}"}
        return tuple(evolve(device, kernel_log=_told(device, said)) for device in devices)


def _told(device: Device, said: Mapping[str, Any]) -> str:
    if not device.problem and device.missing_since is None:
        return ""
    found: str = said["faults"].get(bus_of(device.bus), "") if device.bus else ""
    return found or said["problem"] or "nothing of it in the kernel's log"
