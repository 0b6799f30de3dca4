"""The agent as a process: adoption, the lock, a bounded stop that leaves engines running, trouble with its disk."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.agent.service import make_agent
from llmgw.config.agent import read_agent
from llmgw.errors import LlmgwError
from llmgw.fleet.shard import ShardState
from llmgw.testing.certificates import Fleet
from tests.agent_rig import FAKE, NodeRig, alive, kill_all, order, settle, until
from tests.ports import free_port

TWISTD = Path(sys.executable).parent / "twistd"


@pytest.fixture
def folder(tmp_path, reactor):
    """An agent's configuration whose server never answers."""
    fleet = Fleet()
    files = fleet.write(tmp_path, "n1", fleet.node("n1"))
    (tmp_path / "agent.yaml").write_text(
        f"node: n1\nserver: 127.0.0.1:{free_port()}\naddress: 127.0.0.1\nstate: state\n"
        f"tls: {{authority: {files.authority}, certificate: {files.certificate}, key: {files.key}}}\n"
    )
    yield tmp_path
    settle(reactor)


class Daemons:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen] = []

    def start(self, name: str = "agent", **more) -> subprocess.Popen:
        command = [str(TWISTD), "-n", "--pidfile=", "--logger=llmgw.logs.text", "llmgw-agent", "--config", "agent.yaml"]
        with open(self._folder / f"{name}.log", "wb") as log:
            self._running.append(subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, **more))
        return self._running[-1]

    def log(self, name: str = "agent") -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def daemons(folder):
    found = Daemons(folder)
    yield found
    found.close()


@pytest.fixture
def engine(reactor, folder):
    """A node's engine that was left running in the state folder; a function that starts it and gives its pid."""
    rigs = []

    async def start() -> int:
        rig = NodeRig(reactor, folder / "state")
        rigs.append(rig)
        await rig.start()
        rig.order(wanted := order(FAKE))
        assert (await rig.done(wanted.operation)).ok
        pid = rig.reports()["m/1/0"].pid
        rig.leave()
        return pid

    yield start
    for rig in rigs:
        kill_all(rig.left)
    settle(reactor)


@pytest_twisted.ensureDeferred
async def test_adopts_and_ends_within_two_seconds(reactor, daemons, engine):
    """An agent adopts what runs, and its end, in the middle of dialling, takes less than 2 seconds and no engine."""
    pid = await engine()
    agent = daemons.start()
    await until(reactor, lambda: "1 engines found running: m/1/0" in daemons.log(), daemons.log)
    await until(reactor, lambda: "refused" in daemons.log(), daemons.log)
    began = time.monotonic()
    agent.send_signal(signal.SIGTERM)
    agent.wait(5)
    assert time.monotonic() - began < 2
    assert alive(pid)


@pytest_twisted.ensureDeferred
async def test_a_second_agent_is_refused(reactor, daemons):
    """It ends at once with one sentence that names the first one's pid, and the first goes on."""
    first = daemons.start()
    await until(reactor, lambda: "found running" in daemons.log(), daemons.log)
    second = daemons.start("second")
    await until(reactor, lambda: second.poll() is not None, lambda: daemons.log("second"))
    assert second.returncode == 1
    assert f"another llmgw-agent (pid {first.pid}) uses" in daemons.log("second")
    assert "Traceback" not in daemons.log("second").split("cannot start")[-1]
    assert first.poll() is None


@pytest_twisted.ensureDeferred
async def test_a_full_disk_keeps_no_agent_from_adopting(reactor, daemons, engine):
    """With not one byte to write the agent comes up all the same and looks after what runs."""
    pid = await engine()

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    read, write = os.pipe()
    os.set_blocking(read, False)
    command = [str(TWISTD), "-n", "--pidfile=", "--logger=llmgw.logs.text", "llmgw-agent", "--config", "agent.yaml"]
    agent = subprocess.Popen(command, cwd=daemons._folder, stdout=write, stderr=write, preexec_fn=full)
    daemons._running.append(agent)
    os.close(write)
    said = bytearray()

    def heard() -> bool:
        with contextlib.suppress(BlockingIOError):
            said.extend(os.read(read, 65536))
        return b"1 engines found running" in said and b"refused" in said

    await until(reactor, heard, lambda: said.decode())
    os.close(read)
    assert b"cannot write" in said
    assert agent.poll() is None and alive(pid)


def test_nothing_is_opened_before_the_start(folder, reactor):
    """Making the services touches no file, and descriptors stay as they were."""
    settings = read_agent(folder / "agent.yaml", (folder / "agent.yaml").read_text())
    make_agent(settings, reactor)  # Warm: what is imported late opens files once.
    before = sorted(os.listdir("/proc/self/fd"))
    agent = make_agent(settings, reactor)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not (folder / "state").exists()
    assert "engines: none" in agent.status()


@pytest_twisted.ensureDeferred
async def test_reload(folder, reactor):
    """Labels change at once; what takes a restart is named, and certificates that cannot be used are refused."""
    settings = read_agent(folder / "agent.yaml", (folder / "agent.yaml").read_text())
    agent = make_agent(settings, reactor)
    up = []
    agent.when_up(lambda: up.append(True))
    agent.startService()
    try:
        await until(reactor, lambda: up)
        agent.reload(evolve(settings, labels={"pool": "a"}))
        assert agent.node.register("f", "127.0.0.1").facts.labels == {"pool": "a"}
        with pytest.raises(LlmgwError, match="node changed: that takes a restart"):
            agent.reload(evolve(settings, node="n2"))
        with pytest.raises(LlmgwError, match="node changed: that takes a restart"):
            agent.reload(evolve(settings, node="n2"))
        settings.tls.key.write_text("nonsense")
        with pytest.raises(LlmgwError):
            agent.reload(settings)
    finally:
        await agent.stopService()


@pytest_twisted.ensureDeferred
async def test_a_stop_in_the_middle_of_the_start(folder, reactor):
    """An agent that is told to end while it looks around ends at once."""
    settings = read_agent(folder / "agent.yaml", (folder / "agent.yaml").read_text())
    agent = make_agent(settings, reactor)
    agent.startService()
    await agent.stopService()
    assert agent.node.running == {}
    other = make_agent(settings, reactor)  # The lock is free again.
    up = []
    other.when_up(lambda: up.append(True))
    other.startService()
    await until(reactor, lambda: up)
    await other.stopService()


@pytest_twisted.ensureDeferred
async def test_a_stop_ordered_from_nobody(reactor, daemons, engine, folder):
    """SIGKILL of a real agent: the next one has the same engine, ready at once."""
    pid = await engine()
    for _ in range(2):
        agent = daemons.start()
        await until(reactor, lambda: "1 engines found running: m/1/0" in daemons.log(), daemons.log)
        agent.kill()
        agent.wait()
        assert alive(pid)
    rig = NodeRig(reactor, folder / "state")
    await rig.start()
    report = rig.reports()["m/1/0"]
    assert (report.pid, report.state) == (pid, ShardState.READY)
    rig.leave()


def test_timers_run_by_a_clock_that_nobody_can_set():
    """A process whose timers are steady fires them whatever the wall clock does."""
    code = (
        "import time\nfrom twisted.internet import reactor\nfrom llmgw.daemon import steady_clock\nsteady_clock(reactor)\n"
        "assert abs(reactor.seconds() - time.monotonic()) < 1\nbegan = time.monotonic()\n"
        "reactor.callLater(0.2, reactor.stop)\nreactor.run()\nassert 0.19 < time.monotonic() - began < 5\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
