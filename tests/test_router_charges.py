"""What a request is charged to its key's tokens, and that limits and usage say the same: through a real worker."""

from __future__ import annotations

import json
import threading

import pytest

from llmgw.router.surface import CALLS, LOCAL, MULTIPART
from llmgw.router.table import KeyEntry, key_digest
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.router_rig import KEY, Rig, plain, request_bytes, until

LONG = "y" * 40_000
FREE = [path.decode() for path, call in CALLS.items() if call.model is not LOCAL and call.usage in ("", "told")]
FORM = {"Content-Type": "multipart/form-data; boundary=xyz"}


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def limited(name, **limits):
    """A key of its own, so that no other test has used its tokens."""
    return (KeyEntry(name, key_digest(KEY), **limits),)


def spoken(size=400_000):
    """A form with a file of this size."""
    parts = ((b'name="model"', b"m"), (b'name="file"; filename="a.wav"', b"\0" * size))
    text = b"".join(b"--xyz\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % part for part in parts)
    return text + b"--xyz--\r\n"


@pytest.mark.parametrize("path", FREE)
def test_what_makes_no_tokens_is_not_charged(rig, path):
    """Sound, pictures and the counting of tokens use none of a key's tokens, however large they are."""
    form = CALLS[path.encode()].model is MULTIPART
    body = spoken() if form else {"model": "m", "input": LONG}
    with ScriptedEngine(plain) as engine:
        rig.use(engine, keys=limited(f"free{path}", tpm=2000, tpd=2000))
        assert [rig.post(path, body, FORM if form else None)[0] for _ in range(3)] == [200] * 3
    assert rig.log(3, key=f"free{path}")[-1]["prompt"] is None


def test_a_transcription_is_charged_what_its_answer_says(rig):
    """An engine that counts the tokens of a recording is believed."""
    said = json.dumps({"text": "x", "usage": {"type": "tokens", "input_tokens": 900, "output_tokens": 200}}).encode()

    def script(talk):
        while talk.request():
            talk.answer(said)

    with ScriptedEngine(script) as engine:
        rig.use(engine, keys=limited("told", tpd=1000))
        assert [rig.post("/v1/audio/transcriptions", spoken(), FORM)[0] for _ in range(2)] == [200, 429]
    assert rig.log(key="told", status=200)[0]["prompt"] == 900


@pytest.mark.parametrize("asks", [{"stream": True}, {}])
def test_who_leaves_before_the_first_byte_has_had_the_prompt_read(rig, asks):
    """The engine was at work on it: the prompt counts by its size, in usage and against the limit."""
    seen, go = threading.Event(), threading.Event()

    def script(talk):
        talk.request()
        seen.set()
        go.wait(5)

    name = f"left{len(asks)}"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}], "max_tokens": 1, **asks}).encode()
    with ScriptedEngine(script) as engine:
        rig.use(engine, keys=limited(name, tpd=10_000))
        with rig.client() as raw:
            raw.send(request_bytes(body))
            assert seen.wait(5)
        row = rig.log(key=name, outcome="client_gone")[0]
        go.set()
        assert 10_000 <= row["prompt"] < 10_100 and not row["completion"]
        answer = rig.post(body={"model": "m", "max_tokens": 1})
        assert json.loads(answer[2])["error"]["code"] == "tpd"


def test_who_leaves_the_line_is_charged_nothing(rig):
    """No engine has seen it."""
    seen, go = threading.Event(), threading.Event()

    def script(talk):
        while talk.request():
            seen.set()
            go.wait(5)
            talk.answer(b"{}")

    body = json.dumps({"model": "m", "messages": LONG, "max_tokens": 1}).encode()
    with ScriptedEngine(script) as engine:
        rig.use(engine, limit=1, keys=limited("line", tpd=11_000))
        first = threading.Thread(target=rig.post, kwargs={"body": {"model": "m", "max_tokens": 1}})
        first.start()
        assert seen.wait(5)
        with rig.client() as raw:
            raw.send(request_bytes(body))
            until(lambda: rig.board.total(rig.board.row("model/m") + 1) == 1)
        assert rig.log(key="line", outcome="client_gone")[0]["prompt"] is None
        go.set()
        first.join()
        assert rig.post(body=body)[0] == 200


@pytest.mark.parametrize("second, total", [({}, 2), ({"rpm": 4}, 4), ({"rpm": 1}, 2), ({"tpd": 10**9}, 2)])
def test_limits_of_a_team_hold_for_all_its_keys(rig, second, total):
    """The largest that any of its keys was given, for the sum over all of them, also where one was given none."""
    team = f"q{second}"
    keys = (KeyEntry("one", key_digest(KEY), team=team, rpm=2), KeyEntry("two", key_digest("sk-two"), team=team, **second))
    with ScriptedEngine(plain) as engine:
        rig.use(engine, keys=keys)
        statuses = [rig.post(key=key)[0] for key in ("sk-two", KEY) * 3]
        rig.use(engine, keys=(*keys, KeyEntry("three", key_digest("sk-three"), rpm=9)))
        assert rig.post(key="sk-three")[0] == 200, "who is in no team is not counted with it"
    assert statuses == [200] * total + [429] * (6 - total)


@pytest.mark.parametrize("path, charged", [("/v1/chat/completions", 1000), ("/v1/embeddings", 0)])
def test_answer_without_usage_counts_by_size(rig, path, charged):
    """An engine that says nothing of usage: what is written down is what the limit counts, and no reservation stays."""

    def script(talk):
        while talk.request():
            talk.answer(json.dumps({"choices": [{"text": "z" * 4000}]}).encode())

    with ScriptedEngine(script) as engine:
        rig.use(engine, keys=limited(f"silent{path}", tpd=2400))
        statuses = [rig.post(path, {"model": "m", "input": "y" * 400, "max_tokens": 100})[0] for _ in range(3)]
    assert statuses == ([200, 200, 429] if charged else [200] * 3)
    row = rig.log(key=f"silent{path}", status=200)[0]
    assert 100 <= row["prompt"] < 130 and charged <= row["completion"] <= charged + 20
