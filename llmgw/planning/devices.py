"""Which devices take nothing new: those that an operator has closed, and by themselves those that are sick or gone.

A device that closed by itself opens by itself when it is well again, since the record says who closed it. What runs on a
closed device goes on: only placement looks at this.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve

from llmgw.fleet.node import Device
from llmgw.fleet.records import DeviceCordon, NodeRecord, ShardRecord
from llmgw.planning.world import Draft


def trouble(device: Device) -> str:
    """Why nothing may run on it, empty for a healthy device."""
    return "missing" if device.missing_since is not None else device.problem


def explained(device: Device) -> str:
    """The same with what the kernel's log has of it."""
    why = trouble(device)
    return f"{why} ({device.kernel_log})" if why and device.kernel_log else why


def closed_device(draft: Draft, shards: Iterable[ShardRecord]) -> str:
    """Which of the devices of these shards takes nothing new, and why; empty where all do."""
    for allocation in (shard.allocation for shard in shards if shard.allocation):
        node = draft.nodes.get(allocation.node)
        for device in node.facts.inventory.devices if node and node.facts else ():
            cordons = node.device_cordons if node else {}
            closed = cordons.get(device.uuid) or (cordons.get(device.parent) if device.parent else None)
            if device.uuid in allocation.devices and closed is not None:
                return f"gpu {device.index} on {allocation.node}: {closed.text}"
    return ""


def follow_devices(draft: Draft) -> None:
    """Close what has become sick or is gone, open what closed by itself and is well; one event each."""
    for node in list(draft.nodes.values()):
        if node.facts is not None and node.name in draft.world.told:
            cordons = _followed(draft, node)
            if cordons != node.device_cordons:
                draft.nodes[node.name] = evolve(node, device_cordons=cordons)


def _followed(draft: Draft, node: NodeRecord) -> dict[str, DeviceCordon]:
    assert node.facts is not None
    cordons = dict(node.device_cordons)
    devices = node.facts.inventory.devices
    troubles = {device.uuid: explained(device) for device in devices}
    indexes = {device.uuid: device.index for device in devices}
    since = {device.uuid: device.missing_since for device in devices}
    for uuid, why in troubles.items():
        name = f"{node.name}: gpu {indexes[uuid]} ({uuid})"
        known = cordons.get(uuid)
        if why and known is None:
            cordons[uuid] = DeviceCordon(why, since.get(uuid) or draft.world.now)
            draft.say("device", node.name, f"{name} is cordoned by itself: {why}", node.name)
        elif why and known is not None and known.by_itself and known.reason != why:
            cordons[uuid] = evolve(known, reason=why)
    for uuid, known in node.device_cordons.items():
        if known.by_itself and not troubles.get(uuid):
            del cordons[uuid]
            gone = "is well again" if uuid in troubles else "is not told of any more"
            draft.say("device", node.name, f"{node.name}: {uuid} {gone}: its cordon is lifted", node.name)
    return cordons
