"""What the router's workers must count together: one file of 64-bit cells, mapped by the server and by every worker.

A bound over several processes without a lock: each process has a B{column} that only it writes, and everybody reads the
sum. To take a place, raise the own cell, then read the sum, and withdraw if it is above the limit. Of two that race for
the last place at least one sees the other, so the bound is never exceeded; both may withdraw, so a refusal is not a proof
that it is full (whoever waits, looks again).

The file, in cells of 8 bytes::

    0 magic   1 rows   2 columns   3 columns in use   4 directory revision   5..63 free
    64 ...            per column: owner's pid, its start time, table version it routes by, its live requests, those of them
                      that are retries, 3 free
    then per row:     hash of the name the row is for (0: free), table version that dropped it (0: in use)
    then per column:  for each row WIDTH cells

A B{row} is named by the index of its first cell in a column, so the hot path has no arithmetic: C{own[row]} is in flight.
What the cells of a row mean depends on what it is for:

    ========  ==========  ==========================================================================
    endpoint  IN_FLIGHT   requests at this endpoint
              ELSEWHERE   load that did not come through these workers (only the server writes it)
    model     IN_FLIGHT   requests of this model
              WAITING     requests in this worker's queue; HEAD: its first waiter's place in line
              DONE        how many requests have ended since the worker began
    key       IN_FLIGHT   requests of this key (or team); the other cells are those of router/windows.py
    ========  ==========  ==========================================================================

Column 0 is the server's. The file outlives the server, as workers do: a new server attaches to the same file, finds the
names of the rows in it, gives its new workers free columns and goes on counting what the old workers still have in
flight. Columns whose owner (pid and start time) is gone are zeroed by L{Scoreboard.sweep}. A row is used again only when
every living worker routes by a table that no longer has it and it sums to 0. A file of another layout is replaced by
rename: workers of an older release then keep counting in the old one until they have finished.

The file belongs in memory (L{shared_file}): on a disk, the kernel's writeback would now and then stop a worker at a count.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from llmgw.errors import LlmgwError
from llmgw.router import windows
from llmgw.router.sharedfile import Absent, locked, map_open, new_file, open_file, started
from llmgw.router.sharedfile import shared_file as shared_file

MAGIC = 0x6C6C6D6777_01
WIDTH = 8
ROWS, COLUMNS = 16_384, 32
ZEROS = memoryview(bytes(WIDTH * 8)).cast("q")
HEAD_CELLS = 64
OWNER_CELLS = 8
PID, STARTED, ACKNOWLEDGED, LIVE, RETRYING = 0, 1, 2, 3, 4
MARK, REVISION = 3, 4

IN_FLIGHT = 0
ELSEWHERE = 1
WAITING, HEAD, DONE = 1, 2, 3


class ScoreboardFull(LlmgwError):
    """There is no free row or column."""


@lru_cache(32_768)
def name_hash(name: str) -> int:
    """The directory's mark of a row's name; never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) or 1


class Scoreboard:
    """The mapped file, seen from one process.

    @ivar own: this process's column; index it with a row (plus a cell).
    @ivar mine: what is said of the column as a whole: L{LIVE} and L{RETRYING} are the worker's to count.
    @ivar descriptor: of the file, for workers to inherit.
    @ivar others: the columns in use that belong to other processes, the server's last.
    """

    def __init__(self, path: Path, column: int, rows: int = ROWS, columns: int = COLUMNS, descriptor: int | None = None) -> None:
        """Map an existing file. The server uses L{create}, a worker L{attach}.

        @param descriptor: of the file, where it is open already; it is ours from now on.
        @raise Absent: there is no such file of this layout.
        """
        self.path, self.column, self.rows, self.columns = path, column, rows, columns
        cells = HEAD_CELLS + columns * OWNER_CELLS + rows * 2 + columns * rows * WIDTH
        self.descriptor = open_file(path) if descriptor is None else descriptor
        try:
            self._map = map_open(self.descriptor, path, cells * 8)
        except Absent:
            os.close(self.descriptor)
            raise
        self._cells = memoryview(self._map).cast("q")
        self._owners = HEAD_CELLS
        self._directory = self._owners + columns * OWNER_CELLS
        self._first = self._directory + rows * 2
        if list(self._cells[:3]) != [MAGIC, rows, columns]:
            self._cells.release()
            self._map.close()
            os.close(self.descriptor)
            raise Absent(f"{path}: is a scoreboard of another layout")
        self._fence = threading.Lock()
        self._mark = -1
        self._rows: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._revision = -1
        self.own = self.view(column)
        self.mine = self._cells[self._owner(column) : self._owner(column) + OWNER_CELLS]
        self.others: list[memoryview[int]] = []
        self._look()

    @classmethod
    def create(cls, path: Path, rows: int = ROWS, columns: int = COLUMNS) -> Scoreboard:
        """The server's view: of the file that is there, else of a new one."""
        with locked(path):
            try:
                board = cls(path, 0, rows, columns)
                board.set_owner(0, os.getpid())
                return board
            except Absent:
                pass
            first = b"".join(value.to_bytes(8, "little") for value in (MAGIC, rows, columns, 1))
            size = HEAD_CELLS + columns * OWNER_CELLS + rows * 2 + columns * rows * WIDTH
            new_file(path, size * 8, first)
            board = cls(path, 0, rows, columns)
            board.set_owner(0, os.getpid())
            return board

    @classmethod
    def attach(
        cls, path: Path, column: int, rows: int = ROWS, columns: int = COLUMNS, descriptor: int | None = None
    ) -> Scoreboard:
        """A worker's view, with the column that its server claimed for it.

        @param descriptor: the server's, of the same file, so that a file that somebody has removed does not keep workers away.
        """
        board = cls(path, column, rows, columns, descriptor)
        board.set_owner(column, os.getpid())
        return board

    def close(self) -> None:
        """Unmap. The counts stay as they are."""
        for view in (self.own, self.mine, *self.others, self._server, self._cells):
            view.release()
        self.others = []
        self._map.close()
        os.close(self.descriptor)

    def view(self, column: int) -> memoryview[int]:
        """The cells of one column."""
        start = self._first + column * self.rows * WIDTH
        return self._cells[start : start + self.rows * WIDTH]

    # The hot path.

    def enter(self, row: int, limit: int) -> bool:
        """Take a place in C{row} unless that makes more than C{limit} over all processes (0: no limit)."""
        own = self.own
        own[row] += 1
        if not limit:
            return True
        self.fence()
        if self.total(row) <= limit:
            return True
        own[row] -= 1
        return False

    def fence(self) -> None:
        """To be called between writing an own cell and reading the others'.

        The lock is nobody else's; taking it is a locked instruction, without which the processor may read the others' cells
        before ours is visible to them.
        """
        with self._fence:
            pass

    def leave(self, row: int) -> None:
        """Give the place back; once per successful L{enter}."""
        self.own[row] -= 1

    def total(self, row: int) -> int:
        """The sum of one cell over all columns in use; add a cell's number to the row for another than IN_FLIGHT."""
        if self._cells[MARK] != self._mark:
            self._look()
        total = self.own[row]
        for column in self.others:
            total += column[row]
        return total

    def crowd(self, cell: int) -> int:
        """The sum over all workers of L{LIVE} or L{RETRYING}."""
        return sum(self._cells[self._owner(column) + cell] for column in range(1, self._cells[MARK]))

    def loads(self, rows: Iterable[int]) -> list[int]:
        """For each endpoint's row, what is in flight there: ours over all processes, and what the engine reports besides."""
        if self._cells[MARK] != self._mark:
            self._look()
        own, server = self.own, self._server
        if len(self.others) == 1:
            return [own[row] + server[row + 1] for row in rows]
        if len(self.others) == 2:
            other = self.others[0]
            return [own[row] + other[row] + server[row + 1] for row in rows]
        columns = [own, *self.others[:-1]]
        return [sum([column[row] for column in columns]) + server[row + 1] for row in rows]

    def every_column(self) -> list[memoryview[int]]:
        """All columns in use, the own one first."""
        if self._cells[MARK] != self._mark:
            self._look()
        return [self.own, *self.others]

    def _look(self) -> None:
        """Follow the number of columns in use. It only grows under a worker, and before the new column's worker counts."""
        self._mark = self._cells[MARK]
        numbers = [number for number in range(1, self._mark) if number != self.column]
        if self.column:
            numbers.append(0)
        for view in self.others:
            view.release()
        self.others = [self.view(number) for number in numbers]
        self._server = self.view(0)

    # Rows.

    def row(self, name: str) -> int | None:
        """The row for a name (C{endpoint/ID}, C{model/NAME}, C{key/ID}, C{team/NAME}), or None if it has none."""
        wanted = name_hash(name)
        found = self._rows.get(name)
        if found is not None and self._cells[self._directory + found // WIDTH * 2] == wanted:
            return found
        number = self._number(wanted)
        if number is None:
            return None
        self._rows[name] = row = number * WIDTH
        return row

    def _number(self, mark: int) -> int | None:
        """Which row has this mark. All marks are read once for each change of them, since a table asks for thousands."""
        if self._revision != self._cells[REVISION]:
            self._revision = self._cells[REVISION]
            self._numbers = {known: number for number, known in enumerate(self._marks()) if known}
        return self._numbers.get(mark)

    def _marks(self) -> list[int]:
        return self._cells[self._directory : self._directory + self.rows * 2].tolist()[::2]

    def assign(self, names: Iterable[str], version: int) -> dict[str, int]:
        """Give each of the names that table C{version} will hold its row, and begin to retire the rows of all others.

        Only the server calls this, before it publishes that version.

        @raise ScoreboardFull: too many names; those that had rows keep them.
        """
        marks = self._marks()
        known = {mark: number for number, mark in enumerate(marks) if mark}
        free = [number for number, mark in enumerate(marks) if not mark]
        free.reverse()
        assigned: dict[str, int] = {}
        for name in sorted(set(names)):
            mark = name_hash(name)
            number = known.pop(mark, -1)
            if number < 0:
                number = self._fresh(free)
                self._cells[self._directory + number * 2] = mark
            self._cells[self._directory + number * 2 + 1] = 0
            assigned[name] = number * WIDTH
        for number in known.values():
            at = self._directory + number * 2
            self._cells[at + 1] = self._cells[at + 1] or version
        self._rows = assigned
        self._cells[REVISION] += 1
        self.sweep()
        return dict(assigned)

    def _fresh(self, free: list[int]) -> int:
        if not free:
            free.extend(self.reclaim())
        if not free:
            raise ScoreboardFull(f"{self.path}: all {self.rows} rows are in use; have fewer endpoints, models and keys")
        return free.pop()

    def reclaim(self) -> list[int]:
        """Free the rows that the living workers' tables no longer hold and that sum to 0; returns their numbers."""
        living = [number for number in range(1, self._cells[MARK]) if self._cells[self._owner(number) + PID]]
        oldest = min((self._cells[self._owner(number) + ACKNOWLEDGED] for number in living), default=2**62)
        freed = []
        for number in range(self.rows):
            at, row = self._directory + number * 2, number * WIDTH
            if self._cells[at] and 0 < self._cells[at + 1] <= oldest and not self.total(row):
                self._cells[at] = self._cells[at + 1] = 0
                for column in (self.own, *self.others):
                    column[row : row + WIDTH] = ZEROS
                freed.append(number)
        self._cells[REVISION] += bool(freed)
        return freed

    # Columns.

    def _owner(self, column: int) -> int:
        return self._owners + column * OWNER_CELLS

    def set_owner(self, column: int, pid: int) -> None:
        """Say which process counts in C{column}."""
        at = self._owner(column)
        self._cells[at + STARTED] = started(pid)
        self._cells[at + PID] = pid

    def claim(self) -> int:
        """A zeroed column for a worker about to be started; the server's until L{set_owner} or L{attach}.

        @raise ScoreboardFull: more workers, old and new, than columns.
        """
        for column in range(1, self.columns):
            if not self._cells[self._owner(column) + PID]:
                self.clear(column)
                self.set_owner(column, os.getpid())
                self._cells[MARK] = max(self._cells[MARK], column + 1)
                return column
        raise ScoreboardFull(f"{self.path}: all {self.columns} columns are in use; older workers have yet to finish")

    def clear(self, column: int) -> None:
        """Zero the column of a worker that has died, and free it. What its keys have used goes over to the server's column."""
        with self.view(column) as cells:
            for name, row in self._rows.items():
                if name.startswith(("key/", "team/")) and cells[row + windows.STAMP]:
                    windows.inherit(self.own, cells, row)
            for number, mark in enumerate(self._marks()):
                if mark:
                    cells[number * WIDTH : (number + 1) * WIDTH] = ZEROS
        at = self._owner(column)
        for cell in (PID, STARTED, ACKNOWLEDGED, LIVE, RETRYING):
            self._cells[at + cell] = 0

    def sweep(self) -> list[int]:
        """Clear every column whose owner is no more, also those of workers that another server started."""
        dead = []
        for column in range(1, self._cells[MARK]):
            at = self._owner(column)
            pid = self._cells[at + PID]
            if pid and started(pid) != self._cells[at + STARTED]:
                self.clear(column)
                dead.append(column)
        return dead

    def depart(self, *beside: Path) -> bool:
        """A worker's last act: whoever goes last, with no server there, takes the file and those C{beside} it away."""
        with locked(self.path):
            for column in range(self._cells[MARK]):
                at = self._owner(column)
                pid = self._cells[at + PID]
                if column != self.column and pid and started(pid) == self._cells[at + STARTED]:
                    return False
            if not self._named():
                return False
            for path in (self.path, *beside):
                path.unlink(missing_ok=True)
        return True

    def _named(self) -> bool:
        """Whether our file is the one at our path: a newer release's, with more rows, may have taken its place."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def acknowledge(self, version: int) -> None:
        """A worker routes by table C{version} now and has nothing more to do with rows that it does not hold."""
        self._cells[self._owner(self.column) + ACKNOWLEDGED] = version
