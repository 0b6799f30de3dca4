"""What of the system decides whether engines run, read from the kernel's files: nothing blocks, nothing asks a network."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMPILERS = ("gcc", "nvcc", "ninja")


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


def memlock() -> int | None:
    """Bytes that an engine may lock in memory, None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def infiniband(root: Path = Path("/sys/class/infiniband")) -> bool | None:
    """Whether a port of InfiniBand or RoCE is active; None where that cannot be read."""
    try:
        return any("ACTIVE" in state.read_text() for state in root.glob("*/ports/*/state"))
    except OSError:
        return None


def loopback(hosts: Path = Path("/etc/hosts"), name: str | None = None) -> bool | None:
    """Whether the host's own name stands in C{hosts} for a loopback address; None where it does not stand there."""
    name = name or socket.gethostname()
    try:
        lines = [line.partition("#")[0].split() for line in hosts.read_text().splitlines()]
    except OSError:
        return None
    address = next((line[0] for line in lines if name in line[1:]), None)
    return None if address is None else address.startswith("127.") or address == "::1"


def system_facts(disk: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """All of it, as the fields of an L{llmgw.fleet.node.Inventory}; C{disk} is the folder whose free space counts."""
    total, available = memory()
    path = environment.get("PATH")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_total": total,
        "memory_available": available,
        "shm_free": free_bytes("/dev/shm"),
        "disk_free": free_bytes(str(disk)),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "memlock": memlock(),
        "compilers": tuple(name for name in COMPILERS if shutil.which(name, path=path)),
        "infiniband": infiniband(),
        "loopback": loopback(),
        "kernel": os.uname().release,
    }
