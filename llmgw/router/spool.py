"""A request's body while it arrives: the first mebibyte in memory, more than that in a file without a name.

So the memory of a worker does not grow with what clients upload, and a crash leaves nothing behind. The whole body is then
mapped, not read: the kernel may take its pages back. Writing goes to the page cache; a disk that is full is the request's
trouble (507), not the worker's.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

IN_MEMORY = 2**20

Whole = bytes | mmap.mmap


class Spool:
    """Takes pieces, gives the whole."""

    __slots__ = ("_file", "_folder", "_held", "_pieces", "size")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: list[bytes] = []
        self._held = 0
        self._file: int | None = None
        self.size = 0

    def add(self, data: bytes) -> None:
        """One more piece. @raise OSError: the disk is full."""
        self._pieces.append(data)
        self.size += len(data)
        self._held += len(data)
        if self._held > IN_MEMORY:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                self._file = os.dup(file.fileno())
        data = memoryview(b"".join(self._pieces))
        self._pieces.clear()
        self._held = 0
        while data:
            data = data[os.write(self._file, data) :]

    def whole(self) -> Whole:
        """All of it; to be asked once. @raise OSError: the disk is full."""
        if self._file is None:
            pieces, self._pieces = self._pieces, []
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._spill()
        found = mmap.mmap(self._file, self.size, access=mmap.ACCESS_READ)
        self.drop()
        return found

    def drop(self) -> None:
        """Let go of what is held; what C{whole} gave stays."""
        self._pieces.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        """A client that has left in mid-upload leaves no descriptor behind."""
        self.drop()
