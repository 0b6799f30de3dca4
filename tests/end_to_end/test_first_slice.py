"""What an operator relies on, through two real daemons, real certificates and the real link."""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.fleet import fake_model, processes, until
from tests.end_to_end.load import Load

SLOW_STREAM = ("--events", "60", "--interval", "0.05")


@pytest.fixture
def serving(fleet):
    """One server, one agent, one ready replica of model m with slow streams."""
    fleet.write_server(fake_model("m", 1, *SLOW_STREAM))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    return fleet


def test_a_model_is_placed_started_and_served(serving):
    """The whole way from the catalog to an answer."""
    status, body = serving.ask()
    assert status == 200
    assert body["choices"][0]["message"]["content"]
    state = serving.status()
    assert state["server"]["role"] == "leader"
    assert state["nodes"][0] | {"name": "n1", "state": "ready"} == state["nodes"][0]
    assert state["models"][0]["ready"] == 1


def test_an_agent_killed_in_mid_stream_adopts_its_engine(serving):
    """kill -9 of the agent: the stream ends whole, the same engine pid is adopted, its attempt stays."""
    before = serving.ready()[0]
    stream = serving.stream(tokens=60)
    until(lambda: len(stream.pieces) > 5, "the stream has begun")
    serving.end("n1", signal.SIGKILL)
    serving.start_agent("n1")
    after = until(lambda: (s := serving.ready()[0]) and serving.status()["nodes"][0]["state"] == "ready" and s, "adopted")
    stream.whole()
    assert (after["pid"], after["attempt"]) == (before["pid"], before["attempt"])


def test_a_killed_engine_is_placed_again_and_the_reason_is_shown(serving):
    """SIGKILL of the engine: a new attempt serves, and status tells why the first ended."""
    before = serving.ready()[0]
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: serving.shards()[0]["attempt"] > before["attempt"] and serving.ready(seconds=30), "a new attempt", 40)
    assert serving.ask()[0] == 200
    events = serving.llmgw("events")
    assert "signal 9" in events or "SIGKILL" in events


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_streams_outlive_their_server(serving, number):
    """20 streams while the server is ended and started again: none cut, no connection refused, no engine restarted."""
    before = serving.ready()[0]
    streams = [serving.stream(tokens=60) for _ in range(20)]
    until(lambda: all(len(stream.pieces) > 3 for stream in streams), "streams have begun")
    load = Load(serving, clients=2)  # each request and stream of it is a new connection
    serving.end("server", number)
    assert serving.ask()[0] == 200
    serving.start_server()
    for _ in range(20):
        assert serving.ask()[0] == 200
    load.end()
    for stream in streams:
        stream.whole()
    after = serving.ready()[0]
    assert (after["pid"], after["attempt"]) == (before["pid"], before["attempt"])


def test_a_lost_store_stops_nothing(serving):
    """The database deleted: the new, empty store adopts the running engine, which keeps its pid."""
    before = serving.ready()[0]
    serving.end("server", signal.SIGKILL)
    for path in (serving.folder / "state").glob("llmgw.db*"):
        path.unlink()
    serving.start_server()
    after = serving.ready(seconds=30)[0]
    assert after["pid"] == before["pid"]
    assert serving.ask()[0] == 200


def test_a_stopped_node_is_unreachable_then_lost_then_back(serving):
    """SIGSTOP of everything on the node: the states follow, explain says why nothing can run; SIGCONT serves again."""
    before = serving.ready()[0]
    pids = [serving.running["n1"].pid, *processes("LLMGW_SHARD")]
    ours = [pid for pid in pids if pid in processes(str(serving.folder))]
    for pid in ours:
        os.kill(pid, signal.SIGSTOP)
    try:
        node = lambda: serving.status()["nodes"][0]["state"]  # noqa: E731
        until(lambda: node() == "unreachable", "unreachable", 15)
        until(lambda: node() == "lost", "lost", 25)
        said = serving.llmgw("explain", "m", code=None)
        assert "0/1 nodes can run this" in said and "n1  lost" in said
    finally:
        for pid in ours:
            os.kill(pid, signal.SIGCONT)
    until(lambda: node() == "ready" and serving.ask()[0] == 200, "served again", 30)
    assert serving.ready()[0]["pid"] == before["pid"]


@pytest.mark.parametrize("name", ["server", "n1"])
def test_sigterm_ends_a_daemon_in_two_seconds(serving, name):
    """With the link idle."""
    serving.ends_in_time(name)


@pytest.mark.parametrize(("name", "stopped"), [("server", "n1"), ("n1", "server")])
def test_sigterm_ends_a_daemon_whose_peer_is_stopped(serving, name, stopped):
    """SIGSTOP of the peer: no close is ever answered, and still the daemon ends in time."""
    peer = serving.running[stopped]
    peer.send_signal(signal.SIGSTOP)
    serving.ends_in_time(name)
