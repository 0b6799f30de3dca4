"""What a node must have for one shard, one check each, in the order in which a node is counted under them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from attrs import evolve, field, frozen

from llmgw.fleet.model import Profile
from llmgw.fleet.node import NodeState
from llmgw.interfaces import Needs
from llmgw.planning.explanation import Check
from llmgw.planning.room import WHOLE, DeviceRoom, NodeRoom

SEARCHING = "not yet searched for the weights"
NO_ROOTS = "its agent.yaml names no folder of weights (models: [/srv/models])"


@frozen
class Want:
    """One replica to be placed: C{profile.parallel.nodes} shards, each of which takes C{needs} on a node of its own.

    @ivar excluded: nodes it must not go to, each with the reason.
    """

    replica: str
    model: str
    profile: Profile
    needs: Needs = Needs()
    excluded: Mapping[str, str] = field(factory=dict)

    @property
    def count(self) -> int:
        """How many shards."""
        return self.profile.parallel.nodes

    @property
    def share(self) -> bool:
        """Whether its devices may serve others, too."""
        return self.profile.resources.share

    @property
    def kind(self) -> object:
        """Equal for wants that fit the same nodes and are refused by others in the same words."""
        place, needs = self.profile.place, self.needs
        return (
            self.profile.engine,
            # Where weights are missing, the words name the model that would fetch them.
            (self.profile.weights, self.model) if self.profile.weights is not None else None,
            tuple(sorted(place.labels.items())),
            place.fabric,
            self.count,
            self.share,
            needs,
            tuple(sorted(self.excluded.items())),
        )


def _state(room: NodeRoom, want: Want) -> Check | None:
    node = room.candidate
    if node.state is NodeState.READY and node.facts is not None:
        return None
    return Check("state", str(node.state) if node.state is not NodeState.READY else "joining", detail=node.note)


def _flags(room: NodeRoom, want: Want) -> Check | None:
    node = room.candidate
    for name in ("cordoned", "draining", "quarantined"):
        if getattr(node, name):
            return Check(name, name, detail=node.note)
    return None


def _excluded(room: NodeRoom, want: Want) -> Check | None:
    reason = want.excluded.get(room.name)
    return Check("excluded", "excluded for now", detail=reason) if reason is not None else None


def _labels(room: NodeRoom, want: Want) -> Check | None:
    missing = [f"{key}={value}" for key, value in want.profile.place.labels.items() if room.labels.get(key) != value]
    if not missing:
        return None
    has = ", ".join(f"{key}={value}" for key, value in sorted(room.labels.items())) or "none"
    return Check("labels", f"without label {' '.join(sorted(missing))}", detail=f"it has {has}")


def _fabric(room: NodeRoom, want: Want) -> Check | None:
    fabric = want.profile.place.fabric
    if fabric is not None and fabric not in room.fabrics:
        return Check("fabric", f"not on fabric {fabric}", detail=f"it is on {', '.join(sorted(room.fabrics)) or 'none'}")
    if want.count > 1 and not room.fabrics:
        return Check("fabric", "on no fabric", detail="a replica of several nodes stays inside one fabric: agent.yaml fabrics")
    return None


def _installation(room: NodeRoom, want: Want) -> Check | None:
    found = room.installations.get(want.profile.engine)
    if found is None:
        has = ", ".join(sorted(room.installations)) or "none"
        return Check("installation", f"without engine {want.profile.engine}", detail=f"it has {has}")
    if found.problem:
        return Check("installation", f"with a broken engine {want.profile.engine}", detail=found.problem)
    return None


def _weights(room: NodeRoom, want: Want) -> Check | None:
    weights = want.profile.weights
    if weights is None:
        return None
    found = room.candidate.weights.get(weights)
    if found is None:
        return Check("weights", SEARCHING)
    if found.found:
        return Check("weights", "with unusable weights", detail=found.problem) if found.problem else None
    looked = ", ".join(found.looked)
    detail = found.problem or (f"{weights} is not at {looked}" if looked else NO_ROOTS)
    fetch = f"llmgw fetch {want.model} --node {room.name}" if weights.startswith("hf:") and not found.fetching else ""
    return Check("weights", "without the weights", detail=": ".join(filter(None, (detail, fetch))))


def _sick(room: NodeRoom) -> str:
    return "; ".join(f"gpu {device.index}: {why}" for device, why in room.closed)


def _for_processors(room: NodeRoom, want: Want) -> str:
    found = room.installations.get(want.profile.engine)
    if found is None or not (found.version or "").endswith("+cpu"):
        return ""
    return f"its {found.name} {found.version} is a build for processors: set `resources: {{devices: 0}}`"


def _holders(rooms: list[DeviceRoom]) -> str:
    return ", ".join(dict.fromkeys(room.holder for room in rooms if room.holder))


def _devices(room: NodeRoom, want: Want) -> Check | None:
    need = want.needs.devices
    rooms = list(room.devices.values())
    free = [r for r in rooms if not r.holders or (want.share and r.shareable)]
    if need <= len(free):
        return None
    return Check("devices", "too few devices", need, len(free), "devices", _sick(room) or _for_processors(room, want))


def _device_memory(room: NodeRoom, want: Want) -> Check | None:
    need, memory = want.needs.devices, want.needs.memory
    if not need or len(room.fitting(memory, want.share)) >= need:
        return None
    open_to = [r for r in room.devices.values() if not r.holders or (want.share and r.shareable)]
    if len(open_to) < need:
        return None
    # All must have the room at once, so the last in a row of the nearest decides; as fewer fit, it is short of something.
    last = sorted(open_to, key=lambda r: (_least(r, memory) - _free(r), r.device.index))[need - 1]
    text = "too little device memory" if memory is not None else "with other use of the device"
    detail = f"gpu {last.device.index}" + (", of unknown size" if last.free is None else "")
    return Check("device_memory", text, _least(last, memory), _free(last), "bytes", detail, last.holder, per=need)


def _makers(room: NodeRoom, want: Want) -> Check | None:
    """Devices of NVIDIA and of AMD serve no engine together."""
    need, memory = want.needs.devices, want.needs.memory
    have = len(room.together(need, memory, want.share))
    if need <= have or len(room.fitting(memory, want.share)) < need:
        return None
    return Check("makers", "with too few devices of one maker", need, have, "devices")


def _least(room: DeviceRoom, memory: int | None) -> int:
    return memory if memory is not None else max(1, math.ceil(WHOLE * (room.device.memory_total or 0)))


def _free(room: DeviceRoom) -> float:
    """A device that does not tell its size has all that anybody needs while it is unused, and nothing afterwards."""
    if room.free is None:
        return 0 if room.holders else math.inf
    return room.free


def _host_memory(room: NodeRoom, want: Want) -> Check | None:
    need = want.needs.host_memory
    if not need or need <= room.host_free:
        return None
    holders = dict.fromkeys(claim.holder.rpartition("/")[0] for claim in room.candidate.claims if claim.host_memory)
    return Check("host_memory", "too little host memory", need, room.host_free, "bytes", holder=", ".join(holders))


def _ports(room: NodeRoom, want: Want) -> Check | None:
    need = want.needs.ports
    if need <= 0 or room.free_ports(need) is not None:
        return None
    low, high = room.candidate.facts.ports if room.candidate.facts else (0, -1)
    free = sum(port not in room.ports_taken for port in range(low, high + 1))
    return Check("ports", "without free ports in a row", need, min(free, need - 1), "ports", f"range {low}-{high}")


CHECKS: tuple[Callable[[NodeRoom, Want], Check | None], ...] = (
    _state,
    _flags,
    _excluded,
    _labels,
    _fabric,
    _installation,
    _weights,
    _devices,
    _device_memory,
    _makers,
    _host_memory,
    _ports,
)


def failed(room: NodeRoom, want: Want) -> Iterator[Check]:
    """What speaks against this node, the first thing first; a node that never said what it has is not asked for it."""
    checks = CHECKS if room.candidate.facts is not None else CHECKS[:3]
    return (check for check in (one(room, want) for one in checks) if check is not None)


def in_full(room: NodeRoom, want: Want) -> tuple[Check, ...]:
    """Everything that speaks against it, and who holds what is missing."""
    held = [r for r in room.devices.values() if r.holders and not (want.share and r.shareable)]
    return tuple(evolve(c, holder=_holders(held)) if c.name == "devices" else c for c in failed(room, want))


def fits(room: NodeRoom, want: Want) -> bool:
    """Whether nothing speaks against it; stops at the first thing that does."""
    return all(check(room, want) is None for check in CHECKS)
