"""Dead engines, retries, breakers, truthful errors, keys; cases J, K, L4, M4 and N1, with the official clients as judges."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import anthropic
import openai
import pytest

from llmgw.config.server import Timeouts
from llmgw.router.table import KeyEntry, RoutedModel, key_digest
from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import KEY, Rig, request_bytes, until

OK = b'{"ok":true}'


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def plain(talk):
    while talk.request():
        talk.answer(OK)


def answering(status, body=b'{"error":{"message":"no"}}'):
    def script(talk):
        while talk.request():
            talk.answer(body, status)

    return script


def refused_url():
    """Of a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


def error(answer):
    return json.loads(answer[2])["error"]


def test_dead_replica_is_skipped(rig):
    """A replica that refuses connections costs no request, and the server is told."""
    rig.heard.clear()
    with ScriptedEngine(plain) as engine:
        rig.use(refused_url(), engine)
        assert [rig.post()[0] for _ in range(20)] == [200] * 20
    failures = [m for m in rig.heard if m["type"] == "failure"]
    assert failures
    assert (failures[0]["endpoint"], failures[0]["kind"]) == ("m/0", "connect")
    assert rig.log(outcome="done", retries=1)


def test_replica_that_resets_before_answering(rig):
    """A reset before the first byte of the answer: another replica answers."""

    def script(talk):
        talk.request()
        talk.reset()

    with ScriptedEngine(script) as bad, ScriptedEngine(plain) as good:
        rig.use(bad, good)
        assert [rig.post()[0] for _ in range(10)] == [200] * 10


def test_replica_that_dies_before_its_first_event(rig):
    """A head without an event has not been passed on: another replica answers the stream."""

    def script(talk):
        talk.request()
        talk.send(STREAM_HEAD)
        time.sleep(0.05)
        talk.reset()

    def good_script(talk):
        while talk.request():
            talk.stream(b"data: [DONE]\n\n")

    with ScriptedEngine(script) as bad, ScriptedEngine(good_script) as good:
        rig.use(bad, good)
        for _ in range(4):
            with rig.client() as raw:
                raw.send(request_bytes())
                assert raw.answer()[::2] == (200, b"data: [DONE]\n\n")


@pytest.mark.parametrize("status", [b"429 Full", b"502 Bad Gateway", b"503 Busy", b"504 Slow", b"401 Who", b"403 No"])
def test_replica_that_turns_away(rig, status):
    """Answers that speak of the replica, not of the request, are not the client's as long as there is another one."""
    with ScriptedEngine(answering(status)) as bad, ScriptedEngine(plain) as good:
        rig.use(bad, good)
        assert [rig.post()[0] for _ in range(6)] == [200] * 6


@pytest.mark.parametrize("status", [b"503 Busy", b"500 Oops", b"400 Bad", b"404 No", b"422 Odd", b"429 Full"])
def test_only_replica_speaks_for_itself(rig, status):
    """With one replica its own answer is the client's, unchanged."""
    body = b'{"error":{"message":"mine"}}'
    with ScriptedEngine(answering(status, body)) as engine:
        rig.use(engine)
        answer = rig.post()
        assert (answer[0], answer[2]) == (int(status[:3]), body)
        assert len(engine.requests) == 1


def test_b4_j1_never_again_for_the_requests_own_fault(rig):
    """B4, J1: a request that an engine finds wrong is not tried elsewhere, however often, and opens no breaker."""
    with ScriptedEngine(answering(b"400 Bad")) as one, ScriptedEngine(answering(b"400 Bad")) as two:
        rig.use(one, two)
        assert [rig.post()[0] for _ in range(30)] == [400] * 30
        assert len(one.requests) + len(two.requests) == 30
        assert len(one.requests) == 15


def test_j2_back_pressure_is_no_sickness(rig):
    """J2: bursts of 503 and 429 do not open the breaker."""
    statuses = iter([b"503 Busy"] * 10 + [b"429 Full"] * 10 + [b"200 OK"])

    def script(talk):
        while talk.request():
            talk.answer(OK, next(statuses))

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        assert [rig.post()[0] for _ in range(21)] == [503] * 10 + [429] * 10 + [200]


def test_j4_all_open(rig):
    """J4: when all replicas have failed repeatedly the answer is 503 with Retry-After, at once and without asking them."""
    rig.use(refused_url(), refused_url())
    for _ in range(12):
        rig.post()
    began = time.monotonic()
    answer = rig.post()
    assert time.monotonic() - began < 0.5
    assert answer[0] == 503
    assert 1 <= int(answer[1]["retry-after"]) <= 31
    assert error(answer)["code"] == "engines_failing"


def test_j10_wrong_engine_key_is_not_the_callers(rig):
    """J10: an engine that refuses the router's key is the router's trouble: 502, never 401."""
    with ScriptedEngine(answering(b"401 Who")) as engine:
        rig.use(engine)
        answer = rig.post()
    assert answer[0] == 502
    assert error(answer)["code"] == "engine_key"


def test_k1_stopped_engine(rig):
    """K1: an engine that is stopped (SIGSTOP) accepts and says nothing: 504 after the first-token time; others are unaffected."""
    code = "import http.server as h, sys; h.HTTPServer(('127.0.0.1', int(sys.argv[1])), h.BaseHTTPRequestHandler).serve_forever()"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", code, str(port)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
        os.kill(process.pid, signal.SIGSTOP)
        with ScriptedEngine(plain) as good:
            rig.use(f"http://127.0.0.1:{port}/v1", good, timeouts=Timeouts(first_token=0.6))
            results = []
            threads = [threading.Thread(target=lambda: results.append(rig.post())) for _ in range(10)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            until(lambda: sum(answer[0] == 200 for answer in results) == 5, 0.5)
            for thread in threads:
                thread.join(5)
            assert time.monotonic() - began < 3
            late = [answer for answer in results if answer[0] != 200]
            assert [answer[0] for answer in late] == [504] * 5
            assert error(late[0])["code"] == "first_token_timeout"
    finally:
        process.kill()
        process.wait()
    until(lambda: rig.in_flight() == 0)


def test_m4_black_hole(rig):
    """M4: an engine whose machine does not answer at all: the next replica after the connect time."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    held = []
    try:
        for _ in range(4):  # fills the queue, so that further connects hang
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(full.getsockname())
            held.append(one)
        with ScriptedEngine(plain) as good:
            rig.use(f"http://127.0.0.1:{full.getsockname()[1]}/v1", good, timeouts=Timeouts(connect=0.4))
            began = time.monotonic()
            assert [rig.post()[0] for _ in range(2)] == [200, 200]
            assert 0.3 < time.monotonic() - began < 2
    finally:
        for one in (*held, full):
            one.close()


def test_l4_codes(rig):
    """L4: 404 nobody knows it; 503 known and not ready, with the reason; 429 full; each with what to do next."""
    begin, go = threading.Event(), threading.Event()

    def script(talk):
        while talk.request():
            begin.set()
            go.wait(5)
            talk.answer(OK)

    with ScriptedEngine(script) as engine:
        rig.use(engine, limit=1, model=RoutedModel("m", max_waiting=0))
        unknown = rig.post(body={"model": "nobody"})
        assert (unknown[0], error(unknown)["code"]) == (404, "model_not_found")
        cold = rig.post(body={"model": "cold"})
        assert (cold[0], error(cold)["code"]) == (503, "not_ready")
        assert "3 too few devices" in error(cold)["message"]
        assert int(cold[1]["retry-after"]) > 0
        thread = threading.Thread(target=rig.post)
        thread.start()
        assert begin.wait(5)
        full = rig.post()
        go.set()
        thread.join(5)
        assert full[0] == 429
        assert int(full[1]["retry-after"]) > 0
        assert full[1]["x-llmgw-reason"]


def openai_client(rig, key=KEY):
    return openai.OpenAI(base_url=rig.url + "/v1", api_key=key, max_retries=0)


def anthropic_client(rig, key=KEY):
    return anthropic.Anthropic(base_url=rig.url, api_key=key, max_retries=0)


ERRORS = {
    "unknown model": ("nobody", KEY, openai.NotFoundError, anthropic.NotFoundError),
    "cold model": ("cold", KEY, openai.InternalServerError, anthropic.InternalServerError),
    "wrong key": ("m", "wrong", openai.AuthenticationError, anthropic.AuthenticationError),
    "forbidden model": ("m", "sk-other", openai.PermissionDeniedError, anthropic.PermissionDeniedError),
    "expired key": ("m", "sk-old", openai.AuthenticationError, anthropic.AuthenticationError),
    "dead engine": ("m", KEY, openai.InternalServerError, anthropic.InternalServerError),
}


@pytest.mark.parametrize("name", ERRORS)
def test_n1_the_clients_raise_what_they_should(rig, name):
    """N1: every error has the shape of its API, and the official clients raise the right exception with the message."""
    model, key, of_openai, of_anthropic = ERRORS[name]
    keys = (
        KeyEntry("k1", key_digest(KEY)),
        KeyEntry("k2", key_digest("sk-other"), models=("cold",)),
        KeyEntry("k3", key_digest("sk-old"), expires=time.time() - 1),
    )
    rig.use(refused_url(), keys=keys)
    with openai_client(rig, key) as client:
        with pytest.raises(of_openai) as caught:
            client.chat.completions.create(model=model, messages=[])
        assert caught.value.code
        assert caught.value.type
        assert isinstance(caught.value.body, dict)
    with anthropic_client(rig, key) as client:
        with pytest.raises(of_anthropic) as caught:
            client.messages.create(model=model, max_tokens=5, messages=[])
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["message"]


BAD = {
    "no json": (b"{", 400, "bad_json"),
    "not utf-8": (b'{"model":"\xff"}', 400, "bad_json"),
    "a list": (b"[]", 400, "bad_request"),
    "no model": (b"{}", 400, "model_missing"),
    "model is a number": (b'{"model":7}', 400, "bad_request"),
    "stream is a word": (b'{"model":"m","stream":"yes"}', 400, "bad_request"),
    "empty": (b"", 400, "bad_json"),
    "too deep": (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "bad_json"),
}


@pytest.mark.parametrize("name", BAD)
def test_n1_bad_bodies(rig, name):
    """N1: a body that names no model is 400 with a sentence; the client raises BadRequestError."""
    body, status, code = BAD[name]
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        answer = rig.post(body=body)
        assert (answer[0], error(answer)["code"]) == (status, code)
        assert not engine.requests


def test_n1_wrong_paths_and_methods(rig):
    """N1: 404 and 405 are JSON, too; 405 says what is allowed."""
    rig.use(refused_url())
    nowhere = rig.get("/v1/nothing")
    assert (nowhere[0], error(nowhere)["code"]) == (404, "no_such_path")
    method = rig.get("/v1/chat/completions")
    assert (method[0], method[1]["allow"], error(method)["code"]) == (405, "POST", "method_not_allowed")
    nowhere = rig.post("/v1/messages/nothing")
    assert json.loads(nowhere[2])["error"]["type"] == "not_found_error"


def test_each_request_is_judged_by_its_own_key(rig):
    """On one connection, as behind a proxy, a request never profits from the key of the one before."""
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        odd = b"Host: x\r\nAuthorization: Basic same\r\n"
        with rig.client() as raw:
            for fields, wanted in (
                (b"x-api-key: sk-test\r\n", 200),
                (b"x-api-key: wrong\r\n", 401),
                (b"", 401),
                (b"x-api-key: sk-test\r\n", 200),
            ):
                raw.send(b"POST /v1/completions HTTP/1.1\r\n" + odd + fields + b'Content-Length: 13\r\n\r\n{"model":"m"}')
                assert raw.answer()[0] == wanted


def test_keys_may_be_left_out_where_they_are_not_required(rig):
    """keys: none serves anybody."""
    with ScriptedEngine(plain) as engine:
        rig.use(engine, keys_required=False, keys=())
        assert rig.post(key=None)[0] == 200
        assert rig.post(key="whatever")[0] == 200


def test_l12_models(rig):
    """L12, J6: the list needs a key and shows what this key may use, aliases included, whatever works at the moment."""
    keys = (KeyEntry("k1", key_digest(KEY)), KeyEntry("k2", key_digest("sk-other"), models=("cold",)))
    rig.use(refused_url(), keys=keys)
    assert rig.get("/v1/models", key=None)[0] == 401
    with openai_client(rig) as client:
        assert [model.id for model in client.models.list()] == ["m", "alias", "cold"]
        assert client.models.retrieve("cold").owned_by == "llmgw"
    with openai_client(rig, "sk-other") as client:
        assert [model.id for model in client.models.list()] == ["cold"]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("m")
    with anthropic_client(rig) as client:
        assert [model.id for model in client.models.list()] == ["m", "alias", "cold"]
        assert client.models.retrieve("alias").type == "model"


def test_health_and_ready(rig):
    """Both answer without a key."""
    rig.use(refused_url())
    assert rig.get("/health", key=None)[0] == 200
    assert rig.get("/ready", key=None)[0] == 200


def test_demand_is_told(rig):
    """A request for a model without endpoints is told to the server, at most once a second."""
    rig.use(refused_url())
    rig.heard.clear()
    began, count = time.monotonic(), 0
    while time.monotonic() - began < 1.5:
        rig.post(body={"model": "cold"})
        count += 1
    told = until(lambda: [m["model"] for m in rig.heard if m["type"] == "demand"])
    assert 1 <= len(told) <= 2 < count
    assert set(told) == {"cold"}


def test_n2_new_tables_cut_nothing(rig):
    """N2: streams go on through many changes of the table, also when their endpoint leaves it; no request fails meanwhile."""
    go = threading.Event()

    def script(talk):
        while request := talk.request():
            if not request.json.get("stream"):
                talk.answer(OK)
                continue
            talk.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            go.wait(10)
            talk.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    with ScriptedEngine(script) as one, ScriptedEngine(plain) as two:
        rig.use(one)
        clients = [rig.client() for _ in range(30)]
        for client in clients:
            client.send(request_bytes())
            client.read_until(b"data: 1\n\n\r\n")
        for turn in range(10):
            rig.use(two, *([one] if turn % 2 else []))
            assert rig.post()[0] == 200
        go.set()
        for client in clients:
            assert client.read_until(b"0\r\n\r\n").endswith(b"data: 2\n\n\r\n0\r\n\r\n")
            client.socket.close()
