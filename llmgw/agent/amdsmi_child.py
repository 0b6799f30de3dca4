"""Asks amdsmi what AMD GPUs there are and prints one JSON object, as L{llmgw.agent.nvml_child} does for NVIDIA's.

amdsmi's Python package comes with ROCm and must match it, so it is no dependency of ours: it is taken from wherever ROCm has put
it. A call that a device or driver does not support leaves its field null; a device that answers nothing has a C{problem}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

ROCM = "/opt/rocm/share/amd_smi"
MIB = 2**20
UNKNOWN = 2**32 - 1  # how amdsmi fills a number that it does not have


class Reader:
    """Reads devices through C{smi}, the module C{amdsmi}."""

    def __init__(self, smi: Any) -> None:
        self._smi = smi

    def maybe(self, call: str, *arguments: Any) -> Any:
        """The answer, None where this device, driver or version of amdsmi has none."""
        found: Callable[..., Any] | None = getattr(self._smi, call, None)
        if found is None:
            return None
        try:
            return found(*arguments)
        except self._smi.AmdSmiException:
            return None

    def everything(self) -> dict[str, Any]:
        """All devices and the driver."""
        handles = self._smi.amdsmi_get_processor_handles()
        devices = [self._device(handle, index) for index, handle in enumerate(handles)]
        drivers = [found for handle in handles if (found := self.maybe("amdsmi_get_gpu_driver_info", handle))]
        return {"devices": devices, "driver": _known(drivers[0], "driver_version") if drivers else None, "problem": ""}

    def _device(self, handle: Any, index: int) -> dict[str, Any]:
        try:
            uuid = str(self._smi.amdsmi_get_gpu_device_uuid(handle))
        except self._smi.AmdSmiException as error:
            why = f"amdsmi cannot read this GPU: {error}"
            return {"uuid": f"index-{index}", "index": index, "name": "unknown", "kind": "amd", "problem": why}
        asic = self.maybe("amdsmi_get_gpu_asic_info", handle) or {}
        return {
            "uuid": uuid,
            "index": index,
            "name": str(_known(asic, "market_name") or "unknown"),
            "kind": "amd",
            "hip": self._hip(handle, index),
            "bus": str(self.maybe("amdsmi_get_gpu_device_bdf", handle) or ""),
            "architecture": str(_known(asic, "target_graphics_version") or ""),
            "processes": self._processes(handle),
            **self._memory(handle),
        }

    def _hip(self, handle: Any, index: int) -> int:
        """Its number in ROCm's runtime; amdsmi older than ROCm 6.4 cannot tell, then, as engines do, its own number of it."""
        found = _known(self.maybe("amdsmi_get_gpu_enumeration_info", handle) or {}, "hip_id")
        return found if isinstance(found, int) and found < UNKNOWN else index

    def _memory(self, handle: Any) -> dict[str, Any]:
        used = self.maybe("amdsmi_get_gpu_vram_usage", handle) or {}
        total = _known(used, "vram_total")
        if total is None:
            problem = "amdsmi does not tell its memory: is the amdgpu driver well?"
            return {"memory_total": None, "memory_used": None, "problem": problem}
        taken = _known(used, "vram_used")
        uncorrectable = _known(self.maybe("amdsmi_get_gpu_total_ecc_count", handle) or {}, "uncorrectable_count") or 0
        problem = f"{uncorrectable} uncorrectable memory errors since the driver was loaded" if uncorrectable else ""
        return {"memory_total": total * MIB, "memory_used": None if taken is None else taken * MIB, "problem": problem}

    def _processes(self, handle: Any) -> list[dict[str, Any]]:
        found = []
        for row in self.maybe("amdsmi_get_gpu_process_list", handle) or []:
            memory = _known(row.get("memory_usage") or {}, "vram_mem")
            found.append({"pid": int(row["pid"]), "name": str(row.get("name") or ""), "memory": memory})
        return found


def _known(row: Mapping[str, Any], name: str) -> Any:
    """amdsmi says N/A for what it does not know."""
    value = row.get(name)
    return None if value in (None, "", "N/A") else value


def ask() -> dict[str, Any]:
    """What amdsmi says; called only on a machine with an AMD driver."""
    sys.path += [ROCM] if os.path.isdir(ROCM) else []
    try:
        import amdsmi
    except (ImportError, OSError, KeyError) as error:
        why = f"there is an AMD GPU, but amdsmi cannot be loaded ({error}): install ROCm's amd-smi-lib"
        return {"devices": [], "problem": why}
    try:
        amdsmi.amdsmi_init()
        return Reader(amdsmi).everything()
    except amdsmi.AmdSmiException as error:
        return {"devices": [], "problem": f"amdsmi does not start: {error}"}


if __name__ == "__main__":
    json.dump(ask(), sys.stdout)
