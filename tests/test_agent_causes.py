"""What the agent adds to an adapter's view of an end and of a start: the kernel's killings, ranks without HTTP, engines that
neither work nor end, and what they leave behind. Numbers are those of the catalogue of failures, see test_engines_failures.py.
"""

from __future__ import annotations

import os
import signal

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from llmgw.agent import ending, processes
from llmgw.agent.output import read_output
from llmgw.agent.ports import has_address
from llmgw.agent.processes import ProcessId, hanging, process_table
from llmgw.engines.command import Command
from llmgw.engines.vllm import vllm
from llmgw.fleet.shard import ShardState
from tests.agent_rig import agent_rig, order, script, until  # noqa: F401
from tests.test_engines_failures import SLOW

DIES = script("import time,sys,os\nprint('fine so far',flush=True)\nos.kill(os.getpid(),9) if sys.argv[1:] else sys.exit(1)")


@pytest.mark.parametrize("words", [(), ("killed",)])
@pytest_twisted.ensureDeferred
async def test_f35_what_the_kernel_killed_is_told_by_the_cgroups_own_count(rig, tmp_path, monkeypatch, words):
    """Whether the front process was killed, or ended because another of its processes was."""
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup" / "memory.events").write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr("llmgw.agent.checks.own_cgroup", lambda name: str(tmp_path / "cgroup"))
    shard = rig.start(order([*DIES, *words]))
    await rig.reach(shard, ShardState.FAILED)
    assert shard.report().exit.oom_kills == 2
    assert "the kernel killed 2 of its processes" in shard.report().diagnosis.text


@pytest_twisted.ensureDeferred
async def test_a_kill_that_its_cgroup_did_not_count_is_not_the_kernels(rig, tmp_path, monkeypatch):
    """Somebody else on the machine may have run out of memory meanwhile."""
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup" / "memory.events").write_text("oom_kill 0\n")
    monkeypatch.setattr("llmgw.agent.checks.own_cgroup", lambda name: str(tmp_path / "cgroup"))
    counts = iter(range(100))
    real = processes.oom_kills
    monkeypatch.setattr("llmgw.agent.supervisor.oom_kills", lambda cgroup=None: real(cgroup) if cgroup else next(counts))
    shard = rig.start(order([*DIES, "killed"]))
    await rig.reach(shard, ShardState.FAILED)
    assert shard.report().exit.oom_kills == 0
    assert "and not by llmgw" in shard.report().diagnosis.text


@pytest_twisted.ensureDeferred
async def test_a_follower_that_has_joined_is_ready_whatever_it_says_next(rig):
    """Ranks of real engines say that they join, then load and say so, and never that they are done."""
    said = "import time\nprint('llmgw: ready\\nllmgw: loading 10 %',flush=True)\ntime.sleep(600)"
    wanted = order(script(said))
    shard = rig.start(evolve(wanted, allocation=evolve(wanted.allocation, rank=1, nodes=2)))
    await rig.reach(shard, ShardState.READY)


FORKS = """
import os, time
for _ in range(5):
    if not os.fork():
        os.fork()
        os._exit(0)
print("made", flush=True)
for _ in range(5):
    os.wait()
time.sleep(600)
"""


@pytest_twisted.ensureDeferred
async def test_f3_what_dies_below_an_engine_leaves_no_zombie(rig):
    """Also what has lost its parent: its forefather, the shim, reaps it."""
    shard = rig.start(order(script(FORKS)))
    await until(rig.reactor, lambda: shard.tree.engine and read_output(shard.folder.path, 0, 100).data)
    ours = {shard.tree.shim.pid, shard.tree.engine.pid}
    await until(rig.reactor, lambda: not any(one.parent in ours and not one.alive for one in process_table().values()), "reaped")


class Deathless:
    """What looks like a tree with a process that SIGKILL does not end, for as long as C{hangs}; nobody is signalled for it."""

    shim = None
    hangs = True

    def members(self, deep=True):
        return frozenset({ProcessId("another boot", os.getpid(), 0)} if self.hangs else ())


@pytest_twisted.ensureDeferred
async def test_f4_what_hangs_in_the_kernel_is_named(reactor, monkeypatch):
    """It is told while it hangs and waited for, since its devices are not free; where it hangs says whose fault it is."""
    monkeypatch.setattr(ending, "STUCK_AFTER", 0.1)
    told, tree = [], Deathless()
    waiting = Deferred.fromCoroutine(ending.Ending(reactor, tree, 0.0, told.append).run())
    await until(reactor, lambda: [os.getpid()] in told, "told")
    assert not waiting.called
    tree.hangs = False
    await waiting
    assert told[-1] == []
    assert hanging(os.getpid()).startswith(f"pid {os.getpid()}")


class Torch(Command):
    """A command whose output is read as vLLM's."""

    phase = vllm.phase
    diagnose = vllm.diagnose


@pytest_twisted.ensureDeferred
async def test_f16_weights_that_do_not_come_end_a_start(rig):
    """Neither output nor memory moves: it is ended at its deadline, and what to look at is said."""
    rig.checks.adapters = {"command": Torch()}
    shard = rig.start(order(script(f"print({chr(10).join(SLOW)!r},flush=True)\nimport time\ntime.sleep(600)"), timeout=1.0))
    await rig.reach(shard, ShardState.FAILED)
    told = shard.report().diagnosis
    assert (shard.code, told.cause, "file system of the weights" in told.advice) == ("start_timeout", "clean_and_retry", True)
    assert told.text == shard.reason and "it is at: weights" in told.text


SICK = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.path.exists("sick") else 200)
        self.end_headers()
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


@pytest_twisted.ensureDeferred
async def test_f39_an_engine_that_stays_unhealthy_is_ended(rig, monkeypatch):
    """It answers 503 for ever and its process lives: after a while of that and of nothing else it is ended, with what to do."""
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.1)
    monkeypatch.setattr("llmgw.agent.progress.HUNG_AFTER", 0.5)
    shard = rig.start(order(script(SICK)))
    await rig.reach(shard, ShardState.READY)
    (shard.folder.path / "work" / "sick").touch()
    await rig.reach(shard, ShardState.FAILED)
    told = shard.report().diagnosis
    assert (shard.code, told.cause, "Xid" in told.advice) == ("hung", "clean_and_retry", True)
    assert "503" in told.text


@pytest_twisted.ensureDeferred
async def test_c4_an_engine_whose_address_the_node_has_lost_is_unhealthy_and_not_ended(rig, monkeypatch):
    """Nobody reaches it and nobody may route to it; when the address comes back, so does it."""
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.1)
    monkeypatch.setattr("llmgw.agent.progress.HUNG_AFTER", 0.3)
    monkeypatch.setattr("llmgw.agent.observer.has_address", lambda host: host != "127.0.0.1")
    monkeypatch.setattr(rig.around.probe, "_deadline", 0.2)
    shard = await rig.ready()
    os.kill(shard.report().pid, signal.SIGSTOP)
    gone = {"address_gone", "unhealthy: 127.0.0.1 is no address of this node any more"}
    await until(rig.reactor, lambda: set(shard.report().conditions) == gone, lambda: shard.report().conditions)
    await deferLater(rig.reactor, 1.0)
    assert shard.state is ShardState.READY and not shard.report().healthy
    os.kill(shard.report().pid, signal.SIGCONT)
    await until(rig.reactor, lambda: shard.report().healthy and not shard.report().conditions)


def test_c4_which_addresses_are_this_machines():
    """Names are looked up elsewhere, so they count as such; 192.0.2.0/24 is nobody's."""
    found = [has_address(host) for host in ("127.0.0.1", "::1", "gpu7.example", "192.0.2.1", "2001:db8::1")]
    assert found == [True, True, True, False, False]
