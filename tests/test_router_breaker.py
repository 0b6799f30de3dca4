"""Breakers always have a way back; retries have a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.breaker import FAILURES, OPEN_FOR, Breaker, RetryBudget, is_failure
from llmgw.router.scoreboard import LIVE, RETRYING, Scoreboard


def test_opens_after_consecutive_failures_only():
    """Four failures and a success are nothing; five in a row open it."""
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            assert not breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state == "closed"
    assert [breaker.failed(1.0) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert (breaker.state, breaker.blocked_until, breaker.opened) == ("open", 1.0 + OPEN_FOR, 1)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 499, 503])
def test_statuses_that_are_not_the_engines_fault(status):
    """J1, J2: callers' mistakes and back-pressure are not failures."""
    assert not is_failure(status)


@pytest.mark.parametrize("status", [500, 502, 504, 507])
def test_statuses_that_are(status):
    """Other 5xx are."""
    assert is_failure(status)


def test_probe_decides():
    """After the open time a single request tests it: success closes, failure opens again for as long."""
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    breaker.trying(OPEN_FOR)
    assert breaker.blocked_until == 2 * OPEN_FOR, "nobody else may probe meanwhile"
    assert breaker.failed(OPEN_FOR + 1)
    assert breaker.blocked_until == 2 * OPEN_FOR + 1
    breaker.trying(100.0)
    assert breaker.succeeded()
    assert (breaker.state, breaker.failures) == ("closed", 0)


def test_probe_that_says_nothing_leaves_the_way_open():
    """A probe whose client leaves, or that gets a 429, lets the next request probe at once."""
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    breaker.trying(40.0)
    breaker.neutral(41.0)
    assert breaker.blocked_until == 41.0


@given(st.lists(st.sampled_from(["failed", "succeeded", "neutral", "trying"]), max_size=50))
def test_j9_there_is_always_a_way_back(steps):
    """J9: whatever has happened, it is closed or may be probed within the open time."""
    breaker, now = Breaker(), 0.0
    for step in steps:
        now += 1.0
        if step == "succeeded":
            breaker.succeeded()
        else:
            getattr(breaker, step)(now)
        assert breaker.blocked_until <= now + OPEN_FOR


@pytest.fixture
def boards(tmp_path):
    """A server's and those of two workers."""
    board = Scoreboard.create(tmp_path / "board", rows=8, columns=4)
    workers = [Scoreboard.attach(board.path, board.claim(), rows=8, columns=4) for _ in range(2)]
    yield board, *workers
    for one in (*workers, board):
        one.close()


def test_budget_is_a_fifth_of_the_live_requests(boards):
    """J5: with 100 live requests 20 may be retrying; with few, three may."""
    budget = RetryBudget(boards[1])
    boards[1].mine[LIVE] = 100
    assert sum(budget.take() for _ in range(100)) == 20
    budget.give()
    assert budget.take() and not budget.take()
    boards[1].mine[LIVE], boards[1].mine[RETRYING] = 1, 0
    assert sum(budget.take() for _ in range(10)) == 3


def test_j5_workers_share_the_budget(boards):
    """J5: it is one for the requests of all workers; a worker that has died takes its part away with it."""
    server, one, two = boards
    first, second = RetryBudget(one), RetryBudget(two)
    one.mine[LIVE], two.mine[LIVE] = 90, 10
    assert sum(second.take() for _ in range(100)) == 20, "the few that are in this worker may use what all allow"
    assert not first.take()
    second.give()
    assert first.take() and not first.take() and not second.take()
    server.clear(two.column)
    assert (server.crowd(LIVE), server.crowd(RETRYING)) == (90, 1)
    assert sum(first.take() for _ in range(100)) == 17
