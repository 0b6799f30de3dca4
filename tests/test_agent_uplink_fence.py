"""Which leadership a node obeys: on disk before anything is done; where it cannot be stored, nothing is done, and why is said."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess

import pytest

from llmgw.agent.fence import FenceError
from llmgw.fleet.shard import Wanted
from llmgw.wire.messages import Bye, Desired, Done, FetchLog, Inspect, Register, Report
from tests.fleetlink import Node, a_world, order
from tests.uplink_rig import ScriptedServer, link_to, rounds


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


@pytest.fixture
def fence(tmp_path):
    (tmp_path / "n1-state").mkdir()
    return tmp_path / "n1-state" / "fence.json"


class Witness(Node):
    """A node that notes what the fence's file held whenever something was asked of it."""

    def __init__(self, fence):
        super().__init__("n1")
        self.fence = fence
        self.seen = []

    def _note(self, what):
        held = json.loads(self.fence.read_text())
        self.seen.append((what, held["epoch"], held["leader"]))

    def accepted(self, epoch, leader, revision):
        self._note("accepted")
        super().accepted(epoch, leader, revision)

    def desired(self, message):
        self._note("desired")
        super().desired(message)

    def inspect(self, message):
        self._note("inspect")
        return super().inspect(message)

    def fetch_log(self, message):
        self._note("fetch_log")
        return super().fetch_log(message)


def desired(epoch, leader="cp1", revision=1, *orders):
    return Desired(epoch, leader, revision, 1, 1, orders or (order(),))


def held(fence):
    value = json.loads(fence.read_text())
    return value["epoch"], value["leader"]


def test_i_l1_a_leadership_is_on_disk_before_anything_is_done_for_it(world, fence):
    """Acceptance, orders and questions alike: whichever brings the higher epoch, the file has it first."""
    server = ScriptedServer(world)
    node = Witness(fence)
    link_to(world, server, world.agent(node=node))
    server.link.send(desired(8), Inspect("i", 9, "cp1", "m.gguf", "vllm"), FetchLog("f", 10, "cp1", "m/1/0", 0, 0, 9))
    world.net.run(0.1)
    assert node.seen == [("accepted", 7, "cp1"), ("desired", 8, "cp1"), ("inspect", 9, "cp1"), ("fetch_log", 10, "cp1")]
    assert [done.ok for done in server.link.of(Done)] == [True, True]


STALE = {
    "stale_epoch": (6, "cp1", "cp1 commands at epoch 6, this node obeys cp1 at epoch 7"),
    "epoch_conflict": (7, "cp2", "cp2 commands at epoch 7, this node obeys cp1 at epoch 7"),
}


@pytest.mark.parametrize(("error", "epoch", "leader", "text"), [(name, *case) for name, case in STALE.items()], ids=STALE.keys())
def test_i_l1_an_order_of_an_old_leadership_is_refused_and_changes_nothing(world, fence, error, epoch, leader, text):
    """Each of its orders and each question is answered with what the node obeys; node, file and what was applied stay."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    server.link.send(desired(7, "cp1", 5))
    world.net.run(0.1)
    before, file = len(agent.node.events), fence.read_bytes()
    orders = (order("m/1/0", "op1", Wanted.STOP), order("m/2/0", "op2", Wanted.STOP))
    server.link.send(desired(epoch, leader, 9, *orders), Inspect("op3", epoch, leader, "m", "vllm"))
    server.link.send(FetchLog("op4", epoch, leader, "m/1/0", 0, 0, 9))
    world.net.run(0.1)
    result = {"epoch": 7, "leader": "cp1", "text": text}
    assert server.link.of(Done) == [Done(f"op{n}", False, error, result) for n in range(1, 5)]
    assert len(agent.node.events) == before
    assert fence.read_bytes() == file
    server.beat()
    world.net.run(0.1)
    assert [(report.epoch, report.revision) for report in server.link.of(Report)][-1] == (7, 5)
    assert len(world.log.having(f"error: n1: refused an order: {error}: {text}")) == 4
    assert server.link.over is False


def test_f31_i_c1_an_older_revision_of_the_same_leadership_is_refused(world):
    """A message that was overtaken does not undo what came after it; the same one again is welcome."""
    server = ScriptedServer(world)
    agent = world.agent()
    link_to(world, server, agent)
    server.link.send(desired(7, "cp1", 5), desired(7, "cp1", 5), desired(7, "cp1", 4))
    world.net.run(0.1)
    assert [message.revision for (message,) in agent.node.of("desired")] == [5, 5]
    (done,) = server.link.of(Done)
    assert (done.error, done.result["text"]) == ("stale_revision", "revision 4 came after 5")
    server.link.send(desired(8, "cp1", 1))
    world.net.run(0.1)
    assert [message.revision for (message,) in agent.node.of("desired")] == [5, 5, 1]


def test_i_l1_an_old_leader_that_takes_the_agent_is_left_as_an_error_and_the_next_address_tried(world, fence):
    """It is told why; so is the operator, in the log of the link and of the round, and not as a clean close."""
    old, new = ScriptedServer(world, epoch=6), ScriptedServer(world, "10.0.0.2", "cp2", epoch=7)
    fence.write_text(json.dumps({"epoch": 7, "leader": "cp2"}))
    agent = world.agent(servers=("10.0.0.1", "10.0.0.2"))
    link_to(world, new, agent)
    why = "stale_epoch: cp1 commands at epoch 6, this node obeys cp2 at epoch 7"
    assert old.link.of(Bye) == [Bye(why)]
    assert world.log.having("n1: the link to") == [f"error: n1: the link to 10.0.0.1:7443 ended after 0.0 s: we left: {why}"]
    assert agent.node.of("accepted") == [(7, "cp2", 11)]
    assert agent.node.of("connected") == [()]
    assert held(fence) == (7, "cp2")


def test_i_l1_the_fence_outlives_the_agent(world, fence):
    """A new process registers with what the old one obeyed, and refuses the same."""
    server = ScriptedServer(world, epoch=9)
    agent = world.agent()
    link_to(world, server, agent)
    world.stop(agent)
    server.epoch = 8
    world.agent()
    world.net.until(lambda: rounds(world))
    (register,) = server.link.of(Register)
    assert (register.epoch, register.leader) == (9, "cp1")
    assert "we left: stale_epoch: cp1 commands at epoch 8, this node obeys cp1 at epoch 9" in rounds(world)[0]


def unable(world, server, agent, reason):
    """What every fence that cannot be written comes to: nothing is done, agent, log and server have the sentence."""
    world.net.until(lambda: rounds(world))
    file = agent.settings.state / "fence.json"
    why = f"fence: cannot write {file}: {reason}; until it can be, no new leader is obeyed"
    assert rounds(world)[0] == f"10.0.0.1:7443: we left: {why}. Next try in 0.5 s."
    assert world.log.having("error: n1: the link to 10.0.0.1:7443 ended after 0.0 s: we left: fence: ")
    assert server.links[0].of(Bye) == [Bye(why)]
    assert [event[0] for event in agent.node.events] == ["register"] * len(server.links)
    assert sorted(path.name for path in agent.settings.state.iterdir()) in (["fence.json"], ["filler"], [])


@contextlib.contextmanager
def no_file_may_grow():
    """The kernel refuses every byte to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def tiny_disk(path):
    """A file system of four pages at C{path}; its end is unmounted with it."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"only root may mount: {made.stderr.strip()}")
    try:
        yield path / "filler"
    finally:
        subprocess.run(["umount", path], check=True)


def fill(filler):
    """Take what is left, to the last byte."""
    with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
        while file.write(b"x" * 512):
            pass


def test_a_fence_that_the_kernel_will_not_write_commands_nothing_and_is_told(world, fence):
    """Nothing is done for a leader that could not be noted; when writing works again, the next try is taken."""
    server = ScriptedServer(world)
    agent = world.agent(start=False)
    world.stoppable.append(agent)
    with no_file_may_grow():
        agent.startService()
        unable(world, server, agent, os.strerror(27))
    link_to(world, server, agent)
    assert held(fence) == (7, "cp1")


def test_a_full_disk_without_a_fence_commands_nothing_and_says_that_it_is_full(world, fence):
    """A new node on a full disk: the reason is the disk, not a file that is not there."""
    server = ScriptedServer(world)
    with tiny_disk(fence.parent) as filler:
        fill(filler)
        agent = world.agent()
        unable(world, server, agent, "No space left on device")
        filler.unlink()
        link_to(world, server, agent)
        assert held(fence) == (7, "cp1")
        world.stop(agent)


def test_a_full_disk_with_a_fence_follows_a_new_leader_all_the_same(world, fence):
    """The file is as long as it ever gets, so it is written in place: a full disk must not strand a node."""
    server = ScriptedServer(world)
    with tiny_disk(fence.parent) as filler:
        agent = world.agent()
        link_to(world, server, agent)
        fill(filler)
        server.link.send(desired(8, "cp2"))
        world.net.run(0.1)
        assert len(agent.node.of("desired")) == 1
        assert held(fence) == (8, "cp2")
        assert sorted(path.name for path in fence.parent.iterdir()) == ["fence.json", "filler"]
        world.stop(agent)


def test_a_disk_that_became_read_only_refuses_a_new_leader_and_goes_on_with_the_old(world, fence):
    """Orders of a leader that cannot be noted are refused one by one with the reason; the known one's are followed."""
    server = ScriptedServer(world)
    with tiny_disk(fence.parent):
        agent = world.agent()
        link_to(world, server, agent)
        subprocess.run(["mount", "-o", "remount,ro", fence.parent], check=True)
        server.link.send(desired(8, "cp2", 1), desired(7, "cp1", 2, order("m/2/0", "op2")))
        world.net.run(0.1)
        (done,) = server.link.of(Done)
        why = f"cannot write {fence}: Read-only file system; until it can be, no new leader is obeyed"
        assert done == Done("op1", False, "fence", {"epoch": 7, "leader": "cp1", "text": why})
        assert [(message.epoch, message.leader) for (message,) in agent.node.of("desired")] == [(7, "cp1")]
        assert held(fence) == (7, "cp1")
        assert world.log.having(f"error: n1: refused an order: fence: {why}")
        world.stop(agent)


GARBAGE = {
    "nothing": b"",
    "no JSON": b"epoch: 7",
    "a list": b"[]",
    "not UTF-8": b"\xff\xfe\x00",
    "deep": b"[" * 200_000,
    "long number": b'{"epoch": ' + b"9" * 5000 + b', "leader": "cp1"}',
    "too high": b'{"epoch": 9223372036854775808, "leader": "cp1"}',
    "negative": b'{"epoch": -1, "leader": "cp1"}',
    "true": b'{"epoch": true, "leader": "cp1"}',
    "no leader": b'{"epoch": 7}',
    "half": b'{"epoch": 7, "lea',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_garbage_fence_starts_no_agent_and_says_what_to_do(world, fence, content):
    """To forget it would let an old leader command: one sentence with the file's name and the way out; nothing is dialed."""
    fence.write_bytes(content)
    agent = world.agent(start=False)
    with pytest.raises(FenceError) as caught:
        agent.startService()
    assert str(fence) in str(caught.value)
    assert "remove it while only one llmgw-server runs, then start again" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    world.net.run(10)
    assert world.net.dialed == []
    assert fence.read_bytes() == content


def test_a_fence_that_is_a_folder_starts_no_agent(world, fence):
    """Nor does one that cannot be read at all."""
    fence.mkdir()
    with pytest.raises(FenceError, match="Is a directory"):
        world.agent(start=False).startService()


def test_what_a_crash_left_beside_the_fence_is_no_hindrance(world, fence):
    """A file half written before the rename is not read, and is replaced."""
    left = fence.with_name("fence.json.new")
    left.touch(0o600)
    left.write_text('{"epoch": 99, "lea')
    server = ScriptedServer(world)
    link_to(world, server, world.agent())
    assert held(fence) == (7, "cp1")
    assert [path.name for path in fence.parent.iterdir()] == ["fence.json"]
    assert fence.stat().st_mode & 0o777 == 0o600
