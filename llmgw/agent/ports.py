"""Ports: whether one is free, who holds it, and whether a listener is one of ours.

Surprising: an engine may bind early and listen minutes later, and SO_REUSEADDR lets two of them bind. So a free port is one
that can be bound without it. What other users' processes hold is not visible to an agent that is not root: unknown is None.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable

from attrs import frozen

LISTEN, TIME_WAIT = "0A", "06"


@frozen
class Listener:
    """A listening socket as C{/proc/net/tcp} shows it; C{inode} leads to its holder."""

    address: str
    port: int
    inode: int


def port_is_free(host: str, port: int) -> bool:
    """Whether an engine could listen on C{port}, of C{host} and of all addresses, right now.

    A port that only closed connections linger on (TIME_WAIT) is free: every engine takes it with SO_REUSEADDR.

    @raise OSError: binding fails for a reason other than the port (no such address, no permission).
    """
    for address in {host, "::" if ":" in host else "0.0.0.0"}:
        if not _binds(address, port, False) and not (_lingers(port) and _binds(address, port, True)):
            return False
    return True


def _binds(address: str, port: int, reuse: bool) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _address(text: str) -> str:
    raw = bytes.fromhex(text)
    words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    if len(words) == 4:
        return socket.inet_ntop(socket.AF_INET, words)
    if words[:12] == bytes(10) + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, words[12:])
    return socket.inet_ntop(socket.AF_INET6, words)


def _sockets(port: int, state: str) -> list[Listener]:
    found = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(path) as file:
            for line in list(file)[1:]:
                part = line.split()
                address, _, number = part[1].rpartition(":")
                if part[3] == state and int(number, 16) == port:
                    found.append(Listener(_address(address), port, int(part[9])))
    return found


def listeners(port: int) -> list[Listener]:
    """Every socket that listens on C{port} in our network namespace."""
    return _sockets(port, LISTEN)


def _lingers(port: int) -> bool:
    return bool(_sockets(port, TIME_WAIT)) and not listeners(port)


def sockets_of(pid: int) -> set[int] | None:
    """The inodes of the sockets that C{pid} holds; None if we may not look."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return None
    except OSError:
        return set()
    found = set()
    for name in names:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def owned_by(pids: Iterable[int], host: str, port: int) -> bool | None:
    """Whether every socket that would take a connection to C{host:port} is held by one of C{pids}; None: cannot be known.

    It cannot where the holders' descriptors are hidden from us, and where nothing listens in our network namespace.
    """
    wildcards = {"0.0.0.0", "::", host}
    there = [listener for listener in listeners(port) if listener.address in wildcards]
    held = [sockets_of(pid) for pid in pids]
    ours = set().union(*(inodes for inodes in held if inodes))
    if there and all(listener.inode in ours for listener in there):
        return True
    return None if not there or None in held else False


def holder(port: int) -> str:
    """Who listens on C{port}: C{pid 812 (nginx)}, or that it cannot be seen."""
    inodes = {listener.inode for listener in listeners(port)}
    for name in os.listdir("/proc"):
        if name.isdigit() and inodes & (sockets_of(int(name)) or set()):
            with contextlib.suppress(OSError), open(f"/proc/{name}/comm") as file:
                return f"pid {name} ({file.read().strip()})"
    return "a process of another user, or one that has bound it without listening" if inodes else "nobody that listens yet"
