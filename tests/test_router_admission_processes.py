"""Lines of waiting requests over real processes: who is next, and who is passed over."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from llmgw.router.scoreboard import WAITING, Scoreboard
from tests import board_processes


def say(process, text):
    process.stdin.write(text + "\n")
    process.stdin.flush()


def hear(process):
    return json.loads(process.stdout.readline())


@pytest.fixture
def workers(tmp_path):
    """Three real workers of one server, with one endpoint for one request."""
    board = Scoreboard.create(tmp_path / "board")
    board.assign(["model/m", "endpoint/e"], 1)
    processes = [board_processes.start("queue", board) for _ in range(3)]
    assert all(hear(process)["ready"] for process in processes)
    yield board, processes
    for process in processes:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
    board.close()


def test_freed_place_is_passed_on_between_processes(workers):
    """A place given back in one process is taken in another, in the order of arrival over all of them, in milliseconds."""
    board, (one, two, three) = workers
    say(one, "take")
    assert hear(one)["taken"]
    for process, name in ((two, "a"), (three, "b"), (two, "c")):
        say(process, f"wait {name}")
        assert hear(process)["waiting"] == name
        time_between_arrivals()
    took = []
    holder = one
    for process, name in ((two, "a"), (three, "b"), (two, "c")):
        say(holder, "give")
        gave = hear(holder)["gave"]
        turn = hear(process)
        assert turn["turn"] == name
        took.append(turn["at"] - gave)
        holder = process
    assert min(took) < 0.1, "a busy machine is slow, but not each time"
    # A turn is told from within; the line is shorter a moment later.
    deadline = time.monotonic() + 5
    while board.total(board.row("model/m") + WAITING) and time.monotonic() < deadline:
        time_between_arrivals()
    assert board.total(board.row("model/m") + WAITING) == 0


def test_stopped_process_does_not_hold_up_the_line(workers):
    """While the worker whose turn it is does not run (SIGSTOP), the place goes to the next; it gets its own later."""
    _, (one, two, three) = workers
    say(one, "take")
    assert hear(one)["taken"]
    for process, name in ((two, "a"), (three, "b")):
        say(process, f"wait {name}")
        assert hear(process)["waiting"] == name
        time_between_arrivals()
    os.kill(two.pid, signal.SIGSTOP)
    try:
        say(one, "give")
        assert "gave" in hear(one)
        assert hear(three)["turn"] == "b"
    finally:
        os.kill(two.pid, signal.SIGCONT)
    say(three, "give")
    assert "gave" in hear(three)
    assert hear(two)["turn"] == "a"


def time_between_arrivals():
    """Arrivals are ordered by the millisecond; let one pass."""
    begin = time.monotonic()
    while time.monotonic() - begin < 0.002:
        pass
