"""A file that only takes room, so that a full disk can be recovered from: on one, even deleting rows needs space."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Ballast:
    """C{size} bytes beside the store, really allocated."""

    def __init__(self, path: Path, size: int = 2**20) -> None:
        self.path, self.size = path, size

    def load(self) -> bool:
        """Make sure it is there; False if there is no room for it."""
        try:
            if self.path.stat().st_size >= self.size:
                return True
        except OSError:
            pass
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(file, 0, self.size)
        except OSError:
            self.drop()
            return False
        finally:
            os.close(file)
        return True

    def drop(self) -> bool:
        """Give the room back; False if there was none to give."""
        with suppress(OSError):
            self.path.unlink()
            return True
        return False
