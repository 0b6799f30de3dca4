"""Large JSON bodies: found are the same members as a decoder finds, each step is short, and engines get what they should."""

from __future__ import annotations

import asyncio
import json
import mmap
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmgw.router import skim
from llmgw.router.body import skim_json
from llmgw.router.errors import Refusal
from llmgw.router.form import skim_form
from llmgw.router.reading import Reading
from llmgw.router.request import Request
from llmgw.router.table import RoutedModel
from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import (
    DONE,
    EVENTS,
    OK,
    Rig,
    descriptors,
    finished,
    idle,
    longest_step,
    plain,
    request_bytes,
    stream,
    until,
)


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def spans(data, wanted=("model", "messages", "x")):
    return finished(skim.skim(data, wanted))


TEXT = st.text(st.sampled_from('ab"\\[]{}:, \né日🦊/u'), max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
DEEP = st.builds(lambda value, depth: json.loads("[" * depth + json.dumps(value) + "]" * depth), VALUE, st.integers(0, 12))
BODY = st.dictionaries(st.sampled_from(["model", "messages", "x"]) | TEXT, VALUE | DEEP, min_size=1, max_size=8)


@settings(max_examples=120, deadline=None)
@given(BODY, st.booleans(), st.sampled_from([None, 1, "\t"]), st.integers(4, 40), st.integers(2, 20))
@example({"x": ['\\"' * 9, "]"], "model": "m"}, True, None, 5, 2)
def test_the_same_members_as_a_decoder_finds(body, ascii, indent, piece, near):
    """Whatever the values are, and wherever a slice is cut."""
    data = json.dumps(body, ensure_ascii=ascii, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skim, "SLICE", piece)
        patch.setattr(skim, "NEAR", near)
        patch.setattr(skim, "MAX_NAME", 1000)
        try:
            found = spans(data)
        except Refusal:
            # Blanks and numbers longer than a slice are refused; none of those made here are, in the real size.
            assert piece < 40
            patch.undo()
            found = spans(data)
    wanted = {name: value for name, value in body.items() if name in ("model", "messages", "x")}
    assert {name: json.loads(data[start:end]) for name, (start, end) in found.items()} == wanted


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('{}[]":,\\ a1'), max_size=60), st.integers(2, 9))
def test_whatever_it_is_there_is_an_end(text, piece):
    """No bytes make it fail in another way than by refusing, or go on for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skim, "SLICE", piece)
        patch.setattr(skim, "NEAR", 2)
        try:
            found = spans(b'{"model":' + text.encode())
        except Refusal as refusal:
            assert refusal.status == 400
        else:
            assert "model" in found


@pytest.mark.parametrize(
    "body, code",
    [
        (b'{"model":"a","model":"b"}', "bad_request"),
        (b'{"mod\\u0065l":"a","model":"b"}', "bad_request"),
        (b'["model"]', "bad_json"),
        (b'{"model":"a', "bad_json"),
        (b'{"model":"a","messages":[[1,2]', "bad_json"),
        (b"{" + b",".join(b'"%d":[]' % number for number in range(2000)) + b"}", "bad_json"),
    ],
)
def test_refused(body, code):
    """Two readings of one body, no end, or so many members that looking at them would be the attack."""
    with pytest.raises(Refusal) as caught:
        spans(body)
    assert caught.value.code == code


SIZE = 3 * 2**20


def members(value, count=990):
    """The inside of an object with so many members."""
    return b",".join(b'"k%d":%b' % (number, value) for number in range(count))


SHAPES = {
    "image": b'"x":["' + b"A" * SIZE + b'"]',
    "messages": b'"x":[' + b'{"role":"user","content":"hi, \\"you\\""},' * (SIZE // 40) + b"1]",
    "numbers": b'"x":[' + b"1," * (SIZE // 2) + b"1]",
    "brackets": b'"x":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "teeth": b'"x":[' + (b"[" * 50 + b"]" * 50 + b",") * (SIZE // 101) + b"1]",
    "pairs": b'"x":[' + b"[]," * (SIZE // 3) + b"1]",
    "escapes": b'"x":["' + b"\\\\" * (SIZE // 2) + b'"]',
    "quotes": b'"x":["' + b'\\"' * (SIZE // 2) + b'"]',
    "unicode": b'"x":["' + b"\\u00e9" * (SIZE // 6) + b'"]',
    "empty": b'"x":[' + b'"",' * (SIZE // 3) + b"1]",
    "blanks": b'"x":[' + b" " * SIZE + b"1]",
    "text": b'"x":"' + b'\\"' * (SIZE // 2) + b'"',
    "name": b'"' + b'\\"' * (SIZE // 2) + b'":1',
    "many pairs": members(b"[" + b"[]," * 1350 + b"1]"),
    "many nested": members(b"[" * 2000 + b"]" * 2000, 300),
    "many objects": members(b'{"a":{}}' + b" " * 4000),
    "many quotes": members(b'["' + b'\\"' * 2000 + b'"]'),
    "many deep quotes": members(b'[[[[[[[["' + b'\\"' * 2000 + b'"]]]]]]]]'),
    "many empty": members(b"[" + b'"",' * 1300 + b"1]"),
    "many blanks": members(b" " * 4000 + b"1" + b" " * 4000),
    "many short": members(b"[[[[[[[[[1]]]]]]]]]") + b" " * 10_000,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_step_is_short(shape):
    """Whatever is in it, in one member or in many. Decoding it at once takes up to a hundred times as long, and a pattern that
    began again after each failure took nine seconds."""
    data = b"{" + SHAPES[shape] + b',"model":"m"}'
    took = []
    found = finished(skim.skim(data, ("model",)), took.append)
    assert data[slice(*found["model"])] == b'"m"'
    assert len(took) > len(data) // skim.SLICE // 2
    assert sum(took) < 3
    assert longest_step(lambda: skim.skim(data, ("model",))) < 0.01


def test_engines_get_large_bodies_as_they_should(rig):
    """Under the name it serves, asked for usage, all else byte for byte; and the client's own wish for usage stands."""
    pad = b'"pad":"' + b"x\\n" * 700_000 + b'"'

    def script(talk):
        while request := talk.request():
            talk.stream(*EVENTS, DONE) if b'"stream":true' in request.body else talk.answer(OK)

    with ScriptedEngine(script) as engine:
        rig.use(engine, served="served/name")
        for body, wanted in (
            (b' {"model": "alias",%b}' % pad, b' {"model": "served/name",%b}' % pad),
            (b'{"model":"m","stream":true,%b}' % pad,
             b'{"stream_options":{"include_usage":true},"model":"served/name","stream":true,%b}' % pad),
            (b'{"stream_options":{"a":1},"stream":true,%b,"model":"m"}' % pad,
             b'{"stream_options":{"a":1,"include_usage":true},"stream":true,%b,"model":"served/name"}' % pad),
            (b'{"stream_options":{"include_usage":true},"stream":true,%b,"model":"m"}' % pad,
             b'{"stream_options":{"include_usage":true},"stream":true,%b,"model":"served/name"}' % pad),
        ):  # fmt: skip
            assert rig.post(body=body)[0] == 200
            request = engine.requests.pop()
            assert request.body == wanted
            assert request.header(b"content-length") == b"%d" % len(wanted)
        rig.use(engine)
        body = b'{"model":"m",%b}' % pad
        assert rig.post(body=body)[0] == 200
        assert engine.requests.pop().body == body


def test_large_bodies_are_refused_like_small_ones(rig):
    """With the same words, on a connection that goes on."""
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        pad = b'"pad":"' + b"x" * 1_500_000 + b'"'
        with rig.client() as raw:
            for body, code in ((b"{%b}" % pad, b"model_missing"), (b'{"model":"none",%b}' % pad, b"model_not_found"),
                               (b'{"model":1,%b}' % pad, b"bad_request"), (b"[%b]" % pad, b"bad_json")):  # fmt: skip
                raw.send(request_bytes(body))
                status, _, said = raw.answer()
                assert code in said and 400 <= status < 500
            raw.send(request_bytes(b'{"model":"m",%b}' % pad))
            assert raw.answer()[::2] == (200, OK)
        assert len(engine.requests) == 1


def test_large_prompts_stick_to_their_replica(rig):
    """What a prompt begins with, and its session, are found in a large body, too."""
    with ScriptedEngine(plain) as one, ScriptedEngine(plain) as two:
        rig.use(one, two, model=RoutedModel("m", policy="least_cost"))
        for turn in range(4):
            for mark in "ab":
                messages = [{"role": "user", "content": mark * 1_200_000}, {"role": "user", "content": str(turn)}]
                assert rig.post(body={"model": "m", "messages": messages})[0] == 200
        marks = [{request.body.count(b"aaaa") > 0 for request in engine.requests} for engine in (one, two)]
        assert sorted(map(sorted, marks)) == [[False], [True]]


FORM_TYPE = "multipart/form-data; boundary=xyz"
HOSTILE_HEAD = b"--xyz\r\n" + b"content-disposition:form-data;" * 130 + b"\r\n\r\n\r\n"
HOSTILE_FORM = HOSTILE_HEAD * 900 + b"--xyz\r\nContent-Disposition: form-data; name=model\r\n\r\nm\r\n--xyz--\r\n"


def test_g1_streams_go_on_while_a_large_body_is_read(rig):
    """G1: a stream of events that leave every 5 ms loses none and is never held up for long: by 20 MB of messages, bodies and a
    form that are made for it."""
    bodies = [b"{" + inner + b',"model":"m"}' for inner in (SHAPES["many pairs"], SHAPES["quotes"], SHAPES["many deep quotes"])]
    bodies.append(b'{"model":"m","messages":[' + b'{"role":"user","content":"hi"},' * 650_000 + b"1]}")
    stop = threading.Event()

    def script(talk):
        while request := talk.request():
            if b"stream" not in request.body:
                talk.answer(OK)
                continue
            talk.send(STREAM_HEAD)
            while not stop.wait(0.005):
                talk.send(chunk(b"data: %.6f\n\n" % time.monotonic()))
            talk.send(chunk(DONE) + b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig, body=b'{"model":"m","stream":true}') as raw:
            waits = []

            def follow():
                while b"[DONE]" not in (line := raw.read_until(b"\n\n")):
                    waits.append(time.monotonic() - float(line.split(b"data: ")[1]))

            follower = threading.Thread(target=follow)
            follower.start()
            until(lambda: len(waits) > 20)
            for body in bodies:
                assert rig.post(body=body)[0] == 200
            assert rig.post("/v1/audio/transcriptions", HOSTILE_FORM, {"Content-Type": FORM_TYPE})[0] == 200
            stop.set()
            follower.join()
        assert len(waits) > 40
        assert sorted(waits)[len(waits) * 95 // 100] < 0.15
        assert max(waits) < 1.0


def test_client_leaves_while_its_body_is_read(rig):
    """Nothing is asked of an engine then, nothing stays in flight, and the worker goes on."""
    body = b'{"model":"m","messages":[' + b'{"role":"user","content":"hi"},' * 650_000 + b"1]}"
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        rig.post()
        before = descriptors(rig)
        with rig.client() as raw:
            raw.send(request_bytes(body))
        assert [rig.post()[0] for _ in range(20)] == [200] * 20
        idle(rig)
        until(lambda: descriptors(rig) <= before, 5, "the body's file closed")
        beats = len(rig.heard)
        until(lambda: len(rig.heard) > beats + 1, 5, "two beats, in which it could have been read to its end")
        assert len(engine.requests) == 21


class Stub:
    """A connection whose body is being read."""

    def __init__(self):
        self.work, self.refused, self.served = self, [], []

    def refuse(self, request, refusal):
        self.refused.append((refusal.status, refusal.code))

    def serve(self, request, then, body):
        self.served.append(body.model)


def mapped(raw):
    file = mmap.mmap(-1, len(raw))
    file[:] = raw
    return file


@pytest.mark.parametrize("shape", [*SHAPES, "form"])
def test_g1_the_worst_pause_of_others(shape):
    """G1: how much CPU time goes by in which nobody else gets a turn, in the quickest of three readings."""

    async def worst():
        raw = mapped(HOSTILE_FORM if shape == "form" else b"{" + SHAPES[shape] + b',"model":"m"}')
        connection, pauses = Stub(), []
        Reading(connection, Request(0.0), skim_form(raw, FORM_TYPE.encode()) if shape == "form" else skim_json(raw), None)
        while connection.work is not None:
            began = time.thread_time()
            await asyncio.sleep(0)
            pauses.append(time.thread_time() - began)
        assert (connection.served, connection.refused) == (["m"], [])
        return max(pauses)

    assert min(asyncio.run(worst()) for _ in range(3)) < 0.015


async def reading(during):
    """Read a large body; C{during} is called with the reading after its first turn. Gives the connection when all is quiet."""
    file = mapped(b'{"model":"m","messages":[' + b'{"role":"user","content":"hi"},' * 300_000 + b"1]}")
    connection = Stub()
    work = Reading(connection, Request(0.0), skim_json(file), lambda body: None)
    await asyncio.sleep(0)
    during(work)
    turns = 0
    while (connection.work is not None or turns < 100) and turns < 20_000:
        turns += 1
        await asyncio.sleep(0)
    return connection


def test_a_body_that_is_read_to_its_end():
    """It is served then, once."""
    connection = asyncio.run(reading(lambda work: None))
    assert (connection.served, connection.refused) == (["m"], [])


def test_the_worker_exits_while_a_body_is_read():
    """The client is told to send it again, and nothing of it is served."""
    connection = asyncio.run(reading(Reading.cut))
    assert (connection.served, connection.refused) == ([], [(503, "router_leaving")])


def test_a_reading_that_fails_is_answered(monkeypatch, expect_failures):
    """What nobody expected is the request's trouble: it gets an answer, not silence."""

    expect_failures(ZeroDivisionError)

    def broken(raw):
        yield
        raise ZeroDivisionError

    monkeypatch.setattr("tests.test_router_skim.skim_json", broken)
    connection = asyncio.run(reading(lambda work: None))
    assert (connection.served, connection.refused) == ([], [(500, "internal")])
