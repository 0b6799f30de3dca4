"""Moving a whole store: to another database, or to a file as a backup. Blocking; for the command line.

A copy keeps the epoch, which never goes down, and leaves the lease free. Agents that have seen the old store's epochs
therefore follow the new one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, func, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from llmgw.store import leaserow
from llmgw.store.backend import Backend, make_backend
from llmgw.store.errors import StoreError
from llmgw.store.schema import events, fence, lease, meta, metadata, version_of
from llmgw.store.sqlite import check_header

_BATCH = 500
_WATCH = 10.0  # seconds: three renewals of a lease of 15 s
_LOOK = 0.25


def copy_store(source: str, target: str, watch: float = _WATCH) -> dict[str, int]:
    """Copy everything into a new store and count it there; returns the number of rows by table.

    @param source: the address of a store that no server uses; C{target} that of an empty database, or a file not there yet.
    @param watch: how many seconds to look whether somebody renews the lease of a PostgreSQL store that nobody has released.
    @raise StoreError: either cannot be used, the source is in use, or the target is not new; the target stays empty then.
    """
    _check_there(source)
    with _opened(source) as old:
        if source.startswith("postgresql:"):
            _check_idle(old, watch)
        return _copy(old, target)


def _check_there(source: str) -> None:
    """Opening what is not there would make it."""
    backend = make_backend(source)
    try:
        if source.startswith("sqlite:"):
            there = Path(source.removeprefix("sqlite:///")).exists()
        else:
            with _blaming(backend), backend.reading() as connection:
                there = version_of(connection) > 0
    finally:
        backend.close()
    if not there:
        raise StoreError(f"there is no store at {backend.place}: nothing to copy")


def _check_idle(old: Backend, watch: float) -> None:
    """No lock holds servers off a database, but the one that leads shows itself: it renews its lease."""
    until, first = time.monotonic() + watch, _lease(old)
    while not first.released and time.monotonic() < until:
        time.sleep(_LOOK)
        if _lease(old) != first:
            who = first.holder.partition("@")[0]
            raise StoreError(f"{old.place} is in use, {who} leads over it: stop every llmgw-server first", "locked")


def _lease(old: Backend) -> leaserow.LeaseRow:
    with _blaming(old), old.reading() as connection:
        return leaserow.made(connection.execute(leaserow.reading()).one())


def backup_store(url: str, file: Path) -> int:
    """Write a consistent copy to a SQLite file, beside a running server; returns its size in bytes.

    @raise StoreError: the store cannot be read or the file is there already.
    """
    if file.exists():
        raise StoreError(f"{file} is there already: a backup overwrites nothing", "conflict")
    if url.startswith("sqlite:"):
        _backup_sqlite(Path(url.removeprefix("sqlite:///")), file)
    else:
        _backup_database(url, file)
    return file.stat().st_size


def _backup_database(url: str, file: Path) -> None:
    _check_there(url)
    source = make_backend(url)
    try:
        _copy(source, f"sqlite:///{file.absolute()}")
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    finally:
        source.close()
        for ending in (".lock", ".ballast"):
            file.with_name(file.name + ending).unlink(missing_ok=True)


def _backup_sqlite(source: Path, file: Path) -> None:
    new = file.with_name(f".{file.name}.new")
    try:
        check_header(source)
        new.unlink(missing_ok=True)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # Reading a WAL store needs its index beside it to be written, so a read-only connection would not do.
        with closing(sqlite3.connect(source, timeout=10)) as old, closing(sqlite3.connect(new, isolation_level=None)) as copy:
            old.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
        with new.open("rb") as written:
            os.fsync(written.fileno())
        new.replace(file)
    except sqlite3.Error as error:
        raise StoreError(f"{source} cannot be backed up to {file}: {error}") from error
    except OSError as error:
        raise StoreError(f"{error.filename or file}: {error.strerror}") from error
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def _opened(url: str) -> Iterator[Backend]:
    backend = make_backend(url)
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def _copy(old: Backend, target: str) -> dict[str, int]:
    with _opened(target) as new, _blaming(old), old.reading() as source, _blaming(new), new.writing() as sink:
        if _used(sink):
            raise StoreError(f"{new.place} is not new: copy into an empty database or to a file that is not there", "conflict")
        return _copy_rows(old, source, sink)


def _used(sink: Connection) -> bool:
    """Whether a server ever led over it, or it holds anything. A copy that failed leaves it as unused as it was."""
    if leaserow.made(sink.execute(leaserow.reading()).one()).epoch:
        return True
    tables = [table for table in metadata.sorted_tables if table not in (meta, lease, fence)]
    return any(sink.execute(select(table).limit(1)).first() for table in tables)


@contextmanager
def _blaming(backend: Backend) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        raise backend.explain(error) from error


def _rows(old: Backend, source: Connection, table: Table) -> Iterator[list[dict[str, Any]]]:
    with _blaming(old):
        for batch in source.execute(select(table)).mappings().partitions(_BATCH):
            yield [dict(row) for row in batch]


def _copy_rows(old: Backend, source: Connection, sink: Connection) -> dict[str, int]:
    counts = {}
    for table in metadata.sorted_tables:
        sink.execute(table.delete())
        counts[table.name] = 0
        for batch in _rows(old, source, table):
            sink.execute(table.insert(), batch)
            counts[table.name] += len(batch)
        there = sink.execute(select(func.count()).select_from(table)).scalar_one()
        if there != counts[table.name]:
            raise StoreError(
                f"{table.name} has {counts[table.name]} rows in {old.place} but {there} in the copy: nothing is kept"
            )
    sink.execute(update(lease).values(released=1))
    if sink.dialect.name == "postgresql":
        last = sink.execute(select(func.max(events.c.number))).scalar()
        if last:
            sink.execute(text("SELECT setval(pg_get_serial_sequence('events', 'number'), :last)"), {"last": last})
    return counts
