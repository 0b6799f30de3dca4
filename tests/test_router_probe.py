"""Probes of static endpoints, against real sockets on a loop of their own; and who a client is behind proxies."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.router.breaker import OPEN_FOR
from llmgw.router.probe import FAILURES, Prober
from llmgw.router.proxies import Proxies
from llmgw.router.table import endpoint
from llmgw.router.upstream import Upstream
from llmgw.testing.scripted_engine import ScriptedEngine


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


class World:
    """One endpoint, its prober, and rounds on demand."""

    def __init__(self, loop, engine, static=True):
        self.loop, self.prober, self.now = loop, Prober(), 1000.0
        self.upstream = Upstream(loop, endpoint("static:m/0", engine.url, model="m", key="k", static=static), 4.0, [0, 0])

    def round(self, wait=0.05):
        changed = self.prober.round([self.upstream], self.now)
        self.now += 5
        self.loop.run_until_complete(asyncio.sleep(wait))
        return [to for _, to in changed]

    def end(self):
        self.prober.round([], self.now)
        self.upstream.close()


def test_dead_endpoint_is_left_alone_and_used_again(loop):
    """K1: three probes without an answer open the breaker, within 15 s; one answer closes it."""
    state = {"alive": False}

    def script(talk):
        while request := talk.request():
            if not state["alive"]:
                talk.closed_within(1)
                return
            assert request.line == b"GET /v1/models HTTP/1.1"
            assert request.header(b"authorization") == b"Bearer k"
            talk.answer(b"{}", b"404 Not Found")

    with ScriptedEngine(script) as engine:
        world = World(loop, engine)
        assert [world.round() for _ in range(FAILURES + 1)] == [[]] * FAILURES + [["open"]]
        assert world.upstream.breaker.blocked_until > world.now
        assert world.now - 5 - 1000 <= 15
        state["alive"] = True
        world.round()
        assert world.round() == ["closed"]
        assert not world.upstream.breaker.blocked_until
        world.end()


def test_broken_endpoint_stays_open(loop):
    """Answers of 5xx are none; while they go on the breaker stays open and says so once."""

    def script(talk):
        while talk.request():
            talk.answer(b"{}", b"500 Oops")

    with ScriptedEngine(script) as engine:
        world = World(loop, engine)
        changes = [world.round() for _ in range(8)]
        assert sum(changes, []) == ["open"]
        assert world.upstream.breaker.blocked_until > world.now + OPEN_FOR - 10
        world.end()


def test_j8_busy_endpoint_is_not_left_alone(loop):
    """J8: an endpoint that is late with probes while answers flow from it is busy, not dead."""
    with ScriptedEngine(lambda talk: talk.closed_within(2)) as engine:
        world = World(loop, engine)
        world.upstream.flowing = 1
        assert [world.round(0.01) for _ in range(6)] == [[]] * 6
        assert not world.upstream.breaker.blocked_until
        world.end()


def test_replicas_of_ours_are_not_probed(loop):
    """Endpoints with an agent are the agent's to probe."""
    with ScriptedEngine(lambda talk: talk.request()) as engine:
        world = World(loop, engine, static=False)
        world.round()
        assert not engine.conversations
        world.end()


def test_k3_a_name_is_resolved_for_each_connection(loop, monkeypatch):
    """K3: when an endpoint's name leads elsewhere, the next connection goes there; nothing is kept of what it was."""

    def script(talk):
        while talk.request():
            talk.answer(b"{}")

    with ScriptedEngine(script) as old, ScriptedEngine(script) as new:
        now = [old]

        async def resolve(host, port, **_):
            assert host == "engine.example"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", now[0].port))]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        world = World(loop, old)
        world.upstream.config = replace(world.upstream.config, host="engine.example")
        world.round()
        now[0] = new
        world.round()
        world.end()
        assert (len(old.requests), len(new.requests)) == (1, 1)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", b"1.2.3.4", "1.2.3.4"),
        ("10.0.0.1", b"6.6.6.6, 1.2.3.4", "1.2.3.4"),
        ("10.0.0.1", b"6.6.6.6, 1.2.3.4, 10.0.0.9", "1.2.3.4"),
        ("9.9.9.9", b"1.2.3.4", "9.9.9.9"),
        ("10.0.0.1", b"", "10.0.0.1"),
        ("::1", b"2001:db8::7", "2001:db8::7"),
        ("10.0.0.1", b"10.0.0.2", "10.0.0.2"),
    ],
)
def test_client_behind_proxies(peer, forwarded, client):
    """The last address that no trusted proxy has; from others nothing is believed."""
    assert Proxies(["10.0.0.0/8", "::1"]).client(peer, forwarded) == client


@given(st.binary(max_size=100))
def test_any_forwarded_for(forwarded):
    """Whatever stands in the field, there is an answer, and it is short."""
    assert len(Proxies(["10.0.0.1"]).client("10.0.0.1", forwarded)) <= 64
