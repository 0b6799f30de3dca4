"""Passing listening sockets from old workers to a new server, so that no connection is refused or reset in between.

A listening socket has a queue of connections that the kernel has accepted and no process has taken yet. To close it resets
them, and those whose handshake is under way; with SO_REUSEPORT a new socket beside it does not inherit them. So a new server does
not merely bind beside the old workers: it asks each of them, over a unix socket in the state folder, for its listening
descriptors. Both then hold the same sockets and queues, and the old worker may close its own whenever it likes.

The files are called C{GENERATION.COLUMN.sock}. Only a process of the same user gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

WAIT = 0.5
MAX_SOCKETS = 64


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for C{path} that fits into the 108 bytes of a unix socket's address."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid in (0, os.getuid())


class Offer:
    """A worker's side: gives its listening sockets to whoever asks and is of the same user."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path, sockets: list[socket.socket]) -> None:
        self._loop = loop
        self._path = path
        self._sockets = [listening.dup() for listening in sockets]
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        with _short(path) as name:
            self._asked.bind(name)
        self._asked.listen(8)
        loop.add_reader(self._asked.fileno(), self._give)

    def _give(self) -> None:
        try:
            connection, _ = self._asked.accept()
        except OSError:
            return
        with connection:
            if _same_user(connection):
                with contextlib.suppress(OSError):
                    socket.send_fds(connection, [b"."], [listening.fileno() for listening in self._sockets])

    def close(self) -> list[socket.socket]:
        """Offer them no longer. Returns the offer's own hold on the sockets, for a last look into their queues."""
        self._loop.remove_reader(self._asked.fileno())
        self._asked.close()
        self._path.unlink(missing_ok=True)
        return self._sockets


def offers(folder: Path) -> list[tuple[int, Path]]:
    """The generations and files of the workers that offer their sockets, the newest first."""
    found = []
    for path in folder.glob("*.*.sock"):
        generation = path.name.split(".")[0]
        if generation.isdigit():
            found.append((int(generation), path))
    return sorted(found, reverse=True)


def _ask(path: Path) -> list[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT)
        try:
            with _short(path) as name:
                connection.connect(name)
            if not _same_user(connection):
                return []
            _, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_SOCKETS)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return []
        except OSError:
            return []
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def collect(folder: Path, address: tuple[str, int]) -> list[socket.socket]:
    """The listening sockets on this address that old workers still hold, each once.

    Blocks for at most half a second for each worker that is there and does not answer.
    """
    kept: dict[int, socket.socket] = {}
    for _, path in offers(folder):
        for listening in _ask(path):
            inode = os.fstat(listening.fileno()).st_ino
            if inode in kept or listening.getsockname()[:2] != address:
                listening.close()
            else:
                kept[inode] = listening
    return list(kept.values())
