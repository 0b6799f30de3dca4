"""Asks NVML what GPUs there are and prints one JSON object; run as a child, since NVML calls may block for ever on a sick GPU.

C{{"devices": [...], "driver": ..., "cuda": ..., "problem": ...}}, a device as in L{llmgw.fleet.node.Device}. A call that a
device or driver does not support leaves its field null; a lost device has a C{problem} and the others are told as ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, MISMATCH = 12, 9, 18
LOST, RESET_REQUIRED = 15, 16
PROBLEMS = {
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; running engines are left alone, nothing new is placed here",
    MISMATCH: "the NVIDIA driver was updated and the node has to be rebooted; running engines are left alone",
    LOST: "the GPU is lost (NVML 15); the node probably needs a reboot",
    RESET_REQUIRED: "the GPU needs a reset (NVML 16)",
}
RECOVERY = {1: "GPU reset", 2: "reboot of the node", 4: "drain and reset", 6: "bus reset", 7: "reboot of the system"}
RECOVERY_FIELD = 230
FABRIC = {1: "not started", 2: "in progress", 3: "completed"}
READ = 0  # NVML_P2P_CAPS_INDEX_READ, which the bindings have as a tuple by mistake


def text(value: Any) -> str:
    """NVML's bindings return bytes or str, by version."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class Reader:
    """Reads devices through C{nvml}, the module C{pynvml}."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}

    def maybe(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where this device or driver has none. A lost device is told, not left out.

        @raise NVMLError: the device is lost.
        """
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in (LOST, RESET_REQUIRED):
                raise
            return None

    def everything(self) -> dict[str, Any]:
        """All devices, the driver and what CUDA it can run."""
        nvml = self._nvml
        devices: list[dict[str, Any]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            devices += self._at(index)
        for device in devices:
            if device["uuid"] in self._handles:
                device["peers"] = self._peers(device["uuid"])
        cuda = self.maybe(nvml.nvmlSystemGetCudaDriverVersion_v2)
        driver = self.maybe(nvml.nvmlSystemGetDriverVersion)
        return {"devices": devices, "driver": text(driver) if driver else None, "cuda": cuda, "problem": ""}

    def _at(self, index: int) -> Iterator[dict[str, Any]]:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            whole = self._device(handle, index)
        except nvml.NVMLError as error:
            why = PROBLEMS.get(error.value, f"NVML cannot read this GPU: {error}")
            yield {"uuid": f"index-{index}", "index": index, "name": "unknown", "problem": why}
            return
        if not whole["problem"]:
            self._handles[whole["uuid"]] = handle
        yield whole
        yield from self._instances(handle, whole)

    def _device(self, handle: Any, index: int) -> dict[str, Any]:
        nvml = self._nvml
        found: dict[str, Any] = {"uuid": text(nvml.nvmlDeviceGetUUID(handle)), "index": index, "problem": ""}
        try:
            found["name"] = text(self.maybe(nvml.nvmlDeviceGetName, handle) or "unknown")
            found |= self._memory(handle)
            capability = self.maybe(nvml.nvmlDeviceGetCudaComputeCapability, handle)
            found["capability"] = list(capability) if capability else None
            found["processes"] = self._processes(handle)
            found["bus"] = self._bus(handle)
            found["fabric"] = self._fabric(handle)
            found["problem"] = self._recovery(handle)
        except nvml.NVMLError as error:
            found = {"name": "unknown"} | found | {"problem": PROBLEMS.get(error.value, str(error))}
        return found

    def _bus(self, handle: Any) -> str:
        found = self.maybe(self._nvml.nvmlDeviceGetPciInfo, handle)
        return text(found.busId) if found is not None else ""

    def _fabric(self, handle: Any) -> str | None:
        """How far its NVSwitch fabric is; None where it is on none."""
        nvml = self._nvml
        if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfo"):
            return None
        info = nvml.c_nvmlGpuFabricInfo_t()
        if self.maybe(nvml.nvmlDeviceGetGpuFabricInfo, handle, nvml.byref(info)) is None:
            return None
        return FABRIC.get(int(info.state))

    def _peers(self, uuid: str) -> list[str] | None:
        """The devices whose memory it reaches directly; None where the driver does not say."""
        nvml = self._nvml
        found: list[str] = []
        for other, handle in self._handles.items():
            if other == uuid:
                continue
            try:
                status = nvml.nvmlDeviceGetP2PStatus(self._handles[uuid], handle, READ)
            except nvml.NVMLError:
                return None
            found += [other] if status == nvml.NVML_P2P_STATUS_OK else []
        return found

    def _memory(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        version = getattr(nvml, "nvmlMemory_v2", None)
        memory = self.maybe(nvml.nvmlDeviceGetMemoryInfo, handle, *([version] if version is not None else []))
        if memory is None:
            memory = self.maybe(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            return {"memory_total": None, "memory_used": None, "memory_reserved": 0}
        return {"memory_total": memory.total, "memory_used": memory.used, "memory_reserved": getattr(memory, "reserved", 0) or 0}

    def _processes(self, handle: Any) -> list[dict[str, Any]]:
        call = getattr(self._nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        call = call or self._nvml.nvmlDeviceGetComputeRunningProcesses
        return [
            {"pid": found.pid, "name": command(found.pid), "memory": found.usedGpuMemory}
            for found in self.maybe(call, handle) or []
        ]

    def _recovery(self, handle: Any) -> str:
        values = self.maybe(self._nvml.nvmlDeviceGetFieldValues, handle, [RECOVERY_FIELD]) or []
        action = next((int(value.value.uiVal) for value in values if value.nvmlReturn == 0), 0)
        return f"the driver asks for: {RECOVERY.get(action, f'recovery action {action}')}" if action else ""

    def _instances(self, parent: Any, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """MIG instances, as devices of their own; their parent then takes no engine."""
        nvml = self._nvml
        mode = self.maybe(nvml.nvmlDeviceGetMigMode, parent) if not whole["problem"] else None
        if not mode or not mode[0]:
            return
        for number in range(self.maybe(nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, number)
                yield self._device(handle, whole["index"]) | {"parent": whole["uuid"], "capability": whole.get("capability")}


def command(pid: int) -> str:
    """The process's short name; empty when it is in another namespace or gone."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def ask() -> dict[str, Any]:
    """What NVML says; a machine without it has no devices, which is normal."""
    try:
        import pynvml
    except ImportError:
        return {"devices": [], "problem": "nvidia-ml-py is not installed" if os.path.exists("/dev/nvidiactl") else ""}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == LIBRARY_NOT_FOUND:
            there = os.path.exists("/dev/nvidiactl")
            why = "there are NVIDIA devices but no libnvidia-ml.so.1: is this a container without the NVIDIA runtime?"
            return {"devices": [], "problem": why if there else ""}
        return {"devices": [], "problem": PROBLEMS.get(error.value, f"NVML does not start: {error}")}
    return Reader(pynvml).everything()


if __name__ == "__main__":
    json.dump(ask(), sys.stdout)
