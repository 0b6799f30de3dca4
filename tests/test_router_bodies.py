"""Bodies of requests: their limit, slow and large ones, where they are kept; cases F, G1 and H3."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time

import pytest

from llmgw.config.server import Timeouts
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.router_rig import AUTH, BODY, LENGTH, LINE, OK, Rig, descriptors, plain, until


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


def test_f1_body_limit(rig, engine):
    """F1: exactly the limit is taken, one byte more is 413 in JSON, with a length and in chunks."""
    rig.use(engine, body_limit=1000)
    body = b'{"model":"m","pad":"' + b"x" * 978 + b'"}'
    assert len(body) == 1000
    assert rig.post(body=body)[0] == 200
    status, _, answer = rig.post(body=body + b" ")
    assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")
    for size, wanted in ((1000, 200), (1001, 413)):
        with rig.client() as raw:
            raw.send(
                LINE + AUTH + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (size, body + b" " * (size - 1000))
            )
            assert raw.answer()[0] == wanted


def test_f1_large_body_is_refused_early(rig, engine):
    """F1: 413 comes before the body, and arrives although the client is still sending."""
    rig.use(engine, body_limit=1000)
    with rig.client() as raw:
        raw.send(LINE + AUTH + b"Content-Length: 100000000\r\n\r\n")
        for _ in range(20):
            raw.send(b"x" * 10_000)
        assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_f2_large_bodies_arrive_whole(rig, engine):
    """F2: an image of 20 MB in base64 is not truncated."""
    body = json.dumps({"model": "m", "messages": [{"image": "data:image/png;base64," + "QUJD" * 5_000_000}]}).encode()
    assert rig.post(body=body)[0] == 200
    assert engine.requests[0].body == body


def test_f6_slow_head_and_slow_body(rig, engine):
    """F6: a head or a body that does not come is answered 408; a connection that says nothing is closed."""
    rig.use(engine, timeouts=Timeouts(headers=0.3, body=0.3))
    for sent in (LINE, LINE + AUTH + LENGTH + b"\r\n{"):
        with rig.client() as raw:
            raw.send(sent)
            assert raw.read_all(3).startswith(b"HTTP/1.1 408")
    with rig.client() as raw:
        assert raw.read_all(3) == b""


def test_f6_a_slow_body_holds_no_place(rig, engine):
    """F6: only when a request's body is here does it take a place at an engine, which others have until then."""
    rig.use(engine, limit=1)
    with rig.client() as raw:
        raw.send(LINE + AUTH + LENGTH + b"\r\n" + BODY[:-1])
        assert [rig.post()[0] for _ in range(3)] == [200] * 3
        raw.send(BODY[-1:])
        assert raw.answer()[0] == 200


def test_trickling_body_is_taken(rig, engine):
    """F6: the body's clock runs between its pieces, not over all of it."""
    rig.use(engine, timeouts=Timeouts(headers=5, body=1.0))
    with rig.client() as raw:
        raw.send(LINE + AUTH + LENGTH + b"\r\n")
        for number in range(len(BODY)):
            raw.send(BODY[number : number + 1])
            time.sleep(0.12)
        assert raw.answer()[0] == 200


def test_upload_to_a_slow_engine(rig):
    """A large body reaches an engine that reads slowly, without a deadline being missed."""

    def script(talk):
        talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        time.sleep(0.5)
        while talk.request():
            talk.answer(OK)

    body = b'{"model":"m","pad":"' + b"x" * 5_000_000 + b'"}'
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        assert rig.post(body=body)[0] == 200
        assert engine.requests[0].body == body


def anonymous(rig):
    """Bytes of the worker's memory that nothing else could give back."""
    with open(f"/proc/{rig.process.pid}/status") as file:
        return int(file.read().partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.parametrize("name", ["m", "alias"])
def test_h3_large_bodies_do_not_stay_in_memory(rig, name):
    """H3: many large uploads at once are kept in a file without a name; they arrive whole, and nothing stays behind."""
    go = threading.Event()
    sizes = []

    def script(talk):
        while request := talk.request():
            if len(request.body) > 1000:
                go.wait(30)
            sizes.append((len(request.body), request.body[-9:]))
            talk.answer(OK)

    body = json.dumps({"model": name, "stream": False, "pad": "x" * 8_000_000, "end": 12}, separators=(",", ":")).encode()
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        rig.post()
        before, files = anonymous(rig), descriptors(rig)
        threads = [threading.Thread(target=rig.post, kwargs={"body": body}) for _ in range(5)]
        for thread in threads:
            thread.start()
        until(lambda: descriptors(rig) >= files + 10, 20)
        grown = anonymous(rig) - before
        go.set()
        for thread in threads:
            thread.join(20)
        assert len(sizes) == 6
        assert [end for _, end in sizes[1:]] == [body[-9:]] * 5
        assert len({size for size, _ in sizes[1:]}) == 1
        if name == "m":
            assert sizes[1][0] == len(body)
            assert grown < 12_000_000
    until(lambda: descriptors(rig) <= files + 1)


def test_h3_left_uploads_leave_no_file(rig, engine):
    """H3: clients that leave in the middle of a large upload leave no descriptor behind."""
    rig.post()
    files = descriptors(rig)
    for _ in range(20):
        with rig.client() as raw:
            raw.send(LINE + AUTH + b"Content-Length: 9000000\r\n\r\n" + b"x" * 3_000_000)
    until(lambda: descriptors(rig) <= files)


def test_h3_full_disk(rig, engine):
    """H3: a body that cannot be kept is 507, and the worker goes on. (A limit on the size of files stands in for the disk.)"""
    soft, hard = resource.prlimit(rig.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(rig.process.pid, resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        with rig.client() as raw:
            raw.send(LINE + AUTH + b"Content-Length: 9000000\r\n\r\n" + b"x" * 4_000_000)
            answer = raw.read_until(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 507")
        assert rig.post()[0] == 200
    finally:
        resource.prlimit(rig.process.pid, resource.RLIMIT_FSIZE, (soft, hard))


def test_g1_large_bodies_do_not_stall_others(rig, engine):
    """G1: while bodies of 20 MB are read, other requests go on; their parsing is the longest pause there is."""
    body = b'{"model":"m","pad":"' + b"x" * 20_000_000 + b'"}'
    rig.post()
    threads = [threading.Thread(target=rig.post, kwargs={"body": body}) for _ in range(5)]
    for thread in threads:
        thread.start()
    waits = []
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        assert rig.get("/health")[0] == 200
        waits.append(time.monotonic() - began)
    assert len(waits) > 10
    assert sorted(waits)[len(waits) // 2] < 0.1
