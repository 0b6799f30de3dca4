"""What the agent keeps on disk: output by offset, answers to operations, attempts and their pruning."""

from __future__ import annotations

import contextlib
import os
import resource

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.agent import operations as operations_module
from llmgw.agent import shardfolder as shardfolder_module
from llmgw.agent.operations import Operations
from llmgw.agent.output import last_lines, read_output, written
from llmgw.agent.shardfolder import Intent, ShardFolders
from llmgw.agent.shim import keep_bounded
from llmgw.fleet.shard import Wanted
from llmgw.wire.messages import Done
from tests.agent_rig import order

LIMIT = 64


def at(offset: int) -> int:
    """The byte that was written at C{offset}."""
    return (offset * 7919 >> 3) % 251


def read_all(folder) -> list:
    """Every piece from the beginning, in steps of 10 bytes."""
    pieces, offset = [], 0
    while (chunk := read_output(folder, offset, 10)).data:
        pieces.append(chunk)
        offset = chunk.next
    return pieces


@settings(max_examples=60, deadline=None)
@given(writes=st.lists(st.integers(0, 3 * LIMIT), max_size=12))
def test_every_byte_that_is_read_was_written_there(tmp_path_factory, writes):
    """However the output was cut: a piece is what was written at its offset, the start and the end are there, disk is bounded."""
    folder = tmp_path_factory.mktemp("attempt")
    log, total = folder / "output.log", 0
    log.touch()
    for count in writes:
        with open(log, "ab") as file:
            file.write(bytes(map(at, range(total, total + count))))
        total += count
        keep_bounded(str(folder), LIMIT)
        assert written(folder) == total
        assert sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name != "output.base") <= 3 * LIMIT
    pieces = read_all(folder)
    for chunk in pieces:
        assert chunk.data == bytes(map(at, range(chunk.offset, chunk.next)))
        assert chunk.size == total
    seen = [offset for chunk in pieces for offset in range(chunk.offset, chunk.next)]
    assert seen == sorted(set(seen))
    assert seen[: min(total, LIMIT)] == list(range(min(total, LIMIT)))
    assert set(range(max(0, total - LIMIT), total)) <= set(seen) or total == 0
    tail = read_output(folder, -20, 20)
    assert tail.data == bytes(map(at, range(max(0, total - 20), total)))


def test_nothing_was_written_yet(tmp_path):
    """Before there is any output everything reads as empty."""
    assert read_output(tmp_path, 0, 10).data == b""
    assert last_lines(tmp_path) == ()


def test_a_full_disk_loses_the_copies_not_the_bound(tmp_path, monkeypatch):
    """Where nothing can be copied the output is cut all the same."""
    (tmp_path / "output.log").write_bytes(b"x" * 1000)
    (tmp_path / "output.0").mkdir()
    (tmp_path / "output.1").mkdir()
    with pytest.raises(OSError):
        keep_bounded(str(tmp_path), LIMIT)
    assert (tmp_path / "output.log").stat().st_size == 0


def test_answers_are_remembered(tmp_path):
    """Also past a torn line and one of nothing but brackets, and never more than the last thousand."""
    path = tmp_path / "operations.jsonl"
    first = Operations(path)
    first.load()
    first.add(Done("a", True))
    first.add(Done("b", False, "exited", {"text": "exit status 1"}))
    with open(path, "ab") as file:
        file.write(b"\n" + b"[" * 100_000)
        file.write(b'\n{"operation": "torn')
    second = Operations(path)
    second.load()
    second.add(Done("c", True))
    third = Operations(path)
    third.load()
    assert [third.get(name) for name in "abc"] == [Done("a", True), second.get("b"), Done("c", True)]
    assert third.get("b").result == {"text": "exit status 1"}
    assert third.get("torn") is None
    assert os.stat(path).st_mode & 0o077 == 0


def test_answers_are_bounded(tmp_path, monkeypatch):
    """The file is written anew when it has twice as many lines as are kept."""
    monkeypatch.setattr(operations_module, "KEEP", 5)
    path = tmp_path / "operations.jsonl"
    memory = Operations(path)
    for number in range(40):
        memory.add(Done(str(number), True))
        assert len(path.read_bytes().splitlines()) <= 2 * (2 * 5 + 2)
    again = Operations(path)
    again.load()
    assert [number for number in range(40) if again.get(str(number))] == [35, 36, 37, 38, 39]


def test_answers_without_a_disk(tmp_path):
    """They are kept in memory where they cannot be written."""
    memory = Operations(tmp_path / "missing" / "operations.jsonl")
    memory.add(Done("a", True))
    assert memory.get("a") == Done("a", True)


@pytest.fixture
def full_disk():
    """While it is entered no file of this process grows."""

    @contextlib.contextmanager
    def filled():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return filled()


def attempt(folders: ShardFolders, shard: str, number: int, size: int = 10):
    folder = folders.attempt(shard, number)
    folder.create()
    folder.write("intent.json", Intent(order(("true",), shard=shard, attempt=number), "command", "command"))
    (folder.path / "output.log").write_bytes(b"x" * size)
    os.utime(folder.path, (number, number))
    return folder


def test_what_an_adopted_engine_is_reached_by_survives_a_full_disk(tmp_path, full_disk):
    """No byte can be written any more while it is told of a drain: its key and what it was started for stay as they were."""
    folder = ShardFolders(tmp_path).attempt("m/1/0", 1)
    folder.create()
    noted = Intent(order(("true",)), "command", "command", key="secret")
    folder.write_intent(noted)
    with full_disk, pytest.raises(OSError):
        folder.write_intent(evolve(noted, order=evolve(noted.order, wanted=Wanted.DRAIN)))
    assert folder.intent() == noted


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\xff", "[" * 100_000], ids=["empty", "half", "list", "binary", "deep"])
def test_damaged_notes_of_an_attempt_are_as_good_as_none(tmp_path, text):
    """Whatever is in its files, the other attempts are adopted."""
    folder = ShardFolders(tmp_path).attempt("m/1/0", 1)
    folder.create()
    for name in ("intent.json", "run.json", "exit.json"):
        (folder.path / name).write_bytes(text.encode("latin-1"))
    assert (folder.intent(), folder.run(), folder.outcome()) == (None, None, None)


def test_ten_attempts_of_a_shard_are_kept(tmp_path):
    """The oldest go first; what is in use never goes."""
    folders = ShardFolders(tmp_path)
    made = [attempt(folders, "m/1/0", number) for number in range(1, 16)]
    folders.prune([made[1].path])
    assert [folder.attempt for folder in folders.attempts("m/1/0")] == [2, *range(6, 16)]


def test_ended_attempts_take_a_bounded_room(tmp_path, monkeypatch):
    """Beyond the bound the oldest of all shards are deleted; the newest always stays."""
    monkeypatch.setattr(shardfolder_module, "KEEP_BYTES", 50_000)
    folders = ShardFolders(tmp_path)
    for number in range(1, 5):
        attempt(folders, f"m/{number % 2}/0", number, 20_000)
    folders.prune([])
    assert [[folder.attempt for folder in shard] for shard in folders.shards()] == [[4], [3]]
    monkeypatch.setattr(shardfolder_module, "KEEP_BYTES", 1)
    folders.prune([])
    assert [[folder.attempt for folder in shard] for shard in folders.shards()] == [[4]]


@pytest.mark.parametrize(
    "shard", ["../../etc/1/0", "org/model:7b/1/0", "..", "", "a" * 200 + "/1/0", "\u00e9\n/1/0", "m%2F1/1/0"]
)
def test_an_id_never_leads_out_of_its_folder(tmp_path, shard):
    """Whatever a shard is called, its attempts lie in one folder directly below the root."""
    folders = ShardFolders(tmp_path)
    path = folders.attempt(shard, 1).path
    assert path.parent.parent == tmp_path and len(path.parent.name) < 200
    attempt(folders, shard, 1)
    attempt(folders, "m/1/0", 1)
    assert [folder.shard for folder in folders.attempts(shard)] == [shard]
    assert {shard, "m/1/0"} == {found[0].shard for found in folders.shards()}
