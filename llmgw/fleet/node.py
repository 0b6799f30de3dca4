"""What a node is and has, and the states a leader holds it in.

A device is keyed by its UUID and nothing else: indexes move when a GPU falls off the bus. Unknown is None, never 0.
The node's state is the leader's verdict; C{cordoned}, C{draining} and C{quarantined} are flags apart from it, so that a
drain survives a lost link and a return does not undo a cordon.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen

from llmgw.errors import LlmgwError

NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?\Z", re.ASCII)


@frozen
class DeviceProcess:
    """A process that holds memory on a device; C{shard} is set when it is one of ours."""

    pid: int
    name: str
    memory: int | None = None
    shard: str | None = None


@frozen
class Device:
    """One GPU (or MIG instance) as last seen. Memory in bytes; C{memory_used} is observed, not claimed.

    C{problem} is empty for a healthy device; with a text the device is shown but nothing is placed on it.
    C{bus} is its PCI address, C{architecture} what AMD's is called (C{gfx942}), C{hip} its number in ROCm's runtime.
    C{kernel_log} is what the kernel's log says of one that is sick or missing (C{Xid 79}), or why the log could not be read.
    C{fabric} is how far its NVSwitch fabric is (C{not started}, C{in progress}, C{completed}), C{peers} the UUIDs that it reaches
    directly; both None where nobody knows.
    """

    uuid: str
    index: int
    name: str
    memory_total: int | None = None
    memory_reserved: int = 0
    memory_used: int | None = None
    capability: tuple[int, int] | None = None
    kind: str = "nvidia"
    parent: str | None = None
    processes: tuple[DeviceProcess, ...] = ()
    problem: str = ""
    missing_since: float | None = None
    kernel_log: str = ""
    bus: str = ""
    architecture: str = ""
    hip: int | None = None
    fabric: str | None = None
    peers: tuple[str, ...] | None = None


@frozen
class Installation:
    """An engine installed on a node. C{version} None is unknown (not asked yet, or it would not say: see C{problem})."""

    name: str
    adapter: str
    command: tuple[str, ...] = ()
    version: str | None = None
    problem: str = ""


@frozen
class Fabric:
    """A fast interconnect this node is on, and where the node is reached on it."""

    name: str
    address: str | None = None
    interface: str | None = None


@frozen
class Inventory:
    """What the hardware and the system offer; None is unknown.

    @ivar nofile: how many files an engine may open; C{memlock} bytes that it may lock in memory, None without a limit.
    @ivar compilers: which of gcc, nvcc and ninja stand in the PATH.
    @ivar infiniband: whether a port of InfiniBand or RoCE is active.
    @ivar loopback: whether the host's own name resolves to a loopback address.
    """

    cpus: int
    memory_total: int
    memory_available: int | None = None
    devices: tuple[Device, ...] = ()
    driver: str | None = None
    cuda: int | None = None
    shm_free: int | None = None
    disk_free: int | None = None
    nofile: int | None = None
    memlock: int | None = None
    compilers: tuple[str, ...] | None = None
    infiniband: bool | None = None
    loopback: bool | None = None
    kernel: str = ""
    problem: str = ""


@frozen
class NodeFacts:
    """All that a registration tells of a node: the leader keeps it until the next one."""

    name: str
    address: str
    inventory: Inventory
    ports: tuple[int, int] = (20000, 20999)
    labels: Mapping[str, str] = field(factory=dict)
    fabrics: tuple[Fabric, ...] = ()
    installations: tuple[Installation, ...] = ()
    model_roots: tuple[str, ...] = ()
    version: str = ""


class NodeState(StrEnum):
    """The leader's verdict on a node."""

    JOINING = "joining"
    READY = "ready"
    UNREACHABLE = "unreachable"
    LOST = "lost"
    REMOVED = "removed"


class NodeEvent(StrEnum):
    """What can happen to a node, as far as its state is concerned."""

    REGISTERED = "registered"
    LINK_LOST = "link_lost"
    LOST_TIMER = "lost_timer"
    REMOVE = "remove"
    RESET = "reset"


_J, _R, _U, _L, _X = NodeState
_NODE: dict[tuple[NodeState, NodeEvent], NodeState] = {
    (_J, NodeEvent.REGISTERED): _R,
    (_J, NodeEvent.LINK_LOST): _J,
    (_R, NodeEvent.REGISTERED): _R,
    (_R, NodeEvent.LINK_LOST): _U,
    (_U, NodeEvent.REGISTERED): _R,
    (_U, NodeEvent.LINK_LOST): _U,
    (_U, NodeEvent.LOST_TIMER): _L,
    (_L, NodeEvent.REGISTERED): _R,
    (_L, NodeEvent.LINK_LOST): _L,
    (_X, NodeEvent.RESET): _J,
    **{(state, NodeEvent.REMOVE): _X for state in NodeState},
}


class IllegalTransition(LlmgwError):
    """A transition that is not in the table: logged and refused, never followed."""


def next_node_state(state: NodeState, event: NodeEvent) -> NodeState:
    """The node's state after C{event}.

    @raise IllegalTransition: the table (facts: node lifecycle) has no such edge, e.g. C{removed} with C{registered}.
    """
    try:
        return _NODE[state, event]
    except KeyError:
        raise IllegalTransition(f"a node that is {state} cannot take {event}") from None
