"""A node's orders, answers and reports, without a link, over real engines."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.task import deferLater
from zope.interface.verify import verifyObject

from llmgw.agent.inode import INode
from llmgw.agent.processes import identify
from llmgw.agent.statefolder import StateFolder, StateFolderError
from llmgw.fleet.shard import ShardState, Wanted
from llmgw.wire.messages import FetchLog, Inspect
from tests.agent_rig import FAKE, KEY, NodeRig, alive, node_rigs, order, script, until

READY, FAILED = ShardState.READY, ShardState.FAILED


SLEEP = script("import time\ntime.sleep(600)")


@pytest.fixture
def rigs(reactor, tmp_path):
    with node_rigs(reactor, tmp_path) as make:
        yield make


def test_provides_the_links_interface(rigs):
    """A node is what the uplink asks for."""
    assert verifyObject(INode, rigs().node)


@pytest_twisted.ensureDeferred
async def test_a_node_that_runs_nothing_reports_an_empty_list(rigs):
    """Nothing is news, too."""
    rig = rigs()
    await rig.start()
    assert rig.node.register("fleet", "127.0.0.1").shards == ()
    assert rig.node.report().shards == ()


@pytest_twisted.ensureDeferred
async def test_run_is_answered_when_ready_and_repeated_orders_change_nothing(rigs):
    """The same list any number of times: one engine, the same answer."""
    rig = rigs()
    await rig.start()
    wanted = order(FAKE)
    rig.order(wanted)
    assert rig.reports()["m/1/0"].state is ShardState.STARTING  # Listed at once, or the leader would think it gone.
    rig.order(wanted)
    done = await rig.done(wanted.operation)
    assert done.ok
    pid = rig.reports()["m/1/0"].pid
    rig.order(wanted)
    rig.order(wanted)
    assert [m for m in rig.said if m == done] == [done] * 3
    assert rig.reports()["m/1/0"].pid == pid
    report = rig.reports()["m/1/0"]
    assert report.order == wanted and report.key == KEY and report.url.endswith(str(wanted.allocation.ports[0]))


@pytest_twisted.ensureDeferred
async def test_absence_is_no_order(rigs):
    """A running shard that a desired state does not list is left running and reported."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(FAKE))
    await rig.done(wanted.operation)
    rig.order()
    assert rig.reports()["m/1/0"].state is READY


@pytest_twisted.ensureDeferred
async def test_stop_takes_it_off_the_list_when_the_leader_does(rigs):
    """A stopped shard is reported as stopped until a desired state no longer names it."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(FAKE))
    await rig.done(wanted.operation)
    stop = evolve(wanted, wanted=Wanted.STOP, operation="stop")
    rig.order(stop)
    assert (await rig.done("stop")).ok
    assert rig.reports()["m/1/0"].state is ShardState.STOPPED
    assert not rig.left()
    rig.order()
    assert rig.reports() == {}
    rig.order(evolve(stop, operation="again"))
    assert (await rig.done("again")).ok


@pytest_twisted.ensureDeferred
async def test_a_stop_that_met_nothing_is_followed_when_something_is_there(rigs):
    """A store that was restored from before it has the shard run after all, and later stopped under the same name."""
    rig = rigs()
    await rig.start()
    wanted = order(FAKE)
    rig.order(stop := evolve(wanted, wanted=Wanted.STOP, operation="stop"))
    assert (await rig.done("stop")).ok
    rig.order(wanted)
    await rig.done(wanted.operation)
    rig.order(stop)
    await until(rig.reactor, lambda: rig.reports()["m/1/0"].state is ShardState.STOPPED, "stopped")
    assert not rig.left()


@pytest_twisted.ensureDeferred
async def test_a_stop_with_patience_signals_nobody_before_it_is_ordered_without(rigs):
    """A rank is left alone while its rank 0 ends, which is told the node by a second order."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(FAKE))
    await rig.done(wanted.operation)
    pid = rig.reports()["m/1/0"].pid
    rig.order(stop := evolve(wanted, wanted=Wanted.STOP, operation="stop", patience=600.0))
    assert rig.reports()["m/1/0"].state is ShardState.STOPPING
    await deferLater(rig.reactor, 0.3)
    assert alive(pid)
    rig.order(evolve(stop, patience=0.0))
    assert (await rig.done("stop")).ok
    assert not alive(pid)


@pytest_twisted.ensureDeferred
async def test_drain_keeps_running(rigs):
    """A drain changes what is shown, not what runs."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(FAKE))
    await rig.done(wanted.operation)
    rig.order(evolve(wanted, wanted=Wanted.DRAIN, operation="drain"))
    assert (await rig.done("drain")).ok
    report = rig.reports()["m/1/0"]
    assert report.state is ShardState.DRAINING and alive(report.pid)


@pytest_twisted.ensureDeferred
async def test_an_ended_attempt_is_never_restarted(rigs):
    """Only the leader raises the attempt: the same one again is answered with its failure, a higher one is started."""
    rig = rigs()
    await rig.start()
    wanted = order(script("print('first cause'); raise SystemExit(4)"))
    rig.order(wanted)
    done = await rig.done(wanted.operation)
    assert (done.ok, done.error) == (False, "exited")
    rig.order(evolve(wanted, operation="other"))
    assert (await rig.done("other")).error == "exited"
    assert rig.reports()["m/1/0"].exit.code == 4
    rig.order(order(FAKE, attempt=2))
    assert (await rig.done("run:m/1/0:2")).ok
    assert rig.reports()["m/1/0"].attempt == 2
    rig.order(evolve(wanted, operation="late"))
    assert (await rig.done("late")).error == "stale_attempt"
    log = rig.node._fetch_log(FetchLog("log", 1, "cp1", "m/1/0", 1, 0, 1000))
    assert log.result["text"] == "first cause\n"


@pytest_twisted.ensureDeferred
async def test_a_higher_attempt_ends_the_one_before(rigs):
    """Two attempts of one shard never run at once."""
    rig = rigs()
    await rig.start()
    rig.order(first := order(FAKE, devices=("GPU-a",)))
    await rig.done(first.operation)
    pid = rig.reports()["m/1/0"].pid
    rig.order(second := order(FAKE, attempt=2, devices=("GPU-a",)))
    assert rig.reports()["m/1/0"].attempt == 2
    assert (await rig.done(second.operation)).ok
    assert not alive(pid)


@pytest_twisted.ensureDeferred
async def test_devices_are_never_given_twice(rigs):
    """A device that another shard holds is refused, whatever the leader believes, and the refusal leaves no trace."""
    rig = rigs()
    await rig.start()
    rig.order(first := order(SLEEP, devices=("GPU-a",)))
    rig.order(first, second := order(FAKE, shard="x/1/0", devices=("GPU-a", "GPU-b")))
    done = await rig.done(second.operation)
    assert (done.error, done.result["text"]) == ("device_in_use", "device GPU-a is held by m/1/0")
    assert "x/1/0" not in rig.reports()
    assert not (rig.path / "shards" / "x%2F1%2F0" / "1").exists()
    rig.order(first, second)
    assert rig.said[-1] == done or done in rig.said[-3:]
    shared = [order(SLEEP, shard=f"s/{n}/0", devices=("GPU-b",), share=True) for n in (1, 2)]
    rig.order(first, *shared)
    await until(rig.reactor, lambda: rig.reports()["s/1/0"].pid)
    assert rig.reports()["s/2/0"].reason == "waits for the start of s/1/0 on the same device"


@pytest_twisted.ensureDeferred
async def test_refusals(rigs):
    """What cannot be started is answered with a word and a sentence that names what is missing."""
    rig = rigs()
    await rig.start()
    held = order(SLEEP, shard="held/1/0")
    rig.order(held)
    listener = subprocess.Popen(
        [sys.executable, "-c", "import socket\ns=socket.socket();s.bind(('127.0.0.1',0));s.listen();print(s.getsockname()[1],"
         "flush=True)\nimport time;time.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        port = int(listener.stdout.readline())
        cases = {
            "device_missing": (order(FAKE, shard="a/1/0", devices=("GPU-z",)), "n1 has no device GPU-z"),
            "port_in_use": (order(FAKE, shard="b/1/0", ports=(port,)), f"port {port} is in use by pid {listener.pid} (python"),
            "invalid": (order((), shard="c/1/0"), "a command engine needs `argv`"),
        }
        missing = order(FAKE, shard="d/1/0")
        cases["no_installation"] = (
            evolve(missing, profile=evolve(missing.profile, engine="vllm")),
            "engine vllm is not installed on n1 (there: command)",
        )
        rig.order(held, *(wanted for wanted, _ in cases.values()))
        for code, (wanted, text) in cases.items():
            done = await rig.done(wanted.operation)
            assert done.error == code and text in done.result["text"]
        same = order(FAKE, shard="e/1/0", ports=held.allocation.ports)
        rig.order(held, same)
        assert (await rig.done(same.operation)).result["text"] == f"port {held.allocation.ports[0]} is held by held/1/0"
    finally:
        listener.kill()
        listener.wait()
        listener.stdout.close()


@pytest_twisted.ensureDeferred
async def test_one_bad_order_keeps_no_other_from_being_followed(rigs, expect_failures):
    """An order that cannot even be read is answered, and the next one is followed."""
    expect_failures(AttributeError)
    rig = rigs()
    await rig.start()
    bad, good = evolve(order(FAKE, shard="bad/1/0"), profile=None), order(FAKE)
    rig.order(bad, good)
    assert (await rig.done(good.operation)).ok
    assert (await rig.done(bad.operation)).error == "internal"


@pytest_twisted.ensureDeferred
async def test_events_of_a_time_without_link_are_told_later(rigs):
    """What happened while nobody listened is said when somebody does, the output's end with a failure."""
    rig = rigs()
    await rig.start()
    rig.node.disconnected("test")
    rig.order(wanted := order(script("print('why');raise SystemExit(1)")))
    await until(rig.reactor, lambda: rig.reports()["m/1/0"].state is FAILED)
    assert rig.events() == []
    rig.node.connected(rig.said.append)
    assert rig.events()[-1] == (wanted.shard, "starting", "failed")
    assert rig.said[-1].tail == ("why",)


@pytest_twisted.ensureDeferred
async def test_logs_by_offset(rigs):
    """Output is read by offset, negative from the end, a character cut in two left to the next piece; ids are no paths."""
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(script("print('abcdefgh\u00e9')\nraise SystemExit(1)")))
    await rig.done(wanted.operation)

    def ask(shard="m/1/0", attempt=0, offset=0, limit=100):
        return rig.node._fetch_log(FetchLog("log", 1, "cp1", shard, attempt, offset, limit))

    assert ask().result == {"attempt": 1, "offset": 0, "next": 11, "size": 11, "text": "abcdefgh\u00e9\n"}
    assert ask(limit=9).result == {"attempt": 1, "offset": 0, "next": 8, "size": 11, "text": "abcdefgh"}
    assert ask(offset=-3).result["text"] == "\u00e9\n"
    assert ask(offset=50).result["text"] == ""
    assert ask(attempt=7).error == "not_found"
    for path in ("../../etc", "m/1/0/../..", "/etc/passwd", ".."):
        assert ask(path).error == "not_found"


@pytest_twisted.ensureDeferred
async def test_inspect_tells_what_was_looked_at(rigs):
    """The answer to an inspection has the files under C{files}."""
    rig = rigs()
    await rig.start()
    done = await rig.node.inspect(Inspect("op", 1, "cp1", "smol.gguf", "command"))
    assert done.ok and done.result["files"]["looked"] in (["/nowhere"], ("/nowhere",))


def test_a_second_agent_on_one_folder_is_refused(tmp_path):
    """It is told who has the folder."""
    first, second = StateFolder(tmp_path / "s", lambda: "a"), StateFolder(tmp_path / "s", lambda: "b")
    first.open()
    try:
        with pytest.raises(StateFolderError, match=f"another llmgw-agent \\(pid {os.getpid()}\\) uses {tmp_path}/s"):
            second.open()
    finally:
        first.close()
    second.open()
    assert (second.instance, second.starts) == ("a", 2)
    assert os.stat(tmp_path / "s").st_mode & 0o777 == 0o700
    second.close()


def test_a_lock_let_go_of_is_free_whatever_was_just_forked(tmp_path):
    """A child has the lock's descriptor until it executes its program; a copy of it stands in for one that is slow to."""
    first, second = StateFolder(tmp_path / "s", lambda: "a"), StateFolder(tmp_path / "s", lambda: "b")
    first.open()
    child = os.dup(first._lock)
    try:
        first.close()
        second.open()
        assert second.starts == 2
    finally:
        second.close()
        os.close(child)


@pytest_twisted.ensureDeferred
async def test_two_agents_of_one_machine_do_not_touch_each_other(rigs, reactor, tmp_path):
    """The same shard and attempt of an agent with another state folder is another agent's."""
    rig = rigs()
    await rig.start()
    rig.order(mine := order(FAKE))
    await rig.done(mine.operation)
    other = NodeRig(reactor, tmp_path / "other")
    try:
        await other.start()
        other.order(theirs := order(FAKE))
        assert (await other.done(theirs.operation)).ok
        pid = other.reports()["m/1/0"].pid
        rig.order(evolve(mine, wanted=Wanted.STOP, operation="stop"))
        await rig.done("stop")
        assert alive(pid)
        other.order(evolve(theirs, wanted=Wanted.STOP, operation="stop"))
        await other.done("stop")
    finally:
        other.leave()


@pytest_twisted.ensureDeferred
async def test_full_disk(rigs, monkeypatch):
    """Without room for an engine's output a start is refused in a sentence; reports and answers go on."""
    rig = rigs()
    await rig.start()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = order(FAKE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # Every write to a file fails.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        rig.order(wanted)
        done = await rig.done(wanted.operation)
        assert done.error == "start_failed" and "File too large" in done.result["text"]
        assert rig.node.report().shards == ()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not rig.left()
    rig.order(again := evolve(wanted, operation="again"))
    assert (await rig.done(again.operation)).ok


@pytest_twisted.ensureDeferred
async def test_little_room_is_refused_with_figures(rigs, monkeypatch, tmp_path):
    """The free space is looked at before anything is written."""
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: used._replace(total=2**40, free=2**20))
    rig = rigs()
    await rig.start()
    rig.order(wanted := order(FAKE))
    done = await rig.done(wanted.operation)
    assert done.error == "disk_full"
    assert f"1.0 MiB are free under {rig.path}, 32.0 MiB are needed" in done.result["text"]


def test_identity_of_a_process_that_is_gone():
    """Nobody."""
    process = subprocess.Popen(["true"])
    process.wait()
    assert identify(process.pid) is None
