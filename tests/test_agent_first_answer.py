"""An engine that says that it is well and fails what it is asked: not ready, looked into later, and never taken for busy."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.fleet.shard import ShardState
from tests.agent_rig import FAKE, agent_rig, order, script, until  # noqa: F401

# Healthy, and answers a POST to PATH with 200, all others with STATUS.
ENGINE = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self): self.tell(200)
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.tell(200 if self.path == "PATH" else STATUS)
    def tell(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()
ThreadingHTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def engine(status: int, path: str = "") -> tuple[str, ...]:
    return script(ENGINE.replace("STATUS", str(status)).replace("PATH", path))


def tell(shard, path: str) -> None:
    """POST to the fake engine."""
    where = urlsplit(shard.intent.url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=10)
    connection.request("POST", path, "{}", {"authorization": f"Bearer {shard.intent.key}"})
    assert connection.getresponse().status == 200
    connection.close()


def probing(wanted, probe: str):
    return evolve(wanted, profile=evolve(wanted.profile, probe=probe))


@pytest_twisted.ensureDeferred
async def test_an_engine_that_fails_every_request_is_never_ready(rig):
    """Its health path answers 200 and its requests 500: it loads, says why, and has failed when that lasts."""
    shard = rig.start(order([*FAKE, "--health-lies"], timeout=1.5))
    await until(rig.reactor, lambda: "asked for one token: it answers 500: told to fail" in shard.reason, "said why")
    assert shard.state is ShardState.LOADING
    await rig.reach(shard, ShardState.FAILED)
    assert shard.code == "first_answer" and "failed every request for" in shard.reason
    assert not any(told.report.state is ShardState.READY for told in rig.told)
    assert "probe: none" in shard.report().diagnosis.advice


@pytest.mark.parametrize("status", [400, 404, 405, 501])
@pytest_twisted.ensureDeferred
async def test_a_refusal_of_a_completion_is_an_answer(rig, status):
    """What makes no completions refuses them, and thinks: a reranker, a transcriber, llama.cpp for embeddings."""
    shard = rig.start(order(engine(status)))
    await rig.reach(shard, ShardState.READY)


@pytest_twisted.ensureDeferred
async def test_an_engine_may_be_asked_for_an_embedding_or_for_nothing(rig):
    """As its profile says, where it would fail a completion."""
    embeds = rig.start(probing(order(engine(500, "/v1/embeddings"), shard="e/1/0"), "embedding"))
    unasked = rig.start(probing(order(engine(500), shard="n/1/0"), "none"))
    await rig.reach(embeds, ShardState.READY)
    await rig.reach(unasked, ShardState.READY)
    assert (await rig.around.probe.works(unasked.intent)).serves


@pytest_twisted.ensureDeferred
async def test_a_first_token_may_take_longer_than_other_answers(rig):
    """It is waited for, and nothing else is asked meanwhile."""
    rig.around.probe._deadline = 0.2
    shard = rig.start(order([*FAKE, "--first-token", "1"]))
    await rig.reach(shard, ShardState.READY)


@pytest.fixture
def hasty(monkeypatch):
    """All looks and patience of the agent a hundred times shorter."""
    monkeypatch.setattr("llmgw.agent.observer.EVERY", 0.05)
    monkeypatch.setattr("llmgw.agent.progress.HUNG_AFTER", 0.6)


def doubt(shard, doubted: bool = True) -> None:
    """What the leader orders when routers tell that a replica's requests fail."""
    shard.order(evolve(shard.intent.order, doubted=doubted))


@pytest_twisted.ensureDeferred
async def test_an_engine_in_doubt_that_fails_a_token_too_is_ended_as_hung(rig, hasty):
    """It prints a line for each request that it fails, which is no work."""
    shard = await rig.ready()
    tell(shard, "/fake/fail")
    doubt(shard)
    await until(rig.reactor, lambda: not shard.report().healthy, "unhealthy")
    assert any("asked for one: it answers 500: told to fail" in text for text in shard.report().conditions)
    doubt(shard, False)  # routers know it no more, since it has left their table
    await rig.reach(shard, ShardState.FAILED)
    assert shard.code == "hung" and "no answer and no token for" in shard.reason
    assert shard.report().diagnosis.cause == "clean_and_retry"


@pytest_twisted.ensureDeferred
async def test_an_engine_in_doubt_that_makes_a_token_is_left_alone(rig, hasty, monkeypatch):
    """Whatever the routers say. One that fails for a while is healthy again when it makes one, without their word."""
    monkeypatch.setattr("llmgw.agent.progress.HUNG_AFTER", 60.0)
    shard = await rig.ready()
    doubt(shard)
    await until(rig.reactor, lambda: (shard.report().load.tokens or 0) >= 20, "asked again and again")
    assert shard.state is ShardState.READY and shard.report().healthy
    tell(shard, "/fake/fail")
    await until(rig.reactor, lambda: not shard.report().healthy, "unhealthy")
    tell(shard, "/fake/fail")
    doubt(shard, False)
    await until(rig.reactor, lambda: shard.report().healthy, "healthy again")
    assert shard.state is ShardState.READY


@pytest_twisted.ensureDeferred
async def test_an_engine_in_doubt_that_may_be_full_is_waited_for(rig, hasty, monkeypatch):
    """A token that is asked of one that works on others as long as it can waits: it is left out, and ended ten times later."""
    monkeypatch.setattr("llmgw.agent.probe.DEEP", 0.01)
    shard = await rig.ready()
    tell(shard, "/fake/stall")
    doubt(shard)
    await until(rig.reactor, lambda: not shard.report().healthy, "unhealthy")
    began = shard._observer.health.failing_since
    await until(rig.reactor, lambda: rig.reactor.seconds() - began > 1.5, "more than enough to be called hung")
    assert shard.state is ShardState.READY
    monkeypatch.setattr("llmgw.agent.progress.STILL_FULL", 1.6)
    await rig.reach(shard, ShardState.FAILED)
    assert shard.code == "hung"


@pytest_twisted.ensureDeferred
async def test_an_engine_of_an_agent_that_asked_nothing_may_answer_what_it_likes(rig):
    """It served without ever having been asked for a token, so that it fails one is no news; one that says nothing hangs."""
    shard = rig.start(probing(order(engine(500)), "none"))
    await rig.reach(shard, ShardState.READY)
    assert (await rig.around.probe.works(evolve(shard.intent, probe=""))).serves
    assert not (await rig.around.probe.works(evolve(shard.intent, probe="completion"))).serves


@pytest_twisted.ensureDeferred
async def test_an_engine_that_nobody_doubts_is_asked_nothing(rig, hasty):
    """A token costs something."""
    shard = await rig.ready()
    await until(rig.reactor, lambda: shard._observer.health._good > 5, "looked at")
    assert shard.report().load.tokens == 1, "the first one"
