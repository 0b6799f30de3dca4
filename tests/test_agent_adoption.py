"""Adoption: what another supervisor makes of the folder and the processes that the one before left."""

from __future__ import annotations

import json
import os
import signal

import pytest_twisted

from llmgw.agent.shardfolder import AttemptFolder
from llmgw.fleet.shard import NODE_RESTARTED, ShardState
from tests.agent_rig import FAKE, KEY, agent_rig, alive, order, printed_child, script, until  # noqa: F401

READY, FAILED, STOPPED = ShardState.READY, ShardState.FAILED, ShardState.STOPPED


@pytest_twisted.ensureDeferred
async def test_adopts_the_same_pid(rig):
    """An engine that was ready is ready at once for the next agent, with the same pid, and a stop works on it."""
    shard = await rig.ready("--fork-setsid")
    pid, child = shard.report().pid, await until(rig.reactor, lambda: printed_child(shard))
    shard.leave()
    adopted = rig.adopt()
    assert adopted.state is READY and adopted.report().pid == pid and adopted.report().key == KEY
    adopted.stop()
    await adopted.when_over()
    assert not alive(pid) and not alive(child)
    assert adopted.report().exit.code == 0


@pytest_twisted.ensureDeferred
async def test_adopts_while_loading(rig):
    """An engine that was loading when the agent ended becomes ready under the next one."""
    shard = rig.start(order([*FAKE, "--load-seconds", "1"]))
    await rig.reach(shard, ShardState.LOADING)
    shard.leave()
    adopted = rig.adopt()
    assert adopted.state in (ShardState.STARTING, ShardState.LOADING)
    await rig.reach(adopted, READY)


@pytest_twisted.ensureDeferred
async def test_exit_while_nobody_looked(rig):
    """The status of an engine that ended without an agent comes from the shim."""
    shard = await rig.ready("--exit-code", "7", "--exit-after", "0.8")
    shard.leave()
    await until(rig.reactor, lambda: shard.folder.exit())
    adopted = rig.adopt()
    await rig.reach(adopted, FAILED)
    assert adopted.report().exit.code == 7
    assert "while no agent was running" in adopted.reason


@pytest_twisted.ensureDeferred
async def test_what_a_dead_engine_left_is_ended_at_adoption(rig):
    """The engine died while no agent ran: the next one ends what it left behind."""
    shard = await rig.ready("--fork-setsid")
    child = await until(rig.reactor, lambda: printed_child(shard))
    shard.leave()
    os.kill(shard.tree.engine.pid, signal.SIGKILL)
    await until(rig.reactor, lambda: shard.folder.exit())
    adopted = rig.adopt()
    await rig.reach(adopted, FAILED)
    assert not alive(child)


def forge(folder: AttemptFolder, pid: int, **changes) -> None:
    run = json.loads((folder.path / "run.json").read_text())
    run["engine"] |= {"pid": pid, **changes}
    run["shim"] |= {"pid": pid, **changes}
    (folder.path / "run.json").write_text(json.dumps(run))


@pytest_twisted.ensureDeferred
async def test_a_reused_pid_is_neither_adopted_nor_signalled(rig):
    """The recorded pid now belongs to another start time: it has ended for us, and the stranger lives on."""
    shard = await rig.ready()
    shard.leave()
    stranger = rig.start(order(script("import time;time.sleep(600)"), shard="stranger/1/0"))
    run = await until(rig.reactor, lambda: stranger.folder.run())
    shard.folder.path.joinpath("state.json").unlink()
    os.kill(shard.tree.engine.pid, signal.SIGKILL)
    await until(rig.reactor, lambda: shard.folder.exit())
    forge(shard.folder, run.engine.pid, start=run.engine.start - 1)
    adopted = rig.adopt()
    await rig.reach(adopted, FAILED)
    adopted.stop()
    await rig.reach(adopted, STOPPED)
    assert alive(run.engine.pid) and stranger.state is not FAILED


@pytest_twisted.ensureDeferred
async def test_another_boot_is_another_process(rig):
    """After a reboot a pid with the same start time is a stranger, too."""
    shard = await rig.ready()
    shard.leave()
    run = json.loads((shard.folder.path / "run.json").read_text())
    (shard.folder.path / "run.json").write_text(json.dumps(run | {"boot": "another"}))
    (shard.folder.path / "exit.json").write_text(json.dumps({"code": -signal.SIGKILL, "at": 1.0, "error": ""}))
    os.rename(shard.folder.path, shard.folder.path.with_name("2"))  # Its marks no longer name it, as after a reboot.
    adopted = rig.adopt(attempt=2)
    await rig.reach(adopted, FAILED)
    assert adopted.reason == "the node was restarted: killed by signal 9" and NODE_RESTARTED in adopted.conditions
    assert adopted.diagnosis is None, "nobody is told of memory for what the shutdown did"
    assert alive(run["engine"]["pid"])


@pytest_twisted.ensureDeferred
async def test_a_drain_survives_the_agent(rig):
    """What was draining is draining for the next agent."""
    shard = await rig.ready()
    shard.drain()
    assert shard.state is ShardState.DRAINING
    shard.leave()
    assert rig.adopt().state is ShardState.DRAINING
