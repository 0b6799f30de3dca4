"""Every call of the API through a real worker, forms and HTTPS included, and the official clients; case F3."""

from __future__ import annotations

import base64
import json
import mmap
import os
import socket
import ssl
import subprocess
from pathlib import Path

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.errors import Refusal
from llmgw.router.form import MAX_PART_HEAD, fields, skim_form
from llmgw.router.surface import CALLS, LOCAL, MULTIPART
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.router_rig import KEY, Rig, finished, longest_step

OK = b'{"ok":true}'


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def plain(talk):
    while talk.request():
        talk.answer(OK)


@pytest.fixture
def engine(rig):
    with ScriptedEngine(plain) as engine:
        rig.use(engine, served="served")
        yield engine


def form(*parts, boundary="xyz"):
    text = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        % (boundary.encode(), name, b'; filename="a.wav"\r\nContent-Type: audio/wav' if name == b"file" else b"", value)
        for name, value in parts
    )
    return text + b"--%b--\r\n" % boundary.encode()


@pytest.mark.parametrize("path", [path.decode() for path, call in CALLS.items() if call.model is not LOCAL])
def test_every_call_reaches_its_path_under_the_served_name(rig, engine, path):
    """Each call goes to the same path of the engine, an alias exchanged for what the engine serves, in JSON and in forms."""
    if CALLS[path.encode()].model is MULTIPART:
        body = form((b"file", b"\0\1"), (b"model", b"alias"), (b"language", b"de"))
        wanted = form((b"file", b"\0\1"), (b"model", b"served"), (b"language", b"de"))
        answer = rig.post(path, body, {"Content-Type": 'multipart/form-data; boundary="xyz"'})
    else:
        wanted = json.dumps({"model": "served", "input": "x"}, separators=(",", ":")).encode()
        answer = rig.post(path, {"model": "alias", "input": "x"})
    assert (answer[0], answer[2]) == (200, OK)
    request = engine.requests[0]
    assert request.line == b"POST %b HTTP/1.1" % path.encode()
    assert json.loads(request.body) == json.loads(wanted) if request.body[:1] == b"{" else request.body == wanted
    assert rig.get(path)[0] == 405


def test_f3_model_after_a_large_file(rig, engine):
    """F3: the model's name may stand behind a file of 30 MB."""
    body = form((b"file", os.urandom(1000) * 30_000), (b"model", b"m"))
    answer = rig.post("/v1/audio/transcriptions", body, {"Content-Type": "multipart/form-data; boundary=xyz"})
    assert answer[0] == 200
    assert len(engine.requests[0].body) == len(body) + len("served") - 1
    assert engine.requests[0].header(b"content-type") == b"multipart/form-data; boundary=xyz"


BAD_FORMS = {
    "no boundary": (b"multipart/form-data", form((b"model", b"m"))),
    "not a form": (b"application/json", b'{"model":"m"}'),
    "other boundary": (b"multipart/form-data; boundary=other", form((b"model", b"m"))),
    "no model": (b"multipart/form-data; boundary=xyz", form((b"file", b"x"))),
    "two models": (b"multipart/form-data; boundary=xyz", form((b"model", b"m"), (b"model", b"cold"))),
    "no end": (b"multipart/form-data; boundary=xyz", form((b"model", b"m"))[:-12]),
    "not utf-8": (b"multipart/form-data; boundary=xyz", form((b"model", b"\xff"))),
}


@pytest.mark.parametrize("name", BAD_FORMS)
def test_bad_forms(rig, engine, name):
    """A form that is none, or names no model or two, is 400; the engine does not see it."""
    content_type, body = BAD_FORMS[name]
    answer = rig.post("/v1/audio/translations", body, {"Content-Type": content_type.decode()})
    assert answer[0] == 400
    assert json.loads(answer[2])["error"]["message"]
    assert not engine.requests


@given(st.lists(st.tuples(st.sampled_from([b"file", b"model", b"x"]), st.binary(max_size=40)), max_size=6))
def test_forms_are_read_as_they_were_written(parts):
    """Whatever stands in a form, its parts are found again, byte for byte."""
    parts = [(name, value) for name, value in parts if b"--xyz" not in value]
    body = form(*parts)
    if not parts:
        return
    assert [(name, body[start:end]) for name, start, end in finished(fields(body, b"xyz"))] == parts


@given(st.binary(max_size=300))
def test_any_bytes_are_a_form_or_refused(data):
    """No bytes make the reader fail in another way than by refusing."""
    try:
        finished(skim_form(b"--xyz\r\n" + data, b"multipart/form-data; boundary=xyz"))
    except Refusal as refusal:
        assert refusal.status == 400


def part_head(line):
    """A form of one part with this line in its head, and nothing in it."""
    return b"--xyz\r\n" + line + b"\r\n\r\nm\r\n--xyz--\r\n"


@pytest.mark.parametrize(
    "line, name",
    [
        (b"Content-Disposition: form-data; name=model", b"model"),
        (b'content-disposition:form-data;name="model"', b"model"),
        (b'Content-Disposition: form-data; filename="a; name=\\"x\\"; .wav"; name="model"', b"model"),
        (b'Content-Type: text/plain\r\nContent-Disposition: form-data;; x; name = "model" ; y=1', b"model"),
        (b'X: content-disposition: form-data; name="model"', b""),
        (b"Content-Disposition: form-data; name*=utf-8''model", b""),
        (b'Content-Disposition: form-data; filename="model', b""),
    ],
)
def test_which_field_a_part_is(line, name):
    """As engines read it: by the parameter, not by what stands in another one's quotes."""
    assert [found for found, _, _ in finished(fields(part_head(line), b"xyz"))] == [name]


@pytest.mark.parametrize(
    "line",
    [
        b'Content-Disposition: form-data; name="x"; name="model"',
        b"Content-Disposition: form-data; name=x\r\nContent-Disposition: form-data; name=model",
        b'Content-Disposition: form-data; name="model"; x="' + b"x" * MAX_PART_HEAD + b'"',
    ],
    ids=["name", "line", "length"],
)
def test_parts_that_two_readers_would_read_in_two_ways(line):
    """They are refused, as are heads too long to be a part's."""
    with pytest.raises(Refusal):
        finished(fields(part_head(line), b"xyz"))


LINE = b"content-disposition:form-data;"
FORMS = {
    "lines": [LINE * 130] * 900,
    "parameters": [LINE + b";" * 4000] * 900,
    "assignments": [LINE + b"a=b;" * 1000] * 900,
    "blanks": [LINE + b" " * 4000] * 900,
    "quotes": [LINE + b'a="' * 1300] * 900,
    "heads": [(LINE + b"\r\n") * 120] * 900,
    "short": [b""] * 990,
    "file": [b'Content-Disposition: form-data; name="file"\r\n\r\n' + b"\r\n--xy" * 4_000_000],
}


@pytest.mark.parametrize("shape", FORMS)
def test_each_step_of_a_form_is_short(shape):
    """However its parts' heads are made; a pattern that tried each of their beginnings took seconds."""
    data = b"".join(b"--xyz\r\n%b\r\n\r\n\r\n" % head for head in FORMS[shape]) + b"--xyz--\r\n"
    raw = mmap.mmap(-1, len(data))
    raw[:] = data
    took = []
    assert len(finished(fields(raw, b"xyz"), took.append)) == len(FORMS[shape])
    assert sum(took) < 3
    assert longest_step(lambda: fields(raw, b"xyz")) < 0.01


TOOL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHOICE = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "content": None, "tool_calls": [TOOL]}}
CHAT = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]}


def serving(body, fields=b"content-type: application/json\r\n"):
    def script(talk):
        while talk.request():
            talk.answer(body if isinstance(body, bytes) else json.dumps(body).encode(), fields=fields)

    return script


def test_openai_client(rig):
    """The official client: tools, an image in base64, embeddings, audio both ways, through their own code."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    image = "data:image/png;base64," + base64.b64encode(os.urandom(200_000)).decode()
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": image}}]
    with openai.OpenAI(base_url=rig.url + "/v1", api_key=KEY, max_retries=0) as client:
        with ScriptedEngine(serving(CHAT)) as engine:
            rig.use(engine)
            made = client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], tools=tools)
            assert made.choices[0].message.tool_calls[0].function.name == "look"
            assert engine.requests[0].json["messages"][0]["content"][1]["image_url"]["url"] == image
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        with ScriptedEngine(serving({"data": [{"index": 0, "embedding": [0.5]}], "model": "m", "usage": usage})) as engine:
            rig.use(engine)
            assert client.embeddings.create(model="m", input="x", encoding_format="float").data[0].embedding == [0.5]
        with ScriptedEngine(serving({"text": "hello"})) as engine:
            rig.use(engine, served="whisper")
            assert client.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF")).text == "hello"
            assert b"whisper" in engine.requests[0].body
        with ScriptedEngine(serving(b"\xff\xfbMP3", b"content-type: audio/mpeg\r\n")) as engine:
            rig.use(engine)
            assert client.audio.speech.create(model="m", input="x", voice="v").read() == b"\xff\xfbMP3"


def test_anthropic_client(rig):
    """The official client: a message with a tool, and counting tokens."""
    message = {"id": "1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use", "stop_sequence": None,
               "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
               "usage": {"input_tokens": 3, "output_tokens": 4}}  # fmt: skip
    with anthropic.Anthropic(base_url=rig.url, api_key=KEY, max_retries=0) as client:
        with ScriptedEngine(serving(message)) as engine:
            rig.use(engine)
            made = client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}])
            assert made.content[0].name == "look"
            assert KEY.encode() not in engine.requests[0].raw
        with ScriptedEngine(serving({"input_tokens": 7})) as engine:
            rig.use(engine)
            assert client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}]).input_tokens == 7
    rows = rig.log(call="messages", completion=4)
    assert rows[-1]["prompt"] == 3


def certificate(folder: Path, name: str) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj",
         f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key.pem"), "-out",
         str(folder / "cert.pem")], check=True, capture_output=True,
    )  # fmt: skip


def test_https_and_a_new_certificate(tmp_path):
    """HTTPS with the same behaviour; a new certificate is presented to new connections after the server has said so."""
    certificate(tmp_path, "first")
    rig = Rig("--certificate", str(tmp_path / "cert.pem"), "--key", str(tmp_path / "key.pem"))

    def name():
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", rig.port), timeout=5) as raw, context.wrap_socket(raw) as wrapped:
            wrapped.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert wrapped.recv(1000).startswith(b"HTTP/1.1 200")
            return wrapped.getpeercert(True)

    try:
        first = name()
        (tmp_path / "cert.pem").write_text("nonsense")
        rig.channel.sendall(b'{"type":"certificates"}\n')
        assert name() == first
        certificate(tmp_path, "second")
        rig.channel.sendall(b'{"type":"certificates"}\n')
        rig.use()
        assert name() != first
    finally:
        rig.stop()
