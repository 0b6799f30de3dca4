"""Lines of waiting requests: order, bounds, deadlines; over the workers of one clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.task import Clock

from llmgw.router.admission import AGEING, LONGEST_RETRY, PATIENCE, POLL, Line, WaitingRoom
from llmgw.router.choose import Candidate, Group
from llmgw.router.scoreboard import HEAD, WAITING, Scoreboard


class Rig:
    """Workers of one server on one clock, with a model m of some endpoints."""

    def __init__(self, path, workers=1, endpoints=1, each=1, limit=0, most=100):
        self.clock = Clock()
        self.clock.advance(1000)
        self.server = Scoreboard.create(path / "board", rows=64, columns=8)
        self.rows = self.server.assign(["model/m", *(f"endpoint/{n}" for n in range(endpoints))], 1)
        self.boards = [Scoreboard.attach(path / "board", self.server.claim(), rows=64, columns=8) for _ in range(workers)]
        self.candidates = [Candidate(str(n), self.rows[f"endpoint/{n}"], each) for n in range(endpoints)]
        self.lines = []
        for board in self.boards:
            room = WaitingRoom(self.clock.callLater, self.clock.seconds)
            group = Group(board, self.candidates, "least_inflight", random.Random(1).random)
            self.lines.append(Line(room, board, group, self.rows["model/m"], limit, most))
        self.turns = []
        self.ended = []
        self.running = []

    def take(self, worker=0):
        found, why = self.lines[worker].take(self.clock.seconds())
        if found is not None:
            self.running.append((worker, found))
        return found is not None

    def give(self, number=0):
        worker, found = self.running.pop(number)
        self.lines[worker].give(found)

    def wait(self, name, worker=0, high=False, seconds=60.0):
        def attempt():
            taken = self.take(worker)
            if taken:
                self.turns.append(name)
            return taken

        return self.lines[worker].wait(high, seconds, attempt, lambda reason: self.ended.append((name, reason)))

    def pass_time(self, seconds=PATIENCE * 3):
        """Advance, letting everything that ticks tick."""
        steps = int(seconds / (POLL / 2)) + 1
        if steps < 1000:
            self.clock.pump([POLL / 2] * steps)
        else:
            self.clock.pump([seconds / 100] * 100)

    def in_flight(self):
        return [self.server.total(row) for _, row in sorted(self.rows.items(), reverse=True)]

    def waiting(self):
        return self.server.total(self.rows["model/m"] + WAITING)

    def close(self):
        for board in (*self.boards, self.server):
            board.close()


@pytest.fixture
def make(tmp_path):
    rigs = []

    def make(**values):
        rigs.append(Rig(tmp_path, **values))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_model_and_endpoint_bounds(make):
    """A place is one at an endpoint and one in the model's own bound; a refusal keeps neither."""
    rig = make(endpoints=2, each=2, limit=3)
    assert [rig.take() for _ in range(5)] == [True, True, True, False, False]
    model, *endpoints = rig.in_flight()
    assert model == 3 and sorted(endpoints) == [1, 2]
    while rig.running:
        rig.give()
    assert rig.in_flight() == [0, 0, 0]


def test_first_come_first_served(make):
    """A freed place goes to whoever has waited longest."""
    rig = make()
    rig.take()
    for name in "abc":
        rig.wait(name)
        rig.clock.advance(0.1)
    for _ in range(3):
        rig.give()
        rig.pass_time()
    assert rig.turns == ["a", "b", "c"]
    assert rig.waiting() == 0


def test_freed_place_is_taken_in_the_same_turn_of_the_loop(make):
    """In the worker where it was freed, no time passes."""
    rig = make()
    rig.take()
    rig.wait("a")
    rig.clock.advance(0)
    rig.give()
    rig.clock.advance(0)
    assert rig.turns == ["a"]


def test_freed_place_wakes_a_waiter_in_another_worker(make):
    """Within the poll's interval."""
    rig = make(workers=2)
    rig.take(0)
    rig.wait("a", worker=1)
    rig.clock.advance(0)
    rig.give()
    rig.clock.advance(POLL)
    assert rig.turns == ["a"]


def test_new_arrivals_do_not_overtake(make):
    """While somebody waits in any worker, a worker knows that a new request has to get in line."""
    rig = make(workers=2)
    rig.take(0)
    waiter = rig.wait("a", worker=1)
    assert all(line.crowded() for line in rig.lines)
    waiter.leave()
    assert not any(line.crowded() for line in rig.lines)


def test_order_holds_over_workers(make):
    """Who came first goes first, in whichever worker places become free."""
    rig = make(workers=3)
    rig.take(0)
    names = [(f"{number}", number % 3) for number in (2, 0, 1, 1, 2, 0)]
    for place, (_, worker) in enumerate(names):
        rig.wait(place, worker=worker)
        rig.clock.advance(0.01)
    for _ in names:
        rig.give()
        rig.pass_time(0.02)
    assert rig.turns == [0, 1, 2, 3, 4, 5]


def test_high_goes_before_low(make):
    """L9: with low ones waiting, the next place is the high one's."""
    rig = make()
    rig.take()
    for name in ("low1", "low2"):
        rig.wait(name)
    rig.clock.advance(1)
    rig.wait("high", high=True)
    for _ in range(3):
        rig.give()
        rig.pass_time()
    assert rig.turns == ["high", "low1", "low2"]


def test_low_does_not_starve(make):
    """A low request that has waited long enough goes before a high one that has just come."""
    rig = make()
    rig.take()
    rig.wait("low")
    rig.clock.pump([1.0] * int(AGEING + 1))
    rig.wait("high", high=True)
    rig.give()
    rig.pass_time()
    assert rig.turns == ["low"]


def test_line_is_bounded_over_workers(make):
    """No more wait than may, counted over all workers; whoever is refused is told nothing else."""
    rig = make(workers=2, most=3)
    rig.take()
    waiters = [rig.wait(number, worker=number % 2) for number in range(5)]
    assert [waiter is None for waiter in waiters] == [False] * 3 + [True] * 2
    assert rig.waiting() == 3
    assert rig.lines[0].waiting + rig.lines[1].waiting == 3


def test_high_displaces_the_last_low_of_a_full_line(make):
    """L9: a line full of low requests still takes a high one; the low one that came last gives way."""
    rig = make(most=2)
    rig.take()
    rig.wait("first")
    rig.wait("last")
    assert rig.wait("high", high=True) is not None
    assert rig.ended == [("last", "displaced")]
    assert rig.waiting() == 2
    rig.wait("high2", high=True)
    assert rig.wait("high3", high=True) is None
    rig.give()
    rig.pass_time()
    assert rig.turns == ["high"]


def test_no_queue(make):
    """A model with max_waiting 0 refuses at once."""
    rig = make(most=0)
    rig.take()
    assert rig.wait("a") is None
    assert rig.waiting() == 0


def test_deadline(make):
    """Whoever has waited too long is told so, once, and its place in line is free."""
    rig = make()
    rig.take()
    rig.wait("a", seconds=5.0)
    rig.wait("b", seconds=50.0)
    rig.clock.pump([0.01] * 499)
    assert rig.ended == []
    rig.clock.pump([0.01] * 3)
    assert rig.ended == [("a", "timeout")]
    rig.give()
    rig.pass_time()
    assert rig.turns == ["b"]


def test_client_that_leaves_is_not_called(make):
    """Its turn goes to the next one; leaving twice does nothing."""
    rig = make()
    rig.take()
    waiter = rig.wait("a")
    rig.wait("b")
    waiter.leave()
    waiter.leave()
    rig.give()
    rig.pass_time()
    assert (rig.turns, rig.ended) == (["b"], [])


def test_nothing_ticks_when_nobody_waits(make):
    """No timer is left once the line is empty."""
    rig = make()
    rig.take()
    waiter = rig.wait("a")
    rig.pass_time()
    waiter.leave()
    rig.pass_time()
    assert rig.clock.getDelayedCalls() == []


def test_model_that_is_no_longer_routed(make):
    """All who wait for it are told."""
    rig = make()
    rig.take()
    for name in "ab":
        rig.wait(name)
    rig.lines[0].close()
    assert rig.ended == [("a", "gone"), ("b", "gone")]
    assert rig.waiting() == 0 and rig.boards[0].own[rig.rows["model/m"] + HEAD] == 0


def test_new_table_lets_waiters_go(make):
    """Who waits for a model without endpoints goes on as soon as a table has one."""
    rig = make()
    line = rig.lines[0]
    full = line.group
    line.update(Group(rig.boards[0], [], "least_inflight", random.random), 0, 100)
    rig.wait("a")
    rig.pass_time()
    assert rig.turns == []
    line.update(full, 0, 100)
    rig.clock.advance(0)
    assert rig.turns == ["a"]


def test_worker_that_does_not_take_its_turn_is_passed_over(make):
    """A stopped worker's waiters hold the others up only for a moment, and only once."""
    rig = make(workers=2)
    rig.take(0)
    row = rig.rows["model/m"]
    rig.boards[1].own[row + WAITING] = 1
    rig.boards[1].own[row + HEAD] = 1
    for name in "ab":
        rig.wait(name)
    rig.give()
    rig.clock.pump([PATIENCE / 5] * 4)
    assert rig.turns == []
    rig.clock.pump([PATIENCE / 5] * 4)
    assert rig.turns == ["a"]


def test_one_bad_request_does_not_stop_the_line(make, expect_failures):
    """An error in one request's turn is logged, and the next one has its turn."""
    expect_failures(RuntimeError)
    rig = make()
    rig.take()

    def broken():
        raise RuntimeError("boom")

    rig.lines[0].wait(False, 60, broken, lambda reason: None)
    rig.wait("b")
    rig.give()
    rig.pass_time()
    assert rig.turns == ["b"]
    assert rig.waiting() == 0


def test_retry_after_follows_the_drain_rate(make):
    """Two a second with nine waiting are five seconds; with no end in sight it is the longest."""
    rig = make(each=100, most=9)
    assert rig.lines[0].retry_after() == LONGEST_RETRY
    for _ in range(60):
        rig.clock.advance(0.5)
        rig.take()
        rig.give()
        rig.lines[0].retry_after()
    for candidate in rig.candidates:
        candidate.limit = 1
    rig.take()
    for number in range(9):
        rig.wait(number)
    assert rig.lines[0].retry_after() in (5, 6)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["arrive", "arrive", "high", "give", "leave", "time"]), max_size=60),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_order_and_bounds_whatever_happens(tmp_path_factory, steps, workers, each, draw):
    """Within a class requests go in the order of their arrival, no more run than may, and in the end nothing is left."""
    rig = Rig(tmp_path_factory.mktemp("law"), workers=workers, each=each)
    waiting, names = {}, 0
    for step in steps:
        if step in ("arrive", "high"):
            worker, names = draw.randrange(workers), names + 1
            rig.clock.advance(0.002)
            if rig.lines[worker].crowded() or not rig.take(worker):
                name = (step == "high", names)
                waiting[name] = rig.wait(name, worker=worker, high=step == "high")
        elif step == "give" and rig.running:
            rig.give(draw.randrange(len(rig.running)))
        elif step == "leave" and waiting:
            waiting.pop(draw.choice(sorted(waiting))).leave()
        else:
            rig.pass_time(0.05)
        assert rig.in_flight()[1] <= each
    for name in rig.turns:
        waiting.pop(name, None)
    for _ in range(len(rig.running) + len(waiting) + 5):
        if rig.running:
            rig.give()
        rig.pass_time(0.05)
    for high in (True, False):
        turns = [number for was_high, number in rig.turns if was_high == high]
        assert turns == sorted(turns)
    assert rig.in_flight() == [0, 0] and rig.waiting() == 0
    assert rig.clock.getDelayedCalls() == []
    rig.close()


def test_no_leak_after_a_thousand_random_ends(make):
    """L1: with random cancels, deadlines and ends, afterwards all is 0 and the full limit is there."""
    rig = make(workers=2, endpoints=2, each=3, limit=5, most=20)
    draw = random.Random(11)
    waiters = []
    for number in range(1000):
        worker = draw.randrange(2)
        if rig.lines[worker].crowded() or not rig.take(worker):
            waiters.append(rig.wait(number, worker=worker, high=draw.random() < 0.2, seconds=draw.choice([0.05, 5.0])))
        if rig.running and draw.random() < 0.8:
            rig.give(draw.randrange(len(rig.running)))
        waiters = [waiter for waiter in waiters if waiter is not None]
        if waiters and draw.random() < 0.3:
            waiters.pop(draw.randrange(len(waiters))).leave()
        rig.clock.advance(draw.choice([0, 0.001, 0.01]))
    for waiter in waiters:
        waiter.leave()
    while rig.running:
        rig.give()
    rig.pass_time()
    assert rig.in_flight() == [0, 0, 0] and rig.waiting() == 0
    assert sum(rig.take(number % 2) for number in range(9)) == 5
