"""Records to rows and back. Whatever a commit takes has its place here, and nothing else of the store knows the kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from attrs import evolve
from sqlalchemy import Connection, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from twisted.logger import Logger

from llmgw.fleet.events import FleetEvent
from llmgw.fleet.line import escape
from llmgw.fleet.plain import from_text, to_text
from llmgw.store import clock, schema
from llmgw.store.errors import StoreError
from llmgw.store.records import (
    CatalogRevision,
    Change,
    Drop,
    KeyRecord,
    NodeRecord,
    RolloutRecord,
    ShardRecord,
    Snapshot,
    ToldBy,
    UsageRow,
)

EVENTS = 50_000
REVISIONS = 500
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_TAIL = 100
_SUMS = ("requests", "failures", "prompt_tokens", "completion_tokens", "cached_tokens", "seconds")

T = TypeVar("T")
log = Logger()


def put(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Insert a row, or overwrite the one with its primary key."""
    keys = [column.name for column in table.primary_key]
    rest = {name: value for name, value in values.items() if name not in keys}
    statement = _INSERT[connection.dialect.name](table).values(**values)
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=rest))


def write(connection: Connection, change: Change) -> None:
    """Write one change of a commit.

    @raise StoreError: a catalog number that is taken, or no change at all.
    """
    match change:
        case NodeRecord():
            put(connection, schema.nodes, {"name": change.name, "body": to_text(change)})
        case ShardRecord():
            put(connection, schema.shards, {"shard": change.shard, "model": change.model, "body": to_text(change)})
        case RolloutRecord():
            put(connection, schema.rollouts, {"model": change.model, "body": to_text(change)})
        case KeyRecord():
            put(connection, schema.keys, {"id": change.id, "body": to_text(change)})
        case FleetEvent():
            _write_event(connection, change)
        case ToldBy():
            put(connection, schema.meta, {"key": clock.TOLD_BY, "value": clock.written(connection, change)})
        case CatalogRevision():
            _write_catalog(connection, change)
        case Drop():
            _drop(connection, change)
        case _:
            raise StoreError(f"{type(change).__name__} is nothing that a store keeps")


def _write_event(connection: Connection, event: FleetEvent) -> None:
    bounded = evolve(event, text=escape(event.text), tail=tuple(map(escape, event.tail[-_TAIL:])), number=0)
    number = connection.execute(schema.events.insert().values(at=event.at, body=to_text(bounded))).inserted_primary_key
    if number and number[0] % 256 == 0:
        connection.execute(schema.events.delete().where(schema.events.c.number <= number[0] - EVENTS))


def _write_catalog(connection: Connection, revision: CatalogRevision) -> None:
    newest = connection.execute(select(func.max(schema.catalog.c.number))).scalar() or 0
    if revision.number <= newest:
        raise StoreError(f"catalog {revision.number} cannot be written: {newest} is in force already", "conflict")
    values = {"number": revision.number, "at": revision.at, "origin": escape(revision.origin), "text": revision.text}
    connection.execute(schema.catalog.insert().values(**values))
    connection.execute(schema.catalog.delete().where(schema.catalog.c.number <= revision.number - REVISIONS))


_DROPS = {
    "node": schema.nodes.c.name,
    "shard": schema.shards.c.shard,
    "rollout": schema.rollouts.c.model,
    "key": schema.keys.c.id,
}


def _drop(connection: Connection, drop: Drop) -> None:
    column = _DROPS.get(drop.kind)
    if column is None:
        raise StoreError(f"{drop.kind} is nothing that can be dropped")
    connection.execute(column.table.delete().where(column == drop.name))


def snapshot(connection: Connection) -> Snapshot:
    """Everything a leader needs, of one moment."""
    fence = connection.execute(select(schema.fence)).mappings().one()
    held = connection.execute(select(schema.lease)).mappings().one()
    return Snapshot(
        fleet=fleet_of(connection),
        epoch=max(fence["epoch"], held["epoch"]),
        revision=fence["revision"],
        catalog=newest_catalog(connection),
        nodes=tuple(_bodies(connection, schema.nodes, NodeRecord)),
        shards=tuple(_bodies(connection, schema.shards, ShardRecord)),
        keys=tuple(_bodies(connection, schema.keys, KeyRecord)),
        rollouts=tuple(_bodies(connection, schema.rollouts, RolloutRecord)),
        ahead=clock.ahead(connection),
    )


def _bodies(connection: Connection, table: Table, kind: type[T]) -> Iterator[T]:
    """Every record of a table. One that cannot be read is left out: its engine becomes an orphan, and stops for that no more
    than for any other gap in what we know."""
    key = table.primary_key.columns[0]
    for name, body in connection.execute(select(key, table.c.body).order_by(key)):
        try:
            yield from_text(body, kind)
        except ValueError as error:
            log.error("left out {name} of {table}, which cannot be read: {error}", name=name, table=table.name, error=error)


def newest_catalog(connection: Connection) -> CatalogRevision | None:
    """The catalog in force."""
    row = connection.execute(select(schema.catalog).order_by(schema.catalog.c.number.desc()).limit(1)).mappings().first()
    return CatalogRevision(row["number"], row["text"], row["at"], row["origin"]) if row else None


def fleet_of(connection: Connection) -> str:
    """The fleet id that the store belongs to, empty if none has been written."""
    found = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "fleet")).scalar()
    return found or ""


def claim(connection: Connection, fleet: str) -> str:
    """Write the fleet id down unless there is one; returns the one that stands, which another server may just have written."""
    statement = _INSERT[connection.dialect.name](schema.meta).values(key="fleet", value=fleet)
    connection.execute(statement.on_conflict_do_nothing())
    return fleet_of(connection)


def events(connection: Connection, after: int | None, limit: int) -> list[FleetEvent]:
    """Events with higher numbers than C{after}, or the last ones where it is None; the oldest first."""
    number = schema.events.c.number
    if after is None:
        rows = list(connection.execute(select(schema.events).order_by(number.desc()).limit(limit)))[::-1]
    else:
        rows = list(connection.execute(select(schema.events).where(number > after).order_by(number).limit(limit)))
    return [evolve(from_text(row.body, FleetEvent), number=row.number) for row in rows]


def add_usage(connection: Connection, batch: str, rows: list[UsageRow], now: float) -> bool:
    """Add a batch's rows up, once; False if this batch was there already."""
    if connection.execute(select(schema.usage_batches.c.id).where(schema.usage_batches.c.id == batch)).first():
        return False
    connection.execute(schema.usage_batches.delete().where(schema.usage_batches.c.at < now - 3 * 86400))
    connection.execute(schema.usage_batches.insert().values(id=batch, at=now))
    table = schema.usage
    for row in sorted(rows, key=lambda row: (row.hour, row.key, row.model)):  # in one order, so that two servers never deadlock
        given = {name: getattr(row, name) for name in _SUMS}
        statement = _INSERT[connection.dialect.name](table).values(hour=row.hour, key=row.key, model=row.model, **given)
        sums = {name: table.c[name] + statement.excluded[name] for name in _SUMS}
        connection.execute(statement.on_conflict_do_update(index_elements=["hour", "key", "model"], set_=sums))
    return True


def usage(connection: Connection, since: float, until: float, by: tuple[str, ...]) -> list[UsageRow]:
    """Usage summed over the hours that begin in the span, kept apart by C{by} (of hour, key, model)."""
    table = schema.usage
    groups = [table.c[name] for name in by]
    sums = [func.sum(table.c[name]).label(name) for name in _SUMS]
    found = select(*groups, *sums).where(table.c.hour >= since, table.c.hour < until).group_by(*groups).order_by(*groups)
    return [_usage_row(row, since) for row in connection.execute(found).mappings() if row["requests"] is not None]


def _usage_row(row: Any, since: float) -> UsageRow:
    sums = {name: int(row[name]) for name in _SUMS if name != "seconds"}
    hour = int(row.get("hour", since))
    return UsageRow(hour, row.get("key", ""), row.get("model", ""), seconds=float(row["seconds"]), **sums)
