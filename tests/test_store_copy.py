"""Moving a store: SQLite to PostgreSQL and back, and backups beside a running server."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.store import leaserow
from llmgw.store.backend import make_backend
from llmgw.store.copy import backup_store, copy_store
from llmgw.store.errors import NotLeader, StoreError
from llmgw.store.lease import SqliteLeadership
from llmgw.store.records import UsageRow
from tests.store_fixtures import *  # noqa: F403
from tests.test_store_sql import CATALOG, EVENT, KEY, NODE, SHARD, leading


async def filled(store) -> int:
    """Something in every table; returns the epoch."""
    epoch = await leading(store)
    await store.commit(epoch, [CATALOG, SHARD, KEY, *[evolve(NODE, name=f"n{n}") for n in range(700)], EVENT, EVENT])
    await store.add_usage("b", [UsageRow(3600, "k", "m", 1)])
    return epoch


async def contents(store):
    return (await store.load(), await store.events(), await store.usage(0, 1e9))


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_a_fleet_moves_to_postgresql_and_back(tmp_path, postgres, stores):
    """Everything arrives, numbers go on where they were, and the epoch only grows."""
    places = [f"sqlite:///{tmp_path}/a.db", postgres.database(), f"sqlite:///{tmp_path}/b.db"]
    store = stores(places[0], fleet="f1")
    epoch = await filled(store)
    before = await contents(store)
    await store.close()
    for old, new in zip(places, places[1:]):
        counts = copy_store(old, new)
        assert (counts["nodes"], counts["events"], counts["usage"], counts["catalog"]) == (700, 2, 1, 1)
    for place in places[1:]:
        store = stores(place, fleet="f1")
        assert not (await store.open()).fresh
        assert await contents(store) == before
        leadership = SqliteLeadership(store)
        await leadership.start()
        assert leadership.epoch == epoch + 1
        with pytest.raises(NotLeader):
            await store.commit(epoch, [NODE])
        await store.commit(epoch + 1, [EVENT])
        assert [event.number for event in await store.events()] == [1, 2, 3]
        assert not await store.add_usage("b", [UsageRow(3600, "k", "m", 1)])


@pytest_twisted.ensureDeferred
async def test_only_a_new_store_is_copied_into_and_none_in_use_copied_from(tmp_path, stores):
    """A mistyped command changes nothing."""
    a, b, c = (f"sqlite:///{tmp_path}/{name}.db" for name in "abc")
    for place in (a, b):
        store = stores(place)
        await filled(store)
        await store.close()
    with pytest.raises(StoreError, match=r"b\.db is not new"):
        copy_store(a, b)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreError, match=r"there is no store at .*c\.db: nothing to copy"):
        copy_store(c, f"sqlite:///{tmp_path}/d.db")
    assert sorted(tmp_path.iterdir()) == before
    store = stores(a)
    await store.open()
    with pytest.raises(StoreError, match="is locked by pid"):
        copy_store(a, f"sqlite:///{tmp_path}/e.db")


@pytest_twisted.ensureDeferred
async def test_a_backup_is_taken_beside_a_running_server(url, tmp_path, stores):
    """It is one 0600 file that opens as a store, whole, while the server goes on writing."""
    store = stores(url, fleet="f1")
    epoch = await filled(store)
    before = await contents(store)
    file = tmp_path / "backup.db"
    assert backup_store(url, file) == file.stat().st_size
    await store.commit(epoch, [evolve(NODE, name="later")])
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["backup.db"]
    with pytest.raises(StoreError, match="is there already: a backup overwrites nothing"):
        backup_store(url, file)
    restored = stores(f"sqlite:///{file}", fleet="f1")
    assert not (await restored.open()).fresh
    assert await contents(restored) == before


def test_a_backup_of_nothing_is_a_sentence(tmp_path):
    """And leaves no file."""
    with pytest.raises(StoreError, match=r"a\.db: No such file"):
        backup_store(f"sqlite:///{tmp_path}/a.db", tmp_path / "b.db")
    assert list(tmp_path.iterdir()) == []


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_a_database_that_somebody_leads_over_is_not_copied_from(tmp_path, postgres, stores):
    """It has no lock, so the leader is known by its renewals; one that died long ago renews nothing and holds nobody up."""
    url = postgres.database()
    store = stores(url, fleet="f1", name="cp1")
    await filled(store)
    statements = leaserow.renewing(store.holder, 1)
    renewing = threading.Event()

    def renew() -> None:
        backend = make_backend(url)
        while not renewing.wait(0.05):
            with backend.writing() as connection:
                leaserow.run(connection, statements)
        backend.close()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(StoreError, match="is in use, cp1 leads over it: stop every llmgw-server first"):
            copy_store(url, f"sqlite:///{tmp_path}/a.db")
    finally:
        renewing.set()
        thread.join()
    assert copy_store(url, f"sqlite:///{tmp_path}/a.db", watch=0.3)["nodes"] == 700


@pytest_twisted.ensureDeferred
async def test_a_copy_that_loses_rows_is_not_kept(tmp_path, stores):
    """What arrived is counted; the target is as new as before, so that the next try can have it."""
    old, new = (f"sqlite:///{tmp_path}/{name}.db" for name in ("old", "new"))
    store = stores(old, fleet="f1")
    await filled(store)
    await store.close()
    target = make_backend(new)
    target.open()
    target.close()
    with closing(sqlite3.connect(tmp_path / "new.db")) as database:
        database.execute("CREATE TRIGGER lose BEFORE INSERT ON nodes WHEN NEW.name = 'n7' BEGIN SELECT RAISE(IGNORE); END")
    with pytest.raises(StoreError, match=r"nodes has 700 rows in .*old\.db but 699 in the copy: nothing is kept"):
        copy_store(old, new)
    with closing(sqlite3.connect(tmp_path / "new.db")) as database:
        database.execute("DROP TRIGGER lose")
    assert copy_store(old, new)["nodes"] == 700


def test_who_cannot_be_reached_is_named(tmp_path):
    """Of two databases the one that is away, not the other."""
    away = "postgresql://u@127.0.0.1:1/d"
    for act in (lambda: copy_store(away, f"sqlite:///{tmp_path}/a.db"), lambda: backup_store(away, tmp_path / "a.db")):
        with pytest.raises(StoreError, match="postgresql://127.0.0.1:1/d: cannot be reached"):
            act()
    assert not (tmp_path / "a.db").exists()


def test_a_missing_driver_is_a_sentence(monkeypatch, tmp_path):
    """PostgreSQL's is an extra of the package: who has not installed it is told how to."""
    monkeypatch.setattr("llmgw.store.backend.find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"PostgreSQL needs its driver: pip install 'llmgw\[postgresql\]'"):
        backup_store("postgresql://u@h/d", tmp_path / "a.db")
