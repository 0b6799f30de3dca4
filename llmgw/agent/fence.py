"""The fence: which leadership this node obeys, on disk before it is obeyed.

A lease does not keep an old leader from speaking; only the node that refuses to listen does. So the highest epoch ever seen,
and who held it, survive restarts and power cuts. The file is written beside and renamed; one that cannot be read stops the
agent, since forgetting the epoch would let an old leader command. It is always one sector long, so that on a full disk it can
be written in place: an agent whose disk is full must still be able to follow a new leader and say so.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from llmgw.errors import LlmgwError


class FenceError(LlmgwError):
    """The fence's file cannot be read or written."""


class Fence:
    """@ivar epoch: the highest epoch obeyed so far, 0 for none. C{leader} is who held it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.epoch = 0
        self.leader = ""

    def load(self) -> None:
        """Read the file; one that is not there is a node that was never commanded.

        @raise FenceError: it is there and cannot be used.
        """
        try:
            value = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise FenceError(f"cannot read {self._path}: {error}; {_ADVICE}") from None
        if not _sound(value):
            raise FenceError(f"{self._path} does not hold an epoch and a leader; {_ADVICE}")
        self.epoch, self.leader = value["epoch"], value["leader"]

    def problem(self, epoch: int, leader: str) -> str:
        """Why this leader may not command: C{stale_epoch}, C{epoch_conflict}, or nothing."""
        if epoch < self.epoch:
            return "stale_epoch"
        if epoch == self.epoch and self.leader not in ("", leader):
            return "epoch_conflict"
        return ""

    def admit(self, epoch: int, leader: str) -> str:
        """Like L{problem}, but a higher epoch is stored, and on disk when this returns.

        @raise FenceError: it cannot be stored, so it must not be obeyed.
        """
        problem = self.problem(epoch, leader)
        if not problem and (epoch, leader) != (self.epoch, self.leader):
            self._store(epoch, leader)
        return problem

    def _store(self, epoch: int, leader: str) -> None:
        text = json.dumps({"epoch": epoch, "leader": leader}).encode().ljust(_SECTOR) + b"\n"
        try:
            try:
                self._replace(text)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or _size(self._path) != len(text):
                    raise
                _write(self._path, text, os.O_WRONLY)
        except OSError as error:
            raise FenceError(f"cannot write {self._path}: {error.strerror}; until it can be, no new leader is obeyed") from None
        self.epoch, self.leader = epoch, leader

    def _replace(self, text: bytes) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            _write(temporary, text, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.rename(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sound(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("leader"), str):
        return False
    epoch = value.get("epoch")
    return type(epoch) is int and 0 <= epoch < 2**63


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _write(path: Path, text: bytes, flags: int) -> None:
    with open(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


_SECTOR = 511
_ADVICE = "it says which leader may command; if it is lost, remove it while only one llmgw-server runs, then start again"
