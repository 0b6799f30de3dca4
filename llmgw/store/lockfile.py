"""One server per SQLite store: a lock on a file beside it, which the kernel lets go of however the holder dies.

Not on the database itself: SQLite drops its own locks when any descriptor of the file is closed, and a backup opens one.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from llmgw.store.errors import StoreError


class LockFile:
    """C{FILE.lock}, held from L{take} to L{release}. It is never removed: two could then hold locks on two files of one name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def take(self) -> None:
        """Lock it and leave our pid in it.

        @raise StoreError: another process holds it; the text names its pid.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(file, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(file)
            raise StoreError(
                f"{self._path} is locked by pid {holder}, another llmgw-server on this store: stop it first", "locked"
            ) from None
        self._file = file
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.pwrite(file, f"{os.getpid():<19}\n".encode(), 0)

    def release(self) -> None:
        """Let go."""
        if self._file is not None:
            # Closing alone would leave it to a child that has been forked and has not got as far as its program yet.
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None
