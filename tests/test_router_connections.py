"""Connections kept, dropped and broken, on both sides of a worker; cases E and N8."""

from __future__ import annotations

import json
import os
import resource
import threading
import time

import pytest

from llmgw.config.server import Timeouts
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.ports import free_port
from tests.router_rig import BODY, OK, Rig, descriptors, plain, request_bytes, until


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


def test_e1_idle_connection_closed_by_the_engine(rig):
    """E1: an engine that closes a reused connection as a request arrives: the request is sent once more, on a fresh one."""

    def script(talk):
        while talk.request():
            talk.answer(OK)
            if turn["n"] % 2 == 0:
                # The next request comes into a connection that is closed without an answer.
                while b"\r\n\r\n" not in talk.rest and talk._more():
                    pass
                talk.reset()
                return

    turn = {"n": 0}
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            for turn["n"] in range(20):
                raw.send(request_bytes(BODY))
                assert raw.answer()[::2] == (200, OK)
        assert len(engine.requests) == 20
        assert len(engine.conversations) > 5


def test_e1_a_thousand_gaps_around_the_engines_keep_alive(rig):
    """E1: an engine that closes what is idle, and requests just before, just then and just after: each is answered, each once.

    These are 5 s and gaps of 4.9 to 5.1 s, a hundred times faster, by 25 clients at once.
    """
    keep, gaps, count = 0.05, (-0.001, 0.001), 40
    failed, closed, over = [], [], threading.Event()

    def script(talk):
        while talk.request():
            talk.answer(OK)
            talk.socket.settimeout(keep)
        if not over.is_set():
            closed.append(talk)

    def ask(number):
        with rig.client() as raw:
            for turn in range(count):
                began = time.monotonic()
                raw.send(request_bytes(BODY))
                if raw.answer(20)[::2] != (200, OK):
                    failed.append((number, turn))
                gap = keep + gaps[0] + (gaps[1] - gaps[0]) * ((turn * 7 + number) % 20) / 19
                pause.wait(max(0.0, began + gap - time.monotonic()))

    pause = threading.Event()
    with ScriptedEngine(script) as engine:
        rig.use(engine)
        clients = [threading.Thread(target=ask, args=(number,)) for number in range(25)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        over.set()
        assert not failed
        assert len(engine.requests) == 25 * count
        assert closed, "the engine closed some"


def test_e1_a_fresh_connection_is_not_tried_again(rig):
    """E1: a request that a fresh connection swallowed may have been worked on: it is not sent twice to the same engine."""

    def script(talk):
        talk.request()
        talk.reset()

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        status, _, body = rig.post()
        assert status == 502
        assert json.loads(body)["error"]["code"] == "engine_reset"
        assert len(engine.requests) == 1


def test_e1_idle_connections_are_dropped_in_time(rig):
    """E1: a connection is not reused when it has been idle for as long as engines may keep it."""
    with ScriptedEngine(plain) as engine:
        rig.use(engine, timeouts=Timeouts(engine_keep_alive=0.3))
        rig.post()
        assert engine.open == 1
        until(lambda: engine.open == 0, 2, "idle connection closed")
        rig.post()
        assert len(engine.conversations) == 2


def test_e3_idle_client_is_closed_silently(rig, engine):
    """E3: a client's idle connection ends without a stray byte, and the next request on a new one succeeds."""
    rig.use(engine, timeouts=Timeouts(keep_alive=0.3))
    with rig.client() as raw:
        raw.send(request_bytes(BODY))
        raw.answer()
        assert raw.read_all(3) == b""
    assert rig.post()[0] == 200


def test_answers_with_a_length_keep_it(rig, engine):
    """A plain answer keeps its length and is not chunked."""
    _, headers, body = rig.post()
    assert headers["content-length"] == str(len(OK))
    assert body == OK


def test_engine_that_dies_in_a_plain_answer(rig):
    """An answer with a length that breaks off ends abnormally: the client can see that it is not whole."""

    def script(talk):
        talk.request()
        talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            raw.send(request_bytes(BODY))
            head, _, body = raw.read_all().partition(b"\r\n\r\n")
    assert b"content-length: 100" in head
    assert len(body) < 100


@pytest.mark.parametrize(
    "answer",
    [
        b"no http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\nab",
        b"HTTP/1.1 099 Early\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 999 Late\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=[
        "garbage",
        "two lengths",
        "bad chunk",
        "endless head",
        "gzip, chunked",
        "identity",
        "099",
        "999",
        "2.0",
        "204 with a body",
        "upgrade",
    ],
)
def test_engine_that_speaks_no_http(rig, answer):
    """An engine that answers with anything else than HTTP is 502, not a hang and not passed on."""

    def script(talk):
        talk.request()
        talk.send(answer)
        talk.closed_within(3)

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        status, _, body = rig.post()
        assert status == 502 and b"answered what is no HTTP/1.1" in body


def test_engine_that_answers_twice(rig):
    """What an engine sends without having been asked is nobody's answer: its connection is given up."""
    sent = []

    def script(talk):
        while talk.request():
            talk.answer(OK + b" " * 10)
            time.sleep(0.05)
            talk.answer(b'{"smuggled":true}')
            sent.append(talk.closed_within(2))

    with ScriptedEngine(script) as engine:
        rig.use(engine)
        with rig.client() as raw:
            for turn in range(3):
                raw.send(request_bytes(BODY))
                assert raw.answer()[2].startswith(OK)
                until(lambda: len(sent) > turn)  # noqa: B023
        assert len(engine.conversations) == 3
        assert None not in sent


def test_n8_no_more_descriptors():
    """N8: with as many connections as descriptors allow, the worker neither ends nor spins, and serves again when some go."""
    rig = Rig()
    try:
        rig.use(f"http://127.0.0.1:{free_port()}/v1")
        limit = descriptors(rig) + 40
        resource.prlimit(rig.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        clients = [rig.client() for _ in range(120)]
        time.sleep(0.3)
        before = cpu(rig)
        time.sleep(1.0)
        assert cpu(rig) - before < 0.5
        assert rig.process.poll() is None
        for client in clients:
            client.socket.close()
        until(lambda: healthy(rig), 8)
    finally:
        rig.stop()


def cpu(rig):
    with open(f"/proc/{rig.process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def healthy(rig):
    try:
        return rig.get("/health")[0] == 200
    except OSError:
        return False
