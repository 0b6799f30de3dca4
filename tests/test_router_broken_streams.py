"""Streams that end early, by the client or by the engine, through a real worker; cases A and B."""

from __future__ import annotations

import itertools
import json
import time

import anthropic
import openai
import pytest
from msgspec.structs import replace

from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import DONE, EVENTS, KEY, Rig, dechunk, idle, plain, stream, until


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def test_a1_client_gone_after_first_byte(rig):
    """A1: a client that leaves after some events: the engine's connection is closed within a second, nothing stays in flight."""
    closed = []

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + b"".join(map(chunk, EVENTS[:3])))
        closed.append(talk.closed_within(3))

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            raw.read_until(b'"n":2}')
            assert rig.in_flight() == 1
        until(lambda: closed, 4)
    assert closed[0] is not None
    assert closed[0] < 1.0
    idle(rig)
    assert rig.log(outcome="client_gone")[-1]["status"] == 499


@pytest.mark.parametrize("streaming", [b"true", b"false"])
def test_a2_a3_client_gone_before_first_byte(rig, streaming):
    """A2, A3: a client that leaves while the engine is silent, streaming or not: the engine sees it within a second."""
    closed = []

    def script(talk):
        talk.request()
        closed.append(talk.closed_within(3))

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig, body=b'{"model":"m","stream":%b}' % streaming):
            until(lambda: engine.requests)
        until(lambda: closed, 4)
    assert closed[0] is not None
    assert closed[0] < 1.0
    idle(rig)


def test_a2_client_with_more_sent_ahead(rig):
    """A2: a client that has pipelined 20 KiB and leaves is noticed all the same."""
    closed = []

    def script(talk):
        talk.request()
        closed.append(talk.closed_within(3))

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            until(lambda: engine.requests)
            raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b" " * 20_000)
        until(lambda: closed, 4)
    assert closed[0] is not None
    assert closed[0] < 1.0


def test_a6_l1_random_cancels(rig):
    """A6, L1: many cancels at every stage: nothing in flight is left, and the engine is used as before."""

    def script(talk):
        while talk.request():
            for event in EVENTS:
                if not talk.send(event and (STREAM_HEAD if event is EVENTS[0] else b"") + chunk(event)):
                    return
                time.sleep(0.002)
            talk.send(chunk(DONE) + b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine, engine.url)
        for turn in range(200):
            with stream(rig) as raw:
                if turn % 4 == 1:
                    raw.read_until(b'"n":0')
                elif turn % 4 == 2:
                    raw.read_until(b'"n":3')
                elif turn % 4 == 3:
                    assert raw.answer()[2] == b"".join(EVENTS) + DONE
        idle(rig)
        with stream(rig) as raw:
            assert raw.answer()[2] == b"".join(EVENTS) + DONE


@pytest.mark.parametrize("ending", ["reset", "fin"])
def test_b1_b2_engine_dies_in_stream(rig, ending):
    """B1, B2: whole events, one error event, an abnormal close, never [DONE], and no second try."""

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + b"".join(map(chunk, EVENTS)) + chunk(b'data: {"to')[:-4])
        until(lambda: seen)
        talk.reset() if ending == "reset" else talk.socket.close()

    seen = []
    with ScriptedEngine(script) as engine:
        rig.use(engine, engine.url)
        with stream(rig) as raw:
            head = raw.read_until(b"\r\n\r\n")
            begun = raw.read_until(EVENTS[-1] + b"\r\n")
            seen.append(True)
            body, ended = dechunk(begun + raw.read_all())
        assert head.startswith(b"HTTP/1.1 200")
        assert not ended
        assert body.startswith(b"".join(EVENTS))
        error = body[len(b"".join(EVENTS)) :]
        assert error.startswith(b'data: {"error":{')
        assert error.endswith(b"}\n\n")
        assert b"[DONE]" not in body
        assert b'"to' not in body
        assert len(engine.requests) == 1
    idle(rig)
    assert rig.log(outcome="upstream_error")


def test_b1_openai_client_raises(rig):
    """B1: the official client gets its API error after the events, not a decoding error."""

    def script(talk):
        talk.request()
        event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
        talk.send(STREAM_HEAD + chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
        until(lambda: seen)
        talk.reset()

    seen = []
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        client = openai.OpenAI(base_url=rig.url + "/v1", api_key=KEY, max_retries=0)
        with pytest.raises(openai.APIError) as caught:
            seen.extend(client.chat.completions.create(model="m", messages=[], stream=True))
        client.close()
    assert len(seen) == 1
    assert "broke off" in caught.value.message


def test_b1_anthropic_client_raises(rig):
    """B1 for /v1/messages: the error event has Anthropic's shape and its client raises."""
    start = {"type": "message_start", "message": {"id": "1", "type": "message", "role": "assistant", "content": [], "model": "m",
             "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 0}}}  # fmt: skip

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + chunk(b"event: message_start\ndata: " + json.dumps(start).encode() + b"\n\n"))
        until(lambda: seen)
        talk.reset()

    seen = []
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        client = anthropic.Anthropic(base_url=rig.url, api_key=KEY, max_retries=0)
        with pytest.raises(anthropic.APIStatusError) as caught:
            seen.extend(client.messages.create(model="m", max_tokens=5, messages=[], stream=True))
        client.close()
    assert len(seen) == 1
    assert "broke off" in str(caught.value)


def test_b3_error_event_of_the_engine_passes(rig):
    """B3: an error inside a stream that is the engine's own goes through unchanged, and is counted as one."""
    said = b'data: {"error":{"message":"out of memory"}}\n\n'

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + chunk(EVENTS[0]))
        time.sleep(0.05)  # so that the error is a read of its own, as events mostly are
        talk.send(chunk(said) + b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with stream(rig) as raw:
            assert raw.answer()[2] == EVENTS[0] + said
    row = rig.log(reason="engine_error")[-1]
    assert (row["status"], row["outcome"]) == (200, "done")


FAILED = {"code": "server_error", "message": "out of memory"}
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [], "usage": None}


TOLD = [
    ("/v1/responses", {"type": "response.failed", "response": {**RESPONSE, "status": "failed", "error": FAILED}}),
    ("/v1/responses", {"type": "error", "code": "server_error", "message": "no", "param": None, "sequence_number": 3}),
    ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
]


def test_b3_failures_of_other_apis_are_counted(rig):
    """B3: the same for the events that tell of a failure in the Responses and Anthropic APIs, alone or with the stream's end."""
    begun = {"type": "response.created", "response": {**RESPONSE, "status": "in_progress", "error": None}}
    first = f"event: begun\ndata: {json.dumps(begun)}\n\n".encode()
    cases = list(itertools.product(TOLD, (True, False), (True, False)))

    def script(talk):
        while request := talk.request():
            (_, said), named, together = cases[int(request.header(b"x-case"))]
            name = f"event: {said['type']}\n" if named else ""
            event = f"{name}data: {json.dumps(said)}\n\n".encode()
            talk.send(STREAM_HEAD + chunk(first))
            time.sleep(0.05)
            talk.send(chunk(event))
            time.sleep(0.0 if together else 0.05)
            talk.send(b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        for number, ((path, said), _, _) in enumerate(cases):
            fields = b"X-Case: %d\r\nX-Request-Id: told-%d\r\n" % (number, number)
            with stream(rig, path=path.encode(), fields=fields) as raw:
                assert raw.answer()[2].endswith(f"data: {json.dumps(said)}\n\n".encode())
    for number, case in enumerate(cases):
        assert rig.log(client_id=f"told-{number}")[0]["reason"] == "engine_error", case


WHOLE = [
    ("/v1/responses", {**RESPONSE, "status": "failed", "error": FAILED}, True),
    ("/v1/responses", {**RESPONSE, "status": "failed", "error": None}, True),
    ("/v1/chat/completions", {"error": FAILED}, True),
    ("/v1/responses", {**RESPONSE, "status": "completed", "error": None}, False),
    ("/v1/responses", {**RESPONSE, "status": 7, "output": [{"error": FAILED, "status": "failed"}]}, False),
    ("/v1/chat/completions", {"choices": [{"message": {"content": '{"error":{}} "failed"'}}]}, False),
]


def test_b3_failures_in_a_whole_answer_are_counted(rig):
    """B3: an answer of the Responses API says by its own status that it failed, under HTTP 200; it goes through unchanged."""

    def script(talk):
        while request := talk.request():
            talk.answer(json.dumps(WHOLE[int(request.header(b"x-case"))][1]).encode())

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        for number, (path, said, _) in enumerate(WHOLE):
            fields = {"X-Case": str(number), "X-Request-Id": f"whole-{number}"}
            status, _, body = rig.post(path, body={"model": "m"}, headers=fields)
            assert (status, json.loads(body)) == (200, said)
    for number, (_, said, failed) in enumerate(WHOLE):
        (row,) = rig.log(client_id=f"whole-{number}")
        assert row.get("reason", "") == ("engine_error" if failed else ""), said


def test_b5_error_instead_of_a_stream(rig):
    """B5: an engine that answers 500 with JSON although a stream was asked for: that status and that body."""

    def script(talk):
        talk.request()
        talk.answer(b'{"error":{"message":"no"}}', b"500 Oops")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        status, headers, body = rig.post(body={"model": "m", "stream": True})
    assert (status, body) == (500, b'{"error":{"message":"no"}}')
    assert headers["content-type"] == "application/json"


def test_what_runs_on_an_engine_that_is_being_ended_hears_of_the_drain(rig):
    """A stream ends with an error event that says so, and its engine's connection is closed at once; what has not begun goes to
    another replica."""
    closed = []

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + b"".join(map(chunk, EVENTS[:3])))
        closed.append(talk.closed_within(3))

    def silent(talk):
        talk.request()
        closed.append(talk.closed_within(3))

    with ScriptedEngine(script) as engine, ScriptedEngine(silent) as other, ScriptedEngine(plain) as third:
        table = rig.use(engine)
        with stream(rig) as raw:
            raw.read_until(b'"n":2}')
            rig.version += 1
            table = rig.publish(replace(table, version=rig.version, endpoints=(), stopping=("m/0",)))
            said = raw.read_all()
        assert b'"engine_drained"' in said and b"its drain) is over" in said and b"[DONE]" not in said
        rig.use(other)
        with stream(rig, body=b'{"model":"m"}') as raw:
            until(lambda: other.requests)
            after = rig.use(other, third)
            rig.version += 1
            left = tuple(one for one in after.endpoints if one.id != "m/0")
            models = tuple(replace(one, endpoints=("m/1",)) for one in after.models)
            rig.publish(replace(after, version=rig.version, endpoints=left, models=models, stopping=("m/0",)))
            assert raw.answer()[0] == 200 and third.requests
        until(lambda: len(closed) == 2, 4)
    assert max(closed) < 1.0
    idle(rig)
