"""The store over both databases: what is written is read again, fenced, bounded and kept apart by fleet."""

from __future__ import annotations

import threading

import pytest
import pytest_twisted
from attrs import evolve
from zope.interface.verify import verifyObject

from llmgw.config.catalog import dump_catalog, load_catalog
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Catalog, Lora, Model, Place, Profile
from llmgw.fleet.node import Device, Fabric, Installation, Inventory, NodeFacts, NodeState
from llmgw.fleet.records import NodeRecord, RolloutRecord, RolloutState, ShardRecord
from llmgw.fleet.shard import Allocation, ShardState, Wanted
from llmgw.interfaces import ILeadership, IStore
from llmgw.store import rows
from llmgw.store.errors import NotLeader, StoreError
from llmgw.store.lease import SqliteLeadership
from llmgw.store.postgresql import PostgresBackend
from llmgw.store.records import CatalogRevision, Drop, KeyRecord, UsageRow
from llmgw.store.schema import MIGRATIONS, migrate, version_of
from tests.store_fixtures import *  # noqa: F403

DEVICES = (Device("GPU-1", 0, "H100", 80 * 2**30, capability=(9, 0)), Device("GPU-2", 1, "H100", problem="Xid 79"))
FACTS = NodeFacts(
    "n1", "10.0.0.1",
    Inventory(8, 2**35, 2**34, DEVICES),
    labels={"pool": "ä\x00\u2028"}, fabrics=(Fabric("rack3", "10.9.0.1"),),
    installations=(Installation("vllm", "vllm", ("vllm",), "0.33"),),
)  # fmt: skip
NODE = NodeRecord("n1", "i", "b", FACTS, NodeState.UNREACHABLE, 12.5, "link lost", True, True, 99.0, certificate_expires=1e10)
SHARD = ShardRecord(
    "org/a/2/0", "org/a", 2, 0, ("n1",), "abc", 3, Wanted.DRAIN, ShardState.BACKOFF, 5.0, "exit status 1", "op",
    Profile("vllm", arguments={"a": [1, 2.5, True, None, {"b": "c"}]}),
    Allocation("n1", devices=("GPU-1",), memory=5, ports=(20000,)),
    ("org/a", "x"), (1.0, 2.0), (1.5,), "retry", "first", "last", 7.5, 4, {"n2": 100.0}, "http://10.0.0.1:20000",
    adopted=True,
)  # fmt: skip
KEY = KeyRecord("k1", "ann", "ff" * 32, 1.0, 2.0, None, "team", ("a",), 60, 1000, 5000, 8, 1)
EVENT = FleetEvent(3.0, "shard_state", "org/a/2", "loading -> backoff", "n1", 1, "loading", "backoff", ("line 1", "line 2"))
CATALOG = CatalogRevision(1, '{"models":[]}', 1.0, "start")


async def leading(store) -> int:
    """Open a store and take its lead; returns the epoch."""
    await store.open()
    leadership = SqliteLeadership(store)
    await leadership.start()
    return leadership.epoch


@pytest_twisted.ensureDeferred
async def test_everything_comes_back_as_it_was_written(url, stores):
    """Across a close and an open, to the last number; the state revision grew by one."""
    store = stores(url, fleet="f1")
    epoch = await leading(store)
    assert await store.commit(epoch, [CATALOG, NODE, SHARD, KEY, EVENT]) == 1
    await store.close()
    store = stores(url, fleet="f1")
    opened = await store.open()
    assert (opened.fleet, opened.fresh) == ("f1", False)
    found = await store.load()
    assert (found.fleet, found.epoch, found.revision) == ("f1", 1, 1)
    assert (found.catalog, found.nodes, found.shards, found.keys) == (CATALOG, (NODE,), (SHARD,), (KEY,))
    assert await store.events() == [evolve(EVENT, number=1)]


@pytest_twisted.ensureDeferred
async def test_the_last_record_wins_and_drops_forget(url, stores):
    """Within one commit, too, in order."""
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [NODE, evolve(NODE, state=NodeState.READY), SHARD, KEY, Drop("shard", SHARD.shard)])
    await store.commit(
        epoch, [evolve(CATALOG, number=2), evolve(CATALOG, number=7, text="{}"), Drop("key", "k1"), Drop("node", "none")]
    )
    found = await store.load()
    assert found.nodes == (evolve(NODE, state=NodeState.READY),)
    assert (found.shards, found.keys, found.revision, found.catalog.number) == ((), (), 2, 7)


@pytest_twisted.ensureDeferred
async def test_a_write_of_an_old_leader_changes_nothing(url, stores):
    """Neither with an old epoch nor with the right epoch of another holder: all of it or none."""
    store = stores(url)
    epoch = await leading(store)
    with pytest.raises(NotLeader) as caught:
        await store.commit(epoch - 1, [NODE, EVENT])
    assert (caught.value.epoch, caught.value.leader) == (epoch, store.holder)
    store.holder = "other@1"
    with pytest.raises(NotLeader, match="leads with epoch 1, this was epoch 1"):
        await store.commit(epoch, [NODE, EVENT])
    assert (await store.load()).nodes == ()
    assert await store.events() == []


@pytest_twisted.ensureDeferred
async def test_a_commit_is_whole_or_not_at_all(url, stores):
    """A bad change at its end undoes what went before, the revision, too."""
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [CATALOG])
    for bad in (
        CATALOG,
        evolve(CATALOG, number=0),
        Drop("cat", "x"),
        object(),
        evolve(NODE, since=float("nan")),
        evolve(CATALOG, number=2**70),
    ):
        with pytest.raises(StoreError):
            await store.commit(epoch, [NODE, bad])
    found = await store.load()
    assert (found.nodes, found.revision) == ((), 1)


@pytest_twisted.ensureDeferred
async def test_a_leader_raises_its_epoch_above_what_agents_saw(url, stores):
    """The old epoch then writes nothing; a jump that would burn the counter is refused; only the holder may."""
    store = stores(url)
    await store.open()
    leadership, told = SqliteLeadership(store), []
    assert verifyObject(ILeadership, leadership)
    leadership.watch(lambda: told.append((leadership.epoch, leadership.may_act())))
    assert not leadership.may_act()
    await leadership.start()
    assert await leadership.outrank(41) == 42 == leadership.epoch
    with pytest.raises(NotLeader):
        await store.commit(1, [NODE])
    await store.commit(42, [NODE])
    with pytest.raises(StoreError, match="more than 1000000 above ours"):
        await leadership.outrank(42 + 1_000_001)
    await leadership.release()
    assert told == [(1, True), (42, True), (42, False)]
    again = SqliteLeadership(store)
    await again.start()
    assert again.epoch == 43
    with pytest.raises(StoreError, match="does not hold epoch 42 any more"):
        await leadership.outrank(50)


@pytest_twisted.ensureDeferred
async def test_a_store_of_another_fleet_is_refused(url, stores):
    """Both fleets are named; a router only, which has none, does not ask."""
    store = stores(url)
    await store.open()
    await store.close()
    store = stores(url, fleet="f1")
    assert (await store.open()).fleet == "f1"
    await store.close()
    store = stores(url, fleet="f2")
    with pytest.raises(StoreError, match="belongs to fleet f1, our certificate to fleet f2"):
        await store.open()
    store = stores(url)
    assert (await store.open()).fleet == "f1"


@pytest_twisted.ensureDeferred
async def test_events_are_numbered_and_bounded(url, stores, monkeypatch):
    """The newest stay, numbers never come again, and foreign text is fit for a terminal."""
    monkeypatch.setattr(rows, "EVENTS", 300)
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [evolve(EVENT, subject=str(n)) for n in range(600)])
    await store.commit(epoch, [evolve(EVENT, text="\x1b[31m\ud800\x00", tail=("x",) * 500)])
    found = await store.events(0, 5)
    assert (found[0].number, len(found)) == (213, 5)
    (last,) = await store.events(600)
    assert (last.number, last.text, len(last.tail)) == (601, "\\x1b[31m\\xd800\\x00", 100)
    assert await store.events(601) == []


@pytest_twisted.ensureDeferred
async def test_usage_adds_up_once_per_batch(url, stores):
    """A batch that is sent again because its answer was lost counts once."""
    store = stores(url)
    await store.open()
    row = UsageRow(3600, "k1", "a", 2, 1, 10, 20, 5, 1.5)
    assert await store.add_usage("b1", [row, evolve(row, model="b")])
    assert not await store.add_usage("b1", [row])
    assert await store.add_usage("b2", [row, evolve(row, hour=7200)])
    assert await store.usage(0, 10_000) == [
        UsageRow(0, "k1", "a", 6, 3, 30, 60, 15, 4.5), UsageRow(0, "k1", "b", 2, 1, 10, 20, 5, 1.5),
    ]  # fmt: skip
    assert await store.usage(3600, 7200, ["hour"]) == [UsageRow(3600, "", "", 6, 3, 30, 60, 15, 4.5)]
    assert await store.usage(9000, 10_000, []) == []


@pytest_twisted.ensureDeferred
async def test_a_record_that_cannot_be_read_is_left_out(url, stores):
    """One bad row does not keep a server from leading the rest of the fleet."""
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [NODE, evolve(NODE, name="n2"), SHARD])
    bad = rows.schema.nodes.update().where(rows.schema.nodes.c.name == "n1").values(body='{"name":5,"state":"dreaming"}')
    await store.write("spoil it", lambda connection: connection.execute(bad) and None)
    found = await store.load()
    assert [node.name for node in found.nodes] == ["n2"]
    assert found.shards == (SHARD,)


@pytest_twisted.ensureDeferred
async def test_a_rollouts_profile_comes_back_equal_to_the_catalogs(url, stores):
    """Or a restarted server would take it for another one, and try again what was rolled back."""
    profile = Profile(
        "vllm", context=2**20, arguments={"a": [1, 2.5, True, None, {"b": "c"}], "x": 3}, argv=("a", "b"), start_timeout=60.0,
        place=Place({"pool": "a"}, spread=True), loras=(Lora("l", "hf:a/b"),),
    )  # fmt: skip
    profile = load_catalog(dump_catalog(Catalog((Model("org/a", profile=profile),)))).models[0].profile
    record = RolloutRecord("org/a", RolloutState.ROLLED_BACK, profile, Profile("vllm"), 5.5, "why", True, ("org/a/1:2",), True)
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [record, evolve(record, model="b")])
    assert (await store.load()).rollouts == (evolve(record, model="b"), record)
    await store.commit(epoch, [Drop("rollout", "b")])
    (found,) = (await store.load()).rollouts
    assert found == record and found.in_force(Model("org/a", profile=profile)).profile == Profile("vllm")


@pytest_twisted.ensureDeferred
async def test_a_store_of_before_rollouts_is_taken_over(url, stores):
    """Schema 1 had no table for them; what it has stays."""
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [NODE])
    old = rows.schema.meta.update().where(rows.schema.meta.c.key == "schema").values(value="1")

    def older(connection):
        connection.exec_driver_sql("DROP TABLE rollouts")
        connection.execute(old)

    await store.write("make it old", older)
    await store.close()
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [RolloutRecord("m", RolloutState.RUNNING, Profile("vllm"))])
    found = await store.load()
    assert (found.nodes, len(found.rollouts)) == ((NODE,), 1)


@pytest_twisted.ensureDeferred
async def test_a_newer_schema_is_refused_and_an_older_one_migrated(url, stores):
    """In one transaction: a step that fails leaves the old version whole, and the data is there afterwards."""
    store = stores(url)
    epoch = await leading(store)
    await store.commit(epoch, [NODE])

    def step(connection):
        connection.exec_driver_sql("CREATE TABLE more (x INTEGER)")

    def broken(connection):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.write("migrate", lambda connection: migrate(connection, [*MIGRATIONS, step, broken]))
    newest = len(MIGRATIONS) + 1
    assert await store.read("ask", version_of) == newest
    assert await store.write("migrate", lambda connection: migrate(connection, [*MIGRATIONS, step])) == newest
    assert await store.write("migrate", lambda connection: migrate(connection, [*MIGRATIONS, step])) == newest + 1
    assert (await store.load()).nodes == (NODE,)
    await store.close()
    store = stores(url)
    with pytest.raises(StoreError, match=f"schema {newest + 1} of a newer llmgw, this one knows {newest}"):
        await store.open()


@pytest_twisted.ensureDeferred
async def test_a_job_in_time_or_an_error_in_time(url, stores):
    """What hangs is given up with whether it was begun; what waits behind it is never begun; a full queue refuses at once."""
    store = stores(url)
    assert verifyObject(IStore, store)
    await store.open()
    gate, begun = threading.Event(), []
    store.timeout = 0.2
    hung = store.read("wait", lambda connection: gate.wait(10))
    behind = store.read("wait", lambda connection: begun.append("behind"))
    with pytest.raises(StoreError, match=r"did not wait within 0.2 s: it had begun, so whether it happened is not known"):
        await hung
    with pytest.raises(StoreError, match="it was not begun"):
        await behind
    store.timeout = 5
    waiting = [store.read("wait", lambda connection: None) for _ in range(store._thread.limit - 1)]
    with pytest.raises(StoreError, match="jobs wait already") as caught:
        await store.read("wait", lambda connection: None)
    assert caught.value.code == "busy"
    gate.set()
    for one in waiting:
        await one
    assert begun == []
    await store.close()
    with pytest.raises(StoreError, match="is closed and cannot load"):
        await store.load()


@pytest_twisted.ensureDeferred
async def test_closing_waits_for_what_runs_but_not_for_ever(url, stores):
    """A commit that was asked for is done before the store closes; a hung one is left behind in time."""
    store = stores(url)
    epoch = await leading(store)
    done = store.commit(epoch, [NODE])
    await store.close()
    assert await done == 1
    store = stores(url)
    await store.open()
    assert (await store.load()).nodes == (NODE,)
    gate = threading.Event()
    store.close_timeout = 0.1
    hung = store.read("wait", lambda connection: gate.wait(10))
    with pytest.raises(StoreError, match="did not close within 0.1 s"):
        await store.close()
    gate.set()
    await hung


@needs_postgres  # noqa: F405
def test_f10_the_fleet_is_written_down_once_by_servers_that_come_at_once(postgres):
    """F10. The second waits for the first one's word, and takes it."""
    url = postgres.database()
    backends = [PostgresBackend(url), PostgresBackend(url)]
    backends[0].open()
    said = []

    def second():
        with backends[1].writing() as connection:
            said.append(rows.claim(connection, "f2"))

    other = threading.Thread(target=second)
    with backends[0].writing() as connection:
        assert rows.claim(connection, "f1") == "f1"
        other.start()
        other.join(0.3)
        assert not said, "it waits"
    other.join(5)
    assert said == ["f1"]
    for backend in backends:
        backend.close()
