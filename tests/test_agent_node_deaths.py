"""Agents that die at any moment, killed for real, and what the next one on the same folder finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.agent.processes import marked, marks_of
from llmgw.fleet.shard import ShardState, Wanted
from tests.agent_rig import FAKE, KEY, alive, kill_all, node_rigs, order, script, until

READY, FAILED = ShardState.READY, ShardState.FAILED


@pytest.fixture
def rigs(reactor, tmp_path):
    with node_rigs(reactor, tmp_path) as make:
        yield make


@pytest_twisted.ensureDeferred
async def test_answers_survive_the_agent(rigs):
    """A repeated operation is answered by the next agent as it was by the one before, and serials go on growing."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(FAKE))
    done = await rig.done(wanted.operation)
    before = rig.reports()["m/1/0"]
    rig.leave()
    rig = rigs()
    await rig.start()
    after = rig.reports()["m/1/0"]
    assert (after.pid, after.state, after.key) == (before.pid, READY, KEY)
    assert after.serial > before.serial
    rig.order(wanted)
    assert done in rig.said


@pytest_twisted.ensureDeferred
async def test_a_failure_is_told_by_the_next_agent(rigs):
    """A shard that failed is reported as failed by the next agent, until the leader no longer lists it."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(script("raise SystemExit(9)")))
    await rig.done(wanted.operation)
    rig.leave()
    rig = rigs()
    await rig.start()
    assert (rig.reports()["m/1/0"].state, rig.reports()["m/1/0"].exit.code) == (FAILED, 9)
    rig.order()
    assert rig.reports() == {}
    rig.leave()
    (rig.path / "operations.jsonl").unlink()
    rig = rigs()
    await rig.start()
    rig.order()
    rig.order(wanted)  # Even with the answers lost, the attempt's own folder knows this operation.
    assert (await rig.done(wanted.operation)).error == "failed"
    assert not rig.left()


DRIVER = """
import sys, json
from pathlib import Path
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from tests.agent_rig import NodeRig
from llmgw.fleet.plain import from_text
from llmgw.fleet.shard import ShardOrder
orders = [from_text(text, ShardOrder) for text in sys.argv[2:]]
async def main():
    rig = NodeRig(reactor, Path(sys.argv[1]))
    await rig.start()
    for order in orders:
        rig.order(order)
        print(order.operation, (await rig.done(order.operation)).ok, flush=True)
Deferred.fromCoroutine(main()).addErrback(lambda f: (f.printTraceback(), reactor.stop()))
reactor.run()
"""


def driver(path: Path, *orders, prelude: str = "") -> subprocess.Popen:
    from llmgw.fleet.plain import to_text

    return subprocess.Popen(
        [sys.executable, "-c", prelude + DRIVER, str(path), *map(to_text, orders)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


@pytest_twisted.ensureDeferred
async def test_engines_outlive_kill_9_of_the_agent(rigs, tmp_path):
    """SIGKILL of the agent: the engine goes on, the next agent adopts the same pid as ready, and can stop it."""
    wanted = order(FAKE)
    agent = driver(tmp_path, wanted)
    try:
        assert agent.stdout.readline() == f"{wanted.operation} True\n"
    finally:
        end(agent)
    run = json.loads((tmp_path / "shards" / "m%2F1%2F0" / "1" / "run.json").read_text())
    assert alive(run["engine"]["pid"])
    rig = rigs()
    await rig.start()
    report = rig.reports()["m/1/0"]
    assert (report.pid, report.state, report.attempt) == (run["engine"]["pid"], READY, 1)
    rig.order(wanted)
    assert (await rig.done(wanted.operation)).ok
    assert len(marked(marks_of(rig.state.instance, "m/1/0", 1))) == 2  # The shim and the engine: no twin.
    rig.order(evolve(wanted, wanted=Wanted.STOP, operation="stop"))
    assert (await rig.done("stop")).ok
    assert not alive(report.pid)


# Each of these points lies between two files that must not be taken for each other.
POINTS = {
    "before the shim": "import llmgw.agent.supervisor as s, os\ns.spawn_shim = lambda *a: os.kill(os.getpid(), 9)\n",
    "right after the shim": (
        "import llmgw.agent.supervisor as s, os\nspawn = s.spawn_shim\n"
        "s.spawn_shim = lambda *a: (spawn(*a), os.kill(os.getpid(), 9))\n"
    ),
    "before the launch is written": (
        "import llmgw.agent.shardfolder as f, os\nwrite = f.AttemptFolder.write\n"
        "f.AttemptFolder.write = lambda self, name, value: os.kill(os.getpid(), 9) if name == 'launch.json' "
        "else write(self, name, value)\n"
    ),
}


@pytest.mark.parametrize("point", POINTS)
@pytest_twisted.ensureDeferred
async def test_killed_while_starting_there_is_no_twin(rigs, tmp_path, point):
    """Whenever an agent is killed during a start: the next one has exactly one engine, and it becomes ready."""
    wanted = order(FAKE)
    agent = driver(tmp_path, wanted, prelude=POINTS[point])
    try:
        assert agent.wait(20) == -signal.SIGKILL
    finally:
        end(agent)
    rig = rigs()
    await rig.start()
    rig.order(wanted)
    assert (await rig.done(wanted.operation)).ok
    engines = [
        pid
        for pid in marked(marks_of(rig.state.instance, "m/1/0", 1))
        if b"fake_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert engines == [rig.reports()["m/1/0"].pid]


@pytest_twisted.ensureDeferred
async def test_killed_while_stopping_the_stop_goes_on(rigs, reactor, tmp_path):
    """An agent killed in the middle of a stop: the next one ends the engine without being told again."""
    wanted = order([*FAKE, "--ignore-term"], grace=60.0)
    agent = driver(tmp_path, wanted, evolve(wanted, wanted=Wanted.STOP, operation="stop"))
    folder = tmp_path / "shards" / "m%2F1%2F0" / "1"
    try:
        await until(reactor, lambda: (folder / "run.json").exists())
        pid = json.loads((folder / "run.json").read_text())["engine"]["pid"]
        await until(reactor, lambda: '"stop"' in (folder / "intent.json").read_text())
    finally:
        end(agent)
    intent = json.loads((folder / "intent.json").read_text())
    intent["order"]["grace"] = 0.2
    (folder / "intent.json").write_text(json.dumps(intent))
    rig = rigs()
    await rig.start()
    await until(rig.reactor, lambda: not alive(pid))


UNIFIED = next((p for p in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if os.path.exists(f"{p}/cgroup.controllers")), "")


@pytest.mark.skipif(not os.access(f"{UNIFIED}/cgroup.procs", os.W_OK), reason="needs a cgroup v2 to put an agent into")
@pytest_twisted.ensureDeferred
async def test_a_cgroup_per_engine_where_one_is_delegated(rigs, reactor, tmp_path):
    """With C{Delegate=yes} each engine has a cgroup of its own below the agent's, and it is gone when the engine is."""
    group = Path(UNIFIED) / f"llmgw-test-{os.getpid()}"
    group.mkdir()
    wanted = order([*FAKE, "--fork-setsid"])
    join = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    agent = None
    try:
        os.setxattr(group, "user.delegate", b"1")
        agent = driver(tmp_path, wanted, prelude=join)
        assert agent.stdout.readline() == f"{wanted.operation} True\n"
        own = group / "llmgw-m_1_0.1"
        end(agent)
        rig = rigs()
        await rig.start()
        inside = {int(pid) for pid in (own / "cgroup.procs").read_text().split()}
        assert rig.reports()["m/1/0"].pid in inside and len(inside) == 2
        rig.order(evolve(wanted, wanted=Wanted.STOP, operation="stop"))
        assert (await rig.done("stop")).ok
        assert not own.exists() and not any(map(alive, inside))
    finally:
        if agent is not None:
            end(agent)
        kill_all(lambda: {int(pid) for pid in (group / "cgroup.procs").read_text().split()})
        group.rmdir()


@pytest_twisted.ensureDeferred
async def test_broken_files_keep_nobody_from_starting(rigs, tmp_path):
    """Garbage in the state folder is logged; what can be read is adopted."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(FAKE))
    await rig.done(wanted.operation)
    rig.leave()
    for name in ("x%2F1%2F0/3/intent.json", "y/1/run.json", "z%2F1%2F0/nonsense", "m%2F1%2F0/2/intent.json"):
        path = tmp_path / "shards" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff{")
    (tmp_path / "operations.jsonl").write_bytes(
        b'{"operation": "a", "ok": tr\n\xff\n' + (tmp_path / "operations.jsonl").read_bytes()
    )
    rig = rigs()
    await rig.start()
    assert rig.reports()["m/1/0"].state is READY
    rig.order(wanted)
    assert (await rig.done(wanted.operation)).ok
