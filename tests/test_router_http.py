"""HTTP as spoken with clients and engines: framing, smuggling, pipelining, fields, heads; cases D."""

from __future__ import annotations

import json
import re
import time

import pytest

from llmgw.testing.scripted_engine import ScriptedEngine
from tests.router_rig import AUTH, BODY, KEY, LENGTH, LINE, OK, Rig, plain, request_bytes


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


@pytest.fixture
def engine(rig):
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        yield engine


CORPUS = {
    "cl and te": LINE + AUTH + LENGTH + b"Transfer-Encoding: chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "te and cl": LINE + AUTH + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "two lengths": LINE + AUTH + LENGTH + LENGTH + b"\r\n" + BODY,
    "two different lengths": LINE + AUTH + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,
    "list of lengths": LINE + AUTH + b"Content-Length: 13, 13\r\n\r\n" + BODY,
    "length +13": LINE + AUTH + b"Content-Length: +13\r\n\r\n" + BODY,
    "length -1": LINE + AUTH + b"Content-Length: -1\r\n\r\n" + BODY,
    "length 0xd": LINE + AUTH + b"Content-Length: 0xd\r\n\r\n" + BODY,
    "length too long": LINE + AUTH + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "xchunked": LINE + AUTH + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked, identity": LINE + AUTH + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "gzip, chunked": LINE + AUTH + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "vt chunked": LINE + AUTH + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunked twice": LINE + AUTH + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked in 1.0": LINE.replace(b"1.1", b"1.0") + AUTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size 0xd": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\n0xd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size +d": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\n+d\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size too large": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\n1111111111111111d\r\n" + BODY + b"\r\n0\r\n\r\n",
    "lf after chunk size": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\nd\n" + BODY + b"\n0\n\n",
    "lf in extension": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\nd;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than said": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\nd\r\n" + BODY + b"XX0\r\n\r\n",
    "bare lf": LINE.replace(b"\r", b"") + AUTH.replace(b"\r", b"") + b"Content-Length: 13\n\n" + BODY,
    "one bare lf": LINE + b"Host: x\n" + AUTH[9:] + LENGTH + b"\r\n" + BODY,
    "bare cr": LINE + b"X: a\rY: b\r\n" + AUTH + LENGTH + b"\r\n" + BODY,
    "folded line": LINE + AUTH + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "space before colon": LINE + AUTH + b"Content-Length : 13\r\n\r\n" + BODY,
    "nul": LINE + AUTH + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "control": LINE + AUTH + b"X: a\x01b\r\n" + LENGTH + b"\r\n" + BODY,
    "two hosts": LINE + b"Host: y\r\n" + AUTH + LENGTH + b"\r\n" + BODY,
    "no host": LINE + AUTH[9:] + LENGTH + b"\r\n" + BODY,
    "two keys": LINE + AUTH + AUTH[9:] + LENGTH + b"\r\n" + BODY,
    "no name": LINE + AUTH + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "no colon": LINE + AUTH + b"foo\r\n" + LENGTH + b"\r\n" + BODY,
    "nul in path": b"POST /v1/chat\0/completions HTTP/1.1\r\n" + AUTH + LENGTH + b"\r\n" + BODY,
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/2.0": LINE.replace(b"1.1", b"2.0") + AUTH + LENGTH + b"\r\n" + BODY,
    "http/0.9": b"GET /v1/models\r\n\r\n",
    "connect": b"CONNECT x:1 HTTP/1.1\r\n" + AUTH + b"\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\n" + AUTH + b"\r\n",
    "endless extension": LINE
    + AUTH
    + b"Transfer-Encoding: chunked\r\n\r\nd;"
    + b"a" * 400_000
    + b"\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "extensions all over": LINE
    + AUTH
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"1;x=%b\r\n \r\n" % (b"e" * 9000) * 50
    + b"0\r\n\r\n",
    "endless trailer": LINE
    + AUTH
    + b"Transfer-Encoding: chunked\r\n\r\nd\r\n"
    + BODY
    + b"\r\n0\r\nX: "
    + b"a" * 400_000
    + b"\r\n\r\n",
    "many trailers": LINE
    + AUTH
    + b"Transfer-Encoding: chunked\r\n\r\nd\r\n"
    + BODY
    + b"\r\n0\r\n"
    + b"X: a\r\n" * 90_000
    + b"\r\n",
    "target without a path": LINE.replace(b"/v1", b"http://x?y=/v1") + AUTH + b"Connection: close\r\n" + LENGTH + b"\r\n" + BODY,
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
}


@pytest.mark.parametrize("name", CORPUS)
def test_d1_refused(rig, engine, name):
    """D1: what can be read in two ways is answered 4xx or 505 and closed, and no engine sees anything of it."""
    after = request_bytes()
    with rig.client() as raw:
        raw.send(CORPUS[name] + after)
        answer = raw.read_all()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 505", b"HTTP/1.1 404")), answer
    assert len(re.findall(rb"HTTP/1.1 \d\d\d ", answer)) == 1
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert not engine.requests


TAKEN = {
    "chunked": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk extension": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\nd;a=b\r\n" + BODY + b"\r\n0\r\n\r\n",
    "trailer": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\nX-Trailer: a\r\n\r\n",
    "tab before chunked": LINE + AUTH + b"Transfer-Encoding:\tchunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "spaces around length": LINE + AUTH + b"Content-Length:   13 \r\n\r\n" + BODY,
    "absolute target": LINE.replace(b"/v1", b"http://other/v1") + AUTH + LENGTH + b"\r\n" + BODY,
    "upper case names": LINE + AUTH.upper().replace(KEY.upper().encode(), KEY.encode()) + LENGTH.upper() + b"\r\n" + BODY,
    "leading empty lines": b"\r\n\r\n" + LINE + AUTH + LENGTH + b"\r\n" + BODY,
    "a byte a chunk": LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"1\r\n%c\r\n" % c for c in BODY) + b"0\r\n\r\n",
    "upgrade to h2c": LINE + AUTH + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n" + LENGTH
    + b"\r\n" + BODY,
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_d1_taken_in_one_way(rig, engine, name):
    """D1: unusual but clear requests are served; the engine gets one that is plainly framed."""
    with rig.client() as raw:
        raw.send(TAKEN[name])
        assert raw.answer()[::2] == (200, OK)
        raw.send(request_bytes(b'{"model":"m"} '))
        assert raw.answer()[0] == 200
    assert [request.body for request in engine.requests] == [BODY, b'{"model":"m"} ']
    first = engine.requests[0]
    assert first.line == b"POST /v1/chat/completions HTTP/1.1"
    assert first.header(b"content-length") == b"13"
    assert first.header(b"transfer-encoding") is None
    assert first.header(b"upgrade") is None
    assert first.header(b"x-trailer") is None


@pytest.mark.parametrize("step", [1, 7, 40])
def test_requests_in_small_pieces(rig, engine, step):
    """A request that arrives in pieces of any size is the same request."""
    data = request_bytes(BODY)
    with rig.client() as raw:
        for start in range(0, len(data), step):
            raw.send(data[start : start + step])
        assert raw.answer()[::2] == (200, OK)


def test_d2_pipelining(rig):
    """D2: three requests in one segment get three answers in order, the first being slow."""

    def script(talk):
        while request := talk.request():
            number = request.json["n"]
            time.sleep(0.2 if number == 1 else 0)
            talk.answer(b"%d" % number)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            raw.send(b"".join(request_bytes(b'{"model":"m","n":%d}' % number) for number in (1, 2, 3)))
            assert [raw.answer()[2] for _ in range(3)] == [b"1", b"2", b"3"]


def test_d2_pipelining_with_a_malformed_second(rig, engine):
    """D2: the answer before is whole, then comes the 400, then the end."""
    with rig.client() as raw:
        raw.send(request_bytes(BODY) + CORPUS["two hosts"] + request_bytes(BODY))
        assert raw.answer()[::2] == (200, OK)
        assert raw.answer()[0] == 400
        assert raw.read_all() == b""
    assert len(engine.requests) == 1


def test_d2_pipelining_of_errors(rig, engine):
    """D2: many requests that need no engine, sent at once, are answered in order."""
    with rig.client() as raw:
        raw.send((b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n") * 200)
        assert [raw.answer()[0] for _ in range(400)] == [200, 404] * 200


def test_d3_expect_continue(rig, engine):
    """D3: with an acceptable head the client is told to go on, and the answer comes after the body."""
    body = b'{"model":"m","pad":"' + b"x" * 2_000_000 + b'"}'
    with rig.client() as raw:
        raw.send(LINE + AUTH + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert raw.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(body)
        assert raw.answer()[::2] == (200, OK)
    assert engine.requests[0].body == body
    assert engine.requests[0].header(b"expect") is None


def test_d3_expect_continue_with_a_refused_key(rig, engine):
    """D3: with a key that is not known the answer is 401, without the body being read."""
    with rig.client() as raw:
        raw.send(LINE + b"Host: x\r\nAuthorization: Bearer wrong\r\nExpect: 100-continue\r\nContent-Length: 2000000\r\n\r\n")
        assert raw.read_all().startswith(b"HTTP/1.1 401")


def test_d4_alias_is_rewritten(rig, engine):
    """D4: a request under an alias reaches the engine under the name it serves, with the right length; the rest is as it was."""
    rig.use(engine, served="served/name")
    body = {"model": "alias", "messages": [{"role": "user", "content": 'say "model"'}], "n": 1e3, "x": {"model": "alias"}}
    assert rig.post(body=body)[0] == 200
    request = engine.requests[0]
    assert request.header(b"content-length") == b"%d" % len(request.body)
    assert request.json == {**body, "model": "served/name"}


def test_d5_no_encoding_asked_for(rig, engine):
    """D5: whatever the client accepts, engines are asked for plain bytes."""
    rig.post(headers={"Accept-Encoding": "gzip, br"})
    assert engine.requests[0].header(b"accept-encoding") == b"identity"


def test_d6_hop_by_hop_fields(rig):
    """D6: fields of one hop, and those that Connection names, are not passed on, either way; others are."""

    def script(talk):
        while talk.request():
            talk.answer(
                OK,
                fields=b"Content-Type: audio/mpeg\r\nConnection: X-Bar\r\nConnection: X-Baz\r\nX-Bar: 1\r\nX-Baz: 1\r\n"
                b"X-Llmgw-Replica: z\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: x\r\nTrailer: X\r\nX-Other: 2\r\n"
                b"Set-Cookie: a=b\r\n",
            )

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        sent = {"Connection": "X-Foo", "X-Foo": "1", "Keep-Alive": "5", "Proxy-Authorization": "a", "TE": "trailers",
                "X-Mine": "2", "Cookie": "a=b", "X-Forwarded-For": "1.2.3.4"}  # fmt: skip
        _, headers, _ = rig.post(headers=sent)
        with rig.client() as raw:
            raw.send(request_bytes(fields=b"Connection: X-Foo\r\nConnection: close\r\nX-Foo: 1\r\n"))
            assert raw.answer()[0] == 200
    assert engine.requests[1].header(b"x-foo") is None
    names = {name for name, _ in engine.requests[0].headers}
    assert not names & {b"connection", b"x-foo", b"keep-alive", b"proxy-authorization", b"te", b"cookie", b"x-forwarded-for"}
    assert engine.requests[0].header(b"x-mine") == b"2"
    assert headers["x-llmgw-replica"] == "m/0", "and nobody else's"
    assert not set(headers) & {"x-bar", "x-baz", "keep-alive", "proxy-authenticate", "trailer", "set-cookie"}
    assert headers["x-other"] == "2"
    assert headers["content-type"] == "audio/mpeg"


def test_d8_interim_answers(rig):
    """D8: 1xx from an engine is not taken for the answer."""

    def script(talk):
        while talk.request():
            talk.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
            talk.answer(OK)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        assert rig.post()[::2] == (200, OK)


def test_d8_no_content(rig):
    """D8: an answer without a body does not hang."""

    def script(talk):
        while talk.request():
            talk.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        assert rig.post()[::2] == (204, b"")


def test_head_and_get(rig, engine):
    """HEAD of what answers GET has a head and no body."""
    status, headers, body = rig.send("HEAD", "/v1/models", None)
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 10


def test_d10_request_ids(rig, engine):
    """D10: a client's id comes back to it; engines get one that is unique even if the client's is not."""
    for _ in range(2):
        assert rig.post(headers={"X-Request-Id": "mine"})[1]["x-request-id"] == "mine"
    ids = [request.header(b"x-request-id") for request in engine.requests]
    assert len(set(ids)) == 2
    assert b"mine" not in ids
    assert {row["client_id"] for row in rig.log(2, client_id="mine")} == {"mine"}
    assert rig.post(headers={"X-Request-Id": ""})[1]["x-request-id"], "an empty one is none"
    assert rig.post(headers={"X-Request-Id": "x" * 9000})[1]["x-request-id"] == "x" * 9000
    assert rig.log(client_id="x" * 200), "but the log does not grow by it"


def test_d11_keys_stay_where_they_belong(rig, engine):
    """D11: the client's key does not reach an engine, the engine's key reaches nobody else."""
    for headers in ({}, {"x-api-key": KEY}):
        _, answered, _ = rig.post(headers=headers, key=None if headers else KEY)
        request = engine.requests[-1]
        assert KEY.encode() not in request.raw
        assert request.header(b"authorization") == b"Bearer ek-0"
        assert "ek-0" not in str(answered)
    with ScriptedEngine(lambda talk: (talk.request(), talk.reset())) as broken:
        rig.use(broken)
        status, *answered = rig.post()
        assert status == 502 and "ek-0" not in str(answered)
    rig.log(2, outcome="done")
    assert "ek-0" not in rig.access.read_text()
    assert KEY not in rig.access.read_text()


@pytest.mark.parametrize("fields", [b"X-%d: y\r\n" * 600, b"X: " + b"y" * 20_000 + b"\r\n"], ids=["many", "large"])
def test_d12_too_large_a_head(rig, engine, fields):
    """D12: 431, told in JSON, not a reset."""
    fields = fields % tuple(range(600)) if b"%d" in fields else fields
    with rig.client() as raw:
        raw.send(LINE + AUTH + fields + LENGTH + b"\r\n" + BODY)
        answer = raw.read_all()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


def test_d12_a_head_without_end(rig, engine):
    """D12: a head that never ends is cut off."""
    with rig.client() as raw:
        raw.send(LINE + b"X: ")
        for _ in range(10):
            raw.send(b"y" * 8000)
            time.sleep(0.01)
        assert raw.read_all().startswith(b"HTTP/1.1 431 ")
