"""Header fields that clients, proxies and tracers rely on, and choices that a whole table makes, through a real worker."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from email.utils import parsedate_to_datetime

import anthropic
import openai
import pytest
from msgspec.structs import replace

from llmgw.router.table import RoutedModel
from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import DONE, EVENTS, KEY, OK, Rig, plain, request_bytes

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def test_own_answers_are_dated(rig):
    """Errors and lists carry the date; an engine's answer has the engine's, once."""
    then = b"Tue, 15 Nov 1994 08:12:31 GMT"

    def script(talk):
        while talk.request():
            talk.answer(OK, fields=b"content-type: application/json\r\ndate: %b\r\n" % then)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        for answer in (rig.get("/health"), rig.get("/v1/models"), rig.get("/nowhere"), rig.post(key="wrong")):
            assert abs(parsedate_to_datetime(answer[1]["date"]).timestamp() - time.time()) < 5
        with rig.client() as raw:
            raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: 13\r\n\r\n"
                     b'{"model":"m"}' % KEY.encode())  # fmt: skip
            assert raw.answer()[1].lower().count(b"\r\ndate: ") == 1
        assert rig.post()[1]["date"] == then.decode()


def test_traces_go_through(rig):
    """W3C trace context reaches the engine as it came, so that its spans belong to the caller's."""
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        rig.post(headers={"Traceparent": TRACE, "Tracestate": "a=1,b=2", "Baggage": "user=7"})
        fields = dict(engine.requests[0].headers)
        assert fields[b"traceparent"] == TRACE.encode()
        assert (fields[b"tracestate"], fields[b"baggage"]) == (b"a=1,b=2", b"user=7")


def test_answers_name_their_replica_and_request(rig):
    """The client's own id comes back and stands in the log, beside one of ours that no other request has."""
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        answers = [rig.post(headers={"X-Request-Id": "mine-7"})[1] for _ in range(2)]
        assert {(head["x-request-id"], head["x-llmgw-replica"]) for head in answers} == {("mine-7", "m/0")}
        rows = rig.log(2, client_id="mine-7")
        assert len({row["id"] for row in rows}) == 2
        assert [request.header(b"x-request-id").decode() for request in engine.requests] == [row["id"] for row in rows]
        wanted = {"time", "id", "client", "key", "call", "model", "replica", "why", "status", "outcome", "retries", "queue_ms",
                  "ttft_ms", "duration_ms", "prompt", "cached", "completion"}  # fmt: skip
        assert wanted <= set(rows[0])
        assert (rows[0]["key"], rows[0]["call"], rows[0]["replica"]) == ("k1", "chat", "m/0")


def test_clients_behind_trusted_proxies(rig):
    """Who is logged as the client: what a trusted proxy says, and nobody else."""
    with ScriptedEngine(plain) as engine:
        for trusted, client in ((("127.0.0.0/8",), "192.0.2.7"), (("10.0.0.0/8",), "127.0.0.1"), ((), "127.0.0.1")):
            rig.use(engine, trusted_proxies=trusted)
            id = f"from {client} {trusted}"
            rig.post(headers={"X-Forwarded-For": "6.6.6.6, 192.0.2.7", "X-Request-Id": id})
            assert rig.log(client_id=id)[0]["client"] == client


def test_weighted_by_the_tables_shares(rig):
    """An endpoint with three times the share gets about three times as many requests."""
    with ScriptedEngine(plain) as one, ScriptedEngine(plain) as two:
        table = rig.use(one, two, model=RoutedModel("m", policy="weighted"))
        shares = (replace(table.endpoints[0], share=3), replace(table.endpoints[1], share=1))
        rig.version += 1
        rig.publish(replace(table, version=rig.version, endpoints=shares))
        counts = Counter(rig.post()[1]["x-llmgw-replica"] for _ in range(300))
        assert 180 < counts["m/0"] < 270


def test_fallback_to_a_static_endpoint(rig):
    """When a model has no replica, somebody else's engine answers, under the name that it serves there; else its own does."""
    with ScriptedEngine(plain) as engine, ScriptedEngine(plain) as own:
        table = rig.use(engine, own, served="upstream/name")
        static = replace(table.endpoints[0], static=True)
        for mine in ((), (table.endpoints[1].id,)):
            models = (
                RoutedModel("elsewhere", endpoints=(static.id,)),
                RoutedModel("m", endpoints=mine, fallbacks=("elsewhere",)),
            )
            rig.version += 1
            rig.publish(replace(table, version=rig.version, endpoints=(static, table.endpoints[1]), models=models))
            assert rig.post()[0] == 200
        assert [len(engine.requests), len(own.requests)] == [1, 1]
        assert engine.requests[0].json["model"] == "upstream/name"


def sse(*events):
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode()) for event in events)


def test_anthropic_client_streams(rig):
    """The official client: an image in base64 goes up, a tool's input comes down in pieces."""
    message = {"id": "1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
               "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 1}}  # fmt: skip
    block = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    events = sse(
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": part}}
          for part in ('{"x"', ": 1}")),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    )  # fmt: skip
    image = base64.b64encode(bytes(range(256)) * 500).decode()
    content = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}]

    def script(talk):
        while talk.request():
            talk.stream(events)

    with ScriptedEngine(script) as engine, anthropic.Anthropic(base_url=rig.url, api_key=KEY, max_retries=0) as client:
        rig.use(engine)
        with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": content}]) as stream:
            made = stream.get_final_message()
        assert (made.content[0].name, made.content[0].input, made.stop_reason) == ("look", {"x": 1}, "tool_use")
        assert engine.requests[0].json["messages"][0]["content"][0]["source"]["data"] == image
    row = rig.log(call="messages", completion=5)[-1]
    assert (row["prompt"], row["completion"]) == (9, 5)


def test_openai_client_streams_tools(rig):
    """The official client puts a tool's call together from the pieces; it does not see the usage that the router asked for."""

    def piece(delta, finish=None):
        return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m",
                "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}  # fmt: skip

    def call(**function):
        return {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]}

    usage = {**piece({}), "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
    pieces = [
        piece(call(name="look", arguments="")),
        piece(call(arguments='{"x"')),
        piece(call(arguments=": 1}"), "tool_calls"),
        usage,
    ]
    events = [b"data: %b\n\n" % json.dumps(one).encode() for one in pieces]

    def script(talk):
        while talk.request():
            talk.stream(*events, b"data: [DONE]\n\n")

    with ScriptedEngine(script) as engine, openai.OpenAI(base_url=f"{rig.url}/v1", api_key=KEY, max_retries=0) as client:
        rig.use(engine)
        seen = list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True))
    assert "".join(one.choices[0].delta.tool_calls[0].function.arguments for one in seen) == '{"x": 1}'
    assert rig.log(call="chat", completion=3)[-1]["prompt"] == 7


def test_openai_client_responses(rig):
    """The official client's Responses API: whole and streamed; a stream whose engine dies raises, it does not stop short."""
    text = {"type": "output_text", "text": "hi", "annotations": []}
    message = {"type": "message", "id": "o", "role": "assistant", "status": "completed", "content": [text]}
    base = {"id": "r", "object": "response", "created_at": 1, "model": "m", "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": [], "error": None, "incomplete_details": None}  # fmt: skip
    usage = {"input_tokens": 6, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2,
             "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 8}  # fmt: skip
    whole = {**base, "status": "completed", "output": [message], "usage": usage}
    delta = {"type": "response.output_text.delta", "sequence_number": 1, "item_id": "o", "output_index": 0, "content_index": 0,
             "delta": "hi", "logprobs": []}  # fmt: skip
    first = sse({"type": "response.created", "sequence_number": 0, "response": {**whole, "usage": None, "output": []}}, delta)
    last = sse({"type": "response.completed", "sequence_number": 2, "response": whole})

    def script(talk):
        while request := talk.request():
            if not request.json.get("stream"):
                talk.answer(json.dumps(whole).encode())
            elif request.json["input"] == "die":
                talk.send(STREAM_HEAD + chunk(first))
                return
            else:
                talk.stream(first, last)

    with ScriptedEngine(script) as engine, openai.OpenAI(base_url=f"{rig.url}/v1", api_key=KEY, max_retries=0) as client:
        rig.use(engine)
        assert client.responses.create(model="m", input="x").output_text == "hi"
        seen = list(client.responses.create(model="m", input="x", stream=True))
        assert [one.type for one in seen] == ["response.created", "response.output_text.delta", "response.completed"]
        with pytest.raises(openai.APIError, match="broke off"):
            list(client.responses.create(model="m", input="die", stream=True))
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="none", input="x")
    rows = rig.log(2, call="responses", completion=2, status=200)
    assert [(row["prompt"], row["cached"]) for row in rows[:2]] == [(6, 4)] * 2


def test_openai_client_images(rig):
    """The official client's images: made from a prompt, and edited, where the model stands in a form."""
    picture = base64.b64encode(bytes(range(256))).decode()

    def script(talk):
        while talk.request():
            talk.answer(json.dumps({"created": 1, "data": [{"b64_json": picture}]}).encode())

    with ScriptedEngine(script) as engine, openai.OpenAI(base_url=f"{rig.url}/v1", api_key=KEY, max_retries=0) as client:
        rig.use(engine, served="painter")
        assert client.images.generate(model="m", prompt="a fox").data[0].b64_json == picture
        assert client.images.edit(model="m", image=("a.png", b"\x89PNG"), prompt="a fox").data[0].b64_json == picture
        assert engine.requests[0].json["model"] == "painter"
        assert b'name="model"\r\n\r\npainter\r\n' in engine.requests[1].body


def test_times_are_counted_from_the_whole_request(rig):
    """A slow upload is nobody's wait in line, nor an engine's time to its first token; it is part of the duration."""

    def script(talk):
        while request := talk.request():
            talk.stream(*EVENTS, DONE) if request.json.get("stream") else talk.answer(OK)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        before = rig.scrape()
        for number, body in enumerate((b'{"model":"m","stream":true}', b'{"model":"m"}')):
            whole = request_bytes(body, fields=b"X-Request-Id: slow-%d\r\n" % number)
            with rig.client() as raw:
                raw.send(whole[:-5])
                assert not raw.readable(0.5)
                raw.send(whole[-5:])
                assert raw.answer()[0] == 200
        after = rig.scrape()
    rows = [rig.log(client_id=f"slow-{number}")[0] for number in range(2)]
    assert [row["queue_ms"] for row in rows] == [0.0, 0.0]
    assert 0 < rows[0]["ttft_ms"] < rows[0]["duration_ms"] / 2
    assert rows[1]["ttft_ms"] is None
    for name in ('llmgw_queue_wait_seconds_sum{model="m"}', "llmgw_router_overhead_seconds_sum"):
        assert after[name] - before.get(name, 0) < 0.4
