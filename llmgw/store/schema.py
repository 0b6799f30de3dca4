"""The tables, the same for SQLite and PostgreSQL, and how an older store becomes a newer one.

A record's body is JSON text: a field that a later version adds needs no new column, and nothing here is searched by a field
inside a body. Text and not a JSON type, so that both databases give back exactly what was written.

Lease and fence are two rows on purpose. A leader's commit takes the fence's row, its renewal the lease's, so that a long
commit never delays a renewal; whoever takes the lease over sets both in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import BigInteger, Column, Connection, Float, Index, Integer, MetaData, Table, Text, inspect, select, text

from llmgw.store.errors import StoreError

FENCE = "control-plane"
_NUMBER = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

lease = Table(
    "lease",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("renewals", BigInteger, nullable=False),
    Column("released", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("addresses", Text, nullable=False),
)

fence = Table(
    "fence",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
)

catalog = Table(
    "catalog",
    metadata,
    Column("number", _NUMBER, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("origin", Text, nullable=False),
    Column("text", Text, nullable=False),
)

nodes = Table("nodes", metadata, Column("name", Text, primary_key=True), Column("body", Text, nullable=False))

shards = Table(
    "shards",
    metadata,
    Column("shard", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("body", Text, nullable=False),
)

rollouts = Table("rollouts", metadata, Column("model", Text, primary_key=True), Column("body", Text, nullable=False))

keys = Table("keys", metadata, Column("id", Text, primary_key=True), Column("body", Text, nullable=False))

events = Table(
    "events",
    metadata,
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("body", Text, nullable=False),
    sqlite_autoincrement=True,
)

usage = Table(
    "usage",
    metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("seconds", Float, nullable=False),
)

usage_batches = Table(
    "usage_batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("at", Float, nullable=False),
    Index("usage_batches_at", "at"),
)

servers = Table(
    "servers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("at", Float, nullable=False),
    Column("body", Text, nullable=False),
)

routing = Table(
    "routing",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("text", Text, nullable=False),
)


Step = Callable[[Connection], object]

# MIGRATIONS[N] makes schema N + 2 of schema N + 1. It is written in SQL, since the tables above are what the newest one has.
MIGRATIONS: Sequence[Step] = (
    lambda connection: connection.execute(text("CREATE TABLE rollouts (model TEXT NOT NULL PRIMARY KEY, body TEXT NOT NULL)")),
)


def version_of(connection: Connection) -> int:
    """The schema's version; 0 for a database without our tables."""
    if not inspect(connection).has_table("meta"):
        return 0
    found = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar()
    return int(found) if found else 0


def migrate(connection: Connection, steps: Sequence[Step] | None = None) -> int:
    """Bring the schema up to date within the caller's transaction, so that a death on the way leaves the old one whole.

    @return: the version that was found, 0 for a new store.
    @raise StoreError: a newer llmgw wrote it.
    """
    steps = MIGRATIONS if steps is None else steps
    found, newest = version_of(connection), len(steps) + 1
    if found > newest:
        raise StoreError(f"the store has schema {found} of a newer llmgw, this one knows {newest}: use the newer one", "newer")
    if found == 0:
        _create(connection)
    else:
        for step in steps[found - 1 :]:
            step(connection)
    if found != newest:
        connection.execute(meta.delete().where(meta.c.key == "schema"))
        connection.execute(meta.insert().values(key="schema", value=str(newest)))
    return found


def _create(connection: Connection) -> None:
    metadata.create_all(connection, checkfirst=False)
    connection.execute(lease.insert().values(name=FENCE, holder="", epoch=0, renewals=0, released=1, at=0.0, addresses="[]"))
    connection.execute(fence.insert().values(name=FENCE, holder="", epoch=0, revision=0))
