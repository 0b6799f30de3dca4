"""The child of a stand-in engine that does the work, as vLLM and SGLang have one: it is left behind when its server is killed."""

from __future__ import annotations

import ctypes
import os
import time

ORPHAN_SECONDS = 60.0
_PR_SET_NAME = 15


def fork_worker(name: bytes) -> int:
    """Fork it; it outlives a killed server for C{ORPHAN_SECONDS} and no longer.

    @param name: what it is called in the process list, at most 15 bytes of it.
    @return: its pid.
    """
    parent = os.getpid()
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    orphaned = 0.0
    while not orphaned or time.monotonic() - orphaned < ORPHAN_SECONDS:
        if not orphaned and os.getppid() != parent:
            orphaned = time.monotonic()
        time.sleep(0.1)
    os._exit(0)
