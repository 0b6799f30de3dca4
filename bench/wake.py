"""How soon a place that is given back in one worker is taken by whoever waits in another.

    .venv/bin/python -m bench.wake [--turns 400] [--workers 3]

Real processes on one scoreboard, with the lines of waiting requests that router workers have (llmgw/router/admission.py) and one
place for all of them: each turn it is given back in one process and taken in another. Printed is the time from the one to the
other, beside what the machine needs to wake a process at all (a line through a pipe and back, halved), since on a busy one that
is most of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from llmgw.router.scoreboard import Scoreboard
from tests import board_processes

GOAL = 0.010


class Waiter:
    """One process with a line of its own."""

    def __init__(self, board: Scoreboard) -> None:
        self.process = board_processes.start("queue", board)
        self.hear()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def pipe_wake() -> list[float]:
    """Seconds until another process hears of something, by way of a pipe; the shortest first."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as echo:
        assert echo.stdin is not None
        assert echo.stdout is not None
        took = []
        for _ in range(200):
            began = time.monotonic()
            echo.stdin.write(b"x")
            echo.stdout.read(1)
            took.append((time.monotonic() - began) / 2)
    return sorted(took)


def run(workers: list[Waiter], turns: int) -> list[float]:
    """Pass the place round; how long each turn took."""
    holder = workers[0]
    holder.say("take")
    assert holder.hear()["taken"]
    took = []
    for turn in range(turns):
        taker = workers[(turn + 1) % len(workers)]
        taker.say("wait x")
        taker.hear()
        time.sleep(0.02)
        holder.say("give")
        gave = holder.hear()["gave"]
        took.append(taker.hear()["at"] - gave)
        holder = taker
    return took


def spread(took: list[float]) -> str:
    shares = [took[len(took) * share // 100] * 1000 for share in (50, 95, 99)]
    return "{:.2f} ms (95 %: {:.2f}, 99 %: {:.2f}, worst {:.2f})".format(*shares, took[-1] * 1000)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=400)
    options.add_argument("--workers", type=int, default=3)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        board = Scoreboard.create(Path(folder) / "board")
        board.assign(["model/m", "endpoint/e"], 1)
        workers = [Waiter(board) for _ in range(args.workers)]
        try:
            took = sorted(run(workers, args.turns))
        finally:
            for worker in workers:
                worker.end()
        board.close()
    within = sum(one <= GOAL for one in took) / len(took)
    print(f"a waiter in another worker is woken after  {spread(took)}")
    print(f"a pipe to another process wakes it after   {spread(pipe_wake())}")
    print(f"within {GOAL * 1000:.0f} ms: {within:.1%} of {len(took)} turns")


if __name__ == "__main__":
    main()
