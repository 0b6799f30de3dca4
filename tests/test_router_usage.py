"""Token counts: asked for, read, and hidden again, byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.usage import StreamUsage, Tally, Usage, ask, asks, has_usage, of_body


def event(value: object, end: str = "\n\n", spaced: bool = False) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    data = value if isinstance(value, str) else json.dumps(value, separators=separators)
    return f"data: {data}{end}".encode()


def named(name: str, value: dict) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()


def delta(text: str) -> dict:
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}


USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 4}}
LAST = {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"choices": [{"message": {"content": "hi"}}], "usage": USAGE}, Usage(10, 4, 3)),
        ({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 8, "total_tokens": 8}}, Usage(8, 0, 0)),
        ({"usage": {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}}, Usage(5, 1, 2)),
        (
            {"type": "message", "usage": {"input_tokens": 5, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 3,
                                          "output_tokens": 7}},
            Usage(28, 20, 7),
        ),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": None, "prompt_tokens_details": None}}, Usage(5, 0, 0)),
        ({"choices": []}, None),
        ({"usage": None}, None),
        ({"usage": "much"}, None),
        ({"choices": [{"message": {"tool_calls": [{"usage": {"prompt_tokens": 99}}]}}], "usage": USAGE}, Usage(10, 4, 3)),
    ],
)  # fmt: skip
def test_whole_answers(body, expected):
    """OpenAI's, the Responses API's and Anthropic's names; null and absence are nothing, nested look-alikes are not it."""
    assert of_body(json.dumps(body).encode()) == expected


def test_end_of_a_long_answer_suffices():
    """The last part of an answer too large to keep still tells its usage."""
    body = json.dumps({"data": "x" * 5000, "usage": USAGE, "id": "{"}).encode()
    assert of_body(body[-400:]) == Usage(10, 4, 3)
    assert of_body(b'ge":1}') is None
    assert of_body(b'xx"usage":{"prompt_tokens":5') is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [(None, False), (b'{"include_usage":true}', True), (b'{"include_usage": true }', True), (b'{"include_usage":false}', False),
     (b"{}", False), (b"null", False), (b"[]", False)],
)  # fmt: skip
def test_who_asks(options, expected):
    """Only a true include_usage is a wish for usage."""
    assert asks(options) is expected


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"other": 1}, "null", {"continuous_usage_stats": True}])
def test_asking_changes_nothing_else(options):
    """The engine is asked for usage at the end and is told everything else as the client said it."""
    body = {"model": "m", "messages": [{"role": "user", "content": 'a "stream_options":{} b'}], "stream": True}
    raw = None
    if options is not None:
        body["stream_options"] = None if options == "null" else options
        raw = json.dumps(body["stream_options"]).encode()
    asked = json.loads(ask(b" " + json.dumps(body).encode(), raw))
    said = asked.pop("stream_options")
    body.pop("stream_options", None)
    assert asked == body
    assert said.pop("include_usage") is True
    assert said == ({"other": 1} if options == {"other": 1} else {})


@pytest.mark.parametrize("hide", [True, False])
@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
def test_openai_stream(hide, spaced, end):
    """L8: the counts are read either way; the extra chunk goes out exactly if the client asked."""
    usage = StreamUsage(hide)
    last, done = event(LAST, end, spaced), event("[DONE]", end)
    before = event(delta("a"), end, spaced)
    assert has_usage(last) and not has_usage(before)
    assert usage.look(before + last + done) == before + (b"" if hide else last) + done
    assert usage.result(True, 1, 400) == Usage(10, 4, 3)


def test_usage_beside_text_is_never_hidden():
    """A chunk that says something else as well goes out, whoever asked."""
    usage = StreamUsage(True)
    chunk = event({**delta("a"), "usage": USAGE})
    assert usage.look(chunk) is chunk
    assert usage.result(True, 1, 0) == Usage(10, 4, 3)


def test_anthropic_stream():
    """The prompt comes in message_start, the answer's count in the last message_delta."""
    start = {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 9, "cache_read_input_tokens": 30, "output_tokens": 1}},
    }
    stream = named("message_start", start) + named("message_delta", {"type": "message_delta", "usage": {"output_tokens": 12}})
    usage = StreamUsage(True)
    assert usage.look(stream) == stream
    assert usage.result(True, 2, 0) == Usage(39, 30, 12)


def test_responses_stream():
    """The Responses API tells it with the whole response."""
    body = {"type": "response.completed", "response": {"usage": {"input_tokens": 6, "output_tokens": 2}}}
    usage = StreamUsage()
    usage.look(named("response.completed", body))
    assert usage.result(True, 5, 0) == Usage(6, 0, 2)


@pytest.mark.parametrize("junk", [b'data: {"usage":{"prompt_tokens":"x"}}\n\n', b'data: {"usage":{\xff}}\n\n', b'"usage":{\n\n',
                                  b'data: {"usage":{},"x":' + b"[" * 100_000 + b"\n\n",
                                  b'data: {"choices":3,"usage":{}}\n\n', b'data: {"message":"no","usage":{}}\n\n'])  # fmt: skip
def test_junk_goes_out_as_it_came(junk):
    """What is not understood is neither hidden nor counted."""
    usage = StreamUsage(True)
    assert usage.look(junk) == junk
    assert not usage.result(True, 4, 40).exact


def test_aborted_stream_is_counted_by_its_events():
    """L6: a stream that ends before its usage came has about as many tokens as events, and a prompt by its size."""
    assert StreamUsage(True).result(False, 17, 400) == Usage(100, 0, 17, False)
    seen = StreamUsage()
    seen.look(named("message_start", {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}))
    assert seen.result(False, 17, 400) == Usage(9, 0, 17, False)


texts = st.text(max_size=20)


@given(st.lists(texts, max_size=8), st.booleans(), st.data())
def test_any_split_at_events_gives_the_same(words, hide, data):
    """However a stream's events are gathered into reads, what goes out and what is counted are the same."""
    events = [event(delta(word)) for word in words] + [event(LAST), event("[DONE]")]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=5)))
    usage, out = StreamUsage(hide), b""
    for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        read = b"".join(events[start:end])
        out += usage.look(read) if has_usage(read) else read
    assert out == b"".join(one for one in events if not (hide and one == event(LAST)))
    assert usage.result(True, 0, 0) == Usage(10, 4, 3)


@given(texts)
def test_marks_cannot_stand_in_text(text):
    """Text that a model writes is never taken for usage, whatever it is."""
    assert not has_usage(event(delta(text + '"usage":{"prompt_tokens":5}')))


def test_tally_adds_up_and_begins_anew():
    """Rows by key and model; taken once; put back if they could not be sent."""
    tally = Tally()
    tally.add("k", "m", Usage(10, 4, 3), 1.5)
    tally.add("k", "m", None, 0.5, failed=True)
    tally.add("", "m", Usage(1, 0, 1, False), 1.0)
    rows = tally.take()
    assert rows[0] == {"key": "k", "model": "m", "requests": 2, "failures": 1, "prompt_tokens": 10, "completion_tokens": 3,
                       "cached_tokens": 4, "seconds": 2.0}  # fmt: skip
    assert len(rows) == 2 and tally.take() == []
    tally.put_back(rows)
    tally.add("k", "m", Usage(1, 0, 0), 0.0)
    assert tally.take()[0]["prompt_tokens"] == 11
