"""Leadership over a SQLite store: there is one server, so it leads. The lock on the file holds others off.

The epoch still grows with each start: an agent tells a command of a server that has died from one of its successor by that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from sqlalchemy import Connection, select, update
from twisted.internet.defer import Deferred
from zope.interface import implementer

from llmgw.interfaces import ILeadership
from llmgw.store.errors import StoreError
from llmgw.store.schema import FENCE, fence, lease
from llmgw.store.sql import SqlStore

MAX_JUMP = 1_000_000


@implementer(ILeadership)
class SqliteLeadership:
    """See L{llmgw.interfaces.ILeadership}. Start it when the store is open.

    @ivar leader: the holder's name as agents get it, unlike any before: C{cp1@8f3a...}.
    """

    def __init__(self, store: SqlStore, addresses: tuple[str, ...] = ()) -> None:
        self.epoch = 0
        self.leader = store.holder
        self._store = store
        self._addresses = addresses
        self._held = False
        self._watchers: list[Callable[[], None]] = []

    def may_act(self) -> bool:
        """Whether this process may send a command right now."""
        return self._held

    def watch(self, changed: Callable[[], None]) -> None:
        """Have C{changed} called, in the reactor's thread, each time leadership was won, lost, raised or seen to move."""
        self._watchers.append(changed)

    def start(self) -> Deferred[None]:
        """Take the next epoch."""
        return Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        holder, addresses = self._store.holder, json.dumps(self._addresses)
        self.epoch = await self._store.write("take the lead", lambda connection: take(connection, holder, addresses))
        self._set(True)

    def outrank(self, epoch: int) -> Deferred[int]:
        """See L{ILeadership.outrank}."""
        return Deferred.fromCoroutine(self._outrank(epoch))

    async def _outrank(self, epoch: int) -> int:
        mine, holder = self.epoch, self._store.holder
        self.epoch = await self._store.write("raise the epoch", lambda connection: outrank(connection, holder, mine, epoch))
        self._tell()
        return self.epoch

    def release(self) -> Deferred[None]:
        """Let go. The epoch stays: it is never lowered."""
        self._set(False)
        holder, epoch = self._store.holder, self.epoch
        return self._store.write("release the lead", lambda connection: release(connection, holder, epoch))

    def _set(self, held: bool) -> None:
        self._held = held
        self._tell()

    def _tell(self) -> None:
        for changed in list(self._watchers):
            changed()


def take(connection: Connection, holder: str, addresses: str) -> int:
    """Make C{holder} the leader with the next epoch, whoever was it before; returns the epoch."""
    epoch: int = connection.execute(select(lease.c.epoch)).scalar_one() + 1
    held = {"holder": holder, "epoch": epoch, "renewals": 0, "released": 0, "at": time.time(), "addresses": addresses}
    connection.execute(update(lease).where(lease.c.name == FENCE).values(**held))
    connection.execute(update(fence).where(fence.c.name == FENCE).values(holder=holder, epoch=epoch))
    return epoch


def outrank(connection: Connection, holder: str, mine: int, seen: int) -> int:
    """Raise the epoch that C{holder} holds above C{seen}; returns the new one.

    @raise StoreError: it does not hold it, or the jump is too large.
    """
    if seen - mine > MAX_JUMP:
        text = f"an agent says it has seen epoch {seen}, more than {MAX_JUMP} above ours, {mine}: not believed"
        raise StoreError(text, "epoch_jump")
    epoch = max(seen, mine) + 1
    for table in (lease, fence):
        held = (table.c.name == FENCE) & (table.c.holder == holder) & (table.c.epoch == mine)
        if connection.execute(update(table).where(held).values(epoch=epoch)).rowcount != 1:
            raise StoreError(f"the epoch cannot be raised: {holder} does not hold epoch {mine} any more", "not_leader")
    return epoch


def release(connection: Connection, holder: str, epoch: int) -> None:
    """Mark the lease as free, if C{holder} has it; its row and its epoch stay."""
    held = (lease.c.name == FENCE) & (lease.c.holder == holder) & (lease.c.epoch == epoch)
    connection.execute(update(lease).where(held).values(released=1, at=time.time()))
