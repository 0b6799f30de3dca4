"""The agent's state folder: who it is, and that it is the only one.

STATE/lock         held by the agent that runs; holds its pid
STATE/instance     a random id, made once: the node's engines carry it
STATE/starts       how often an agent has begun here, so that the numbers of reports grow over restarts
STATE/devices.json see L{llmgw.agent.known_devices}
STATE/shards/      see L{llmgw.agent.shardfolder}
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from twisted.logger import Logger

from llmgw.errors import LlmgwError

log = Logger()


class StateFolderError(LlmgwError):
    """The state folder cannot be used."""


class StateFolder:
    """@ivar instance: the agent's id. C{starts}: the number of this start, from 1; 0 before C{open}."""

    def __init__(self, path: Path, new_instance: Callable[[], str]) -> None:
        self.path = path
        self.instance = ""
        self.starts = 0
        self._new_instance = new_instance
        self._lock = -1

    def open(self) -> None:
        """Make the folder, lock it, and know who we are.

        @raise StateFolderError: another agent has it, or it cannot be read or written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(self.path, 0o700)
            self._take_lock()
            self.instance = self._text("instance") or self._write("instance", self._new_instance())
            self.starts = self._next_start()
        except OSError as error:
            raise StateFolderError(f"cannot use the state folder {self.path}: {error.strerror} ({error.filename})") from None

    def close(self) -> None:
        """Let go of the lock; does nothing the second time."""
        if self._lock >= 0:
            # Closing alone would leave it to a child that has been forked and has not got as far as its program yet.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 20, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            raise StateFolderError(
                f"another llmgw-agent (pid {holder}) uses {self.path}: end it first, or give this one a `state` of its own"
            ) from None
        with contextlib.suppress(OSError):  # A full disk: the lock holds all the same.
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _next_start(self) -> int:
        """One more than last time. A full disk keeps it from being noted, which is no reason not to look after engines."""
        before = self._text("starts")
        number = int(before) + 1 if before.isdecimal() else 1
        try:
            self._write("starts", str(number))
        except OSError as error:
            log.error("cannot write {path}/starts: {error}", path=str(self.path), error=error.strerror)
        return number

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text().strip()
        except FileNotFoundError:
            return ""

    def _write(self, name: str, text: str) -> str:
        temporary = self.path / f"{name}.new"
        with open(temporary, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.path / name)
        return text
