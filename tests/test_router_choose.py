"""Policies: which endpoint, and why."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import prefix
from llmgw.router.breaker import FAILURES, OPEN_FOR
from llmgw.router.choose import POLICIES, PRESSED_FOR, Candidate, Group
from llmgw.router.scoreboard import Scoreboard


class Rig:
    """Some endpoints, one worker."""

    def __init__(self, path, count=4, limit=0, shares=()):
        self.server = Scoreboard.create(path / "board", rows=512, columns=4)
        self.rows = list(self.server.assign([f"endpoint/{n:03}" for n in range(count)], 1).values())
        self.board = Scoreboard.attach(path / "board", self.server.claim(), rows=512, columns=4)
        self.endpoints = [Candidate(str(n), row, limit, shares[n] if shares else 1) for n, row in enumerate(self.rows)]
        self.random = random.Random(7)

    def group(self, policy="least_cost"):
        return Group(self.board, self.endpoints, policy, self.random.random)

    def load(self, *loads):
        for endpoint, load in zip(self.endpoints, loads, strict=True):
            for _ in range(load):
                self.board.enter(endpoint.row, 0)

    def send(self, group, count, **values):
        """Choose and count so many requests, none of which ends."""
        chosen = Counter()
        for _ in range(count):
            found, _ = group.choose(0.0, **values)
            self.board.enter(found.row, 0)
            chosen[found.id] += 1
        return chosen

    def close(self):
        self.board.close()
        self.server.close()


@pytest.fixture
def make(tmp_path):
    rigs = []

    def make(*args, **values):
        rigs.append(Rig(tmp_path, *args, **values))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("policy", ["least_inflight", "least_cost"])
def test_i8_simultaneous_arrivals_spread(make, policy):
    """I8: load is counted at dispatch, so that 100 arrivals at 4 idle endpoints are 25 each."""
    rig = make(4)
    assert set(rig.send(rig.group(policy), 100).values()) == {25}


def test_i7_requests_one_at_a_time_spread(make):
    """I7: prompts that share nothing and never overlap in time do not all go to the same endpoint."""
    rig = make(4)
    group = rig.group()
    chosen = Counter(group.choose(0.0)[0].id for _ in range(400))
    assert max(chosen.values()) <= 110 and min(chosen.values()) >= 90


def test_prefix_draws_until_it_is_too_busy(make):
    """An endpoint that holds 10 of 12 blocks gets the request until it has 7 more in flight than the least loaded one."""
    rig = make(4)
    group = rig.group()
    rig.load(1, 7, 1, 2)
    found, why = group.choose(0.0, {1: 10}, 12)
    assert (found.id, why) == ("1", "prefix")
    rig.board.enter(rig.rows[1], 0)
    rig.board.enter(rig.rows[1], 0)
    found, why = group.choose(0.0, {1: 10}, 12)
    assert found.id in "02" and why == "spill"


def test_i1_one_prefix_for_all_does_not_make_a_hotspot(make):
    """I1: 480 requests at once with one shared prefix end up nearly even over 8 endpoints."""
    rig = make(8)
    group, held = rig.group(), {}
    for _ in range(480):
        found, _ = group.choose(0.0, held, 20)
        rig.board.enter(found.row, 0)
        held = {int(found.id): 20}
    loads = rig.board.loads(rig.rows)
    assert max(loads) - min(loads) <= 11
    assert max(loads) * 8 / 480 < 1.2


def test_prefix_that_many_share_finds_a_second_home(make):
    """One at a time, so that nothing is ever busy: an endpoint that has had more than its share draws a short prefix no more."""
    rig = make(4)
    group, held, chosen = rig.group(), {}, Counter()
    for _ in range(400):
        found, _ = group.choose(0.0, held, 12)
        chosen[found.id] += 1
        held[int(found.id)] = 12
    assert max(chosen.values()) <= 1.25 * 100
    assert len(held) == 4


def test_hot_endpoint_keeps_its_sessions_and_long_prompts(make):
    """What would have to be prefilled anew is worth more than an even count, and a session is what the caller asked for."""
    rig = make(4)
    group = rig.group()
    assert {group.choose(0.0, {1: 40}, 40)[0].id for _ in range(100)} == {"1"}
    assert group.choose(0.0, session=1)[1] == "session"
    assert group.choose(0.0, {1: 12}, 12)[1] == "spill"


def test_session_stays_where_it_is(make):
    """A session's endpoint is kept over a few requests more than elsewhere, even for a prompt of less than a block."""
    rig = make(4)
    rig.load(3, 0, 0, 0)
    group = rig.group()
    found, why = group.choose(0.0, session=0)
    assert (found.id, why) == ("0", "session")
    rig.load(3, 0, 0, 0)
    assert group.choose(0.0, session=0)[1] == "spill"


def test_i2_sessions_are_sticky_under_light_load(make):
    """I2: 200 sessions of 10 turns: 95 % of the turns go to where the session was; a lost endpoint moves only its own."""
    rig = make(8)
    group, homes, stayed = rig.group(), {}, 0
    order = [session for session in range(200) for _ in range(10)]
    rig.random.shuffle(order)
    running = []
    for session in order:
        home = homes.get(session)
        found, _ = group.choose(0.0, session=home)
        stayed += home is None or int(found.id) == home
        homes[session] = int(found.id)
        rig.board.enter(found.row, 0)
        running.append(found)
        if len(running) > 12:
            rig.board.leave(running.pop(rig.random.randrange(len(running))).row)
    assert stayed >= 0.95 * len(order)
    rig.endpoints[3].breaker.blocked_until = 100.0
    for session, home in homes.items():
        found, _ = group.choose(0.0, session=home)
        assert found.id == str(home) or home == 3


def test_i4_round_robin_counts_for_each_model(make):
    """I4: two models that are asked in turn are each spread evenly."""
    rig = make(4)
    one, two = rig.group("round_robin"), rig.group("round_robin")
    chosen = Counter()
    for _ in range(40):
        chosen["one", one.choose(0.0)[0].id] += 1
        chosen["two", two.choose(0.0)[0].id] += 1
    assert set(chosen.values()) == {10}


def test_round_robin_skips_what_may_not_be_taken(make):
    """An endpoint left out gives its turn to the next ones alike."""
    rig = make(3)
    group = rig.group("round_robin")
    out = rig.endpoints[1]
    chosen = Counter(group.choose(0.0, excluded=[out])[0].id for _ in range(40))
    assert set(chosen) == {"0", "2"}


def test_weighted_follows_shares(make):
    """Shares of 1, 3 and 0 are a quarter, three quarters and nothing."""
    rig = make(3, shares=(1, 3, 0))
    group = rig.group("weighted")
    chosen = Counter(group.choose(0.0)[0].id for _ in range(4000))
    assert chosen["2"] == 0
    assert 0.21 < chosen["0"] / 4000 < 0.29


@pytest.mark.parametrize("policy", POLICIES)
def test_full_open_and_excluded_endpoints_are_never_chosen(make, policy):
    """Every policy keeps to limits, breakers and exclusions, and says which of them left nothing."""
    rig = make(3, limit=2)
    group = rig.group(policy)
    rig.load(2, 0, 0)
    rig.endpoints[1].breaker.blocked_until = 50.0
    assert {group.choose(1.0)[0].id for _ in range(20)} == {"2"}
    assert group.choose(1.0, excluded=[rig.endpoints[2]]) == (None, "full")
    rig.load(0, 0, 2)
    assert group.choose(1.0) == (None, "full")
    rig.endpoints[0].breaker.blocked_until = rig.endpoints[2].breaker.blocked_until = 50.0
    assert group.choose(1.0) == (None, "open")
    assert group.choose(1.0, excluded=rig.endpoints) == (None, "none")


def test_state_says_whether_there_is_room(make):
    """What waiting requests look at: room, full or open."""
    rig = make(2, limit=1)
    group = rig.group()
    assert group.state(0.0) == "room"
    rig.load(1, 1)
    assert group.state(0.0) == "full"
    for endpoint in rig.endpoints:
        endpoint.breaker.blocked_until = 9.0
    assert group.state(0.0) == "open"
    assert Group(rig.board, [], "least_cost", rig.random.random).state(0.0) == "none"


def test_probe_is_told(make):
    """After the open time the endpoint is tried again, once, and the word says so."""
    rig = make(2)
    breaker = rig.endpoints[0].breaker
    for _ in range(FAILURES):
        breaker.failed(10.0)
    group = rig.group("round_robin")
    rig.endpoints[1].breaker.blocked_until = 1000.0
    assert group.choose(10.0 + OPEN_FOR - 1) == (None, "open")
    found, why = group.choose(10.0 + OPEN_FOR)
    assert (found.id, why) == ("0", "probe")
    breaker.trying(10.0 + OPEN_FOR)
    assert group.choose(10.0 + OPEN_FOR) == (None, "open")


def test_i3_endpoint_that_turns_away_quickly_draws_nothing(make):
    """I3: an endpoint that answers 503 at once is always the least loaded; others are preferred for a second."""
    rig = make(2)
    group = rig.group("least_inflight")
    rig.load(0, 3)
    assert group.choose(0.0)[0].id == "0"
    rig.endpoints[0].press(0.0)
    assert group.choose(0.5)[0].id == "1"
    assert group.choose(PRESSED_FOR)[0].id == "0"
    rig.endpoints[1].press(0.0)
    assert group.choose(0.5)[0].id == "0", "if all are pressed, load decides"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_least_cost_is_least(tmp_path_factory, data):
    """Whatever is held and in flight: no endpoint is cheaper than the one chosen."""
    rig = Rig(tmp_path_factory.mktemp("law"), count=6)
    loads = data.draw(st.lists(st.integers(0, 8), min_size=6, max_size=6))
    blocks = data.draw(st.integers(0, 30))
    held = data.draw(st.dictionaries(st.integers(0, 5), st.integers(1, max(1, blocks)), max_size=6)) if blocks else {}
    rig.load(*loads)
    found, _ = rig.group().choose(0.0, held, blocks)
    above = [load - min(loads) for load in loads]
    costs = [blocks - held.get(n, 0) + 0.8 * above[n] * (1 + above[n] / 8) for n in range(6)]
    assert costs[int(found.id)] == pytest.approx(min(costs))
    rig.close()


def test_little_sharing_does_not_lose_to_round_robin():
    """Where hardly anything is shared, least cost hits no less than round robin and spreads no worse."""
    trace = prefix.little_sharing(500)
    plain, ours = (prefix.replay(trace, policy, 8, 2, 3000, 1) for policy in ("round_robin", "least_cost"))
    assert ours["hit"] >= plain["hit"]
    assert ours["spread"] <= plain["spread"]
    assert ours["hottest_requests"] <= 1.15
