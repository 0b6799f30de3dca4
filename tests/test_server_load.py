"""What the server knows of the load: counts of all workers, what engines say besides, and that not to know is not zero."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from twisted.internet.task import Clock

from llmgw.config.settings import Address, RouterSettings
from llmgw.router.scoreboard import ELSEWHERE, WAITING, Scoreboard
from llmgw.server.sharedrouters import SharedRouters
from llmgw.server.workers import RouterWorkers
from llmgw.store.servers import ServerRecord


@pytest.fixture
def workers(tmp_path):
    """Three workers' columns, without the processes."""
    found = RouterWorkers(Clock(), RouterSettings(listen=Address("127.0.0.1", 0)), tmp_path)
    found._board = Scoreboard.create(tmp_path / "board")
    found._board.assign(["endpoint/m/1", "model/m"], 1)
    found.columns = [Scoreboard.attach(tmp_path / "board", found._board.claim()) for _ in range(3)]
    found.places = [SimpleNamespace(ready=True) for _ in range(3)]
    yield found
    for board in (*found.columns, found._board):
        board.close()


def test_all_workers_count_and_what_others_send_to_an_engine(workers):
    """In flight is ours over all workers; load is that and what the engine says to have from others."""
    row, line = workers._board.row("endpoint/m/1"), workers._board.row("model/m")
    for number, board in enumerate(workers.columns, 1):
        board.own[row] = number
        board.own[line + WAITING] = 10 * number
    assert (workers.in_flight("m/1"), workers.load("m/1"), workers.waiting("m")) == (6, 6, 60)
    workers._board.own[row + ELSEWHERE] = 4
    assert (workers.in_flight("m/1"), workers.load("m/1")) == (6, 10)


def test_what_waits_is_not_known_while_a_worker_is_missing_or_does_not_route_the_model(workers):
    """None, which changes no model's number, and never 0."""
    assert workers.waiting("m") == 0
    assert workers.waiting("another") is None
    workers.places[1].ready = False
    assert workers.waiting("m") is None
    workers.places = []
    assert workers.waiting("m") is None


class Others:
    """The other servers, as last told."""

    problem = ""
    records = (ServerRecord("cp2", "h", in_flight={"m/1": 3}, waiting={"m": 5}),)

    def in_flight(self, endpoint):
        return sum(record.in_flight.get(endpoint, 0) for record in self.records)

    def waiting(self, model):
        return sum(record.waiting.get(model, 0) for record in self.records)


def test_the_load_is_that_of_all_servers_and_not_known_while_they_are_out_of_sight(workers):
    """Lines add up; an engine's own word includes what other servers sent, so the larger of both is its load."""
    others = Others()
    shared = SharedRouters(workers, None, None, others, Clock(), lambda: 0)
    row = workers._board.row("endpoint/m/1")
    workers.columns[0].own[row] = 2
    assert (shared.load("m/1"), shared.waiting("m")) == (5, 5)
    workers._board.own[row + ELSEWHERE] = 7
    assert shared.load("m/1") == 9
    others.problem = "the database is away"
    assert shared.waiting("m") is None
