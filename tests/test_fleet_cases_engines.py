"""The cases of test_fleet_cases.py that are about processes: with real ones, started, watched and ended by an agent's parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.defer import Deferred

from llmgw.agent.output import read_output
from llmgw.agent.processes import identify
from llmgw.agent.progress import StartDeadline
from llmgw.fleet.shard import ShardState
from llmgw.wire.messages import FetchLog
from tests.agent_rig import FAKE, Equipment, agent_rig, alive, node_rigs, order, script, until  # noqa: F401

READY, FAILED, STOPPED = ShardState.READY, ShardState.FAILED, ShardState.STOPPED


@pytest.fixture
def rigs(reactor, tmp_path):
    with node_rigs(reactor, tmp_path) as make:
        yield make


@pytest_twisted.ensureDeferred
async def test_a1_an_engine_that_ends_while_it_starts_has_failed_at_once_with_its_last_words(rig):
    """Exit status 3 after many lines: within 2 s it is failed, with that status and the end of its output."""
    shard = rig.start(order(script("for n in range(300): print('line', n, flush=True)\nraise SystemExit(3)")))
    await until(rig.reactor, lambda: shard.folder.exit(), "it ends")
    began = time.monotonic()
    await rig.reach(shard, FAILED)
    assert time.monotonic() - began < 2
    assert (shard.exit.code, shard.code) == (3, "exited") and "exit status 3" in shard.reason
    assert rig.told[-1].tail[-50:] == tuple(f"line {n}" for n in range(250, 300))


@pytest_twisted.ensureDeferred
async def test_a1_a_shim_that_starts_nothing_is_given_up_at_its_own_deadline(rig, monkeypatch):
    """It hangs before it starts the engine: the start fails with a reason, and the shim is ended."""
    hung = []

    def spawn(reactor, folder, marks):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, **marks})
        hung.append(process)
        return identify(process.pid)

    monkeypatch.setattr("llmgw.agent.supervisor.spawn_shim", spawn)
    monkeypatch.setattr("llmgw.agent.supervisor.SPAWN_DEADLINE", 0.3)
    shard = rig.start(order(FAKE, grace=1.0))
    await until(rig.reactor, lambda: shard.state is ShardState.STOPPING, "given up")
    assert (shard.code, shard.reason) == ("spawn_timeout", "the shim started nothing within 0.3 s")
    await until(rig.reactor, lambda: hung[0].poll() is not None, "ended")
    await rig.reach(shard, FAILED)


@pytest_twisted.ensureDeferred
async def test_a2_a_probe_that_raises_does_not_keep_an_engine_from_being_ready(rig, monkeypatch, expect_failures):
    """The first looks fail with an error of ours; the next one finds that it serves."""
    expect_failures(ZeroDivisionError)
    serving, asked = rig.around.probe.serving, []

    async def broken(*arguments):
        asked.append(arguments)
        return 1 / 0 if len(asked) < 4 else await serving(*arguments)

    monkeypatch.setattr(rig.around.probe, "serving", broken)
    shard = await rig.ready()
    assert len(asked) >= 4 and shard.state is READY


@pytest_twisted.ensureDeferred
async def test_a2_an_engine_that_gets_ready_between_two_agents_is_ready(rig):
    """The agent is replaced while it loads; the next one sees that it serves, in its first look."""
    shard = rig.start(order([*FAKE, "--load-seconds", "0.6"]))
    await rig.reach(shard, ShardState.LOADING)
    shard.leave()
    pid = shard.report().pid
    await until(rig.reactor, lambda: b"llmgw: ready" in read_output(shard.folder.path, 0, 10000).data, "it serves")
    adopted = rig.adopt()
    await rig.reach(adopted, READY, seconds=5)
    assert adopted.report().pid == pid


def test_a9_a_load_of_ten_minutes_is_no_failure_while_it_moves():
    """Its start may take 5 minutes, it tells its progress each 30 s: it goes on; a minute of silence after that is the end."""
    deadline = StartDeadline(0.0, 300.0)
    for now in range(0, 601, 30):
        deadline.saw(now, written=now + 1)
        assert not deadline.over(now)
    assert not deadline.over(659) and deadline.over(660)


@pytest_twisted.ensureDeferred
async def test_a10_a_stop_while_it_warms_up_leaves_none_of_its_children(rig):
    """An engine and two workers, one in a session of its own, all of which ignore SIGTERM: none of the three is left."""
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for own in (False, True):
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", child], start_new_session=own, stdout=subprocess.PIPE)
    worker.stdout.readline()
    print("pid", worker.pid, flush=True)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""
    shard = rig.start(order(script(code), grace=0.5))

    def pids():
        lines = read_output(shard.folder.path, 0, 10000).data.decode().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("pid ")]

    await until(rig.reactor, lambda: len(pids()) == 3, "three processes")
    assert shard.state in (ShardState.STARTING, ShardState.LOADING) and all(map(alive, pids()))
    shard.stop()
    await rig.reach(shard, STOPPED)
    assert not any(map(alive, pids()))


@pytest_twisted.ensureDeferred
async def test_a11_a_stop_that_is_ignored_ends_within_its_deadline_and_5_s(rig):
    """SIGTERM is ignored; SIGKILL follows after the grace, and it is said that it was needed."""
    shard = await rig.ready("--ignore-term", grace=0.5)
    began = time.monotonic()
    shard.stop()
    await rig.reach(shard, STOPPED)
    assert time.monotonic() - began < 0.5 + 5
    assert shard.exit.signal == signal.SIGKILL and shard.exit.forced


@pytest_twisted.ensureDeferred
async def test_b12_starts_that_take_their_time_keep_no_report_back(rigs):
    """Eight starts at once that all wait for slow disks: the node reports as ever, and all that is ordered is shown."""
    disks: list[Deferred] = []

    class Slow(Equipment):
        async def flags(self, installation):
            disks.append(Deferred())
            return await disks[-1]

    rig = rigs(equipment=Slow())
    await rig.start()
    rig.order(*(order(FAKE, shard=f"m/{n}/0") for n in range(8)))
    await until(rig.reactor, lambda: len(disks) == 8, "all eight wait")
    began = time.monotonic()
    assert sorted(rig.reports()) == [f"m/{n}/0" for n in range(8)]
    assert {report.state for report in rig.reports().values()} == {ShardState.STARTING}
    assert time.monotonic() - began < 1


@pytest_twisted.ensureDeferred
async def test_j1_the_output_of_five_crashed_attempts_is_there_with_status_and_times(rigs):
    """The first cause is not overwritten by what followed from it."""
    rig = rigs()
    await rig.start()
    for n in range(1, 6):
        rig.order(order(script(f"print('cause {n}', flush=True)\nraise SystemExit({n})"), attempt=n))
        await until(rig.reactor, lambda n=n: rig.reports()["m/1/0"].attempt == n and rig.reports()["m/1/0"].state is FAILED)
        report = rig.reports()["m/1/0"]
        assert report.exit.code == n and report.exit.at > 1e9
    for n in range(1, 6):
        done = await rig.node.fetch_log(FetchLog(f"log{n}", 1, "cp1", "m/1/0", n, 0, 1000))
        assert done.result["text"] == f"cause {n}\n" and done.result["attempt"] == n


@pytest_twisted.ensureDeferred
async def test_j2_the_output_of_an_adopted_engine_goes_on_without_a_gap(rig):
    """It counts aloud; the agent is replaced in between; no number is missing."""
    count = "import itertools, time\nfor n in itertools.count(): print(n, flush=True); time.sleep(0.01)"
    shard = rig.start(order(script(count)))

    def numbers():
        return [int(word) for word in read_output(shard.folder.path, 0, 60000).data.decode().splitlines()[:-1]]

    await until(rig.reactor, lambda: len(numbers()) > 20, "it counts")
    shard.leave()
    before = len(numbers())
    await until(rig.reactor, lambda: len(numbers()) > before + 20, "it counts on without an agent")
    adopted = rig.adopt()
    after = len(numbers())
    await until(rig.reactor, lambda: len(numbers()) > after + 20, "it counts on")
    assert numbers() == list(range(len(numbers())))
    adopted.order(evolve(adopted.intent.order, grace=0.5))
    adopted.stop()
    await rig.reach(adopted, STOPPED)
