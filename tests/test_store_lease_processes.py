"""Contenders for the lease in processes of their own, which are stopped, woken and killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.task import deferLater

from tests.store_fixtures import *  # noqa: F403
from tests.test_store_lease import SHORT, until

ROOT = Path(__file__).resolve().parent.parent
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
def servers(postgres, tmp_path):
    made = Servers(postgres.database(), tmp_path)
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
