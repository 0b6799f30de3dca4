"""Who listens on a port: found by C{/proc}, so that "address already in use" comes with a pid and a command.

Surprising: what other users' processes hold is not visible to one that is not root, and a socket that is bound and does not
listen yet stands nowhere: who holds those is unknown.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from attrs import frozen

LISTEN = "0A"
# Of a command line: what tells programs apart, and hardly ever the secrets that some take further back.
WORDS, LETTERS = 3, 80


@frozen
class Listener:
    """A listening socket as C{/proc/net/tcp} shows it; C{inode} leads to its holder."""

    address: str
    port: int
    inode: int


def _address(text: str) -> str:
    raw = bytes.fromhex(text)
    words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    if len(words) == 4:
        return socket.inet_ntop(socket.AF_INET, words)
    if words[:12] == bytes(10) + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, words[12:])
    return socket.inet_ntop(socket.AF_INET6, words)


def sockets(port: int, state: str) -> list[Listener]:
    """Every TCP socket on C{port} of our network namespace that is in this state of the kernel's."""
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
    return sockets(port, LISTEN)


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


def _holding(inodes: set[int]) -> Iterator[int]:
    for name in sorted(os.listdir("/proc")):
        if name.isdigit() and inodes & (sockets_of(int(name)) or set()):
            yield int(name)


def command(pid: int) -> str:
    """The beginning of a process' command line, without the folder of its program."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").replace("\0", " ").split()
        with open(f"/proc/{pid}/comm") as file:
            name = file.read().strip()
        shown = " ".join([os.path.basename(words[0]), *words[1:WORDS]]) if words else name
        return "".join(letter if letter.isprintable() else "?" for letter in shown)[:LETTERS]
    return "gone since"


def holder(port: int) -> str:
    """Who listens on C{port}: C{pid 812 (nginx)}, or that it cannot be seen."""
    inodes = {listener.inode for listener in listeners(port)}
    for pid in _holding(inodes):
        return f"pid {pid} ({command(pid)})"
    return "a process of another user, or one that has bound it without listening" if inodes else "nobody that listens yet"


def why_not(error: BaseException, port: int) -> str:
    """What hindered us from listening on C{port}, with who does if it is in use and can be seen."""
    error = getattr(error, "socketError", error)
    text = str(getattr(error, "strerror", None) or error)
    taken = getattr(error, "errno", None) == errno.EADDRINUSE and listeners(port)
    return f"{text} by {holder(port)}" if taken else text
