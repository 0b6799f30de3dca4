"""Workers that are told to stop, as real processes: who hears of it when, and how what still runs ends; case N4."""

from __future__ import annotations

import os
import signal
import socket
import time

from tests.router_rig import RawClient, until
from tests.test_router_workers import Parent, alive, all_end_well, ask, cleaned, engine, state, streams  # noqa: F401


def ready(port):
    """What C{/ready} says on a new connection."""
    client = RawClient(port)
    try:
        client.send(b"GET /ready HTTP/1.1\r\nHost: h\r\n\r\n")
        return client.answer()[0]
    finally:
        client.socket.close()


def test_n4_not_ready_at_once_while_requests_are_still_taken(state, engine):  # noqa: F811
    """SIGTERM: health checks fail before any request does, so that nobody is sent to a closed door."""
    parent = Parent(state, engine, count=2)
    with cleaned(parent):
        running = streams(parent.port, 20)
        assert {ready(parent.port) for _ in range(20)} == {200}
        parent.end(signal.SIGTERM)
        until(lambda: {ready(parent.port) for _ in range(20)} == {503}, 2, "no worker is ready")
        told = time.monotonic()
        while time.monotonic() < told + 3:
            assert (ready(parent.port), ask(parent.port)) == (503, 200)
        engine.let_go.set()
        assert all_end_well(running)


def test_n4_interrupted_worker_stops_accepting_and_finishes(state, engine):  # noqa: F811
    """SIGINT: no new connections, who is still there hears that it is not ready, streams end well, then the process ends."""
    parent = Parent(state, engine, count=1)
    with cleaned(parent):
        parent.end(signal.SIGKILL)
        running, other = streams(parent.port, 50), RawClient(parent.port)
        os.kill(parent.workers[0], signal.SIGINT)
        until(lambda: socket.socket().connect_ex(("127.0.0.1", parent.port)), 3, "connections refused")
        other.send(b"GET /ready HTTP/1.1\r\nHost: h\r\n\r\n")
        assert other.answer()[0] == 503
        engine.let_go.set()
        assert all_end_well(running)
        until(lambda: not alive(parent.workers[0]), 10)


def test_n4_streams_that_do_not_end_are_cut_after_the_drain_time(state, engine):  # noqa: F811
    """A worker that has to go ends what still runs with an error event when timeouts.drain is over (here 2 s)."""
    parent = Parent(state, engine, count=1, drain=2.0)
    with cleaned(parent):
        running = streams(parent.port, 1)
        os.kill(parent.workers[0], signal.SIGINT)
        rest = running[0].read_all(12)
        assert b"being stopped" in rest
        assert b"[DONE]" not in rest
        running[0].socket.close()
