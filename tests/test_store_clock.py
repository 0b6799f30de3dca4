"""By which clock records are told is kept, so that the next leader sees how far its own differs, on whichever machine it is."""

from __future__ import annotations

import pytest
import pytest_twisted

from llmgw.store import clock
from llmgw.store.copy import copy_store
from llmgw.store.lease import SqliteLeadership
from llmgw.store.records import ToldBy
from tests.store_fixtures import *  # noqa: F403


async def told(store, ahead: float) -> None:
    """A leader's commit, by a clock that is so many seconds ahead of when its machine was booted."""
    await store.open()
    leadership = SqliteLeadership(store)
    await leadership.start()
    await store.commit(leadership.epoch, [ToldBy(ahead)])
    await store.close()


async def seen(store) -> float | None:
    """What the next one reads."""
    await store.open()
    return (await store.load()).ahead


@pytest_twisted.ensureDeferred
async def test_the_clock_that_records_are_told_by_comes_back(url, stores):
    """B2: it is the one of the last commit."""
    await told(stores(url), 1.0)
    await told(stores(url), 1_700_000_000.25)
    assert await seen(stores(url)) == pytest.approx(1_700_000_000.25, abs=0.2)


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_a_machine_that_was_booted_at_another_time_sees_the_same_wall_clock(postgres, stores, monkeypatch):
    """B2: the database's clock, which both read, tells them how theirs differ."""
    url, real = postgres.database(), clock.boottime
    await told(stores(url), 1_700_000_000.0)
    monkeypatch.setattr(clock, "boottime", lambda: real() + 5_000.0)
    assert await seen(stores(url)) == pytest.approx(1_700_000_000.0 - 5_000.0, abs=0.2)


@pytest_twisted.ensureDeferred
async def test_after_a_reboot_nothing_tells_what_the_clock_was(tmp_path, stores, monkeypatch):
    """A file has no clock of its own, and the machine's began anew: its wall clock is believed."""
    url = f"sqlite:///{tmp_path}/llmgw.db"
    await told(stores(url), 5.0)
    monkeypatch.setattr(clock, "_boot_id", lambda: "another")
    assert await seen(stores(url)) is None


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_a_store_that_was_copied_into_a_database_begins_with_the_clock_of_whoever_leads_over_it(postgres, tmp_path, stores):
    """What the file tells of this machine means nothing there."""
    source, target = f"sqlite:///{tmp_path}/llmgw.db", postgres.database()
    await told(stores(source), 5.0)
    copy_store(source, target)
    assert await seen(stores(target)) is None
