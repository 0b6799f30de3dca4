"""What keys may use: minutes that slide, reservations that are settled, refusals that cost nothing; over processes."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.router import windows
from llmgw.router.limits import Allowance, Limited, estimate, row_name
from llmgw.router.scoreboard import Scoreboard
from llmgw.router.table import KeyEntry
from tests import board_processes

NOON = 1_700_000_000 // 86400 * 86400 + 43200.0


@pytest.fixture
def board(tmp_path):
    server = Scoreboard.create(tmp_path / "board", rows=64, columns=8)
    server.assign(["key/k", "key/other", "team/t"], 1)
    board = Scoreboard.attach(tmp_path / "board", server.claim(), rows=64, columns=8)
    yield board
    board.close()
    server.close()


def another(board: Scoreboard) -> Scoreboard:
    server = Scoreboard(board.path, 0, 64, 8)
    column = server.claim()
    server.close()
    return Scoreboard.attach(board.path, column, 64, 8)


def key(id="k", **values) -> KeyEntry:
    return KeyEntry(id, "digest", **values)


def counted(board: Scoreboard, now: float) -> tuple[float, float]:
    """Requests and tokens of the key in the minute before now."""
    sums = windows.sums(board.every_column(), board.row("key/k"), int(now // 60))
    left = 1 - now % 60 / 60
    return sums[0] + sums[1] * left, sums[2] + sums[3] * left


def granted(allowance: Allowance, now: float, count: int, tokens: int = 0) -> int:
    return sum(not isinstance(allowance.admit(now, tokens), Limited) for _ in range(count))


def test_requests_per_minute_slide(board):
    """Ten a minute are ten within any sixty seconds, about: half a minute later half of them have slid out."""
    allowance = Allowance(key(rpm=10), board)
    assert granted(allowance, NOON, 20) == 10
    assert granted(allowance, NOON + 59, 5) == 0
    assert granted(allowance, NOON + 90, 20) == 5
    assert granted(allowance, NOON + 300, 20) == 10


def test_refused_requests_use_nothing(board):
    """L7: a thousand refusals do not postpone the next grant."""
    allowance = Allowance(key(rpm=5, tpm=1000), board)
    assert granted(allowance, NOON, 5, 10) == 5
    before = counted(board, NOON)
    assert granted(allowance, NOON, 1000, 10) == 0
    assert counted(board, NOON) == before == (5, 50)
    assert board.total(board.row("key/k")) == 5, "only those let in are running"


@pytest.mark.parametrize("past", [0.0, 10.0, 59.0])
@pytest.mark.parametrize("kind", ["rpm", "tpm"])
def test_retry_after_is_true_and_not_late(board, kind, past):
    """Whoever comes again after Retry-After is let in, and two seconds earlier would not have been."""
    allowance = Allowance(key(**{kind: 60}), board)
    assert granted(allowance, NOON - 30, 20, 1) == 20
    granted(allowance, NOON + past, 60, 1)
    refused = allowance.admit(NOON + past, 1)
    assert isinstance(refused, Limited) and refused.kind == kind
    wait = refused.retry_after
    assert wait < 3 or isinstance(allowance.admit(NOON + past + wait - 2, 1), Limited)
    assert not isinstance(allowance.admit(NOON + past + wait, 1), Limited)


def test_tokens_are_reserved(board):
    """L5: fifty requests at once against a budget for ten let ten in."""
    assert granted(Allowance(key(tpm=10_000), board), NOON, 50, 1000) == 10


def test_tokens_are_settled(board):
    """What was reserved too much comes back, what was used beyond counts."""
    allowance = Allowance(key(tpm=1000), board)
    first = allowance.admit(NOON, 900)
    first.settle(NOON + 1, 100)
    assert counted(board, NOON + 1)[1] == 100
    second = allowance.admit(NOON + 1, 100)
    second.settle(NOON + 2, 950)
    assert isinstance(allowance.admit(NOON + 2, 100), Limited)


def test_long_stream_is_settled_in_its_own_minute(board):
    """A reservation is corrected where it lies: in this minute, in the one before, or, past both, as new use only."""
    allowance = Allowance(key(tpm=1000), board)
    grants = [allowance.admit(NOON, 300) for _ in range(3)]
    grants[0].settle(NOON + 60, 0)
    assert counted(board, NOON + 60)[1] == 600
    grants[1].settle(NOON + 200, 0)
    assert counted(board, NOON + 200)[1] == 0
    grants[2].settle(NOON + 200, 500)
    assert counted(board, NOON + 200)[1] == 200


def test_settling_twice_does_nothing(board):
    """A request that ends from both sides at once is settled once."""
    allowance = Allowance(key(tpm=1000, concurrency=2), board)
    grant = allowance.admit(NOON, 100)
    for _ in range(3):
        grant.settle(NOON, 50)
    assert board.total(board.row("key/k")) == 0
    assert counted(board, NOON)[1] == 50


def test_request_larger_than_the_limit_gets_its_turn(board):
    """It is let in when nothing else was used, and keeps others out until it has slid away."""
    allowance = Allowance(key(tpm=1000), board)
    grant = allowance.admit(NOON, 5000)
    assert not isinstance(grant, Limited)
    assert isinstance(allowance.admit(NOON + 1, 1), Limited)
    assert granted(allowance, NOON + 121, 1, 5000) == 1


def test_concurrency_is_a_bound(board):
    """Requests running at once; a place is free again when one ends."""
    allowance = Allowance(key(concurrency=3), board)
    grants = [allowance.admit(NOON, 0) for _ in range(5)]
    assert [isinstance(grant, Limited) for grant in grants] == [False] * 3 + [True] * 2
    assert grants[3].kind == "concurrency"
    grants[0].settle(NOON, 0)
    assert granted(allowance, NOON, 2) == 1


def test_tokens_per_day(board):
    """The day's budget holds until midnight, over all minutes, and Retry-After says midnight."""
    allowance = Allowance(key(tpd=1000), board)
    for minute in range(10):
        allowance.admit(NOON + minute * 60, 100).settle(NOON + minute * 60, 100)
    refused = allowance.admit(NOON + 3600, 1)
    assert refused.kind == "tpd" and abs(refused.retry_after - (43200 - 3600)) <= 1
    assert granted(allowance, NOON + 43201, 1, 100) == 1


def test_tokens_of_today_are_recalled_once(board):
    """After a stop of everything the store knows what was used; what a worker has counted meanwhile is not counted twice."""
    row = board.row("key/k")
    used = lambda: windows.sums(board.every_column(), row, 60)[4]  # noqa: E731
    windows.recall(board.every_column(), board.own, row, 60, 500)
    windows.recall(board.every_column(), board.own, row, 60, 500)
    assert used() == 500
    windows.add_tokens(board.own, row, 60, 80)
    windows.recall(board.every_column(), board.own, row, 60, 550)
    assert used() == 580
    assert windows.sums(board.every_column(), row, 60)[:4] == (0, 0, 80, 0), "the minute is another matter"


def test_team_shares(board):
    """Keys of one team use one budget; another key has its own."""
    one, two = (Allowance(key(id, team="t", rpm=10), board) for id in ("a", "b"))
    assert row_name(key("a", team="t")) == "team/t"
    assert granted(one, NOON, 7) == 7
    assert granted(two, NOON, 7) == 3
    assert granted(Allowance(key("other", rpm=10), board), NOON, 7) == 7


def test_several_servers_divide(board):
    """Three servers have a third each, at least one."""
    allowance = Allowance(key(rpm=10, concurrency=1), board, servers=3)
    assert (allowance.rpm, allowance.concurrency) == (4, 1)


def test_key_without_limits_is_not_counted(board):
    """It costs nothing and leaves nothing behind."""
    allowance = Allowance(key(), board)
    allowance.admit(NOON, 10**9).settle(NOON, 10**9)
    assert board.own[board.row("key/k") + windows.STAMP] == 0


def test_estimate():
    """The prompt by its size, the answer by what is allowed."""
    assert estimate("openai", 4000, 100) == 1100
    assert estimate("openai", 4000, None) == 1512
    assert estimate("openai", 0, -5) == 0
    assert estimate("prompt", 4000, None) == 1000
    assert estimate("told", 25 * 10**6, None) == estimate("", 4000, None) == 0
    assert estimate("openai", 25 * 10**6, 0) == 131_072, "a picture, not six million tokens"


def test_clock_set_back_does_not_lock_anybody_out(board):
    """After the wall clock has jumped forth and back, the key can be used."""
    allowance = Allowance(key(rpm=2, tpd=100), board)
    assert granted(allowance, NOON + 86400 * 3, 5, 10) == 2
    assert granted(allowance, NOON, 5, 10) == 2


def test_limits_hold_over_processes(tmp_path):
    """Three workers that ask at once let no more in than one would."""
    big = Scoreboard.create(tmp_path / "big")
    big.assign(["key/k"], 1)
    processes = [board_processes.start("spend", big, NOON, 40, 500) for _ in range(3)]
    for process in processes:
        assert json.loads(process.stdout.readline())["ready"]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    total = sum(json.loads(process.stdout.readline())["granted"] for process in processes)
    for process in processes:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
    big.close()
    assert 15 <= total <= 20, "10,000 tokens are twenty requests; some may lose a race for the last places"


def test_nothing_leaks_after_a_thousand_random_ends(board):
    """L1: whatever way requests end, afterwards nothing is running and the whole limit can be used."""
    draw = random.Random(3)
    allowance = Allowance(key(concurrency=20, rpm=10**6, tpm=10**9), board)
    running = []
    for number in range(1000):
        grant = allowance.admit(NOON + number / 10, draw.randint(1, 500))
        if not isinstance(grant, Limited):
            running.append(grant)
        while running and (len(running) > 15 or draw.random() < 0.5):
            ended = running.pop(draw.randrange(len(running)))
            for _ in range(draw.randint(1, 3)):
                ended.settle(NOON + number / 10, draw.choice([0, draw.randint(1, 900)]))
    for grant in running:
        grant.settle(NOON + 100, 0)
    assert board.total(board.row("key/k")) == 0
    assert granted(allowance, NOON + 10**4, 30) == 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 1)), min_size=1, max_size=80), st.integers(1, 12))
def test_no_minute_has_more_than_the_limit(tmp_path_factory, steps, rpm):
    """However requests come, over two workers: within a minute of the clock never more than the limit are let in."""
    server = Scoreboard.create(tmp_path_factory.mktemp("law") / "board", rows=16, columns=4)
    server.assign(["key/k"], 1)
    boards = [Scoreboard.attach(server.path, server.claim(), rows=16, columns=4) for _ in range(2)]
    allowances = [Allowance(key(rpm=rpm), board) for board in boards]
    now, times = NOON, []
    for pause, worker in steps:
        now += pause
        if not isinstance(allowances[worker].admit(now, 0), Limited):
            times.append(now)
    for minute in {time // 60 for time in times}:
        assert sum(time // 60 == minute for time in times) <= rpm
    for board in (*boards, server):
        board.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), max_size=40))
def test_heir_has_what_the_dead_had(uses):
    """Moving one column's counts into another changes no sum, whatever minutes they were last used in."""
    columns = [memoryview(bytearray(8 * 8)).cast("q") for _ in range(3)]
    minute = 29_000_000
    for number, (step, tokens) in enumerate(uses):
        minute += step
        cells = columns[number % 3]
        windows.roll(cells, 0, minute)
        cells[windows.REQUESTS] += 1
        cells[windows.TOKENS] += tokens
        cells[windows.TOKENS_TODAY] += tokens
    before = windows.sums(columns, 0, minute)
    windows.inherit(columns[0], columns[1], 0)
    assert windows.sums([columns[0], columns[2]], 0, minute) == before
