"""Moving a store: SQLite to PostgreSQL and back, and backups beside a running server."""

from __future__ import annotations

import pytest
import pytest_twisted
from attrs import evolve

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
    with pytest.raises(StoreError, match=r"c\.db was not there: nothing to copy"):
        copy_store(c, f"sqlite:///{tmp_path}/d.db")
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
