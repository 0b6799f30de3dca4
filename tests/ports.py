"""Ports that no other run of these tests has: each process of tests claims a block of its own, below the ephemeral range.

A port found by binding 0 and closing it again may be another's by the time it is used: the kernel gives the next program
that binds 0 or dials the same one. Out of these blocks nobody is given anything unasked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket

FIRST, BLOCKS, SIZE = 12_000, 20, 1_000


class Block:
    """A block that is ours as long as this process lives: a socket bound to its first port, which nobody listens on, says so."""

    def __init__(self) -> None:
        begin = os.getpid() % BLOCKS
        for number in (*range(begin, BLOCKS), *range(begin)):
            self._claim = socket.socket()
            self._first = FIRST + number * SIZE
            with contextlib.suppress(OSError):
                self._claim.bind(("127.0.0.1", self._first))
                break
            self._claim.close()
        else:
            raise AssertionError(f"all {BLOCKS} blocks of ports from {FIRST} on are taken")
        self._last = 0

    def take(self, count: int) -> range:
        """The next C{count} ports in a row that are all free; the block's ports come round again."""
        for _ in range(SIZE):
            first = self._last + 1 if self._last + count < SIZE else 1
            self._last = first + count - 1
            found = range(self._first + first, self._first + first + count)
            if all(map(_free, found)):
                return found
        raise AssertionError(f"no {count} free ports in a row from {self._first} on")


def _free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        # As servers bind: what is left of closed connections for a minute takes nothing from whoever listens next.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


@functools.cache
def _block() -> Block:
    return Block()


def free_ports(count: int) -> range:
    """Free ports in a row, which nobody else is told of for a long while."""
    return _block().take(count)


def free_port() -> int:
    return free_ports(1)[0]
