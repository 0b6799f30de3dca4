"""By which wall clock the records are told, kept so that the next leader, on another machine perhaps, can tell its own from it.

Kept is how far that clock is ahead of one that both can read: the database's, or, beside a file, this machine's since it was
booted. What the machines' own clocks say meanwhile does not matter, only that the one clock which both read is not set between.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Float, cast, func, select

from llmgw.store.records import ToldBy
from llmgw.store.schema import meta

TOLD_BY = "told-by"
_DATABASE = "database"


def boottime() -> float:
    """Seconds on the clock that runs on while we do not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def written(connection: Connection, clock: ToldBy) -> Any:
    """The value of the row C{TOLD_BY} in C{meta}: the name of the clock that both read, and the seconds."""
    if connection.dialect.name == "sqlite":
        return f"{_boot_id()} {clock.ahead!r}"
    wall = cast(clock.ahead + boottime(), Float(53))
    return func.concat(f"{_DATABASE} ", wall - func.extract("epoch", func.clock_timestamp()))


def ahead(connection: Connection) -> float | None:
    """See L{llmgw.store.records.Snapshot.ahead}; None also after a reboot, or in a store that was copied from another kind."""
    value = connection.execute(select(meta.c.value).where(meta.c.key == TOLD_BY)).scalar()
    clock, _, seconds = (value or "").partition(" ")
    if connection.dialect.name == "sqlite":
        return float(seconds) if clock == _boot_id() else None
    if clock != _DATABASE:
        return None
    now = connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one()
    return float(seconds) + float(now) - boottime()
