"""The lease's row: what can be done to it, as statements that both databases understand. No clock is compared in any.

The row is never deleted and its epoch never lowered: releasing marks it. C{at} is for people; nobody decides by it, since
the clocks of hosts and databases differ and step. Each list of statements belongs into one transaction and has worked
exactly if the first one changed a row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from attrs import frozen
from sqlalchemy import ColumnElement, Connection, Executable, Select, exists, select, update

from llmgw.store.errors import StoreError
from llmgw.store.schema import FENCE, fence, lease

MAX_JUMP = 1_000_000


@frozen
class LeaseRow:
    """The row as it was read. Whoever sees the same C{(holder, epoch, renewals)} for a whole lease may take it over."""

    holder: str
    epoch: int
    renewals: int
    released: bool
    addresses: tuple[str, ...] = ()
    at: float = 0.0


def reading() -> Select[Any]:
    """The columns that L{made} takes."""
    columns = (lease.c.holder, lease.c.epoch, lease.c.renewals, lease.c.released, lease.c.addresses, lease.c.at)
    return select(*columns).where(lease.c.name == FENCE)


def made(row: Sequence[Any]) -> LeaseRow:
    """The value of a row that L{reading} read."""
    holder, epoch, renewals, released, addresses, at = row
    return LeaseRow(holder, epoch, renewals, bool(released), tuple(json.loads(addresses)), at)


def taking(seen: LeaseRow, holder: str, addresses: Sequence[str]) -> list[Executable]:
    """Make C{holder} the leader with the next epoch if the row is still exactly as seen.

    Fence and lease change together: from the moment this commits, no write of the leader before does.
    """
    same = _held(seen.holder, seen.epoch) & (lease.c.renewals == seen.renewals) & (lease.c.released == int(seen.released))
    epoch = seen.epoch + 1
    values = {"holder": holder, "epoch": epoch, "renewals": 0, "released": 0, "at": time.time()}
    return [
        update(lease).where(same).values(**values, addresses=json.dumps([*addresses])),
        update(fence).where(fence.c.name == FENCE, exists().where(_held(holder, epoch))).values(holder=holder, epoch=epoch),
    ]


def renewing(holder: str, epoch: int) -> list[Executable]:
    """Show that the holder lives."""
    mine = _held(holder, epoch) & (lease.c.released == 0)
    return [update(lease).where(mine).values(renewals=lease.c.renewals + 1, at=time.time())]


def outranking(holder: str, mine: int, seen: int) -> tuple[int, list[Executable]]:
    """Raise the epoch that C{holder} holds above C{seen}; the new one, and how.

    @raise StoreError: the jump is too large.
    """
    if seen - mine > MAX_JUMP:
        text = f"an agent says it has seen epoch {seen}, more than {MAX_JUMP} above ours, {mine}: not believed"
        raise StoreError(text, "epoch_jump")
    epoch = max(seen, mine) + 1
    fenced = (fence.c.name == FENCE) & (fence.c.holder == holder) & (fence.c.epoch == mine)
    return epoch, [
        update(lease).where(_held(holder, mine), lease.c.released == 0).values(epoch=epoch),
        update(fence).where(fenced, exists().where(_held(holder, epoch))).values(epoch=epoch),
    ]


def releasing(holder: str, epoch: int) -> list[Executable]:
    """Mark the lease as free, if C{holder} has it."""
    return [update(lease).where(_held(holder, epoch)).values(released=1, at=time.time())]


def _held(holder: str, epoch: int) -> ColumnElement[bool]:
    return (lease.c.name == FENCE) & (lease.c.holder == holder) & (lease.c.epoch == epoch)


def not_held(holder: str, epoch: int) -> StoreError:
    """The error for an outranking that found the lease with somebody else."""
    return StoreError(f"the epoch cannot be raised: {holder} does not hold epoch {epoch} any more", "not_leader")


def run(connection: Connection, statements: list[Executable]) -> bool:
    """Run them within the caller's transaction; whether they worked."""
    first, *rest = statements
    worked = connection.execute(first).rowcount == 1
    for statement in rest if worked else ():
        connection.execute(statement)
    return worked
