"""Supervisors and nodes over real processes for tests: the command adapter, small engines, deadlines instead of sleeps."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet.defer import succeed
from twisted.internet.task import deferLater

from llmgw.agent.adoption import begin
from llmgw.agent.checks import Checks
from llmgw.agent.fetching import Fetching
from llmgw.agent.node import Node
from llmgw.agent.output import read_output
from llmgw.agent.probe import EngineProbe
from llmgw.agent.processes import marked, marks_of, read_stat
from llmgw.agent.reports import Surroundings, Transition
from llmgw.agent.shardfolder import Intent, ShardFolders
from llmgw.agent.statefolder import StateFolder
from llmgw.agent.supervisor import Supervisor
from llmgw.config.agent import AgentSettings
from llmgw.config.settings import TlsFiles
from llmgw.engines.command import command
from llmgw.fleet.model import Profile, Resources
from llmgw.fleet.node import Device, Installation, Inventory
from llmgw.fleet.shard import Allocation, ShardOrder, ShardState, Wanted, WeightFiles
from llmgw.interfaces import Flags
from llmgw.wire.messages import Desired, Done, Event
from tests.ports import free_port

FAKE = (sys.executable, "-m", "llmgw.testing.fake_engine", "--port", "{port}", "--name", "{model}")
PATIENCE = 20.0
KEY = "f00dfacef00dface"


def script(code: str) -> tuple[str, ...]:
    """The argv of a small Python program; C{{port}} in it is the engine's port."""
    return (sys.executable, "-I", "-S", "-c", code)


def agent_id() -> str:
    """Of one agent only: by it a rig finds, and kills, what it started, and nothing of another run of the tests."""
    return f"test-{uuid.uuid4().hex}"


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return bool(stat and stat.alive)


def printed_child(shard) -> int | None:
    """The pid of the child that the fake engine left in a session of its own."""
    for line in read_output(shard.folder.path, 0, 10000).data.decode().splitlines():
        if line.startswith("left a child: "):
            return int(line.split()[-1])
    return None


async def until(reactor, found, what="", seconds=PATIENCE):
    """The first true value of C{found}, looked for while the reactor runs."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what() if callable(what) else what or found}: not within {seconds} s"
        await deferLater(reactor, 0.01)
    return value


def order(argv, shard="m/1/0", attempt=1, wanted=Wanted.RUN, devices=(), share=False, timeout=60.0, **more) -> ShardOrder:
    profile = Profile("command", argv=tuple(argv), start_timeout=timeout, resources=Resources(share=share))
    ports = more.pop("ports", None) or (free_port(),)
    allocation = Allocation(node="n1", ports=tuple(ports), devices=tuple(devices))
    values = {"operation": f"{wanted}:{shard}:{attempt}", "grace": 5.0, "served": ("m",), **more}
    return ShardOrder(shard, "m", "g1", attempt, wanted, profile=profile, allocation=allocation, **values)


def settings(path: Path) -> AgentSettings:
    return AgentSettings(path / "agent.yaml", "n1", (), TlsFiles(path, path, path), path)


class Equipment:
    """A node with two devices and the command engine."""

    inventory = Inventory(2, 2**30, devices=(Device("GPU-a", 0, "a"), Device("GPU-b", 1, "b")))

    def installations(self):
        return (Installation("command", "command"),)

    async def flags(self, installation):
        return Flags()

    async def weights(self, weights):
        return WeightFiles(weights, found=False, looked=("/nowhere",))


class Rig:
    """A state folder and the surroundings of its supervisors; C{told} is every transition they told."""

    def __init__(self, reactor, path: Path) -> None:
        self.reactor = reactor
        self.told: list[Transition] = []
        self.supervisors: list[Supervisor] = []
        self.folders = ShardFolders(path / "shards")
        self.checks = Checks(
            settings(path), {"command": command}, Equipment(), lambda: (), lambda: None, lambda: KEY, lambda: 0.0
        )
        self.around = Surroundings(
            reactor=reactor,
            instance=agent_id(),
            probe=EngineProbe(reactor),
            tell=lambda said: self.told.append(said) if isinstance(said, Transition) else None,
            serials=itertools.count(1).__next__,
            released=lambda devices, pids: succeed(""),
            look=Equipment().weights,
        )

    def start(self, wanted: ShardOrder) -> Supervisor:
        folder = self.folders.attempt(wanted.shard, wanted.attempt)
        supervisor = Supervisor(self.around, folder, Intent(wanted, "", "command"))
        self.supervisors.append(supervisor)
        supervisor.start(lambda: self.checks.prepare(wanted))
        return supervisor

    async def ready(self, *arguments: str, **more) -> Supervisor:
        """A fake engine that serves."""
        supervisor = self.start(order([*FAKE, *arguments], **more))
        await self.reach(supervisor, ShardState.READY)
        return supervisor

    def adopt(self, shard: str = "m/1/0", attempt: int = 1) -> Supervisor:
        """What a new agent does with what the old one left."""
        folder = self.folders.attempt(shard, attempt)
        supervisor = Supervisor(self.around, folder, folder.intent(), command)
        self.supervisors.append(supervisor)
        begin(supervisor, folder.run())
        return supervisor

    async def reach(self, supervisor: Supervisor, *states: ShardState, seconds: float = PATIENCE) -> None:
        def what() -> str:
            return f"{states}, now {supervisor.state}: {supervisor.reason}"

        await until(self.reactor, lambda: supervisor.state in states, what, seconds)

    def states(self) -> list[str]:
        return [str(step.report.state) for step in self.told]

    def left(self) -> set[int]:
        """Everything of this rig that still runs."""
        return {pid for s in self.supervisors for pid in marked(s.tree.marks)}

    def close(self) -> None:
        """Let go of all, and kill what runs."""
        for supervisor in self.supervisors:
            supervisor.leave()
        kill_all(self.left)


def settle(reactor) -> None:
    """Let the reactor turn: a connection that was cancelled before it began leaves a call for the next turn."""
    pytest_twisted.blockon(deferLater(reactor, 0.01))


def kill_all(left) -> None:
    deadline = time.monotonic() + 5
    while (pids := left()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


class NodeRig:
    """A node without a link; C{said} is everything that it sent."""

    def __init__(self, reactor, path: Path, equipment=None) -> None:
        self.reactor = reactor
        self.path = path
        self.said: list = []
        self.state = StateFolder(path, agent_id)
        self.state.open()
        self.node = Node(
            reactor,
            settings(path),
            self.state,
            {"command": command},
            equipment or Equipment(),
            lambda devices, pids: succeed(""),
            lambda: KEY,
            Fetching(reactor, {}, path / "hub", path / "fetches.json", lambda: 0.0),
        )

    async def start(self) -> None:
        await self.node.start()
        self.node.connected(self.said.append)

    def order(self, *orders: ShardOrder) -> None:
        self.node.desired(Desired(1, "cp1", 1, 1, 1, orders))

    def reports(self) -> dict[str, object]:
        return {report.shard: report for report in self.node.report().shards}

    async def done(self, operation: str, seconds: float = PATIENCE) -> Done:
        def found():
            return next((m for m in self.said if isinstance(m, Done) and m.operation == operation), None)

        return await until(self.reactor, found, lambda: f"done {operation}; {self.said}", seconds)

    def events(self) -> list[tuple[str, str, str]]:
        return [(m.shard, m.before, m.after) for m in self.said if isinstance(m, Event)]

    def leave(self) -> None:
        """What the end of an agent does."""
        self.node.disconnected("test")
        self.node.leave()
        self.state.close()

    def left(self) -> set[int]:
        shards = self.path / "shards"
        found = set()
        for attempts in ShardFolders(shards).shards():
            for folder in attempts:
                found |= marked(marks_of(self.state.instance, folder.shard, folder.attempt))
        return found

    def close(self) -> None:
        self.leave()
        kill_all(self.left)


@contextlib.contextmanager
def node_rigs(reactor, path: Path):
    """Makes nodes over one state folder, one after another; in the end all are let go of, and what still runs is killed."""
    made: list[NodeRig] = []

    def make(**more) -> NodeRig:
        made.append(NodeRig(reactor, path, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.leave()
    if made:
        kill_all(made[-1].left)
    settle(reactor)


@pytest.fixture(name="rig")
def agent_rig(reactor, tmp_path):
    """A rig that leaves no engine; import it where a test asks for C{rig}."""
    found = Rig(reactor, tmp_path)
    yield found
    found.close()
    settle(reactor)
