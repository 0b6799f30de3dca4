"""Who leads: the row under contention, and databases that hang, stop and restart."""

from __future__ import annotations

import itertools
import random
import re
import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import pytest_twisted
from attrs import evolve
from sqlalchemy import text
from twisted.internet import reactor
from twisted.internet.task import deferLater
from zope.interface.verify import verifyObject

from llmgw.fleet.timing import Timing
from llmgw.interfaces import ILeadership
from llmgw.store import leaserow
from llmgw.store.backend import make_backend
from llmgw.store.errors import NotLeader, StoreError
from llmgw.store.leadership import make_leadership
from llmgw.store.lease import SqliteLeadership
from llmgw.store.leaserow import LeaseRow
from llmgw.store.pgtable import LeaseTable
from llmgw.store.schema import fence
from tests.store_fixtures import *  # noqa: F403

SHORT = Timing(lease=1.5, lease_renew=0.3, lease_deadline=0.9, store_timeout=0.2)
ROW = LeaseRow("cp1@1", 4, 7, False)


async def until(what, seconds: float = 8.0):
    """Wait for a condition, turning the reactor."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        await deferLater(reactor, 0.01, lambda: None)


@pytest.fixture
def backend(url):
    made = make_backend(url)
    made.open()
    yield made
    made.close()


def change(backend, statements) -> bool:
    with backend.writing() as connection:
        return leaserow.run(connection, statements)


def look(backend) -> LeaseRow:
    with backend.reading() as connection:
        return leaserow.made(connection.execute(leaserow.reading()).one())


def test_i_l2_the_row_changes_only_as_it_was_seen(backend):
    """Each statement names holder and epoch; the epoch never falls, whoever holds or releases it."""
    empty = look(backend)
    assert (empty.holder, empty.epoch, empty.released) == ("", 0, True)
    assert change(backend, leaserow.taking(empty, "a@1", ["a:1"]))
    assert not change(backend, leaserow.taking(empty, "b@1", []))
    before = look(backend)
    assert change(backend, leaserow.renewing("a@1", 1))
    assert not change(backend, leaserow.renewing("a@1", 2))
    assert not change(backend, leaserow.renewing("b@1", 1))
    assert not change(backend, leaserow.taking(before, "b@1", []))
    row = look(backend)
    assert (row.holder, row.epoch, row.renewals, row.released, row.addresses) == ("a@1", 1, 1, False, ("a:1",))
    epoch, statements = leaserow.outranking("a@1", 1, 9)
    assert change(backend, statements)
    assert not change(backend, statements)
    assert not change(backend, leaserow.releasing("a@1", 1))
    assert change(backend, leaserow.releasing("a@1", epoch))
    assert not change(backend, leaserow.renewing("a@1", epoch))
    row = look(backend)
    assert (row.epoch, row.released) == (10, True)
    assert change(backend, leaserow.taking(row, "b'@1%", ["x'%s:y"]))
    assert look(backend).addresses == ("x'%s:y",)


@needs_postgres  # noqa: F405
def test_what_did_not_work_leaves_the_fence_alone(postgres):
    """The lease's own connection sends all statements of a change in one message: the later ones run whatever the first did."""
    from llmgw.store.pgtable import LeaseTable

    url = postgres.database()
    backend = make_backend(url)
    backend.open()
    table = LeaseTable(url, 2.0, time.monotonic)
    empty = table.read()
    assert table.change(leaserow.taking(empty, "a@1", []))
    assert not table.change(leaserow.taking(empty, "b@1", []))
    assert not table.change(leaserow.outranking("b@1", 1, 9)[1])
    assert not table.change(leaserow.outranking("a@1", 0, 9)[1])
    with backend.reading() as connection:
        assert connection.execute(fence.select()).one()[1:3] == ("a@1", 1)
    assert (table.read().holder, table.read().epoch) == ("a@1", 1)
    table.close()
    backend.close()


@needs_postgres  # noqa: F405
def test_f10_of_twenty_that_race_one_wins(postgres):
    """F10. All saw the same free row."""
    url = postgres.database()
    first = make_backend(url)
    first.open()
    seen, barrier, won = look(first), threading.Barrier(20), []

    def race(name: str) -> None:
        backend = make_backend(url)
        try:
            with backend.reading():
                barrier.wait(20)
            if change(backend, leaserow.taking(seen, name, [])):
                won.append(name)
        finally:
            backend.close()

    threads = [threading.Thread(target=race, args=(f"cp{n}@1",)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [look(first).holder] == won
    assert look(first).epoch == 1
    first.close()


@pytest.fixture
def postgres_url(postgres):
    return postgres.database()


@pytest_twisted.async_yield_fixture()
async def contender(stores, postgres_url):
    """Makes leaderships of servers over one database; releases them all."""
    made = []

    async def start(name: str, timing: Timing = SHORT, begin: bool = True):
        store = stores(postgres_url, name=name)
        await store.open()
        leadership = make_leadership(store, timing, reactor, random.Random(5), [f"{name}:7443"])
        made.append(leadership)
        leadership.store = store
        if begin:
            await leadership.start()
        return leadership

    yield start
    for leadership in made:
        with suppress(StoreError):
            await leadership.release()


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_one_leads_and_the_other_knows_who(contender):
    """The standby names the leader and where it is, and takes over within two seconds of a release."""
    one = await contender("cp1", begin=False)
    assert verifyObject(ILeadership, one)
    told = []
    one.watch(lambda: told.append(one.may_act()))
    await one.start()
    await until(one.may_act)
    two = await contender("cp2")
    await until(lambda: two.leader)
    assert (two.leader, two.addresses, two.epoch, two.may_act()) == (one.store.holder, ("cp1:7443",), 1, False)
    await deferLater(reactor, 2 * SHORT.lease, lambda: None)
    assert (one.may_act(), two.may_act()) == (True, False)
    with pytest.raises(NotLeader, match="not leader: cp1@"):
        await two.outrank(5)
    begun = time.monotonic()
    await one.release()
    assert not one.may_act()
    await until(two.may_act)
    assert time.monotonic() - begun < 2
    assert (two.epoch, two.leader) == (2, two.store.holder)
    assert told == [True, False]
    with pytest.raises(NotLeader):
        await one.store.commit(1, [])
    assert await two.store.commit(2, []) == 1


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_i_l3_raising_the_epoch_keeps_the_lease(contender):
    """I-L3. Renewals go on under the new epoch."""
    one = await contender("cp1")
    await until(one.may_act)
    assert await one.outrank(50) == 51 == one.epoch
    await deferLater(reactor, SHORT.lease, lambda: None)
    assert (one.may_act(), one.epoch) == (True, 51)
    with pytest.raises(StoreError, match="not believed"):
        await one.outrank(10_000_000)
    assert one.may_act()


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_f17_i_l10_a_hung_reactor_does_not_act_and_is_not_kept_in_office(contender):
    """I-L10, F17. The renewals stop with the ticks, and the standby takes over while the leader hangs."""
    one = await contender("cp1")
    await until(one.may_act)
    time.sleep(SHORT.lease / 3 + 0.05)
    assert not one.may_act()
    await until(one.may_act, 2)
    assert one.epoch == 1
    time.sleep(SHORT.lease + 0.3)
    assert not one.may_act()
    await until(one.may_act)
    assert one.epoch == 2


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_a_locked_row_delays_a_renewal_and_is_given_up_by_the_database(contender, postgres_url):
    """Each try ends at the store's timeout; a short lock costs nothing, a long one the lead, before the lease is over."""
    import psycopg

    one = await contender("cp1")
    await until(one.may_act)
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT * FROM lease FOR UPDATE")
        await until(lambda: one.problem, 2)
        assert "timeout" in one.problem
        other.rollback()
    await until(lambda: not one.problem)
    assert (one.may_act(), one.epoch) == (True, 1)
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT * FROM lease FOR UPDATE")
        begun, told = time.monotonic(), []
        one.watch(lambda: told.append((one.may_act(), time.monotonic())))
        await until(lambda: told, 3)
        assert (told[0][0], one.may_act()) == (False, False)
        assert told[0][1] - begun < SHORT.lease
        other.rollback()
    await until(one.may_act)
    assert one.epoch == 2


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_i_l10_a_commit_does_not_delay_a_renewal(contender):
    """I-L10. A transaction that holds the fence for longer than a lease leaves the leader in office."""
    one = await contender("cp1")
    await until(one.may_act)

    def slow(connection) -> int:
        one.store.take_fence(connection, 1)
        time.sleep(1.2 * SHORT.lease)
        return 5

    assert await one.store.write("be slow", slow) == 5
    assert (one.may_act(), one.epoch) == (True, 1)


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_i_l11_a_commit_waits_for_the_disks_whatever_the_database_is_set_to(contender, postgres_url):
    """Of the lease as of the store: or a failover of the database could repeat an epoch without need."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute(f"ALTER DATABASE {other.info.dbname} SET synchronous_commit = off")
    one = await contender("cp1")
    asking = "SELECT current_setting('synchronous_commit')"
    assert await one.store.write("look", lambda connection: connection.exec_driver_sql(asking).scalar()) == "on"
    table = LeaseTable(postgres_url, 1.0, time.monotonic)
    assert table._run([text(asking)])[1] == ("on",)
    table.close()


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_f16_no_session_state_is_relied_on(contender, postgres_url):
    """F16. What a transaction pooler does to sessions between transactions changes nothing: all of them can be ended at once."""
    import psycopg

    one = await contender("cp1", evolve(SHORT, lease=3.0, lease_deadline=2.4))
    await until(one.may_act)
    with psycopg.connect(postgres_url, autocommit=True) as other:
        for _ in range(3):
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            other.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
            await deferLater(reactor, 0.4, lambda: None)
            assert await one.store.commit(1, []) > 0
    assert (one.may_act(), one.epoch) == (True, 1)


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_f06_f11_a_database_that_hangs_or_restarts(contender, postgres):
    """F06, F11. Hung: the leader has stepped down before its lease is over, says since when, and leads again by itself."""
    one = await contender("cp1")
    await until(one.may_act)
    postgres.stop("immediate")
    postgres.start()
    await until(one.may_act)
    begun, told = time.monotonic(), []
    one.watch(lambda: told.append((one.may_act(), time.monotonic())))
    postgres.signal(signal.SIGSTOP)
    try:
        await until(lambda: told, 3)
        assert not told[0][0]
        assert told[0][1] - begun < SHORT.lease
        await until(lambda: one.problem)
        assert one.problem_since > 0
        epoch = one.epoch
    finally:
        postgres.signal(signal.SIGCONT)
    await until(one.may_act)
    assert (one.epoch, one.problem) == (epoch + 1, "")


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_f14_f15_steps_of_the_wall_clock_move_no_lease(contender, monkeypatch):
    """An hour ahead, an hour back: the leader stays, its epoch, too. The database's clock is not even asked. Takes two leases."""
    ahead = 0.0
    monkeypatch.setattr(leaserow, "time", SimpleNamespace(time=lambda: time.time() + ahead))
    one, two = await contender("cp1"), await contender("cp2")
    await until(lambda: one.may_act() and two.leader)
    for ahead in (3600.0, -3600.0):
        await deferLater(reactor, SHORT.lease * 1.2, lambda: None)
        assert (one.may_act(), two.may_act(), one.epoch) == (True, False, 1)
    raising = leaserow.outranking("a", 1, 5)[1]
    changing = [leaserow.taking(ROW, "a", []), leaserow.renewing("a", 1), leaserow.releasing("a", 1), raising]
    for statement in (leaserow.reading(), *itertools.chain(*changing)):
        assert not re.search(r"now\(|timestamp|clock", str(statement), re.IGNORECASE)


@pytest_twisted.ensureDeferred
async def test_sqlite_has_no_lease_to_lose(stores, tmp_path):
    """Its only server leads from start to release, whatever the clock does."""
    store = stores(f"sqlite:///{tmp_path}/a.db")
    await store.open()
    leadership = make_leadership(store, SHORT, reactor, random.Random(1), ["cp1:7443"])
    assert isinstance(leadership, SqliteLeadership)
    await leadership.start()
    time.sleep(0.1)
    assert (leadership.may_act(), leadership.addresses) == (True, ("cp1:7443",))
