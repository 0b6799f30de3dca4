"""Who leads: the arithmetic, the row under contention, and real servers, processes and databases that hang, stop and die."""

from __future__ import annotations

import itertools
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_twisted
from attrs import evolve
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
from llmgw.store.schema import fence
from llmgw.store.tenure import Tenure, Watch
from tests.store_fixtures import *  # noqa: F403

TIMING = Timing()
SHORT = Timing(lease=1.5, lease_renew=0.3, lease_deadline=0.9, store_timeout=0.2)
ROOT = Path(__file__).resolve().parent.parent
ROW = LeaseRow("cp1@1", 4, 7, False)


async def until(what, seconds: float = 8.0):
    """Wait for a condition, turning the reactor."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        await deferLater(reactor, 0.01, lambda: None)


def test_i_l5_a_tenure_ends_by_the_clock_alone():
    """From the moment its last renewal was sent, without anybody telling it."""
    tenure = Tenure(TIMING, 1, renewed=100.0, ticked=108.0)
    assert tenure.may_act(108.9)
    assert not tenure.may_act(109.0)
    assert not tenure.in_time(109.0)
    tenure.over = True
    assert not tenure.may_act(101.0)


def test_i_l8_a_gap_between_ticks_is_a_doubt_until_the_lease_was_seen_again():
    """After SIGCONT the first to run may be whoever sends commands: it asks before any timer has noticed."""
    tenure = Tenure(TIMING, 1, renewed=100.0, ticked=100.0)
    assert tenure.may_act(105.0)
    assert not tenure.may_act(105.1)
    assert tenure.tick(105.2) == pytest.approx(5.2)
    assert not tenure.may_act(105.3)
    tenure.renewed = 105.15
    assert not tenure.may_act(105.4)
    tenure.renewed = 105.3
    assert tenure.may_act(105.4)
    assert tenure.tick(105.9) == 0.0


def test_i_l9_a_standby_goes_by_changes_it_saw_itself():
    """No clock of a database or another host is compared; a renewal starts the wait anew."""
    watch = Watch(15.0)
    assert not watch.free(1000.0, "cp2@1")
    assert watch.look(ROW, 100.0)
    assert not watch.look(evolve(ROW, at=5e9), 110.0)
    assert not watch.free(115.0, "cp2@1")
    assert watch.free(115.2, "cp2@1")
    assert watch.look(evolve(ROW, renewals=8), 115.3)
    assert not watch.free(116.0, "cp2@1")
    assert watch.free(116.0, "cp1@1")
    watch.look(evolve(ROW, released=True), 117.0)
    assert watch.free(117.0, "cp2@1")


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


SERVER = """
import sys, time
from random import Random
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from llmgw.fleet.timing import Timing
from llmgw.store.leadership import make_leadership
from llmgw.store.sql import SqlStore

async def main():
    store = SqlStore(sys.argv[1], reactor, name=sys.argv[2])
    await store.open()
    timing = Timing(lease=1.5, lease_renew=0.3, lease_deadline=0.9, store_timeout=0.2)
    lease = make_leadership(store, timing, reactor, Random(1))
    await lease.start()
    def act():
        now = time.clock_gettime(time.CLOCK_BOOTTIME)  # before leave is asked: we may be stopped right behind either
        if lease.may_act():
            print("act", lease.epoch, now, flush=True)
    LoopingCall(act).start(0.01)
    print("ready", flush=True)

reactor.callWhenRunning(lambda: Deferred.fromCoroutine(main()).addErrback(lambda failure: print(failure, flush=True)))
reactor.run()
"""


class Servers:
    """Contenders in processes of their own that print a line with epoch and time for each command they would send."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "wb") as log:
            words = [sys.executable, "-c", SERVER, self.url, name]
            self.running.append(subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log))
        return self.running[-1]

    def acts(self, name: str) -> list[tuple[int, float]]:
        """Epoch and time of each command so far."""
        lines = (self.folder / f"{name}.log").read_text().split("\n")[:-1]
        return [(int(line.split()[1]), float(line.split()[2])) for line in lines if line.startswith("act ")]

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def servers(postgres_url, tmp_path):
    made = Servers(postgres_url, tmp_path)
    yield made
    made.close()


@needs_postgres  # noqa: F405
@pytest_twisted.ensureDeferred
async def test_f03_a_stopped_leader_sends_nothing_when_it_wakes(servers):
    """SIGSTOP past the lease, SIGCONT, SIGKILL of the next: the two never act at one time or in one epoch.

    A busy machine may cost a leader its lease at any moment of this, so no epoch is named and no time is a least one. Takes some
    leases: they have to run out in real processes.
    """
    one = servers.start("cp1")
    await until(lambda: servers.acts("cp1"), 15)
    two = servers.start("cp2")
    await until(lambda: b"ready" in (servers.folder / "cp2.log").read_bytes(), 15)
    led = servers.acts("cp1")[-1][0]
    one.send_signal(signal.SIGSTOP)
    await until(lambda: servers.acts("cp2") and servers.acts("cp2")[-1][0] > led)
    one.send_signal(signal.SIGCONT)
    await deferLater(reactor, SHORT.lease, lambda: None)
    two.kill()
    begun, last = time.monotonic(), servers.acts("cp2")[-1][0]
    await until(lambda: servers.acts("cp1")[-1][0] > last)
    assert time.monotonic() - begun < SHORT.lease + SHORT.lease / 10 + 1
    acts = sorted((at, epoch, name) for name in ("cp1", "cp2") for epoch, at in servers.acts(name))
    assert [epoch for _, epoch, _ in acts] == sorted(epoch for _, epoch, _ in acts)
    assert len({epoch for _, epoch, _ in acts}) == len({(epoch, name) for _, epoch, name in acts}) >= 3


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
