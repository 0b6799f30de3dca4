"""SQLite: one file, one server.

What is surprising about SQLite here: it opens an empty file as a valid, empty database, so a file that lost its content
would read as a fleet without models; a transaction that begins by reading cannot always become a writing one, so writes
begin with C{BEGIN IMMEDIATE}; and on a full disk even a delete fails, which is what the ballast is for.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from llmgw.store.ballast import Ballast
from llmgw.store.errors import StoreError
from llmgw.store.lockfile import LockFile
from llmgw.store.schema import migrate

HEADER = b"SQLite format 3\0"
APPLICATION = 0x6C6C6D67  # "llmg", in the file's header: how we know a database as ours before reading a table
BUSY = 2000  # milliseconds until a try to write gives up on another process's lock
_ROOM = 2**24


class SqliteBackend:
    """A SQLite file, locked by this process while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)
        self.warnings: list[str] = []
        self._lock = LockFile(path.with_name(path.name + ".lock"))
        self.ballast = Ballast(path.with_name(path.name + ".ballast"))
        self._engine = make_engine(path)
        self._look_again = 0.0

    def open(self) -> bool:
        """See L{llmgw.store.backend.Backend.open}."""
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._lock.take()
            try:
                return self._open()
            except BaseException:
                self.close()
                raise
        except (OSError, sqlite3.Error, DBAPIError) as error:
            raise self.explain(error) from error

    def _open(self) -> bool:
        fresh = not self.path.exists()
        if fresh:
            self._create()
        check_header(self.path)
        if not self.ballast.load():
            self.warnings.append(f"less than {self.ballast.size // 2**20} MiB is free under {self.path.parent}: make room")
        with self.writing() as connection:
            found = connection.exec_driver_sql("PRAGMA application_id").scalar()
            if found != APPLICATION:
                raise StoreError(
                    f"{self.path} is a SQLite database of another program: give the store a file of its own", "foreign"
                )
            verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if verdict != "ok":
                raise StoreError(f"{self.path} is damaged ({verdict}): {_RESTORE}", "damaged")
            migrate(connection)
        return fresh

    def _create(self) -> None:
        """Make it under another name and move it here whole: a death on the way leaves no half store, and none of 0 bytes."""
        rest = self.path.with_name(self.path.name + "-wal")
        if rest.exists() and rest.stat().st_size:
            raise StoreError(
                f"{self.path} is gone but {rest.name} is there: bring the file back, or move {rest.name} away", "damaged"
            )
        new = self.path.with_name(self.path.name + ".new")
        for leftover in (new, new.with_name(new.name + "-journal"), new.with_name(new.name + "-wal")):
            leftover.unlink(missing_ok=True)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        engine = make_engine(new, journal="DELETE")
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION}")
                migrate(connection)
        finally:
            engine.dispose()
        new.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(folder)
        os.close(folder)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """See L{llmgw.store.backend.Backend.reading}."""
        with self._engine.connect() as connection, connection.execution_options(llmgw_begin="BEGIN").begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """See L{llmgw.store.backend.Backend.writing}."""
        with self._engine.begin() as connection:
            yield connection
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + 60
            self._reload_ballast()

    def _reload_ballast(self) -> None:
        with suppress(OSError):
            free = os.statvfs(self.path.parent)
            if free.f_bavail * free.f_frsize >= _ROOM:
                self.ballast.load()

    def again(self, error: Exception) -> bool:
        """A lock is worth another try; a full disk is while there is ballast to drop."""
        code = _code(error)
        if code == sqlite3.SQLITE_FULL:
            return self.ballast.drop()
        return code == sqlite3.SQLITE_BUSY

    def explain(self, error: Exception) -> StoreError:
        """See L{llmgw.store.backend.Backend.explain}."""
        if isinstance(error, OSError):
            code = "full" if error.errno == 28 else "failed"
            return StoreError(f"{error.filename or self.path}: {error.strerror}", code)
        word, text = _SENTENCES.get(_code(error), ("failed", ""))
        said = str(getattr(error, "orig", None) or error)
        return StoreError(f"{self.path}: {text or said}", word)

    def close(self) -> None:
        """See L{llmgw.store.backend.Backend.close}."""
        self._engine.dispose()
        self._lock.release()


_RESTORE = "stop llmgw-server, put a backup in its place and start it again; the engines run on meanwhile"
_EMPTY = "put a backup in its place, or remove it to begin with a new store, which adopts the engines that run"
_SENTENCES = {
    sqlite3.SQLITE_BUSY: ("locked", "another process holds a lock on it; end what reads or writes it (fuser shows its pid)"),
    sqlite3.SQLITE_FULL: ("full", "the disk is full: make room, it goes on by itself then"),
    sqlite3.SQLITE_READONLY: ("failed", "may not be written: it belongs to another user, or its file system is read-only"),
    sqlite3.SQLITE_CANTOPEN: ("failed", "cannot be opened: is its folder there, and may this user write to it?"),
    sqlite3.SQLITE_CORRUPT: ("damaged", f"is damaged: {_RESTORE}"),
    sqlite3.SQLITE_NOTADB: ("foreign", "is no SQLite database: give the store a file of its own"),
    sqlite3.SQLITE_IOERR: ("failed", "the disk failed to read or write; look at the kernel's log"),
}


def _code(error: Exception) -> int:
    """SQLite's primary result code, -1 for another kind of error."""
    cause = getattr(error, "orig", None) or error
    found: int = getattr(cause, "sqlite_errorcode", -1)
    return found & 0xFF if found >= 0 else -1


def check_header(path: Path) -> None:
    """Refuse a file that is not ours before SQLite sees it: opening alone would change it.

    @raise StoreError: it is empty, or something else.
    """
    with path.open("rb") as file:
        head = file.read(100)
    if not head:
        raise StoreError(f"{path} is empty (0 bytes), which would read as a fleet without models: {_EMPTY}", "damaged")
    if head[:16] != HEADER or len(head) < 100:
        raise StoreError(f"{path} is no SQLite database: give the store a file of its own", "foreign")
    if int.from_bytes(head[68:72], "big") != APPLICATION:
        raise StoreError(f"{path} is a SQLite database of another program: give the store a file of its own", "foreign")


def make_engine(path: Path, journal: str = "WAL") -> Engine:
    """An engine for that file, which must be there already."""
    engine = create_engine("sqlite://", creator=lambda: connect(path, journal), poolclass=QueuePool, pool_size=1, max_overflow=0)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("llmgw_begin", "BEGIN IMMEDIATE"))

    return engine


def connect(path: Path, journal: str = "WAL") -> sqlite3.Connection:
    """A connection without the driver's own transactions. It never makes the file."""
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw", uri=True, isolation_level=None, timeout=BUSY / 1000, check_same_thread=False
    )
    try:
        for pragma in (f"journal_mode = {journal}", "synchronous = FULL", "trusted_schema = OFF", "journal_size_limit = 4194304"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection
