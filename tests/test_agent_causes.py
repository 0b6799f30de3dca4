"""What the agent adds to an adapter's view of an end and of a start: the kernel's killings, and ranks without HTTP."""

from __future__ import annotations

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.agent import processes
from llmgw.fleet.shard import ShardState
from tests.agent_rig import Rig, order, script, settle


@pytest.fixture
def rig(reactor, tmp_path):
    found = Rig(reactor, tmp_path)
    yield found
    found.close()
    settle(reactor)


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
