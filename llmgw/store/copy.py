"""Moving a whole store: to another database, or to a file as a backup. Blocking; for the command line.

A copy keeps the epoch, which never goes down, and leaves the lease free. Agents that have seen the old store's epochs
therefore follow the new one.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, func, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from llmgw.store.backend import Backend, make_backend
from llmgw.store.errors import StoreError
from llmgw.store.schema import events, lease, metadata
from llmgw.store.sqlite import check_header

_BATCH = 500


def copy_store(source: str, target: str) -> dict[str, int]:
    """Copy everything into a new store; returns the number of rows by table.

    @param source: the address of a store that no server uses; C{target} that of an empty database, or a file not there yet.
    @raise StoreError: either cannot be used, the source is in use, or the target is not new.
    """
    with _opened(source) as (old, fresh):
        if fresh:
            raise StoreError(f"{old.place} was not there: nothing to copy")
        return _copy(old, target)


def backup_store(url: str, file: Path) -> int:
    """Write a consistent copy to a SQLite file, beside a running server; returns its size in bytes.

    @raise StoreError: the store cannot be read or the file is there already.
    """
    if file.exists():
        raise StoreError(f"{file} is there already: a backup overwrites nothing", "conflict")
    if url.startswith("sqlite:"):
        _backup_sqlite(Path(url.removeprefix("sqlite:///")), file)
    else:
        source = make_backend(url)
        try:
            _copy(source, f"sqlite:///{file.absolute()}")
        finally:
            source.close()
        for ending in (".lock", ".ballast"):
            file.with_name(file.name + ending).unlink(missing_ok=True)
    return file.stat().st_size


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
def _opened(url: str) -> Iterator[tuple[Backend, bool]]:
    backend = make_backend(url)
    fresh = backend.open()
    try:
        yield backend, fresh
    finally:
        backend.close()


def _copy(old: Backend, target: str) -> dict[str, int]:
    with _opened(target) as (new, fresh):
        if not fresh:
            raise StoreError(f"{new.place} is not new: copy into an empty database or to a file that is not there", "conflict")
        try:
            with old.reading() as source, new.writing() as sink:
                return _copy_rows(source, sink)
        except (SQLAlchemyError, OSError) as error:
            raise new.explain(error) from error


def _copy_rows(source: Connection, sink: Connection) -> dict[str, int]:
    counts = {}
    for table in metadata.sorted_tables:
        sink.execute(table.delete())
        rows = source.execute(select(table)).mappings()
        counts[table.name] = 0
        for batch in rows.partitions(_BATCH):
            sink.execute(table.insert(), [dict(row) for row in batch])
            counts[table.name] += len(batch)
    sink.execute(update(lease).values(released=1))
    if sink.dialect.name == "postgresql":
        last = sink.execute(select(func.max(events.c.number))).scalar()
        if last:
            sink.execute(text("SELECT setval(pg_get_serial_sequence('events', 'number'), :last)"), {"last": last})
    return counts
