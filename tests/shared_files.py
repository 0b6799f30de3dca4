"""The files in memory that a router's processes share: found, and taken away where all of these were killed."""

from __future__ import annotations

from pathlib import Path

from llmgw.router.sharedfile import shared_file


def shared_files(folder: Path) -> list[Path]:
    """Those outside of C{folder} that belong to the server whose router's state it is."""
    found = [shared_file(folder, name) for name in ("scoreboard", "prefixes")]
    return [path for path in found if path.parent != folder and path.exists()]


def remove_shared_files(folder: Path) -> None:
    """What is killed leaves them to the next server; here none comes."""
    for path in shared_files(folder):
        path.unlink(missing_ok=True)
