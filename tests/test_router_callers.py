"""Waiting in line, limits of keys, token counts, metrics: through a real worker; cases A4, A5 and L."""

from __future__ import annotations

import json
import threading
import time

import openai
import pytest

from llmgw.config.server import Timeouts
from llmgw.router.table import KeyEntry, RoutedModel, key_digest
from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import KEY, Rig, request_bytes, until

OK = b'{"ok":true}'
USED = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, "prompt_tokens_details": {"cached_tokens": 64}}
LINE = RoutedModel("m", policy="least_inflight")


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def event(**more):
    body = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


TOKEN = event(choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": None}])
USAGE = event(usage=USED)
DONE = b"data: [DONE]\n\n"


class Gate:
    """An engine that answers only when let, and knows how many it had at once."""

    def __init__(self):
        self.open, self.now, self.most, self.lock = threading.Semaphore(0), 0, 0, threading.Lock()

    def __call__(self, talk):
        while talk.request():
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            self.open.acquire(timeout=10)
            with self.lock:
                self.now -= 1
            talk.answer(OK)


class Asking:
    """Requests in threads."""

    def __init__(self, rig, count, **kwargs):
        self.answers = []
        self.threads = [threading.Thread(target=lambda: self.answers.append(rig.post(**kwargs))) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def join(self):
        for thread in self.threads:
            thread.join(15)
        return self.answers


def waiting(rig):
    rows = [rig.board.row(f"model/{model.name}") for model in rig.table.models]
    return sum(rig.board.total(row + 1) for row in rows)


def test_l2_the_limit_is_a_bound_and_others_wait(rig):
    """L2: at most so many requests as its limit are at an engine; the others wait and are all answered."""
    gate = Gate()
    with ScriptedEngine(gate) as engine:
        rig.use(engine, limit=2, model=LINE)
        asking = Asking(rig, 10)
        until(lambda: waiting(rig) == 8)
        until(lambda: gate.now == 2)
        gate.open.release(10)
        assert [answer[0] for answer in asking.join()] == [200] * 10
        assert gate.most == 2
    until(lambda: rig.in_flight() == 0)
    assert waiting(rig) == 0


def test_a4_client_leaves_the_line(rig):
    """A4: a client that leaves while it waits: the line is shorter, the engine never sees it."""
    gate = Gate()
    with ScriptedEngine(gate) as engine:
        rig.use(engine, limit=1, model=LINE)
        first = Asking(rig, 1)
        until(lambda: gate.now == 1)
        with rig.client() as raw:
            raw.send(request_bytes())
            until(lambda: waiting(rig) == 1)
        until(lambda: waiting(rig) == 0, 1)
        gate.open.release(5)
        first.join()
        assert rig.post()[0] == 200
        assert len(engine.requests) == 2
    assert rig.log(outcome="client_gone", replica="")


def test_line_is_full_and_waits_are_bounded(rig):
    """A full line is 429, a wait that is too long 504; both say when to come again."""
    gate = Gate()
    with ScriptedEngine(gate) as engine:
        rig.use(engine, limit=1, model=RoutedModel("m", max_waiting=1), timeouts=Timeouts(queue=0.6))
        running = Asking(rig, 1)
        until(lambda: gate.now == 1)
        late = Asking(rig, 1)
        until(lambda: waiting(rig) == 1)
        full = rig.post()
        assert (full[0], json.loads(full[2])["error"]["code"]) == (429, "queue_full")
        assert int(full[1]["retry-after"]) >= 1
        answer = late.join()[0]
        assert (answer[0], json.loads(answer[2])["error"]["code"]) == (504, "queue_timeout")
        gate.open.release(2)
        assert running.join()[0][0] == 200


def test_l9_high_class_goes_first(rig):
    """L9: of those who wait a high key goes first."""
    keys = (KeyEntry("low", key_digest(KEY)), KeyEntry("high", key_digest("sk-high"), priority=1))
    order = []

    def script(talk):
        while request := talk.request():
            order.append(request.json.get("who", "first"))
            gate.acquire(timeout=10)
            talk.answer(OK)

    gate = threading.Semaphore(0)
    with ScriptedEngine(script) as engine:
        rig.use(engine, limit=1, model=LINE, keys=keys)
        running = Asking(rig, 1)
        until(lambda: order)
        low = Asking(rig, 1, body={"model": "m", "who": "low"})
        until(lambda: waiting(rig) == 1)
        high = Asking(rig, 1, body={"model": "m", "who": "high"}, key="sk-high")
        until(lambda: waiting(rig) == 2)
        gate.release(3)
        for asking in (running, low, high):
            assert asking.join()[0][0] == 200
    assert order == ["first", "high", "low"]


def test_sleeping_model_is_waited_for(rig):
    """K6: a request for a model that is being started waits, and goes when the first replica is there."""
    asleep = RoutedModel("m", on_demand=True, reason="n1 loads it")
    rig.use(model=asleep)
    rig.heard.clear()
    asking = Asking(rig, 3)
    until(lambda: [m for m in rig.heard if m["type"] == "demand"], 3)
    until(lambda: waiting(rig) == 3)
    gate = Gate()
    gate.open.release(3)
    with ScriptedEngine(gate) as engine:
        rig.use(engine, model=asleep)
        assert [answer[0] for answer in asking.join()] == [200] * 3


def test_k6_request_that_is_earlier_than_the_table(rig):
    """K6: a request that comes a moment before the table with the model's first replica is answered all the same."""
    rig.use()
    asking = Asking(rig, 3)
    until(lambda: waiting(rig) == 3)
    gate = Gate()
    gate.open.release(3)
    with ScriptedEngine(gate) as engine:
        rig.use(engine)
        assert [answer[0] for answer in asking.join()] == [200] * 3


def test_model_limit_over_its_replicas(rig):
    """max_in_flight bounds a model whatever its replicas could take."""
    gate = Gate()
    with ScriptedEngine(gate) as engine:
        rig.use(engine, engine.url, model=RoutedModel("m", max_in_flight=3))
        asking = Asking(rig, 8)
        until(lambda: waiting(rig) == 5)
        assert gate.now == 3
        gate.open.release(8)
        assert [answer[0] for answer in asking.join()] == [200] * 8
        assert gate.most == 3


def limited(**limits):
    return (KeyEntry("k1", key_digest(KEY), name="test", **limits),)


def code(answer):
    return json.loads(answer[2])["error"]["code"]


def answering(usage=None):
    def script(talk):
        while talk.request():
            talk.answer(json.dumps({"id": "1", "choices": [], "usage": usage}).encode())

    return script


def test_l7_requests_per_minute(rig):
    """L7: so many requests as allowed pass, the next is 429 with Retry-After; refused ones do not count."""
    with ScriptedEngine(answering()) as engine:
        rig.use(engine, keys=limited(rpm=5))
        answers = [rig.post() for _ in range(8)]
        assert [answer[0] for answer in answers] == [200] * 5 + [429] * 3
        assert {code(answer) for answer in answers[5:]} == {"rpm"}
        assert 1 <= int(answers[5][1]["retry-after"]) <= 121
        assert len(engine.requests) == 5
        client = openai.OpenAI(base_url=rig.url + "/v1", api_key=KEY, max_retries=0)
        with client, pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="m", messages=[])


def test_l5_l6_tokens_per_minute(rig):
    """L5, L6: tokens are reserved before and settled after, by what engines say."""
    with ScriptedEngine(answering(USED)) as engine:
        # Each reserves some 10 for its body and 512 for its answer, and then uses 120.
        rig.use(engine, keys=(KeyEntry("k5", key_digest(KEY), tpm=1000),))
        statuses = [rig.post()[0] for _ in range(8)]
        assert statuses == [200] * 5 + [429] * 3
        gate = Gate()
    with ScriptedEngine(gate) as engine:
        rig.use(engine, keys=(KeyEntry("k6", key_digest(KEY), tpm=1100),))
        asking = Asking(rig, 10)
        until(lambda: len(asking.answers) == 8)
        assert [answer[0] for answer in asking.answers] == [429] * 8
        gate.open.release(2)
        asking.join()


def test_concurrency_of_a_team(rig):
    """Concurrency is shared by the keys of a team, and given back."""
    keys = tuple(KeyEntry(f"t{n}", key_digest(f"sk-{n}"), team="red", concurrency=2) for n in range(2))
    gate = Gate()
    with ScriptedEngine(gate) as engine:
        rig.use(engine, keys=keys)
        asking = [Asking(rig, 1, key="sk-0"), Asking(rig, 1, key="sk-1")]
        until(lambda: gate.now == 2)
        assert code(rig.post(key="sk-1")) == "concurrency"
        gate.open.release(10)
        for one in asking:
            one.join()
        assert rig.post(key="sk-0")[0] == 200


def test_l10_revoked_key(rig):
    """L10: a key that has left the table is refused at once; the stream that it has goes on."""
    go = threading.Event()

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD + chunk(TOKEN))
        go.wait(5)
        talk.send(chunk(DONE) + b"0\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            raw.send(request_bytes())
            raw.read_until(b'"x"')
            rig.use(engine, keys=())
            assert rig.post()[0] == 401
            go.set()
            raw.read_until(DONE)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("supports", [True, False])
def test_l8_usage_of_streams(rig, asked, supports):
    """L8: the client sees exactly what it asked for; the count is right where the engine says it, else an estimate."""

    def script(talk):
        request = talk.request()
        usage = (request.json.get("stream_options") or {}).get("include_usage") and supports
        talk.stream(*[TOKEN] * 20, *([USAGE] if usage else []), DONE)

    body = {"model": "m", "stream": True, "messages": []}
    if asked is not None:
        body["stream_options"] = {"include_usage": asked}
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            raw.send(request_bytes(json.dumps(body).encode(), fields=b"X-Request-Id: %d%d\r\n" % (bool(asked), supports)))
            seen = raw.answer()[2]
        assert engine.requests[0].json["stream_options"]["include_usage"]
    assert seen == TOKEN * 20 + (USAGE if asked and supports else b"") + DONE
    row = rig.log(client_id=f"{bool(asked):d}{supports:d}")[-1]
    if supports:
        assert (row["prompt"], row["cached"], row["completion"]) == (100, 64, 20)
    else:
        assert row["completion"] > 0


def test_l8_openai_client_sees_usage(rig):
    """L8: the official client gets the usage that it asked for, in its place."""

    def script(talk):
        talk.request()
        talk.stream(TOKEN, USAGE, DONE)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with openai.OpenAI(base_url=rig.url + "/v1", api_key=KEY, max_retries=0) as client:
            events = list(
                client.chat.completions.create(model="alias", messages=[], stream=True, stream_options={"include_usage": True})
            )
    assert events[-1].usage.prompt_tokens == 100
    assert events[0].choices[0].delta.content == "x"


def test_usage_is_told_to_the_server(rig):
    """What keys have used of which model reaches the server within moments, streams that were left included."""
    left = []

    def script(talk):
        while request := talk.request():
            if not request.json.get("stream"):
                talk.answer(json.dumps({"usage": USED}).encode())
                continue
            talk.send(STREAM_HEAD)
            while talk.send(chunk(TOKEN)):
                time.sleep(0.01)
            left.append(True)

    with ScriptedEngine(script) as engine:
        rig.use(engine, keys=(KeyEntry("k9", key_digest(KEY)),))
        rig.heard.clear()
        for _ in range(3):
            rig.post()
        with rig.client() as raw:
            raw.send(request_bytes())
            for _ in range(5):
                raw.read_until(b'"x"')
        until(lambda: left)

        def rows():
            found = [row for message in rig.heard if message["type"] == "usage" for row in message["rows"] if row["key"] == "k9"]
            return found if sum(row["requests"] for row in found) >= 4 else None

        told = until(rows, 4)
    assert {(row["key"], row["model"]) for row in told} == {("k9", "m")}
    assert sum(row["prompt_tokens"] for row in told) >= 300
    assert sum(row["cached_tokens"] for row in told) == 192
    assert sum(row["completion_tokens"] for row in told) >= 65
    assert rig.log(outcome="client_gone")[-1]["completion"] >= 5


def test_metrics(rig):
    """Counters move with what happens, and gauges are back at 0 afterwards."""

    def script(talk):
        while request := talk.request():
            if request.json.get("stream"):
                talk.stream(TOKEN, USAGE, DONE)
            else:
                talk.answer(json.dumps({"usage": USED}).encode())

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        before = rig.scrape()
        for _ in range(3):
            rig.post()
        with rig.client() as raw:
            raw.send(request_bytes())
            raw.answer()
        rig.post(body={"model": "nobody"})
        after = rig.scrape()

    def grown(name):
        return after[name] - before.get(name, 0)

    at = 'model="m",replica="m/0"'
    assert grown(f'llmgw_requests_total{{{at},status="200",reason="done"}}') == 4
    assert grown('llmgw_requests_total{model="",replica="",status="404",reason="model_not_found"}') == 1
    assert grown('llmgw_tokens_total{model="m",kind="prompt"}') == 400
    assert grown(f"llmgw_ttft_seconds_count{{{at}}}") == 1  # of a stream only: the others' first byte is their last
    assert grown(f"llmgw_request_duration_seconds_count{{{at}}}") == 4
    assert grown("llmgw_router_overhead_seconds_count") == 4
    assert grown('llmgw_stream_ends_total{kind="done"}') == 1
    assert grown('llmgw_engine_connections_total{kind="new"}') + grown('llmgw_engine_connections_total{kind="reused"}') == 4
    assert after[f"llmgw_in_flight{{{at}}}"] == 0
    assert after["llmgw_routing_version"] == rig.version


def test_prefixes_stick_and_spread(rig):
    """I1 in small: prompts with one long beginning go to one replica while it has room, others elsewhere."""

    def script(talk):
        while talk.request():
            talk.answer(OK)

    def prompt(mark, turn):
        return {"model": "m", "messages": [{"role": "user", "content": mark * 20_000}, {"role": "user", "content": str(turn)}]}

    with ScriptedEngine(script) as one, ScriptedEngine(script) as two:
        rig.use(one, two, model=RoutedModel("m", policy="least_cost"))
        for turn in range(10):
            rig.post(body=prompt("a", turn))
            rig.post(body=prompt("b", turn))
        counts = [[request.body.count(b"aaaa") > 0 for request in engine.requests] for engine in (one, two)]
        assert sorted(map(len, counts)) == [10, 10]
        assert all(len(set(marks)) == 1 for marks in counts)
    assert rig.log(why="prefix")


def test_sessions_stick(rig):
    """I2 in small: requests of a session go where it began, by header or by field."""

    def script(talk):
        while talk.request():
            talk.answer(OK)

    with ScriptedEngine(script) as one, ScriptedEngine(script) as two:
        rig.use(one, two, model=RoutedModel("m", policy="least_cost"))
        for turn in range(10):
            for session in range(6):
                body = {"model": "m", "session": session, "turn": turn}
                if session % 2:
                    rig.post(body={**body, "prompt_cache_key": f"s{session}"})
                else:
                    rig.post(body=body, headers={"X-Session-Id": f"s{session}"})
        places = [{request.json["session"] for request in engine.requests} for engine in (one, two)]
        assert not places[0] & places[1]
        assert all(places)
