"""Many requests, with cancels, engine deaths, worker deaths and slow readers all at once; and nothing left of it afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from llmgw.config.server import Address, RouterSettings, Timeouts
from llmgw.router.scoreboard import WAITING
from llmgw.router.table import RoutedModel, Table, endpoint
from llmgw.server.workers import RouterWorkers
from tests.ports import free_ports
from tests.shared_files import remove_shared_files
from tests.soak import Soak

ROOT = Path(__file__).parent.parent


def start_engine(port):
    process = subprocess.Popen([sys.executable, "-m", "tests.soak", str(port)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    return process


def rss(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


async def pause(seconds):
    turn: Deferred[None] = Deferred()
    reactor.callLater(seconds, turn.callback, None)
    await turn


async def when(condition, seconds):
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        await pause(0.05)
    assert condition()


async def soak(count, deaths):
    state = Path(tempfile.mkdtemp(prefix="llmgw-soak-"))
    ports = free_ports(3)
    engines = [await deferToThread(start_engine, port) for port in ports]
    settings = RouterSettings(Address("127.0.0.1", 0), workers=2, access_log=state / "access.jsonl", timeouts=Timeouts(queue=5))
    workers = RouterWorkers(reactor, settings, state)
    workers.listen()
    workers.start()
    endpoints = tuple(endpoint(f"m/{n}", f"http://127.0.0.1:{port}/v1", model="m", limit=20) for n, port in enumerate(ports))
    version = workers.publish(
        Table(models=(RoutedModel("m", endpoints=tuple(one.id for one in endpoints)),), endpoints=endpoints)
    )
    await workers.when_routing(version, 20)
    running = Soak(workers.address[1], count, 64, seed=count)
    thread = threading.Thread(target=running.run)
    thread.start()
    sizes = []
    try:
        for death in range(deaths):
            await when(lambda: running.left <= count * (deaths - death) // (deaths + 1), 600)  # noqa: B023
            os.kill(workers.places[death % 2].pid, signal.SIGKILL)
            engines[death % 3].kill()
            engines[death % 3].wait()
            engines[death % 3] = await deferToThread(start_engine, ports[death % 3])
            sizes.append(rss(workers.places[1 - death % 2].pid))
        await when(lambda: not thread.is_alive(), 600)
        await when(lambda: not any(workers.in_flight(one.id) for one in endpoints), 5)
        board = workers._board
        assert board.total(board.row("model/m")) == 0
        assert board.total(board.row("model/m") + WAITING) == 0
        metrics = await workers.metrics()
        assert 'llmgw_in_flight{model="m",replica="m/0"} 0\n' in metrics
        sizes.append(max(rss(place.pid) for place in workers.places))
    finally:
        running.left = 0
        thread.join(30)
        await workers.stop(at_once=True)
        for place in workers.places:
            place.kill()
        await when(lambda: all(place.ended for place in workers.places), 5)
        for engine in engines:
            engine.kill()
            engine.wait()
        remove_shared_files(state)
        shutil.rmtree(state, ignore_errors=True)
    return running, sizes


def check(running, sizes, count):
    assert running.wrong == []
    ends = running.ends
    assert sum(ends.values()) == count
    assert ends["200"] > count * 0.6
    assert ends["stream"] > count * 0.2
    assert ends["stream broken"] > 0
    # Of the engines' faults most are made up for by another replica; a worker that is killed breaks what it had.
    assert ends["502"] + ends["broken"] < count * 0.02
    assert max(sizes) < 75 * 2**20


@pytest_twisted.ensureDeferred
async def test_soak():
    """20,000 requests while both workers and two engines die: each one ends, no counter is left, no answer is mixed up."""
    running, sizes = await soak(20_000, 2)
    check(running, sizes, 20_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest_twisted.ensureDeferred
async def test_long_soak():
    """200,000 requests, a death of both kinds in every 20,000 (slow: minutes of full load): memory does not grow."""
    running, sizes = await soak(200_000, 9)
    check(running, sizes, 200_000)
    assert sizes[-1] < sizes[0] + 20 * 2**20
