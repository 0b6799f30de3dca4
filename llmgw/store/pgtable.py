"""The lease's row in PostgreSQL, over a connection of its own, one round trip each.

All statements of a transaction go in one message, which the database runs as one transaction: so no transaction ever stands
open while this process is stopped, a slow network costs one delay and not six, and limits set with C{SET LOCAL} reach
nobody else's session behind a pooler.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from sqlalchemy import Executable
from sqlalchemy.dialects import postgresql

from llmgw.store import leaserow
from llmgw.store.errors import StoreError
from llmgw.store.leaserow import LeaseRow
from llmgw.store.postgresql import ALIVE, shown

CONNECT = 2  # seconds, the least that libpq takes
# Values are written into the statements: ours alone, and a message of several statements takes no parameters.
_DIALECT = postgresql.dialect(paramstyle="named")


class LeaseTable:
    """Blocking, for one thread; only L{cut_late} is for another.

    @param timeout: seconds that the database may take for one transaction.
    """

    def __init__(self, url: str, timeout: float, clock: Callable[[], float]) -> None:
        self.place = shown(url)
        self._url, self._timeout, self._clock = url, timeout, clock
        self._connection: psycopg.Connection[Any] | None = None
        self._until = float("inf")

    def read(self) -> LeaseRow:
        """The row now."""
        _, row = self._run([leaserow.reading()])
        if row is None:
            raise StoreError(f"{self.place}: the lease's row is gone", "damaged")
        return leaserow.made(row)

    def change(self, statements: list[Executable]) -> bool:
        """Run a list of L{leaserow}'s; whether it worked.

        @raise StoreError: the database did not answer in time, or not with a result; it may have happened all the same.
        """
        return self._run(statements)[0] == 1

    def _run(self, statements: list[Executable]) -> tuple[int, Any]:
        try:
            connection = self._connected()
            self._until = self._clock() + self._timeout * 1.25
            try:
                with connection.execute(self._message(statements).encode()) as cursor:
                    for _ in _LIMITS:
                        cursor.nextset()
                    return cursor.rowcount, cursor.fetchone() if cursor.description else None
            finally:
                self._until = float("inf")
        except (psycopg.Error, OSError) as error:
            self._drop()
            raise StoreError(f"{self.place}: {' '.join(str(error).split()) or type(error).__name__}", "unreachable") from error

    def _message(self, statements: list[Executable]) -> str:
        limits = [f"SET LOCAL {name} = {max(1, int(self._timeout * 1000))}" for name in _LIMITS[:-1]]
        texts = [str(one.compile(dialect=_DIALECT, compile_kwargs={"literal_binds": True})) for one in statements]  # type: ignore[attr-defined]
        return "; ".join([*limits, f"SET LOCAL {_LIMITS[-1]} = on", *texts])

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            options: dict[str, Any] = {"connect_timeout": CONNECT, "application_name": "llmgw-lease", **ALIVE}
            self._connection = psycopg.connect(self._url, autocommit=True, prepare_threshold=None, **options)
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it is broken already
                connection.close()

    def cut_late(self) -> bool:
        """End a query that the database answers neither with a result nor with its own timeout, by ending its connection."""
        connection = self._connection
        if connection is None or self._clock() < self._until:
            return False
        self._until = float("inf")
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.pgconn.socket)) as ours:
            ours.shutdown(socket.SHUT_RDWR)
        return True

    def close(self) -> None:
        """Close the connection."""
        self._drop()


_LIMITS = ("statement_timeout", "lock_timeout", "synchronous_commit")
