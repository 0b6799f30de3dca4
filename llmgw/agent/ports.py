"""Ports: whether one is free, who holds one that an engine could not have, and whether a listener is one of ours.

Surprising: an engine may bind early and listen minutes later, and SO_REUSEADDR lets two of them bind. So a free port is one
that can be bound without it. What cannot be seen (L{llmgw.holders}) is unknown: None.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from attrs import evolve
from twisted.internet.abstract import isIPAddress, isIPv6Address

from llmgw.engines.failures import PORT_TAKEN
from llmgw.fleet.shard import Allocation, Diagnosis
from llmgw.holders import holder, listeners, sockets, sockets_of

TIME_WAIT = "06"


def port_is_free(host: str, port: int) -> bool:
    """Whether an engine could listen on C{port}, of C{host} and of all addresses, right now.

    A port that only closed connections linger on (TIME_WAIT) is free: every engine takes it with SO_REUSEADDR.

    @raise OSError: binding fails for a reason other than the port (no such address, no permission).
    """
    for address in {host, "::" if ":" in host else "0.0.0.0"}:
        if not _binds(address, port, False) and not (_lingers(port) and _binds(address, port, True)):
            return False
    return True


def has_address(host: str) -> bool:
    """Whether C{host} is an address of this machine (still); where that cannot be told, as of a name, it is taken for granted."""
    if not (isIPAddress(host) or isIPv6Address(host)):
        return True
    try:
        return _binds(host, 0, False)
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL


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


def _lingers(port: int) -> bool:
    return bool(sockets(port, TIME_WAIT)) and not listeners(port)


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


def with_holders(found: Diagnosis, allocation: Allocation) -> Diagnosis:
    """The same with who listens on the engine's ports, if it says that one of them was taken."""
    if PORT_TAKEN not in found.text:
        return found
    seen = [f"port {port} by {holder(port)}" for port in allocation.ports if listeners(port)]
    return evolve(found, text=f"{found.text.rstrip('.')}: {', '.join(seen)}") if seen else found
