"""What is free on one node while a plan is made: devices, memory, ports.

Three things lessen a device's free memory, and none is counted twice: what is claimed for shards (also for those that are
still loading), what our engines were seen to use (also after their claim has ended, until it is really back), and what
processes that are not ours use. A device without C{share} belongs to one shard alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, field, frozen

from llmgw.fleet.node import Device, NodeFacts, NodeState
from llmgw.fleet.shard import WeightFiles
from llmgw.fleet.units import show_size

WHOLE = 0.9  # an engine whose need nobody knows gets a device of which at least this much is free


@frozen
class Claim:
    """What one shard holds on its node.

    @ivar memory: bytes on each of C{devices}; None is the whole of each.
    @ivar resident: its engine has had time to take the memory, so what is observed includes it.
    """

    holder: str
    devices: tuple[str, ...] = ()
    memory: int | None = None
    host_memory: int = 0
    ports: tuple[int, ...] = ()
    share: bool = False
    resident: bool = False


@frozen
class Candidate:
    """One node as placement is told of it.

    @ivar note: what to add to its state in an explanation, e.g. how long it has been away.
    @ivar device_cordons: why devices take nothing new, by UUID.
    @ivar weights: what C{inspect} found, by the name of the weights; a missing entry means that nobody has looked yet.
    @ivar last_port: the port claimed last: the next ones are looked for behind it, so that a port rests before it is used again.
    """

    name: str
    facts: NodeFacts | None
    state: NodeState = NodeState.READY
    note: str = ""
    cordoned: bool = False
    draining: bool = False
    quarantined: bool = False
    claims: tuple[Claim, ...] = ()
    device_cordons: Mapping[str, str] = field(factory=dict)
    weights: Mapping[str, WeightFiles] = field(factory=dict)
    last_port: int = 0


@define
class DeviceRoom:
    """One device and who holds it. C{foreign} is memory used by processes that are not ours."""

    device: Device
    holders: list[Claim] = field(factory=list)
    foreign: int = 0

    @property
    def shareable(self) -> bool:
        """Whether all who hold it, if any, are willing to share."""
        return all(claim.share for claim in self.holders)

    @property
    def free(self) -> int | None:
        """Bytes that nobody claims or uses; None where the device does not tell its size."""
        device = self.device
        if device.memory_total is None:
            return None
        if any(claim.memory is None for claim in self.holders):
            return 0
        claimed = sum(claim.memory or 0 for claim in self.holders)
        return max(0, device.memory_total - device.memory_reserved - self.foreign - max(claimed, _own(device)))

    @property
    def holder(self) -> str:
        """Who has the rest, for people."""
        names = [claim.holder.rpartition("/")[0] for claim in self.holders]
        if not self.device.processes:
            return ", ".join(names)
        strangers = sorted((p for p in self.device.processes if p.shard is None), key=lambda p: -(p.memory or 0))
        names += [f"{_held(p.memory)}held by pid {p.pid} {p.name}, not ours" for p in strangers]
        return ", ".join(names)


def _held(memory: int | None) -> str:
    return f"{show_size(memory)} " if memory else ""


def _own(device: Device) -> int:
    return sum(process.memory or 0 for process in device.processes if process.shard is not None)


def _foreign(device: Device, claims: list[Claim]) -> int:
    """What is used beside our engines. Where a device lists no process of ours, our claims explain the use first."""
    if device.memory_used is None:
        return sum(process.memory or 0 for process in device.processes if process.shard is None)
    ours = _own(device)
    if not ours:
        whole = any(claim.memory is None and claim.resident for claim in claims)
        ours = device.memory_used if whole else sum(claim.memory or 0 for claim in claims if claim.resident)
    return max(0, device.memory_used - ours)


class NodeRoom:
    """The free room of one node. Mutable: a plan claims as it goes."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.name = candidate.name
        facts = candidate.facts
        self.labels: Mapping[str, str] = facts.labels if facts else {}
        self.fabrics = {fabric.name: fabric for fabric in facts.fabrics} if facts else {}
        self.installations = {found.name: found for found in facts.installations} if facts else {}
        found = facts.inventory.devices if facts else ()
        parents = {device.parent for device in found}
        closed = {device.uuid: self._why_closed(device) for device in found}
        self.closed = [(device, closed[device.uuid]) for device in found if closed[device.uuid]]
        usable = [device for device in found if not closed[device.uuid] and device.uuid not in parents]
        self.devices = {device.uuid: DeviceRoom(device) for device in usable}
        self.ports_taken: set[int] = set()
        self.last_port = candidate.last_port
        self.host_claimed = 0
        self.models: set[str] = set()
        self.claims: list[Claim] = []
        for claim in candidate.claims:
            self.claim(claim)
        for room in self.devices.values():
            room.foreign = _foreign(room.device, room.holders)
        self.host_foreign = self._host_foreign(candidate.claims)

    def _why_closed(self, device: Device) -> str:
        """Why a device takes nothing; an instance of a MIG device also goes by its parent's cordon."""
        cordons = self.candidate.device_cordons
        why = cordons.get(device.uuid) or (cordons.get(device.parent) if device.parent else None)
        return why or device.problem or ("missing" if device.missing_since is not None else "")

    def _host_foreign(self, claims: Iterable[Claim]) -> int:
        facts = self.candidate.facts
        if facts is None or facts.inventory.memory_available is None:
            return 0
        used = facts.inventory.memory_total - facts.inventory.memory_available
        return max(0, used - sum(claim.host_memory for claim in claims if claim.resident))

    @property
    def unclaimed(self) -> int:
        """How many healthy devices nobody holds."""
        return sum(not room.holders for room in self.devices.values())

    @property
    def host_free(self) -> int:
        """Bytes of host memory that nobody claims or uses."""
        facts = self.candidate.facts
        total = facts.inventory.memory_total if facts else 0
        return max(0, total - self.host_claimed - self.host_foreign)

    def claim(self, claim: Claim) -> None:
        """Take what C{claim} says; the caller has checked that it is free."""
        for uuid in claim.devices:
            if uuid in self.devices:
                self.devices[uuid].holders.append(claim)
        self.host_claimed += claim.host_memory
        self.ports_taken.update(claim.ports)
        self.models.add(claim.holder.rsplit("/", 2)[0])
        self.claims.append(claim)

    def fitting(self, memory: int | None, share: bool) -> list[DeviceRoom]:
        """The devices one shard could have, the tightest fit first; shared ones before empty ones when it shares."""
        rooms = [room for room in self.devices.values() if _takes(room, memory, share)]
        return sorted(rooms, key=lambda room: (not room.holders, room.free or 0, room.device.index))

    def together(self, count: int, memory: int | None, share: bool) -> list[DeviceRoom]:
        """The best C{count} of these that one engine can use, all of one maker; fewer where no maker has so many."""
        fitting = self.fitting(memory, share)
        makers = dict.fromkeys(room.device.kind for room in fitting)
        alike = [[room for room in fitting if room.device.kind == maker] for maker in makers]
        return next((rooms[:count] for rooms in alike if len(rooms) >= count), max(alike, key=len, default=[]))

    def free_ports(self, count: int) -> tuple[int, ...] | None:
        """C{count} ports in a row, the first that fit behind the last claimed; None when the range is used up."""
        low, high = self.candidate.facts.ports if self.candidate.facts else (0, -1)
        start = self.last_port + 1 if low <= self.last_port < high else low
        for first in (*range(start, high + 2 - count), *range(low, min(start, high + 2 - count))):
            block = range(first, first + count)
            if self.ports_taken.isdisjoint(block):
                return tuple(block)
        return None


def _takes(room: DeviceRoom, memory: int | None, share: bool) -> bool:
    if room.holders and not (share and room.shareable):
        return False
    free, total = room.free, room.device.memory_total
    if free is None or total is None:
        return not room.holders
    return free >= (WHOLE * total if memory is None else memory)
