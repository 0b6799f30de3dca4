"""SQLite under faults: wrong files, locks, full disks, and a process that dies at any moment."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet import reactor, task

from llmgw.fleet.records import NodeRecord
from llmgw.store.errors import StoreError
from llmgw.store.lease import SqliteLeadership
from llmgw.store.lockfile import LockFile
from llmgw.store.sqlite import APPLICATION, SqliteBackend
from tests.store_fixtures import *  # noqa: F403

NODE = NodeRecord("n1")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "llmgw.db"


async def opened(stores, file):
    """A new store with its lead taken, and its epoch."""
    store = stores(f"sqlite:///{file}")
    await store.open()
    leadership = SqliteLeadership(store)
    await leadership.start()
    return store, leadership.epoch


async def refusal(stores, file) -> StoreError:
    """Why opening is refused. The file stays as it is."""
    before = file.read_bytes() if file.exists() else None
    store = stores(f"sqlite:///{file}")
    with pytest.raises(StoreError) as caught:
        await store.open()
    assert (file.read_bytes() if file.exists() else None) == before
    return caught.value


class Program:
    """Python code in a process of its own, which says a line when it is where the test wants it."""

    def __init__(self, code: str, *words: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )  # fmt: skip

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def kill(self) -> list[str]:
        """SIGKILL; returns the lines it had said by then."""
        self.process.kill()
        said = self.process.stdout.read().split()
        self.process.wait()
        self.process.stdout.close()
        return said


@pytest.fixture
def run():
    """Starts programs, and ends those that the test left."""
    made = []

    def start(code: str, *words: object) -> Program:
        made.append(Program(code, *words))
        return made[-1]

    yield start
    for program in made:
        if program.process.poll() is None:
            program.kill()


@pytest_twisted.ensureDeferred
async def test_a_new_store_is_private_and_says_that_it_is_new(stores, file):
    """Folder 0700, files 0600, marked as ours, write-ahead log and full synchrony on; the second opening is not fresh."""
    store = stores(f"sqlite:///{file}")
    found = await store.open()
    assert (found.fresh, found.path) == (True, str(file))
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == dict.fromkeys(
        ("llmgw.db", "llmgw.db-wal", "llmgw.db-shm", "llmgw.db.lock", "llmgw.db.ballast"), 0o600
    )
    assert file.with_name("llmgw.db.ballast").stat().st_blocks * 512 >= 2**20
    ask = [f"PRAGMA {name}" for name in ("application_id", "journal_mode", "synchronous")]
    read = await store.read("ask", lambda connection: [connection.exec_driver_sql(one).scalar() for one in ask])
    assert read == [APPLICATION, "wal", 2]
    await store.close()
    assert not (await stores(f"sqlite:///{file}").open()).fresh


@pytest_twisted.ensureDeferred
async def test_an_empty_file_is_no_new_store(stores, file):
    """SQLite would open it as an empty database: a fleet without models."""
    file.parent.mkdir()
    file.touch()
    error = await refusal(stores, file)
    assert error.code == "damaged"
    assert "is empty (0 bytes), which would read as a fleet without models: put a backup in its place" in str(error)


@pytest_twisted.ensureDeferred
async def test_files_of_others_are_refused_and_left_alone(stores, file):
    """Text, another program's database, a file cut short: none is changed, not even its journal mode."""
    file.parent.mkdir()
    file.write_text("not a database, but long enough to be one" * 10)
    assert (await refusal(stores, file)).code == "foreign"
    file.unlink()
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE x (y)")
    other.close()
    assert "database of another program" in str(await refusal(stores, file))
    file.write_bytes(file.read_bytes()[:60])
    assert (await refusal(stores, file)).code == "foreign"


@pytest_twisted.ensureDeferred
async def test_a_damaged_file_is_refused_with_what_to_do(stores, file):
    """Pages overwritten by something else are found at the start, not in the middle of a night."""
    store, epoch = await opened(stores, file)
    await store.commit(epoch, [evolve(NODE, name=f"n{n}", reason="x" * 3000) for n in range(50)])
    await store.close()
    with open(file, "r+b") as spoiled:
        spoiled.seek(4096 * 8)
        spoiled.write(os.urandom(4096 * 12))
    error = await refusal(stores, file)
    assert error.code == "damaged"
    assert "put a backup in its place and start it again; the engines run on meanwhile" in str(error)


@pytest_twisted.ensureDeferred
async def test_a_lost_file_beside_its_log_is_not_replaced(stores, file):
    """A new database would be merged with the log of the lost one."""
    file.parent.mkdir()
    file.with_name("llmgw.db-wal").write_bytes(b"x")
    assert "is gone but llmgw.db-wal is there" in str(await refusal(stores, file))


@pytest_twisted.ensureDeferred
async def test_a_folder_that_cannot_be_made_is_a_sentence(stores, tmp_path):
    """No traceback for a path that leads through a file."""
    (tmp_path / "state").write_text("")
    error = await refusal(stores, tmp_path / "state" / "llmgw.db")
    assert str(error) == f"{tmp_path}/state: File exists"


HOLDER = """
import sys
from llmgw.store.sqlite import SqliteBackend
from pathlib import Path
SqliteBackend(Path(sys.argv[1])).open()
print("open", flush=True)
sys.stdin.read() if False else __import__("time").sleep(60)
"""


@pytest_twisted.ensureDeferred
async def test_f19_i_l12_a_second_server_is_refused_naming_the_first(stores, file, run):
    """F19. The kernel lets go of the lock when the first is killed; the file needs no tidying."""
    holder = run(HOLDER, file)
    assert holder.line() == "open"
    error = await refusal(stores, file)
    assert (error.code, f"is locked by pid {holder.process.pid}, another llmgw-server" in str(error)) == ("locked", True)
    holder.kill()
    assert not (await stores(f"sqlite:///{file}").open()).fresh


def test_a_lock_let_go_of_is_free_whatever_was_just_forked(tmp_path):
    """A child has the lock's descriptor until it executes its program; a copy of it stands in for one that is slow to."""
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    first.take()
    child = os.dup(first._file)
    try:
        first.release()
        second.take()
        assert (tmp_path / "lock").read_text().strip() == str(os.getpid())
    finally:
        second.release()
        os.close(child)


LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
__import__("time").sleep(60)
"""


@pytest_twisted.ensureDeferred
async def test_another_programs_lock_is_waited_out_beside_the_reactor(stores, file, run, monkeypatch):
    """F62. The reactor ticks meanwhile; the write gives up with a sentence at its deadline, reads go on; the next write works."""
    monkeypatch.setattr("llmgw.store.sqlite.BUSY", 100)
    store, epoch = await opened(stores, file)
    locker = run(LOCKER, file)
    assert locker.line() == "locked"
    store.timeout = 1.0
    ticks, clock = [], task.LoopingCall(lambda: ticks.append(reactor.seconds()))
    clock.start(0.02)
    with pytest.raises(StoreError) as caught:
        await store.commit(epoch, [NODE])
    clock.stop()
    assert max(after - before for before, after in zip(ticks, ticks[1:])) < 0.5
    assert caught.value.code in ("locked", "timeout")
    assert (await store.load()).nodes == ()
    store.timeout = 10
    waiting = store.commit(epoch, [NODE])
    locker.kill()
    await waiting
    assert (await store.load()).nodes == (NODE,)


@pytest.fixture
def small(tmp_path):
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "llmgw-test", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Use up all room there; returns the file that holds it."""
    path = place / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError:
            pass
        try:
            while file.write(b"x"):
                pass
        except OSError:
            pass
    return path


@pytest_twisted.ensureDeferred
async def test_a_full_disk_is_survived_by_the_ballast_and_then_said(stores, small):
    """F61. Ballast lets writes go on for a while; then each says that the disk is full; reads work; room heals it."""
    file = small / "llmgw.db"
    store, epoch = await opened(stores, file)
    await store.commit(epoch, [NODE])
    filler = fill(small)
    big = [evolve(NODE, name=f"n{n}", reason="x" * 2000) for n in range(50)]
    assert await store.commit(epoch, big) == 2
    assert not file.with_name("llmgw.db.ballast").exists()
    with pytest.raises(StoreError, match="the disk is full: make room, it goes on by itself then") as caught:
        for n in range(100):
            await store.commit(epoch, [evolve(node, reason="y" * (3000 + n)) for node in big])
    assert caught.value.code == "full"
    found = await store.load()
    assert len(found.nodes) == 50
    filler.unlink()
    assert await store.commit(epoch, [NODE]) == found.revision + 1
    await store.close()
    store = stores(f"sqlite:///{file}")
    await store.open()
    assert len((await store.load()).nodes) == 50


@pytest_twisted.ensureDeferred
async def test_a_new_store_on_a_full_disk_is_one_sentence(stores, small):
    """Nothing half-made stays behind: with room it opens as new."""
    filler = fill(small)
    store = stores(f"sqlite:///{small}/s/llmgw.db")
    with pytest.raises(StoreError) as caught:
        await store.open()
    assert caught.value.code == "full"
    filler.unlink()
    assert (await stores(f"sqlite:///{small}/s/llmgw.db").open()).fresh


@pytest_twisted.ensureDeferred
async def test_an_old_store_opens_on_a_disk_too_full_for_ballast(stores, small):
    """With a warning; a server that could still read must not stay down for want of a spare megabyte."""
    file = small / "llmgw.db"
    store, epoch = await opened(stores, file)
    await store.close()
    file.with_name("llmgw.db.ballast").unlink()
    with open(fill(small), "r+b") as filler:
        filler.truncate(os.path.getsize(small / "filler") - 200_000)
    store = stores(f"sqlite:///{file}")
    assert not (await store.open()).fresh
    assert store.backend.warnings == [f"less than 1 MiB is free under {small}: make room"]


WRITER = """
import sys
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from llmgw.fleet.records import NodeRecord
from llmgw.store.lease import SqliteLeadership
from llmgw.store.sql import SqlStore

async def main():
    store = SqlStore(sys.argv[1], reactor)
    await store.open()
    leadership = SqliteLeadership(store)
    await leadership.start()
    while True:
        number = await store.commit(leadership.epoch, [NodeRecord("a", since=float(n)) for n in range(20)] + [NodeRecord("b")])
        print(number, flush=True)

reactor.callWhenRunning(lambda: Deferred.fromCoroutine(main()))
reactor.run()
"""


@pytest_twisted.ensureDeferred
async def test_a_killed_writer_loses_nothing_that_it_was_told_is_written(stores, file, run):
    """F63. SIGKILL between any two instructions, four times over; each answered commit is there, and the epoch grew."""
    said = 0
    for turn in range(1, 5):
        writer = run(WRITER, f"sqlite:///{file}")
        assert writer.line()
        time.sleep(0.013 * turn)  # how far it gets does not matter, only that it differs
        said = max(map(int, writer.kill()), default=said)
        store = stores(f"sqlite:///{file}")
        await store.open()
        found = await store.load()
        assert found.revision >= said
        assert (found.epoch, [node.name for node in found.nodes]) == (turn, ["a", "b"])
        await store.close()


DYING = """
import os, signal, sys
from pathlib import Path
from llmgw.store import sqlite, schema

def die(*words):
    os.kill(os.getpid(), signal.SIGKILL)

where, file = sys.argv[1], Path(sys.argv[2])
if where == "create":
    sqlite.migrate = die
elif where == "move":
    Path.replace = die
elif where == "migrate":
    def step(connection):
        connection.exec_driver_sql("CREATE TABLE more (x INTEGER)")
        connection.exec_driver_sql("DROP TABLE nodes")
        die()
    schema.MIGRATIONS = [*schema.MIGRATIONS, step]
sqlite.SqliteBackend(file).open()
print("survived")
"""


@pytest.mark.parametrize("where", ["create", "move", "migrate"])
@pytest_twisted.ensureDeferred
async def test_death_while_opening_leaves_a_store_that_opens(where, stores, file, run):
    """F64. Killed before the tables, before the new file has its name, in the middle of a migration: the next start works."""
    if where == "migrate":
        store, epoch = await opened(stores, file)
        await store.commit(epoch, [NODE])
        await store.close()
    dying = run(DYING, where, file)
    assert dying.process.wait(20) == -signal.SIGKILL
    assert dying.kill() == []
    store = stores(f"sqlite:///{file}")
    assert (await store.open()).fresh is (where != "migrate")
    assert (await store.load()).nodes == ((NODE,) if where == "migrate" else ())


def test_the_lock_is_let_go_when_opening_fails(file):
    """A refused start does not keep the next one out."""
    file.parent.mkdir()
    file.touch()
    for _ in range(2):
        with pytest.raises(StoreError, match="is empty"):
            SqliteBackend(file).open()
