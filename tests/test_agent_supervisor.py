"""One attempt of a shard, with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.agent import supervisor as supervisor_module
from llmgw.agent.output import read_output
from llmgw.engines.command import Command
from llmgw.fleet.shard import ShardState
from tests.agent_rig import FAKE, KEY, agent_rig, alive, order, printed_child, script, until  # noqa: F401
from tests.ports import free_port

READY, FAILED, STOPPED = ShardState.READY, ShardState.FAILED, ShardState.STOPPED


class Listing(Command):
    """A command engine that lists its models."""

    def launch(self, *arguments):
        return evolve(super().launch(*arguments), models="/v1/models")


@pytest_twisted.ensureDeferred
async def test_starts_serves_and_stops(rig):
    """An engine goes through loading to ready with its progress, and is gone after a stop."""
    shard = rig.start(order([*FAKE, "--load-seconds", "0.5"]))
    seen = set()
    await until(rig.reactor, lambda: seen.add(shard.report().progress) or shard.state is READY)
    pid = shard.report().pid
    assert alive(pid)
    assert any(progress for progress in seen)
    shard.stop()
    await shard.when_over()
    assert rig.states() == ["loading", "ready", "stopping", "stopped"]
    assert not rig.left()
    assert (shard.report().exit.code, shard.report().exit.forced) == (0, False)
    serials = [step.report.serial for step in rig.told]
    assert serials == sorted(set(serials))


@pytest_twisted.ensureDeferred
async def test_early_exit_fails_with_status_and_tail(rig):
    """An engine that exits with 3 while it starts has failed within 2 seconds, with its last lines."""
    shard = rig.start(order([*FAKE, "--exit-after", "0", "--exit-code", "3", "--say", "no such model", "--load-seconds", "9"]))
    await rig.reach(shard, FAILED, seconds=2)
    assert shard.report().exit.code == 3
    assert "no such model" in rig.told[-1].tail
    assert rig.told[-1].diagnosis is not None
    assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_exit_status_0_of_an_engine_that_should_run_is_a_failure(rig):
    """Exiting 0 is no success of something that is to serve."""
    shard = rig.start(order(script("print('bye')")))
    await rig.reach(shard, FAILED)
    assert shard.report().exit.code == 0


@pytest_twisted.ensureDeferred
async def test_a_program_that_is_not_there(rig):
    """What cannot be executed fails with the system's reason and the program's name."""
    shard = rig.start(order(["/no/such/engine"]))
    await rig.reach(shard, FAILED)
    assert "cannot run /no/such/engine: No such file or directory" in shard.reason
    assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_death_by_signal(rig):
    """An engine killed from outside has failed with the signal."""
    shard = await rig.ready()
    os.kill(shard.report().pid, signal.SIGKILL)
    await rig.reach(shard, FAILED)
    assert shard.report().exit.signal == signal.SIGKILL
    assert not shard.report().exit.forced


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK), reason="needs to set a memory limit")
@pytest_twisted.ensureDeferred
async def test_killed_for_lack_of_memory(rig):
    """The kernel's OOM killer is named as the reason, and the agent lives."""
    limit = Path("/sys/fs/cgroup/memory") / f"llmgw-test-{os.getpid()}"
    code = "import sys,time\ntime.sleep(0.3)\nkept=[b'x'*2**20 for _ in range(200)]\ntime.sleep(600)"
    shard = rig.start(order(script(code)))
    run = await until(rig.reactor, shard.folder.run)
    limit.mkdir()
    try:
        (limit / "memory.limit_in_bytes").write_text(str(50 * 2**20))
        (limit / "cgroup.procs").write_text(str(run.engine.pid))
        await rig.reach(shard, FAILED)
        assert shard.report().exit.signal == signal.SIGKILL
        assert "for lack of memory" in shard.report().diagnosis.text
    finally:
        limit.rmdir()


@pytest_twisted.ensureDeferred
async def test_ignored_sigterm_is_followed_by_sigkill(rig):
    """An engine that ignores SIGTERM is killed after its grace, and the exit says that it was forced."""
    shard = await rig.ready("--ignore-term", grace=0.5)
    shard.stop()
    await shard.when_over()
    assert shard.report().exit.signal == signal.SIGKILL
    assert shard.report().exit.forced
    assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_a_stopped_engine_is_ended_gently(rig):
    """SIGTERM alone never reaches a process under SIGSTOP: it is continued, and ends by itself."""
    shard = await rig.ready()
    os.kill(shard.report().pid, signal.SIGSTOP)
    shard.stop()
    await shard.when_over()
    assert (shard.report().exit.code, shard.report().exit.forced) == (0, False)


@pytest_twisted.ensureDeferred
async def test_stop_takes_a_grandchild_in_its_own_session(rig):
    """A descendant that called setsid dies with its engine."""
    shard = await rig.ready("--fork-setsid")
    child = await until(rig.reactor, lambda: printed_child(shard))
    assert alive(child)
    shard.stop()
    await shard.when_over()
    assert not alive(child)


@pytest_twisted.ensureDeferred
async def test_death_of_the_engine_takes_what_it_left(rig):
    """When the engine dies by itself, what it left behind is ended before the shard counts as failed."""
    shard = await rig.ready("--fork-setsid")
    child = await until(rig.reactor, lambda: printed_child(shard))
    os.kill(shard.report().pid, signal.SIGKILL)
    await rig.reach(shard, FAILED)
    assert not alive(child)
    assert rig.states() == ["loading", "ready", "stopping", "failed"] or rig.states() == ["ready", "stopping", "failed"]
    assert shard.report().exit.signal == signal.SIGKILL


@pytest_twisted.ensureDeferred
async def test_a_daemon_whose_parent_has_exited(rig):
    """An engine that forks into the background and exits has failed, and its daemon is ended (it would hold the devices)."""
    code = "import os,time\npid=os.fork()\nif pid: print(pid,flush=True); os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    shard = rig.start(order(script(code + "print('daemon',os.getpid(),flush=True)\ntime.sleep(600)")))
    await rig.reach(shard, FAILED)
    words = read_output(shard.folder.path, 0, 1000).data.decode().split()
    assert "daemon" in words and not alive(int(words[words.index("daemon") + 1]))
    assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_shim_killed(rig):
    """Without its shim an engine stays ready, the condition says so, and a stop still takes the whole tree."""
    shard = await rig.ready("--fork-setsid")
    child = await until(rig.reactor, lambda: printed_child(shard))
    pid = shard.report().pid
    os.kill(shard.tree.shim.pid, signal.SIGKILL)
    await until(rig.reactor, lambda: "shim_lost" in shard.report().conditions)
    assert shard.state is READY and alive(pid)
    shard.stop()
    await shard.when_over()
    assert not alive(pid) and not alive(child)
    assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_shim_killed_then_engine_killed(rig):
    """Nobody has seen the status of an engine whose shim was gone: it is unknown, never 0; its child is ended."""
    shard = await rig.ready("--fork-setsid")
    child = await until(rig.reactor, lambda: printed_child(shard))
    os.kill(shard.tree.shim.pid, signal.SIGKILL)
    await until(rig.reactor, lambda: "shim_lost" in shard.report().conditions)
    os.kill(shard.report().pid, signal.SIGKILL)
    await rig.reach(shard, FAILED)
    assert (shard.report().exit.code, shard.report().exit.signal) == (None, None)
    assert not alive(child)


@pytest_twisted.ensureDeferred
async def test_never_healthy(rig):
    """An engine that never answers fails at its deadline, with what was missing and its last lines, and is ended."""
    shard = rig.start(order(script("print('still here',flush=True)\nimport time\ntime.sleep(600)"), timeout=1.0))
    await rig.reach(shard, FAILED, seconds=8)
    assert shard.code == "start_timeout"
    assert "not ready after" in shard.reason and "/health" in shard.reason
    assert rig.told[-1].tail == ("still here",)
    assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_a_talking_engine_gets_more_time(rig):
    """While the output grows, the deadline moves."""
    shard = rig.start(order([*FAKE, "--load-seconds", "2.5"], timeout=0.8))
    await rig.reach(shard, READY)
    assert "failed" not in rig.states()


@pytest_twisted.ensureDeferred
async def test_port_stolen(rig):
    """200 and the right name from somebody else's process is not readiness: it is a stolen port, and its holder is named."""
    port = free_port()
    code = "import os,time\nos.execvp('sleep',['sleep','600'])"
    shard = rig.start(order(script(code), ports=(port,)))
    await until(rig.reactor, lambda: shard.tree.engine)
    thief = rig.start(order([*FAKE[:4], str(port), "--name", "m"], shard="thief/1/0"))
    await rig.reach(shard, FAILED)
    assert shard.code == "port_in_use"
    assert f"port {port} is owned by pid {thief.report().pid} (python -m llmgw.testing.fake_engine)" in shard.reason
    assert "ready" not in rig.states()[: rig.states().index("failed")]


@pytest_twisted.ensureDeferred
async def test_e3_who_has_the_port_that_an_engine_could_not_take_is_named(rig):
    """It was free when the engine was started; the engine's own words name nobody."""
    port = free_port()
    code = (
        "import socket,time\n"
        "while True:\n"
        "    s = socket.socket()\n"
        f"    s.bind(('127.0.0.1', {port}))\n"
        "    s.close()\n"
        "    time.sleep(0.02)"
    )
    shard = rig.start(order(script(code), ports=(port,)))
    await until(rig.reactor, lambda: shard.tree.engine)
    thief = subprocess.Popen([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)], stderr=subprocess.DEVNULL)
    try:
        await rig.reach(shard, FAILED)
    finally:
        thief.kill()
        thief.wait()
    told = shard.report().diagnosis
    assert told.cause == "retry"
    assert told.text == f"the command: a port it was given is in use: port {port} by pid {thief.pid} (python -m http.server)"


@pytest_twisted.ensureDeferred
async def test_another_name_is_not_ready(rig):
    """A server of another model never becomes ready, and the reason names what it lists."""
    rig.checks.adapters = {"command": Listing()}
    shard = rig.start(order([*FAKE[:-1], "other"], timeout=1.0))
    await rig.reach(shard, FAILED, seconds=10)
    assert "/v1/models lists other, not m" in shard.reason


@pytest_twisted.ensureDeferred
async def test_a_key_never_shows(rig):
    """The engine's key is in no argv, in no report's text and in no output that leaves the node, even if the engine prints it."""
    shard = await rig.ready("--exit-after", "3")
    pid = shard.report().pid
    with open(f"/proc/{pid}/cmdline") as file:
        assert KEY not in file.read()
    for folder, _, names in os.walk(shard.folder.path):
        assert all(os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0 for name in names)
        assert os.stat(folder).st_mode & 0o077 == 0
    assert [path.name for path in shard.folder.path.iterdir() if path.is_file() and KEY in path.read_text()] == ["key"]
    assert KEY not in repr(shard.intent)


@pytest_twisted.ensureDeferred
async def test_a_printed_key_is_masked(rig):
    """An engine that prints its key and dies: the tail of the event does not show it."""
    shard = rig.start(order(script("import os\nprint('my key is', os.environ['LLMGW_ENGINE_KEY'])")))
    await rig.reach(shard, FAILED)
    assert rig.told[-1].tail == ("my key is " + "*" * len(KEY),)


@pytest_twisted.ensureDeferred
async def test_flood_is_bounded(rig, monkeypatch):
    """100 MB of output leave at most three times the limit on disk: the start and the end are kept."""
    monkeypatch.setattr(supervisor_module.write_launch, "__defaults__", (None, 2**20))
    code = "import sys,time\nprint('first',flush=True)\nline='x'*999999+chr(10)\n"
    code += "for i in range(100): sys.stdout.write(line); sys.stdout.flush(); time.sleep(0.005)\n"
    shard = rig.start(order(script(code + "print('last',flush=True)\ntime.sleep(600)")))

    def on_disk() -> int:
        return sum(entry.stat().st_blocks * 512 for entry in os.scandir(shard.folder.path))

    def ended() -> bool:
        return read_output(shard.folder.path, -5, 5).data == b"last\n" and on_disk() <= 4 * 2**20

    peaks = []
    await until(rig.reactor, lambda: (shard.folder.path / "output.log").exists())
    await until(rig.reactor, lambda: peaks.append(on_disk()) or ended(), seconds=60)
    assert max(peaks) < 60 * 2**20
    assert read_output(shard.folder.path, 0, 6).data == b"first\n"
    await until(rig.reactor, lambda: os.stat(shard.folder.path / "output.log").st_size <= 2**20)


async def rig_pause(rig):
    from twisted.internet.task import deferLater

    await deferLater(rig.reactor, 0.02)


@pytest_twisted.ensureDeferred
async def test_stop_while_starting(rig):
    """A stop right after the start, before anybody knows a pid, leaves nothing behind."""
    for attempt in range(1, 6):
        shard = rig.start(order([*FAKE, "--fork-setsid"], attempt=attempt))
        for _ in range(attempt - 1):
            await rig_pause(rig)
        shard.stop()
        await shard.when_over()
        assert shard.state is STOPPED
        assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_unhealthy_when_it_hangs(rig, monkeypatch):
    """An engine that accepts and never answers is unhealthy after three probes, and healthy again after two good ones."""
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.1)
    monkeypatch.setattr(rig.around.probe, "_deadline", 0.3)
    shard = await rig.ready()
    os.kill(shard.report().pid, signal.SIGSTOP)
    await until(rig.reactor, lambda: not shard.report().healthy)
    assert shard.state is READY
    assert any(text.startswith("unhealthy: /health: no answer in") for text in shard.report().conditions)
    os.kill(shard.report().pid, signal.SIGCONT)
    await until(rig.reactor, lambda: shard.report().healthy)
    assert shard.report().conditions == ()


@pytest_twisted.ensureDeferred
async def test_load_is_reported(rig, monkeypatch):
    """What the engine says of its load is in the report."""
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.1)
    shard = await rig.ready()
    await until(rig.reactor, lambda: shard.report().load.running == 0)
    assert shard.report().load.tokens == 1, "the one that it was asked for"


@pytest_twisted.ensureDeferred
async def test_engine_gets_a_clean_start(rig, monkeypatch):
    """Nothing of the daemon's own is inherited: no notify socket, no blocked or ignored signal, no session, no OOM score."""
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "INVOCATION_ID", "JOURNAL_STREAM"):
        monkeypatch.setenv(name, "mine")
    code = (
        "import os,json,resource,sys\n"
        "status={k:v.split()[0] for k,_,v in (l.partition(':') for l in open('/proc/self/status')) if v.split()}\n"
        "print(json.dumps([dict(os.environ),status['SigBlk'],status['SigIgn'],open('/proc/self/oom_score_adj').read(),"
        "os.getsid(0)==os.getpid(),resource.getrlimit(resource.RLIMIT_NOFILE),sorted(os.listdir('/proc/self/fd'))]))"
    )
    shard = rig.start(order((sys.executable, "-S", "-E", "-c", code)))
    await rig.reach(shard, FAILED)
    environ, blocked, ignored, score, leader, files, descriptors = json.loads(rig.told[-1].tail[0])
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "INVOCATION_ID", "JOURNAL_STREAM"} & set(environ)
    assert environ["LLMGW_SHARD"] == "m/1/0/1" and environ["LLMGW_AGENT"] == rig.around.instance
    assert int(blocked, 16) == 0
    assert int(ignored, 16) & ~0x181001000 == 0  # Python itself ignores SIGPIPE and SIGXFSZ; 32 and 33 are the C library's.
    assert score == "0\n" and leader
    assert files[0] == min(files[1], 2**20)
    assert descriptors == ["0", "1", "2", "3"]  # 3 is the listing of the folder itself.


@pytest_twisted.ensureDeferred
async def test_shim_is_small(rig):
    """A shim takes no more than 15 MB."""
    shard = await rig.ready()
    with open(f"/proc/{shard.tree.shim.pid}/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert resident <= 15 * 1024


@pytest_twisted.ensureDeferred
async def test_drain_before_ready_comes_later(rig):
    """A drain of an engine that is loading takes effect when it is ready."""
    shard = rig.start(order([*FAKE, "--load-seconds", "0.4"]))
    shard.drain()
    await rig.reach(shard, ShardState.DRAINING)
    assert rig.states()[-2:] == ["ready", "draining"]


@pytest_twisted.ensureDeferred
async def test_a_follower_without_http(rig):
    """A rank that serves no HTTP is ready when it says so."""
    wanted = order(script("import time\nprint('llmgw: ready',flush=True)\ntime.sleep(600)"))
    shard = rig.start(evolve(wanted, allocation=evolve(wanted.allocation, rank=1, nodes=2)))
    await rig.reach(shard, READY)
    assert shard.report().url == ""


def test_a_bound_port_that_does_not_listen_is_not_free():
    """An engine may hold its port for minutes before it listens; that must be seen."""
    from llmgw.agent.ports import port_is_free

    with socket.socket() as early:
        early.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        early.bind(("127.0.0.1", 0))
        port = early.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)
