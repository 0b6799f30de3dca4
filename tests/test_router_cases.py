"""What users of other routers have suffered, each as a test named by its id; here those that have no better place.

Every id below has a test in a C{test_router_*.py} whose name contains it (C{test_a1_...}), which a test at the end holds to;
elsewhere other catalogues have such ids, too. Of this one these have none, because they do not apply:

    ====  ==============================================================================================================
    A8    no option to read an aborted answer to its end: every engine that has an adapter takes a closed connection
    C4    nothing is ever inserted into a stream, so no heartbeat can split an event (C1 compares all bytes)
    K5    a rolling update is the control plane's: its tests replace replicas; here N2 changes tables under load
    N3    a worker has no configuration; that a bad file changes nothing is tested through the daemon (SIGHUP)
    N5    a million requests are the soak's (C{make test-all}), which has 200,000 and holds memory and gauges to a line
    ====  ==============================================================================================================
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import openai
import pytest

from llmgw.config.server import Timeouts
from llmgw.router.surface import BODY, CALLS
from llmgw.router.table import RoutedModel
from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import DONE, EVENTS, KEY, OK, Rig, idle, plain, request_bytes, stream, until

APPLY = (  # noqa: SIM905
    "A1 A2 A3 A4 A5 A6 A7 B1 B2 B3 B4 B5 C1 C2 C3 C5 C7 D1 D2 D3 D4 D5 D6 D7 D8 D10 D11 D12 E1 E3 E4 F1 F2 F3 F5 F6 G1 G3 H1 H3 "
    "I1 I2 I3 I4 I7 I8 I9 I11 J1 J2 J4 J5 J6 J8 J9 J10 K1 K2 K3 K4 K6 L1 L2 L4 L5 L6 L7 L8 L9 L10 L12 M1 M2 M4 N1 N2 N4 N8"
).split()


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


# A, B: ends that are nobody's fault but the client's or the engine's.


def test_a5_client_gone_between_tries(rig):
    """A5: a client that leaves while a second replica is being tried: that one is let go at once, a third is never asked."""
    asked, waits = [], []

    def script(talk):
        asked.append(talk.request())
        if len(asked) == 1:
            talk.reset()
        else:
            waits.append(talk.closed_within(5))

    with ScriptedEngine(script) as first, ScriptedEngine(script) as second, ScriptedEngine(script) as third:
        rig.use(first, second, third)
        with stream(rig):
            until(lambda: len(asked) == 2)
        until(lambda: waits, 6)
        assert waits[0] is not None and waits[0] < 1.0
        idle(rig)
        assert len(asked) == 2
    assert rig.log(outcome="client_gone")[-1]["retries"] == 1


@pytest.mark.parametrize("phase", ["queued", "before_first_byte", "streaming"])
def test_a7_a_cancel_is_no_error(rig, phase):
    """A7: 499 in log and metrics, by the phase it came in; no failure of the engine, however often."""

    def script(talk):
        while talk.request():
            if phase == "streaming":
                talk.send(STREAM_HEAD + chunk(EVENTS[0]))
            if talk.closed_within(5) is not None:
                return

    name = f"a7-{phase}"
    with ScriptedEngine(script) as engine:
        rig.use(engine, model=RoutedModel(name), limit=1 if phase == "queued" else None)
        series = f'llmgw_cancels_total{{phase="{phase}"}}'
        before = rig.scrape().get(series, 0)
        body = b'{"model":"%b","stream":true}' % name.encode()
        holder = stream(rig, body=body) if phase == "queued" else None
        if holder is not None:
            until(lambda: engine.requests)
        for turn in range(6):
            with stream(rig, body=body) as raw:
                if phase == "streaming":
                    raw.read_until(b'"n":0')
                elif phase == "queued":
                    until(lambda: rig.board.total(rig.board.row(f"model/{name}") + 1) == 1)
                else:
                    until(lambda turn=turn: len(engine.requests) > turn)
        assert [row["status"] for row in rig.log(6, model=name, outcome="client_gone")] == [499] * 6
        after = rig.scrape()
        assert after[series] - before == 6
        assert not after.get(f'llmgw_breaker_open{{model="{name}",replica="m/0"}}')
        assert not [message for message in rig.heard if message["type"] == "failure"]
        if holder is not None:
            holder.socket.close()
        idle(rig)


def test_b4_never_again_after_the_first_byte(rig):
    """B4: once an event has gone out, a death is told and nothing is sent again, although another replica would be free."""

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + chunk(EVENTS[0]))
        talk.reset()

    with ScriptedEngine(script) as one, ScriptedEngine(script) as two:
        rig.use(one, two)
        with stream(rig) as raw:
            said = raw.read_all()
        assert said.count(b'"n":0') == 1 and b'"error"' in said
        assert len(one.requests) + len(two.requests) == 1


# D, E: what an engine's answer is to the client.


def test_d5_an_encoding_that_nobody_asked_for(rig):
    """D5: an engine that compresses all the same: field and bytes still belong together."""
    packed = gzip.compress(OK)

    def script(talk):
        while talk.request():
            talk.answer(packed, fields=b"content-type: application/json\r\ncontent-encoding: gzip\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        status, head, body = rig.post()
        assert (status, head["content-encoding"], gzip.decompress(body)) == (200, "gzip", OK)


def test_d5_a_stream_in_an_encoding_that_nobody_asked_for(rig):
    """D5: the same for a stream: nothing of it is held back, and nothing is written into it when it breaks off."""
    packed = gzip.compress(b"".join(EVENTS))

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD[:-2] + b"content-encoding: gzip\r\n\r\n" + chunk(packed[:20]))
        go.wait(10)
        talk.send(chunk(packed[20:-1]))

    go = threading.Event()
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            raw.read_until(packed[:20])
            go.set()
            assert raw.read_all().endswith(packed[20:-1] + b"\r\n")


@pytest.mark.parametrize("kind", ["audio/mpeg", "image/png", "text/event-stream; charset=utf-8", "application/x-ndjson"])
def test_d7_content_type_is_kept(rig, kind):
    """D7: whatever an answer is, it says so; bytes that are no text stay as they are."""
    body = bytes(range(256)) if "event" not in kind else EVENTS[0]

    def script(talk):
        while talk.request():
            talk.answer(body, fields=b"Content-Type: %b\r\n" % kind.encode())

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        status, head, said = rig.post("/v1/audio/speech")
        assert (status, head["content-type"], said) == (200, kind, body)


@pytest.mark.parametrize("head", [b"204 No Content\r\n", b"304 Not Modified\r\ncontent-length: 9\r\n", b"304 Not Modified\r\n"])
def test_d8_an_answer_without_a_body_ends_with_its_head(rig, head):
    """D8: a 204 or 304 has no framing and not a byte of body, so that the next answer on the connection is read right."""

    def script(talk):
        talk.request()
        talk.send(b"HTTP/1.1 " + head + b"\r\n")
        while talk.request():
            talk.answer(OK)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            raw.send(request_bytes())
            first = raw.read_until(b"\r\n\r\n")
            assert first.split()[1] == head.split()[0] and b"transfer-encoding" not in first.lower()
            raw.send(request_bytes())
            assert raw.answer()[::2] == (200, OK)


def test_e4_a_burst_of_connections(rig):
    """E4: a thousand requests at once at one engine get a connection each; idle ones are gone when their time is over."""
    count, go = 1000, threading.Event()

    def script(talk):
        while talk.request():
            go.wait(60)
            talk.answer(OK)

    clients = []
    try:
        with ScriptedEngine(script) as engine:
            rig.use(engine, timeouts=Timeouts(engine_keep_alive=0.5))
            clients += [stream(rig, body=b'{"model":"m"}') for _ in range(count)]
            until(lambda: len(engine.requests) == count, 60)
            go.set()
            assert Counter(client.answer(20)[0] for client in clients) == {200: count}
            until(lambda: engine.open <= 1, 10, "idle connections closed")
            assert rig.post()[0] == 200
    finally:
        for client in clients:
            client.socket.close()


# F, G: what is too large or too slow.


def test_f5_an_error_of_a_hundred_megabytes(rig):
    """F5: it is passed on piece by piece as the client takes it; others are answered meanwhile, and memory stays."""
    block = b"x" * 2**20

    def script(talk):
        while request := talk.request():
            if b"huge" not in request.body:
                talk.answer(OK)
                continue
            talk.send(b"HTTP/1.1 500 Oops\r\ncontent-length: %d\r\n\r\n" % (100 * len(block)))
            for _ in range(100):
                if not talk.send(block):
                    return

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        rig.post()
        before = rig.rss()
        with rig.client() as raw:
            raw.send(request_bytes(b'{"model":"m","huge":1}'))
            assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 500 ")
            size = len(raw.seen)
            for _ in range(10):
                began = time.monotonic()
                assert rig.post()[0] == 200
                assert time.monotonic() - began < 0.5
            while size < 100 * len(block):
                size += len(raw.socket.recv(2**20))
            assert size == 100 * len(block)
        assert rig.rss() - before < 8 * 2**20


def test_g3_an_access_log_that_hangs(rig):
    """G3: the log stands on a disk that does not answer, as a pipe that nobody reads: requests go on, in the end the log, too."""
    pipe = rig.folder / "pipe"
    os.mkfifo(pipe)
    with ScriptedEngine(plain) as engine:
        rig.use(engine, access_log=str(pipe))
        beats = len([message for message in rig.heard if message["type"] == "beat"])
        began = time.monotonic()
        assert [rig.post()[0] for _ in range(20)] == [200] * 20
        until(lambda: len([m for m in rig.heard if m["type"] == "beat"]) > beats + 2, 6, "three flushes")
        assert rig.post()[0] == 200
        rig.use(engine)
        assert rig.post(headers={"X-Request-Id": "after"})[0] == 200
        assert time.monotonic() - began < 6
        with open(os.open(pipe, os.O_RDONLY)) as reader:
            # Rows of earlier tests may stand before.
            assert next(row for row in map(json.loads, reader) if row["status"] == 200)
            assert rig.log(client_id="after")


def test_g3_an_access_log_that_cannot_be_written(rig):
    """G3: a log on a full disk, or in a folder that cannot be, costs no request anything."""
    with ScriptedEngine(plain) as engine:
        for path in ("/dev/full", "/proc/nowhere/access.jsonl"):
            rig.use(engine, access_log=path)
            assert [rig.post()[0] for _ in range(20)] == [200] * 20
            beats = len([message for message in rig.heard if message["type"] == "beat"])
            until(lambda beats=beats: len([m for m in rig.heard if m["type"] == "beat"]) > beats + 1, 4, "two more flushes")
            assert rig.post()[0] == 200
        rig.use(engine)
        rig.post()
        assert until(lambda: [row for row in rig.log() if row.get("dropped")]), "the next line that can be written says how many"


# I, J, K: which replica.


@pytest.mark.parametrize("path", sorted(path for path, call in CALLS.items() if call.model is BODY and path.startswith(b"/v1/")))
def test_i1_no_hotspot_through_any_call(rig, path):
    """I1: requests at once with one long beginning in common are spread, whichever call they come through."""
    engines, count, go = 4, 40, threading.Event()

    def script(talk):
        while talk.request():
            go.wait(10)
            talk.answer(OK)

    long = "x" * 20_000
    body = {"model": "m", "messages": [{"role": "user", "content": long}], "prompt": long, "input": long}
    data, clients, running = json.dumps(body).encode(), [], [ScriptedEngine(script) for _ in range(engines)]
    for engine in running:
        engine.__enter__()
    try:
        rig.use(*running, model=RoutedModel("m", policy="least_cost"))
        clients += [stream(rig, body=data, path=path) for _ in range(count)]
        until(lambda: sum(len(engine.requests) for engine in running) == count, 10)
        shares = [len(engine.requests) for engine in running]
        go.set()
        assert all(client.answer()[0] == 200 for client in clients)
        assert max(shares) * engines / count < 2 and min(shares) > 0, shares
    finally:
        go.set()
        for client in clients:
            client.socket.close()
        for engine in running:
            engine.__exit__(None, None, None)


def test_j5_retries_do_not_multiply(rig):
    """J5: a client that tries again against a fleet that fails: what reaches the engines is bounded, not multiplied."""

    def slow_death(talk):
        talk.request()
        time.sleep(0.05)
        talk.reset()

    engines = [ScriptedEngine(slow_death) for _ in range(6)]
    for engine in engines:
        engine.__enter__()
    try:
        rig.use(*engines, model=RoutedModel("m", policy="least_inflight"))
        count = 60
        clients = [stream(rig, body=b'{"model":"m"}') for _ in range(count)]
        answers = Counter(client.answer(10)[0] for client in clients)
        tries = sum(len(engine.requests) for engine in engines)
        for client in clients:
            client.socket.close()
        assert set(answers) <= {502, 503} and sum(answers.values()) == count
        assert tries <= count * 1.2 + 2 * 3, "a fifth of the live requests, and three at any time, may be tried twice more"
        client = openai.OpenAI(base_url=f"{rig.url}/v1", api_key=KEY, max_retries=3, timeout=20)
        client._calculate_retry_timeout = lambda *args: 0.01
        before = sum(len(engine.requests) for engine in engines)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=[])
        assert sum(len(engine.requests) for engine in engines) - before <= 4 * 3
    finally:
        for engine in engines:
            engine.__exit__(None, None, None)


def test_j6_models_without_an_engine(rig):
    """J6: the list of models asks no engine, so a dead one does not matter."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dead = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    rig.use(dead)
    assert rig.post()[0] == 502
    assert {model["id"] for model in json.loads(rig.get("/v1/models")[2])["data"]} >= {"m", "alias"}


def test_k4_replica_at_another_port(rig):
    """K4: a replica that has moved is asked at its new place only, while what runs at the old one goes on."""
    go = threading.Event()

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + chunk(EVENTS[0]))
        go.wait(10)
        talk.send(chunk(DONE) + b"0\r\n\r\n")

    with ScriptedEngine(script) as old, ScriptedEngine(plain) as new:
        rig.use(old)
        with stream(rig) as raw:
            raw.read_until(b'"n":0')
            rig.use(new)
            assert [rig.post()[0] for _ in range(5)] == [200] * 5
            assert (len(old.requests), len(new.requests)) == (1, 5)
            go.set()
            raw.read_until(DONE)
        idle(rig)


def test_every_case_has_its_test():
    """The ids above, and nothing else of the catalogue's letters."""
    names = "\n".join(
        name
        for path in Path(__file__).parent.glob("test_router_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    )
    missing = [id for id in APPLY if not re.search(rf"^test_(?:[a-n]\d+_)*{id.lower()}_", names, re.M)]
    assert not missing
