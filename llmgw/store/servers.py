"""The servers of one store, each with a row that it rewrites again and again, and the routing table that the leader shares.

Nobody compares clocks: a server lives while others see its row change. A row says what the leader must know before it stops an
engine: by which version of the table all routers of that server route, and what they still have in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen
from sqlalchemy import Connection, select
from twisted.logger import Logger

from llmgw.fleet.plain import from_text, to_text
from llmgw.store import schema
from llmgw.store.rows import put
from llmgw.store.schema import FENCE

log = Logger()


@frozen
class ServerRecord:
    """What a server says of itself.

    @ivar holder: its process, as the lease calls it. C{beat} grows with each word.
    @ivar role: C{leader}, C{standby}, C{router} or C{stopped}; C{since} when that began, wall time.
    @ivar address: where agents reach it; C{admin} where operators do, empty if only on its own machine.
    @ivar routed: the version of the shared table by which all its routers route, 0 for none.
    @ivar in_flight: requests that its routers have running, by endpoint, those it no longer routes to included.
    @ivar waiting: requests in its routers' lines, by model.
    @ivar asked: models without an endpoint that clients have asked its routers for lately.
    @ivar differs: whether the models of its file are not the catalog in force.
    """

    name: str
    holder: str
    beat: int = 0
    role: str = "standby"
    since: float = 0.0
    address: str = ""
    admin: str = ""
    routed: int = 0
    in_flight: Mapping[str, int] = field(factory=dict)
    waiting: Mapping[str, int] = field(factory=dict)
    asked: tuple[str, ...] = ()
    differs: bool = False


@frozen
class SharedTable:
    """The leader's routing table. C{text} is for the servers' routers; nobody here reads it."""

    version: int
    text: str


@frozen
class Meeting:
    """What one look at the store showed.

    @ivar servers: all servers' records as they were before ours was written.
    @ivar table: None if it is the version that is known already, or there is none yet.
    @ivar revision: the state revision: whoever only reads loads again when it has moved.
    """

    servers: tuple[ServerRecord, ...]
    table: SharedTable | None
    revision: int


def meet(connection: Connection, own: ServerRecord, known: int, at: float) -> Meeting:
    """Write our row and read the others'.

    @param known: the version of the shared table that need not be read again.
    @param at: wall time, for people.
    """
    rows = connection.execute(select(schema.servers.c.name, schema.servers.c.body).order_by(schema.servers.c.name)).all()
    tell(connection, own, at)
    revision = connection.execute(select(schema.fence.c.revision).where(schema.fence.c.name == FENCE)).scalar_one()
    version = connection.execute(select(schema.routing.c.version).where(schema.routing.c.name == FENCE)).scalar()
    table = shared_table(connection) if version not in (None, known) else None
    return Meeting(tuple(_readable(rows)), table, revision)


def _readable(rows: Iterable[tuple[str, str]]) -> Iterable[ServerRecord]:
    for name, body in rows:
        try:
            yield from_text(body, ServerRecord)
        except ValueError as error:
            log.error("left out server {name}, whose row cannot be read: {error}", name=name, error=error)


def shared_table(connection: Connection) -> SharedTable | None:
    """The table as last shared."""
    row = connection.execute(select(schema.routing).where(schema.routing.c.name == FENCE)).first()
    return SharedTable(row.version, row.text) if row else None


def share(connection: Connection, text: str, above: int) -> int:
    """Put a table in place of the one before; its version.

    Within a transaction that holds the fence, or a leader that was taken over from could put back an old one.

    @param above: a version that has been seen: a store that was restored from a backup must not give it again.
    """
    before = shared_table(connection)
    version = max(before.version if before else 0, above) + 1
    put(connection, schema.routing, {"name": FENCE, "version": version, "text": text})
    return version


def tell(connection: Connection, own: ServerRecord, at: float) -> None:
    """Write our row."""
    put(connection, schema.servers, {"name": own.name, "at": at, "body": to_text(own)})


def forget(connection: Connection, records: Iterable[ServerRecord]) -> None:
    """Take away these rows, if they are still those processes'."""
    for record in records:
        mine = schema.servers.c.name == record.name
        body = connection.execute(select(schema.servers.c.body).where(mine)).scalar()
        if body is not None and from_text(body, ServerRecord).holder == record.holder:
            connection.execute(schema.servers.delete().where(mine))
