"""What differs between SQLite and PostgreSQL, as the store sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Protocol

from sqlalchemy import Connection

from llmgw.store.errors import StoreError


class Backend(Protocol):
    """A database. Everything here blocks and belongs into the store's thread.

    @ivar place: what errors and status call it: the file, or the address without secrets.
    @ivar warnings: sentences about what opening found, for the log.
    """

    place: str
    warnings: list[str]

    def open(self) -> bool:
        """Lock, check and migrate; returns whether the store is new.

        @raise StoreError: it cannot be used; the sentence says why and what to do.
        """

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one state of the store and changes nothing."""

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction that holds the right to write from its first statement on."""

    def again(self, error: Exception) -> bool:
        """Whether what failed did not happen and is worth another try; does what helps (waits, makes room) before it says so."""

    def explain(self, error: Exception) -> StoreError:
        """The sentence for an error of the database."""

    def close(self) -> None:
        """Let go of everything."""


def make_backend(url: str) -> Backend:
    """The backend for a store's address; psycopg is imported for PostgreSQL only.

    @raise StoreError: an address of another kind, or the driver is not installed.
    """
    if url.startswith("sqlite:///"):
        from pathlib import Path

        from llmgw.store.sqlite import SqliteBackend

        return SqliteBackend(Path(url.removeprefix("sqlite:///")))
    if url.startswith("postgresql://"):
        from llmgw.store.postgresql import PostgresBackend

        if find_spec("psycopg") is None:
            raise StoreError("PostgreSQL needs its driver: pip install 'llmgw[postgresql]' where llmgw is installed")
        return PostgresBackend(url)
    raise StoreError(f"{url.partition(':')[0]}: is no kind of store: use sqlite:///FILE or postgresql://USER@HOST/DATABASE")
