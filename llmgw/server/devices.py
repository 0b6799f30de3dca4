"""A node's devices and equipment for C{llmgw status --json}: what each has, who claims it, what is really used, and by whom.

Claimed and observed are different things and both are shown: a claim is what placement has promised to shards that are placed
there, observed is what the device says. What is used by processes that are not ours is C{foreign}, each with its pid.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from llmgw.fleet.node import Device, Inventory
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardState
from llmgw.planning.devices import explained

Data = dict[str, Any]
Claims = dict[str, list[ShardRecord]]
_RELEASED = (ShardState.FAILED, ShardState.STOPPED)


def claims(records: Iterable[ShardRecord]) -> Claims:
    """The shards that hold each device, by its UUID; one that has failed for good or has ended holds nothing."""
    found: Claims = defaultdict(list)
    for shard in records:
        if shard.allocation and shard.state not in _RELEASED:
            for uuid in shard.allocation.devices:
                found[uuid].append(shard)
    return found


def devices_data(record: NodeRecord, inventory: Inventory, held: Claims) -> list[Data]:
    """All devices of a node; a MIG instance names its C{parent}, which takes no engine itself."""
    return [_device(record, device, held.get(device.uuid, [])) for device in inventory.devices]


def _device(record: NodeRecord, device: Device, held: list[ShardRecord]) -> Data:
    cordon = record.device_cordons.get(device.uuid)
    return {
        "uuid": device.uuid,
        "index": device.index,
        "name": device.name,
        "kind": device.kind,
        "parent": device.parent,
        "capability": ".".join(map(str, device.capability)) if device.capability else None,
        "architecture": device.architecture,
        "memory_total": device.memory_total,
        "memory_reserved": device.memory_reserved,
        "memory_claimed": _claimed(device, held),
        "memory_used": device.memory_used,
        "foreign": [
            {"pid": process.pid, "name": process.name, "memory": process.memory}
            for process in device.processes
            if process.shard is None
        ],
        "problem": _trouble(device) or _cordoned(record, device),
        "missing_since": device.missing_since,
        "kernel_log": device.kernel_log,
        "cordon": {"reason": cordon.reason, "since": cordon.since, "by": cordon.by} if cordon else None,
        "shards": [shard.shard for shard in held],
    }


def _trouble(device: Device) -> str:
    if device.missing_since is None:
        return explained(device)
    at = time.strftime("%F %H:%M UTC", time.gmtime(device.missing_since))
    return f"missing since {at}" + (f" ({device.kernel_log})" if device.kernel_log else "")


def _cordoned(record: NodeRecord, device: Device) -> str:
    found = record.device_cordons.get(device.uuid)
    return found.text if found is not None and not found.by_itself else ""


def _claimed(device: Device, held: list[ShardRecord]) -> int | None:
    """Bytes promised to shards; all of it where one of them has the whole device. None where its size is unknown."""
    given = [shard.allocation.memory for shard in held if shard.allocation]
    if any(memory is None for memory in given):
        return device.memory_total
    return sum(memory or 0 for memory in given)


def equipment_data(inventory: Inventory) -> Data:
    """What of the system decides whether engines run: bytes, and numbers as the kernel has them; None is unknown."""
    return {
        "driver": inventory.driver,
        "cuda": f"{inventory.cuda // 1000}.{inventory.cuda % 1000 // 10}" if inventory.cuda else None,
        "kernel": inventory.kernel,
        "shm_free": inventory.shm_free,
        "disk_free": inventory.disk_free,
        "nofile": inventory.nofile,
        "memlock": inventory.memlock,
    }
