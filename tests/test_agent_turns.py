"""Starts on one device follow each other; and an engine that answers all but inference is found out."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from urllib.parse import urlsplit

import pytest
import pytest_twisted
from twisted.internet.task import deferLater

from llmgw.agent.progress import Stillness
from llmgw.agent.turns import Turns
from llmgw.daemon import AwakeClock
from llmgw.fleet.shard import EngineLoad, ShardState, Wanted
from tests.agent_rig import FAKE, agent_rig, node_rigs, order, until  # noqa: F401


def test_a_start_waits_for_those_on_its_devices_only():
    """First come, first served on each device; who is not in the way goes at once, and nobody overtakes on a device."""
    turns = Turns()
    went = []
    for who, devices in (("a", "x"), ("b", "xy"), ("c", "y"), ("d", "z"), ("e", "")):
        turns.take(who, devices).addCallback(lambda _, who=who: went.append(who))
    assert went == ["a", "d", "e"]
    assert turns.before("b") == ["a"] and turns.before("c") == ["b"] and turns.before("d") == []
    turns.end("d")
    turns.end("a")
    assert went == ["a", "d", "e", "b"]
    turns.end("nobody")
    turns.end("b")
    assert went == ["a", "d", "e", "b", "c"]


def test_who_leaves_the_line_holds_up_nobody():
    """A start that is stopped while it waits is not waited for; one that an agent found under way is."""
    turns = Turns()
    went = []
    turns.began("old", ["x"])
    first = turns.take("a", ["x", "y"])
    first.addErrback(lambda failure: went.append("cancelled"))
    turns.take("b", ["y"]).addCallback(lambda _: went.append("b"))
    assert went == []
    first.cancel()
    assert went == ["b", "cancelled"]


@pytest.fixture
def rigs(reactor, tmp_path):
    with node_rigs(reactor, tmp_path) as make:
        yield make


@pytest_twisted.ensureDeferred
async def test_two_engines_on_one_device_start_one_after_the_other(rigs):
    """The second says what it waits for; it is started when the first serves. One on another device does not wait."""
    node = rigs()
    await node.start()
    slow = (*FAKE, "--load-seconds", "0.5")
    node.order(
        order(slow, "m/1/0", devices=("GPU-a",), share=True, served=("m",)),
        order(slow, "m/2/0", devices=("GPU-a",), share=True, served=("m",)),
        order(slow, "m/3/0", devices=("GPU-b",), share=True, served=("m",)),
    )
    await until(node.reactor, lambda: node.reports()["m/1/0"].pid and node.reports()["m/3/0"].pid, "two are started")
    second = node.reports()["m/2/0"]
    assert second.pid is None and second.reason == "waits for the start of m/1/0 on the same device"
    await until(node.reactor, lambda: node.reports()["m/2/0"].pid, "started")
    assert node.reports()["m/1/0"].state is ShardState.READY
    await until(node.reactor, lambda: node.reports()["m/2/0"].state is ShardState.READY, "ready")


@pytest_twisted.ensureDeferred
async def test_a_start_that_waits_can_be_stopped_and_a_failed_one_lets_the_next_go(rigs):
    """Neither leaves the device closed."""
    node = rigs()
    await node.start()
    long, broken = (*FAKE, "--load-seconds", "60"), (*FAKE, "--load-seconds", "60", "--exit-after", "0.7")
    here = {"devices": ("GPU-a",), "share": True}
    waiting = order(long, "m/2/0", **here)
    first, third = order(broken, "m/1/0", **here), order(FAKE, "m/3/0", **here)
    node.order(first, waiting, third)
    await until(node.reactor, lambda: node.reports()["m/1/0"].pid, "the first is started")
    node.order(first, order(long, "m/2/0", wanted=Wanted.STOP, **here), third)
    await until(node.reactor, lambda: node.reports()["m/2/0"].state is ShardState.STOPPED, "stopped while it waited")
    await until(node.reactor, lambda: node.reports()["m/3/0"].state is ShardState.READY, "the next one goes")
    assert node.reports()["m/1/0"].state is ShardState.FAILED


# Hung, though it says that it is well.


def load(tokens=5, running=1, waiting=0):
    return EngineLoad(running, waiting, None, tokens)


BUSY = {
    "tokens": (load(6), 10, 4), "output": (load(), 11, 4), "no requests": (load(running=0), 10, 4),
    "tokens unknown": (load(None), 10, 4), "requests wait": (load(waiting=1), 10, 4), "full": (load(running=4), 10, 4),
    "places unknown": (load(), 10, None),
}  # fmt: skip


@pytest.mark.parametrize("what", BUSY)
def test_what_is_busy_is_not_doubted(what):
    """Requests that make neither tokens nor output for a minute are doubtful; each sign of life ends that, fullness delays it."""
    still = Stillness()
    still.saw(0.0, load(), 10, 4)
    still.saw(1.0, load(), 10, 4)
    assert not still.doubtful(60.9)
    assert still.doubtful(61.0)
    still.saw(61.0, *BUSY[what])
    assert not still.doubtful(62.0)
    assert still.doubtful(601.0) == (what in ("requests wait", "full", "places unknown"))


def post(shard, path, asked):
    """A connection on which this was sent; nobody reads the answer."""
    where = urlsplit(shard.intent.url)
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nauthorization: Bearer {shard.intent.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((where.hostname, where.port), timeout=5)
    connection.sendall(head.encode() + body)
    return connection


@pytest_twisted.ensureDeferred
async def test_an_engine_that_is_well_but_makes_no_token_is_ended_as_hung(rig, monkeypatch):
    """Health and metrics answer, a request makes no token: one token is asked for in vain three times, then it is ended."""
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.1)
    monkeypatch.setattr("llmgw.agent.progress.STILL_FULL", 0.3)
    monkeypatch.setattr("llmgw.agent.progress.HUNG_AFTER", 0.5)
    monkeypatch.setattr("llmgw.agent.probe.DEEP", 0.1)
    shard = await rig.ready()
    assert (await rig.around.probe.works(shard.intent)).serves
    with post(shard, "/fake/stall", {}), post(shard, "/v1/completions", {"model": "m", "max_tokens": 5}):
        await until(rig.reactor, lambda: not shard.report().healthy, "unhealthy")
        assert any("makes no token, and asked for one: no answer in 0.5 s" in text for text in shard.report().conditions)
        await rig.reach(shard, ShardState.FAILED)
    assert shard.reason.startswith("it hangs: no answer, no token and no output for") and shard.code == "hung"
    assert shard.report().diagnosis.cause == "clean_and_retry" and "started anew" in shard.report().diagnosis.advice


@pytest_twisted.ensureDeferred
async def test_a_freeze_of_the_agent_is_no_evidence_against_an_engine(rig, monkeypatch):
    """One that it has found unhealthy, and that takes a moment more than the agent after both were away, has all of its time."""
    clock = AwakeClock(rig.reactor)
    clock.TICK = 0.2
    clock.start()
    monkeypatch.setattr(rig.reactor, "seconds", clock.seconds)
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.01)
    monkeypatch.setattr("llmgw.agent.progress.HUNG_AFTER", 3.5)
    rig.around.probe._deadline = 0.3
    shard = await rig.ready()
    os.kill(shard.tree.engine.pid, signal.SIGSTOP)
    await until(rig.reactor, lambda: not shard.report().healthy, "unhealthy")
    time.sleep(3.5)  # the reactor does not run, as in a process that is stopped
    await deferLater(rig.reactor, 0.6)
    os.kill(shard.tree.engine.pid, signal.SIGCONT)
    await until(rig.reactor, lambda: shard.report().healthy, "healthy again")
    assert shard.state is ShardState.READY
    clock.stop()


@pytest_twisted.ensureDeferred
async def test_an_engine_that_is_only_slow_is_asked_and_left_alone(rig, monkeypatch):
    """Between two tokens of a request passes more than what is doubtful; it makes the one that is asked for, so it lives."""
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.05)
    monkeypatch.setattr("llmgw.agent.progress.STILL_FULL", 0.2)
    monkeypatch.setattr("llmgw.agent.progress.HUNG_AFTER", 0.1)
    shard = await rig.ready("--interval", "1.5")
    asked = []
    works = rig.around.probe.works
    monkeypatch.setattr(rig.around.probe, "works", lambda intent: asked.append(intent) or works(intent))
    with post(shard, "/v1/completions", {"model": "m", "max_tokens": 5}):
        await until(rig.reactor, lambda: len(asked) >= 3, "doubted")
        assert shard.state is ShardState.READY and shard.report().healthy
