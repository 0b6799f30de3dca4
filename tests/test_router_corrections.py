"""Load that engines report besides ours: when it is believed, and that it moves requests away, through real workers."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from llmgw.config.server import Address, RouterSettings
from llmgw.fleet.shard import EngineLoad, ShardReport, ShardState
from llmgw.router.choose import Candidate, Group
from llmgw.router.corrections import Corrections
from llmgw.router.scoreboard import ELSEWHERE, Scoreboard
from llmgw.router.table import RoutedModel, Table, endpoint
from llmgw.server.routing import Routing
from llmgw.server.workers import RouterWorkers
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.shared_files import remove_shared_files


@pytest.fixture
def board(tmp_path):
    board = Scoreboard.create(tmp_path / "scoreboard", rows=16, columns=4)
    board.assign(["endpoint/a", "endpoint/b"], 1)
    yield board
    board.close()


@pytest.fixture
def row(board):
    return board.row("endpoint/a")


def told(board, row, *reports):
    """What is believed after each report, 5 seconds apart."""
    corrections = Corrections(board)
    believed = []
    for number, requests in enumerate((0, *reports)):
        corrections.report(row, requests, number * 5.0)
        believed.append(board.own[row + ELSEWHERE])
    return believed[1:]


def test_two_reports_in_a_row_are_believed(board, row):
    """What one report says alone may be a request that came or went on the way."""
    assert told(board, row, 5, 4, 9, 0) == [0, 4, 4, 0]


def test_requests_of_ours_are_not_counted_twice(board, row):
    """What we have there ourselves, or had at any time since the report before, is no load of others."""
    board.enter(row, 0)
    board.enter(row, 0)
    assert told(board, row, 2, 2, 3, 3) == [0, 0, 0, 1]
    corrections = Corrections(board)
    corrections.report(row, 2, 0.0)
    for at in (5.0, 10.0, 15.0):
        board.enter(row, 0)
        corrections.look()
        board.leave(row)
        corrections.report(row, 3, at)
    assert not board.own[row + ELSEWHERE]


def test_an_old_look_reported_twice_counts_once(board, row):
    """Reports come with each heartbeat and each transition, looks at the engine every 5 seconds."""
    corrections = Corrections(board)
    for at in (0.0, 5.0, 5.5, 6.0, 9.0):
        corrections.report(row, 8, at)
    assert not board.own[row + ELSEWHERE]
    corrections.report(row, 8, 10.0)
    assert board.own[row + ELSEWHERE] == 8


def test_what_an_earlier_server_believed_is_forgotten(board, row):
    """The scoreboard outlives the server; an endpoint that has left and comes back begins anew, the others are left alone."""
    other = board.row("endpoint/b")
    board.own[row + ELSEWHERE] = board.own[other + ELSEWHERE] = 7
    corrections = Corrections(board)
    corrections.route([row, other])
    assert not board.own[row + ELSEWHERE] + board.own[other + ELSEWHERE]
    for at in (0.0, 5.0, 10.0):
        corrections.report(row, 3, at)
    corrections.route([row])
    assert board.own[row + ELSEWHERE] == 3
    corrections.route([other])
    assert not board.own[row + ELSEWHERE]


def test_foreign_load_takes_no_places(board, row):
    """An engine that others have filled is the last choice, not a full one: the bound is on what we send there."""
    other = board.row("endpoint/b")
    candidates = [Candidate("a", row, limit=2), Candidate("b", other, limit=2)]
    group = Group(board, candidates, "least_inflight", lambda: 0.5)
    board.own[row + ELSEWHERE] = 9
    for wanted in ("b", "b", "a", "a"):
        assert group.state(0.0) == "room"
        found, _ = group.choose(0.0)
        assert found.id == wanted
        assert board.enter(found.row, found.limit)
    assert group.state(0.0) == "full"
    assert group.choose(0.0) == (None, "full")


def script(talk):
    while talk.request():
        talk.answer(b"{}")


def report(number, load, state=ShardState.READY):
    return ShardReport(f"m/{number}/0", "m", "g", 1, state, load=load)


async def when(condition, seconds=8.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        turn: Deferred[None] = Deferred()
        reactor.callLater(0.02, turn.callback, None)
        await turn


def who_answers(port, count):
    found: Counter[str] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        for _ in range(count):
            connection.request("POST", "/v1/chat/completions", b'{"model":"m"}')
            reply = connection.getresponse()
            reply.read()
            found[reply.headers["X-Llmgw-Replica"]] += 1
    return found


@pytest_twisted.ensureDeferred
async def test_an_engine_with_foreign_load_gets_fewer_requests(monkeypatch):
    """From agents' reports to the choice in another process: an engine that others use is left alone until they have gone, or
    until it says nothing any more."""
    monkeypatch.setattr(Corrections, "APART", 0.0)
    state = Path(tempfile.mkdtemp(prefix="llmgw-corrections-"))
    workers = RouterWorkers(reactor, RouterSettings(Address("127.0.0.1", 0)), state)
    workers.listen()
    workers.start()
    routing = Routing(workers, lambda: None)
    try:
        with ScriptedEngine(script) as one, ScriptedEngine(script) as two:
            endpoints = tuple(endpoint(f"m/{number}", engine.url, model="m") for number, engine in ((1, one), (2, two)))
            model = RoutedModel("m", endpoints=("m/1", "m/2"), policy="least_inflight")
            await workers.when_routing(workers.publish(Table(models=(model,), endpoints=endpoints)), 15)

            async def shares(load):
                for _ in range(3):
                    routing.heard([report(1, load), report(2, EngineLoad(running=0, waiting=0))])
                return await deferToThread(who_answers, workers.address[1], 20)

            assert set((await shares(EngineLoad(running=0))).values()) == {10}
            assert await shares(EngineLoad(running=2, waiting=1)) == {"m/2": 20}
            assert "m/1" in await shares(EngineLoad()), "an engine that tells no load is not corrected"
            assert await shares(EngineLoad(running=3)) == {"m/2": 20}
            routing.heard([report(1, EngineLoad(running=3))], away=True)
            assert "m/1" in await deferToThread(who_answers, workers.address[1], 20), "nor one whose node is away"
    finally:
        await workers.stop(at_once=True)
        for place in workers.places:
            place.kill()
        await when(lambda: all(place.ended for place in workers.places))
        remove_shared_files(state)
        shutil.rmtree(state)
