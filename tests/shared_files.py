"""The files in memory that a router's processes share: found, and taken away where all of these were killed."""

from __future__ import annotations

import os
from pathlib import Path

from llmgw.router.sharedfile import shared_file

NAMES = ("scoreboard", "prefixes")


def shared_files(folder: Path) -> list[Path]:
    """Those in /dev/shm that belong to routers with their state in C{folder} or anywhere below it."""
    found = [shared_file(Path(below), name) for below, _, _ in os.walk(folder) for name in NAMES]
    return [path for path in found if folder not in path.parents and path.exists()]


def remove_shared_files(folder: Path) -> None:
    """What is killed leaves them to the next server; here none comes."""
    for path in shared_files(folder):
        path.unlink(missing_ok=True)
