"""PostgreSQL: several servers, one store.

No session state is relied on (no prepared statement, no advisory lock, no C{SET} that outlives its transaction), so that a
transaction pooler may stand between. A password comes from a passfile and never from the address.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from llmgw.store.errors import StoreError
from llmgw.store.schema import migrate

STATEMENT = 5.0
CONNECT = 3
_CREATING = 0x6C6C6D67


class PostgresBackend:
    """A PostgreSQL database."""

    def __init__(self, url: str) -> None:
        self.place = shown(url)
        self.warnings: list[str] = []
        self._engine = make_engine(url)

    def open(self) -> bool:
        """See L{llmgw.store.backend.Backend.open}."""
        try:
            with self.writing() as connection:
                # Two servers that find a new database at once: the second waits here, then finds the first one's tables.
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CREATING})
                return migrate(connection) == 0
        except DBAPIError as error:
            raise self.explain(error) from error

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """See L{llmgw.store.backend.Backend.reading}."""
        with self._engine.connect() as connection, connection.begin():
            connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            limit(connection, STATEMENT)
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """See L{llmgw.store.backend.Backend.writing}."""
        with self._engine.begin() as connection:
            limit(connection, STATEMENT)
            yield connection

    def again(self, error: Exception) -> bool:
        """Only what cannot have happened: a lock that was not got, two transactions that met."""
        return _state(error) in ("40001", "40P01", "55P03")

    def explain(self, error: Exception) -> StoreError:
        """See L{llmgw.store.backend.Backend.explain}."""
        said = " ".join(str(getattr(error, "orig", None) or error).split())
        state = _state(error)
        if state == "53100":
            return StoreError(f"{self.place}: the database's disk is full: make room there", "full")
        if state in ("57014", "55P03"):
            return StoreError(f"{self.place}: the database was too slow ({said})", "timeout")
        if state is None or state[:2] in ("08", "57"):
            return StoreError(f"{self.place}: cannot be reached: {said}", "unreachable")
        return StoreError(f"{self.place}: {said}", "failed")

    def close(self) -> None:
        """See L{llmgw.store.backend.Backend.close}."""
        self._engine.dispose()


def make_engine(url: str, pooled: bool = True, connect_timeout: int = CONNECT) -> Engine:
    """An engine for that address; without C{pooled} each use dials anew."""
    settings = {"connect_timeout": connect_timeout, "prepare_threshold": None, "application_name": "llmgw-server", **ALIVE}
    pool: dict[str, Any] = {"poolclass": NullPool}
    if pooled:
        pool = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0, "pool_pre_ping": True}
    return create_engine("postgresql+psycopg" + url.removeprefix("postgresql"), connect_args=settings, **pool)


# A server that vanished without a word is noticed by the kernel, whether data is on the way to it or not.
ALIVE = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 5000}


def limit(connection: Connection, seconds: float) -> None:
    """Bound this transaction: each statement, each wait for a lock, and how long it may stand idle while we are stopped."""
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    settings = ", ".join(f"set_config('{name}', '{int(seconds * 1000)}', true)" for name in names)
    connection.execute(text(f"SELECT {settings}, set_config('synchronous_commit', 'on', true)"))


def shown(url: str) -> str:
    """The address without query and password."""
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _state(error: Exception) -> str | None:
    """The SQLSTATE, None where the connection failed before there was one."""
    found: str | None = getattr(getattr(error, "orig", None) or error, "sqlstate", None)
    return found
