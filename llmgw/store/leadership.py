"""The leadership that belongs to a store."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from llmgw.fleet.timing import Timing
from llmgw.interfaces import ILeadership
from llmgw.store.lease import SqliteLeadership
from llmgw.store.sql import SqlStore


def make_leadership(store: SqlStore, timing: Timing, reactor: Any, random: Random, addresses: Sequence[str] = ()) -> ILeadership:
    """The only server leads over SQLite; several contend over PostgreSQL, whose driver is imported only then.

    @param addresses: where agents and operators reach this server, for those that a standby sends on.
    """
    if store.url.startswith("sqlite:"):
        return SqliteLeadership(store, addresses)
    from llmgw.store.pglease import PostgresLeadership

    return PostgresLeadership(store.url, store.holder, timing, reactor, random, addresses)
