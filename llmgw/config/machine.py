"""What a configuration's defaults and checks need to know of the machine; tests pass their own L{Machine}."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@frozen
class Machine:
    """C{ephemeral} are the ports, both included, that the kernel hands to outgoing connections."""

    name: str = "server"
    cores: int = 1
    ephemeral: tuple[int, int] = (32768, 60999)


def this_machine() -> Machine:
    """The machine this runs on."""
    return Machine(os.uname().nodename.partition(".")[0] or "server", len(os.sched_getaffinity(0)), _ephemeral())


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = _RANGE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return Machine().ephemeral
