"""Streams through a real worker against an engine that behaves byte for byte as told; cases C, H1, M."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.config.server import Timeouts
from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import DONE, EVENTS, Rig, dechunk, idle, request_bytes, stream, until


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


TEXT = (
    'data: {"c":"🦊 日本語"}\n\n: comment\n\nevent: x\r\nid: 7\r\ndata: a\r\ndata: b\r\n\r\n'
    + 'data: {"c":"é"}\n\n' * 3
    + "data: [DONE]\n\n"
).encode()


def test_c1_one_byte_at_a_time(rig):
    """C1: emoji, both line ends, comments and fields, one byte for each chunk: the same bytes come out."""

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD)
        for number in range(len(TEXT)):
            talk.send(chunk(TEXT[number : number + 1]))
        talk.send(b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            assert raw.answer()[2] == TEXT


def test_c1_an_event_whose_end_comes_alone(rig):
    """C1: the blank line that ends an event may be a chunk and a segment of its own, which looks like a whole event."""
    head, ends = b'data: {"n":1}', [b"\n\n", b"\n"]

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + chunk(EVENTS[0]))
        time.sleep(0.02)
        for end in ends:
            for piece in (head, *([b"\n"] if end == b"\n" else []), end):
                talk.send(chunk(piece))
                time.sleep(0.02)
        talk.send(b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            assert raw.answer()[2] == EVENTS[0] + (head + b"\n\n") * 2


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_c1_any_split(rig, data):
    """C1: however the stream is cut into chunks and segments, the same bytes come out, and each write ends at an event."""
    cuts = sorted(data.draw(st.lists(st.integers(1, len(TEXT) - 1), max_size=8)))
    pieces = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True) if a < b]
    wire = STREAM_HEAD + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    wire_cuts = sorted(data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=6)))
    segments = [wire[a:b] for a, b in zip([0, *wire_cuts], [*wire_cuts, len(wire)], strict=True) if a < b]

    def script(talk):
        talk.request()
        for segment in segments:
            talk.send(segment)
            time.sleep(0.001)
        talk.closed_within(2)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            assert raw.answer()[2] == TEXT


def test_c2_events_leave_at_once(rig):
    """C2: an event does not wait for the next one."""
    waits = []

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD)
        for event in EVENTS:
            sent.append(time.monotonic())
            talk.send(chunk(event))
            until(lambda: len(waits) == len(sent))
        talk.send(b"0\r\n\r\n")

    sent = []
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            for event in EVENTS:
                raw.read_until(event)
                waits.append(time.monotonic() - sent[-1])
            raw.read_until(b"0\r\n\r\n")
    assert sorted(waits)[len(waits) // 2] < 0.05


def test_c3_a_thousand_events_in_one_segment(rig):
    """C3: all arrive."""
    events = [b'data: {"n":%d}\n\n' % number for number in range(1000)]

    def script(talk):
        talk.request()
        talk.stream(*events)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            assert raw.answer()[2] == b"".join(events)


def test_c5_an_event_of_ten_megabytes(rig):
    """C5: it goes through whole, and no more than a mebibyte of it is kept until its end comes."""
    event = b"data: " + b"x" * (10 * 2**20) + b"\n\n"
    half, go = len(event) // 200_000 * 100_000, threading.Event()

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD)
        for start in range(0, len(event), 100_000):
            if start == half:
                go.wait(10)
            talk.send(chunk(event[start : start + 100_000]))
        talk.send(chunk(EVENTS[0]) + b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            while len(raw.seen) < half - 2 * 2**20:
                assert raw.readable(10)
                raw.seen += raw.socket.recv(2**20)
            go.set()
            assert raw.answer(20)[2] == event + EVENTS[0]


def test_c7_anthropic_stream_unchanged(rig):
    """C7: an Anthropic stream, which has no [DONE], goes through byte for byte."""
    text = b'event: message_start\ndata: {"type":"message_start"}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'

    def script(talk):
        talk.request()
        talk.stream(text)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig, path=b"/v1/messages?beta=true") as raw:
            assert raw.answer()[2] == text
        assert engine.requests[0].line == b"POST /v1/messages?beta=true HTTP/1.1"


@pytest.mark.parametrize("framing", ["length", "close"])
def test_streams_framed_otherwise(rig, framing):
    """An event stream with a length, or one that ends with its connection, reaches the client whole."""
    body = b"".join(EVENTS) + DONE

    def script(talk):
        talk.request()
        field = b"content-length: %d\r\n" % len(body) if framing == "length" else b"connection: close\r\n"
        talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + field + b"\r\n" + body)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            assert raw.answer()[2] == body


def test_http_1_0_client(rig):
    """A client of HTTP/1.0 gets no chunks; its answer ends with the connection."""

    def script(talk):
        talk.request()
        talk.stream(*EVENTS, DONE)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            raw.send(request_bytes().replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, body = raw.read_all().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body == b"".join(EVENTS) + DONE


def test_h1_slow_reader(rig):
    """H1: an engine offers 100 MB to a client that does not read: bounded memory, others go on, the engine is held back."""
    sent = [0]
    block = chunk(b"data: " + b"x" * 65_000 + b"\n\n")

    def script(talk):
        request = talk.request()
        if b"slow" not in request.body:
            talk.stream(*EVENTS, DONE)
            return
        talk.send(STREAM_HEAD)
        while sent[0] < 100_000_000 and talk.send(block):
            sent[0] += len(block)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        before = rig.rss()
        with stream(rig, body=b'{"model":"m","stream":true,"slow":1}') as slow:
            slow.read_until(b"data: x")
            for _ in range(20):
                with stream(rig) as raw:
                    assert raw.answer()[2] == b"".join(EVENTS) + DONE
            assert sent[0] < 20_000_000
            assert rig.rss() - before < 4 * 2**20
    idle(rig)


def test_m2_silence_in_mid_stream(rig):
    """M2: a stream that falls silent ends with an error event, and the engine's connection is closed."""
    closed = []

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + chunk(EVENTS[0]))
        closed.append(talk.closed_within(5))

    with ScriptedEngine(script) as engine:
        rig.use(engine, timeouts=Timeouts(idle=0.5))
        with stream(rig) as raw:
            raw.read_until(b"\r\n\r\n")
            body, ended = dechunk(raw.read_all())
        until(lambda: closed)
    assert not ended
    assert b"timeouts.idle" in body
    assert closed[0] is not None
    idle(rig)
    assert rig.log(outcome="timeout")


def test_m1_a_long_prefill_passes(rig):
    """M1: what may be slow is only the first token, on its own clock; the idle clock starts after it."""

    def script(talk):
        talk.request()
        time.sleep(1.2)
        talk.stream(*EVENTS, DONE)

    with ScriptedEngine(script) as engine:
        rig.use(engine, timeouts=Timeouts(idle=0.5, first_token=5))
        with stream(rig) as raw:
            assert raw.answer()[2] == b"".join(EVENTS) + DONE


def test_parallel_streams_do_not_mix(rig):
    """Many streams at once over reused connections: each client gets its own bytes."""

    def script(talk):
        while request := talk.request():
            mark = request.json["mark"]
            talk.send(STREAM_HEAD)
            for number in range(20):
                talk.send(chunk(b"data: %d %d\n\n" % (mark, number)))
            talk.send(b"0\r\n\r\n")

    def one(mark):
        with rig.client() as raw:
            for turn in range(5):
                raw.send(request_bytes(b'{"model":"m","stream":true,"mark":%d}' % mark))
                results.append(raw.answer()[2] == b"".join(b"data: %d %d\n\n" % (mark, n) for n in range(20)))

    results = []
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        threads = [threading.Thread(target=one, args=(mark,)) for mark in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert results == [True] * 100
