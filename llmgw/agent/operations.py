"""What was answered to which operation, on disk: an operation that is repeated gets the same answer and no second effect.

One line of JSON each, appended; the last thousand are kept. A line that a power cut has torn is skipped. On a full disk the
answer is remembered in memory only, which is said once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from twisted.logger import Logger

from llmgw.fleet.plain import from_plain, to_plain
from llmgw.wire.messages import Done

KEEP = 1000
log = Logger()


class Operations:
    """The answers given so far, the oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, Done] = {}
        self._lines = 0
        self._complained = False

    def load(self) -> None:
        """Read what earlier agents answered; a file that cannot be read is as good as none."""
        try:
            lines = [line for line in self._path.read_bytes().splitlines() if line]
        except FileNotFoundError:
            return
        except OSError as error:
            log.error("cannot read {path}: {error}", path=str(self._path), error=error.strerror)
            return
        self._lines = len(lines)
        for line in lines:
            try:
                self._keep(from_plain(json.loads(line), Done))
            except (ValueError, RecursionError):
                log.warn("a line of {path} cannot be read: skipped", path=str(self._path))

    def get(self, operation: str) -> Done | None:
        """What was answered to it, None if it is new."""
        return self._answers.get(operation)

    def add(self, done: Done) -> None:
        """Remember an answer; on disk when this returns, unless the disk is full."""
        self._keep(done)
        try:
            if self._lines > 2 * KEEP:
                self._rewrite()
            else:
                self._append(done)
            self._complained = False
        except OSError as error:
            if not self._complained:
                log.error("cannot write {path}: {error}", path=str(self._path), error=error.strerror)
            self._complained = True

    def _keep(self, done: Done) -> None:
        self._answers.pop(done.operation, None)
        self._answers[done.operation] = done
        while len(self._answers) > KEEP:
            del self._answers[next(iter(self._answers))]

    def _append(self, done: Done) -> None:
        with open(self._path, "ab", opener=_private) as file:
            file.write(_line(done))
            file.flush()
            os.fsync(file.fileno())
        self._lines += 1

    def _rewrite(self) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        with open(temporary, "wb", opener=_private) as file:
            file.writelines(map(_line, self._answers.values()))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self._path)
        self._lines = len(self._answers)


def _line(done: Done) -> bytes:
    # A leading newline ends a line that was torn before.
    return b"\n" + json.dumps(to_plain(done)).encode()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
