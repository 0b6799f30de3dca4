"""Real processes on one scoreboard, for tests: C{python -m tests.board_processes WHAT PATH COLUMN ...}, answers as JSON lines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from random import random

from llmgw.router.admission import Line, WaitingRoom
from llmgw.router.choose import Candidate, Group
from llmgw.router.limits import Allowance, Limited
from llmgw.router.scoreboard import Scoreboard
from llmgw.router.table import KeyEntry

ROOT = Path(__file__).resolve().parent.parent


def start(what: str, board: Scoreboard, *arguments: object) -> subprocess.Popen[str]:
    """A process with a column of its own; write a line to its stdin to let it begin, or close that to end it."""
    program = [sys.executable, "-m", "tests.board_processes", what, str(board.path), str(board.claim()), *map(str, arguments)]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def spin(board: Scoreboard, limit: str, seconds: str) -> None:
    """Take and leave places as fast as possible; a second row tells how many were inside at once."""
    bounded, witness = board.row("model/bounded"), board.row("model/witness")
    say(ready=True)
    sys.stdin.readline()
    most = entered = refused = 0
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        for _ in range(50):
            if board.enter(bounded, int(limit)):
                board.enter(witness, 0)
                most = max(most, board.total(witness))
                board.leave(witness)
                board.leave(bounded)
                entered += 1
            else:
                refused += 1
    say(most=most, entered=entered, refused=refused)


def hold(board: Scoreboard, name: str, count: str) -> None:
    """Take places and keep them until stdin ends."""
    for _ in range(int(count)):
        board.enter(board.row(name), 0)
    say(ready=True)
    sys.stdin.read()


def spend(board: Scoreboard, now: str, requests: str, tokens: str) -> None:
    """Ask for a key's allowance again and again, with a budget shared by all processes."""
    allowance = Allowance(KeyEntry("k", "d", rpm=50, tpm=10_000), board)
    say(ready=True)
    sys.stdin.readline()
    granted = [allowance.admit(float(now), int(tokens)) for _ in range(int(requests))]
    say(granted=sum(not isinstance(grant, Limited) for grant in granted))
    sys.stdin.read()


def queue(board: Scoreboard) -> None:
    """A worker's line of model m: each line of stdin is a command, each turn is told with its time."""
    asyncio.run(_queue(board))


async def _queue(board: Scoreboard) -> None:
    loop = asyncio.get_running_loop()
    candidate = Candidate("e", board.row("endpoint/e"), 1)
    line = Line(WaitingRoom(loop.call_later, time.monotonic), board, Group(board, [candidate], "least_inflight", random),
                board.row("model/m"))  # fmt: skip
    say(ready=True)
    while True:
        command, _, name = (await loop.run_in_executor(None, sys.stdin.readline)).strip().partition(" ")
        if command == "wait":

            def attempt(name: str = name) -> bool:
                taken = line.take(time.monotonic())[0] is not None
                if taken:
                    say(turn=name, at=time.monotonic())
                return taken

            line.wait(False, 30, attempt, lambda reason, name=name: say(ended=name, reason=reason))
            say(waiting=name)
        elif command == "take":
            say(taken=line.take(time.monotonic())[0] is not None)
        elif command == "give":
            say(gave=time.monotonic())
            line.give(candidate)
        else:
            return


if __name__ == "__main__":
    _, what, path, column, *arguments = sys.argv
    globals()[what](Scoreboard.attach(Path(path), int(column)), *arguments)
