"""Counts over several processes: true bounds, rows and columns that come and go."""

from __future__ import annotations

import json
import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.router import windows
from llmgw.router.scoreboard import (
    ELSEWHERE,
    WAITING,
    WIDTH,
    Scoreboard,
    ScoreboardFull,
)
from llmgw.router.sharedfile import Absent, shared_file, started
from tests import board_processes


@pytest.fixture
def board(tmp_path):
    board = Scoreboard.create(tmp_path / "board", rows=64, columns=8)
    yield board
    board.close()


@pytest.fixture
def big(tmp_path):
    """A scoreboard of the usual size, as the processes expect it."""
    board = Scoreboard.create(tmp_path / "big")
    yield board
    board.close()


def worker(board: Scoreboard, column: int | None = None) -> Scoreboard:
    return Scoreboard.attach(board.path, column or board.claim(), rows=board.rows, columns=board.columns)


def answer(process) -> dict:
    return json.loads(process.stdout.readline())


def end(*processes) -> None:
    for process in processes:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


@pytest.mark.parametrize("limit", [1, 2])
def test_bound_holds_over_processes(big, limit):
    """However three processes race for places, no more than the limit are ever inside at once."""
    big.assign(["model/bounded", "model/witness"], 1)
    processes = [board_processes.start("spin", big, limit, 0.6) for _ in range(3)]
    assert all(answer(process)["ready"] for process in processes)
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [answer(process) for process in processes]
    end(*processes)
    assert max(result["most"] for result in results) <= limit
    assert sum(result["entered"] for result in results) > 1000
    assert sum(result["refused"] for result in results) > 0
    assert big.total(big.row("model/bounded")) == 0


def test_killed_workers_places_are_free_again(big):
    """SIGKILL leaves a worker's counts behind; the sweep takes them away, and only those."""
    row = big.assign(["endpoint/e"], 1)["endpoint/e"]
    one, two = (board_processes.start("hold", big, "endpoint/e", count) for count in (3, 2))
    assert answer(one)["ready"] and answer(two)["ready"]
    assert big.total(row) == 5
    os.kill(one.pid, signal.SIGKILL)
    one.wait(10)
    assert len(big.sweep()) == 1
    assert big.total(row) == 2
    end(one, two)


def test_counts_outlive_the_server(big):
    """A new server on the same file finds the rows by name and the old worker's requests still in them."""
    row = big.assign(["endpoint/e"], 7)["endpoint/e"]
    old = board_processes.start("hold", big, "endpoint/e", 4)
    assert answer(old)["ready"]
    again = Scoreboard.create(big.path)
    assert again.assign(["endpoint/e", "endpoint/f"], 8)["endpoint/e"] == row
    assert again.total(row) == 4
    assert again.claim() not in (0, 1), "the old worker's column was given away"
    end(old)
    again.sweep()
    assert again.total(row) == 0
    again.close()


def test_zombie_counts_as_gone(big):
    """A worker that has exited but is not yet reaped does not keep its column."""
    process = board_processes.start("hold", big, "endpoint/none", 0)
    assert answer(process)["ready"]
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert started(process.pid) == 0
    assert big.sweep() == [1]
    end(process)


def test_row_is_not_reused_while_somebody_counts_in_it(board):
    """A dropped endpoint's row stays its own until every worker has acknowledged and nothing is in flight there."""
    rows = board.assign(["endpoint/a", "endpoint/b"], 1)
    one = worker(board)
    one.acknowledge(1)
    one.enter(rows["endpoint/a"], 0)
    board.assign(["endpoint/b"], 2)
    assert board.reclaim() == []
    one.acknowledge(2)
    assert board.reclaim() == [], "one request is still there"
    one.leave(rows["endpoint/a"])
    assert board.reclaim() == [rows["endpoint/a"] // WIDTH]
    assert one.row("endpoint/a") is None
    one.close()


def test_row_comes_back_with_its_name(board):
    """An endpoint that leaves the table and returns before its row was reused keeps it."""
    row = board.assign(["endpoint/a"], 1)["endpoint/a"]
    board.assign([], 2)
    assert board.assign(["endpoint/a"], 3)["endpoint/a"] == row
    assert board.reclaim() == []


def test_rows_run_out(board):
    """More names than rows is an error that says so; rows already given stay."""
    board.assign([f"key/{number}" for number in range(60)], 1)
    with pytest.raises(ScoreboardFull, match="64 rows"):
        board.assign([f"key/{number}" for number in range(80)], 2)
    assert board.row("key/0") is not None


def test_columns_run_out(board):
    """More workers than columns is an error."""
    for _ in range(board.columns - 1):
        board.claim()
    with pytest.raises(ScoreboardFull, match="8 columns"):
        board.claim()


def test_new_column_is_seen_at_once(board):
    """A worker that starts later counts in the sums of those that were there before."""
    row = board.assign(["endpoint/a"], 1)["endpoint/a"]
    first = worker(board)
    assert first.total(row) == 0
    later = worker(board)
    later.enter(row, 0)
    assert first.total(row) == first.loads([row])[0] == board.total(row) == 1
    for one in (first, later):
        one.close()


def test_file_of_another_layout_is_replaced(tmp_path):
    """A release with another layout makes a new file; who has mapped the old one keeps it."""
    old = Scoreboard.create(tmp_path / "board", rows=32, columns=4)
    row = old.assign(["endpoint/a"], 1)["endpoint/a"]
    old.enter(row, 0)
    new = Scoreboard.create(tmp_path / "board", rows=64, columns=4)
    assert new.row("endpoint/a") is None
    assert old.total(row) == 1
    new.close()
    old.close()


def test_garbage_is_replaced_by_the_server_and_refused_by_workers(tmp_path):
    """Bytes that are no scoreboard are never counted in."""
    path = tmp_path / "board"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(Absent):
        Scoreboard.attach(path, 1)
    Scoreboard.create(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_symbolic_link_is_not_followed(tmp_path):
    """In a folder that others can write to, a link in our file's place is replaced, not followed."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "board").symlink_to(victim)
    Scoreboard.create(tmp_path / "board").close()
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "board").is_symlink()


def test_shared_file_differs_by_state_folder(tmp_path):
    """Two servers on one machine do not share counts."""
    assert shared_file(tmp_path / "a", "board") != shared_file(tmp_path / "b", "board")


def test_last_to_go_takes_the_file_away(tmp_path):
    """A worker that is left alone removes the files; while a server or another worker is there, nobody does."""
    server = Scoreboard.create(tmp_path / "board")
    server.assign(["endpoint/e"], 1)
    other = board_processes.start("hold", server, "endpoint/e", 1)
    assert answer(other)["ready"]
    beside = tmp_path / "prefixes"
    beside.touch()
    last = Scoreboard.attach(server.path, server.claim())
    assert not last.depart(beside), "the server is there"
    server.set_owner(0, 0)
    assert not last.depart(beside), "another worker is there"
    end(other)
    assert last.depart(beside)
    assert not server.path.exists() and not beside.exists()
    for one in (last, server):
        one.close()


def test_load_from_elsewhere_counts_for_choice_not_for_the_bound(board):
    """What the server says of others' load is in the loads, but takes no places."""
    row = board.assign(["endpoint/a"], 1)["endpoint/a"]
    one = worker(board)
    board.own[row + ELSEWHERE] = 3
    one.enter(row, 0)
    assert one.loads([row]) == [4]
    assert one.total(row) == 1
    one.close()


def test_keys_tokens_outlive_their_worker(board):
    """What a key used today is not forgotten when the worker that counted it dies."""
    row = board.assign(["key/k", "model/m"], 1)["key/k"]
    one = worker(board)
    windows.roll(one.own, row, 29_000_000)
    one.own[row + windows.TOKENS_TODAY] = 500
    one.enter(row, 0)
    one.enter(board.row("model/m") + WAITING, 0)
    board.clear(one.column)
    assert windows.sums(board.every_column(), row, 29_000_000)[4] == 500
    assert board.total(row) == 0
    assert board.total(board.row("model/m") + WAITING) == 0
    one.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=60), st.integers(1, 4))
def test_sums_are_what_was_taken(tmp_path_factory, steps, limit):
    """Whatever workers take and leave in turn: the sum is the number of places taken, and refusals come only when it is full."""
    board = Scoreboard.create(tmp_path_factory.mktemp("law") / "board", rows=16, columns=5)
    rows = list(board.assign(["model/a", "model/b"], 1).values())
    workers = [worker(board) for _ in range(3)]
    inside = {(number, row): 0 for number in range(3) for row in rows}
    for number, which, take in steps:
        row = rows[which]
        total = sum(inside[other, row] for other in range(3))
        if take:
            assert workers[number].enter(row, limit) == (total < limit)
            inside[number, row] += total < limit
        elif inside[number, row]:
            workers[number].leave(row)
            inside[number, row] -= 1
        assert {one.total(row) for one in workers} == {sum(inside[other, row] for other in range(3))}
    for one in (*workers, board):
        one.close()


def test_the_server_remembers_rows_as_they_are(board):
    """A row is found before it is assigned by this server, while it retires, and not once it is free; then under its new name."""
    assert board.row("endpoint/a") is None
    row = board.assign(["endpoint/a"], 1)["endpoint/a"]
    other = Scoreboard.create(board.path, rows=64, columns=8)
    assert board.row("endpoint/a") == other.row("endpoint/a") == row
    board.own[row] = 1
    board.assign(["endpoint/b"], 2)
    assert board.row("endpoint/a") == row and board.row("endpoint/b") != row
    board.own[row] = 0
    board.reclaim()
    assert board.row("endpoint/a") is None
    other.close()


def test_the_last_to_go_takes_nobody_elses_file_away(tmp_path):
    """An older release's worker ends after the newer one's server has put a file of another layout in its file's place."""
    old = Scoreboard.create(tmp_path / "board", rows=16, columns=4)
    last = worker(old)
    old.set_owner(0, 2**22 + 1)
    new = Scoreboard.create(tmp_path / "board", rows=32, columns=4)
    assert not last.depart()
    assert (tmp_path / "board").exists()
    for board in (old, last, new):
        board.close()


def test_a_worker_attaches_without_a_path(board):
    """By the server's descriptor, where somebody has removed the file: both still count in the same one."""
    board.assign(["model/a"], 1)
    board.path.unlink()
    with pytest.raises(Absent):
        worker(board)
    one = Scoreboard.attach(board.path, board.claim(), board.rows, board.columns, os.dup(board.descriptor))
    one.enter(one.row("model/a"), 0)
    assert board.total(board.row("model/a")) == 1
    assert board.assign(["model/a", "model/b"], 2)["model/b"] == one.row("model/b"), "rows that are new are seen at once"
    assert not one.depart(), "there is nothing to take away"
    one.close()
