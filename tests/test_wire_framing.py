"""Lines out of bytes and JSON out of lines: any cut gives the same, and every hostile line is one clean refusal."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.wire.framing import LineSplitter, Malformed, Unsendable, read_object, write_line
from llmgw.wire.messages import MAX_DEPTH, MAX_LINE


def take(pieces, limit=MAX_LINE):
    """The lines in these pieces, and the error that ended them."""
    splitter, lines = LineSplitter("peer", limit), []
    try:
        for piece in pieces:
            lines.extend(splitter.feed(piece))  # keeps what came before an error
    except Malformed as error:
        return lines, str(error)
    return lines, None


@given(st.lists(st.binary(max_size=12), max_size=12), st.data())
def test_f32_any_cut_gives_the_same_lines(parts, data):
    """However a stream is cut into pieces, the lines and the refusal are the same as of the whole."""
    whole = b"\n".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert take(pieces, 8) == take([whole], 8)
    assert take([whole[i : i + 1] for i in range(len(whole))], 8) == take([whole], 8)


def test_utf8_cut_in_the_middle_of_a_character_is_whole_again():
    """A character split over two pieces arrives as it was."""
    line = json.dumps({"a": "Grüße €"}, ensure_ascii=False).encode() + b"\n"
    lines, error = take([line[i : i + 1] for i in range(len(line))])
    assert error is None
    assert read_object(lines[0], "peer") == {"a": "Grüße €"}


@pytest.mark.parametrize(("length", "fits"), [(MAX_LINE - 1, True), (MAX_LINE, True), (MAX_LINE + 1, False)])
def test_f33_the_limit_is_exact(length, fits):
    """A line of the limit passes, one byte more is refused, naming the limit and the peer and not the bytes."""
    lines, error = take([b"x" * length + b"\n"])
    assert [len(line) for line in lines] == ([length] if fits else [])
    assert error == (None if fits else f"peer sent a line longer than {MAX_LINE} bytes")


def test_a_line_without_end_is_refused_as_soon_as_it_is_too_long():
    """100 MB without a newline never sit in memory: the refusal comes with the first piece over the limit."""
    splitter, fed = LineSplitter("peer"), 0
    with pytest.raises(Malformed) as error:
        while True:
            fed += 65536
            list(splitter.feed(b"x" * 65536))
    assert fed <= MAX_LINE + 65536
    assert error.value.limit == MAX_LINE


def test_f34_small_pieces_cost_linear_time():
    """16 MB in 1400-byte pieces take a fraction of a second where a re-splitting reader takes minutes."""
    piece, splitter = b"x" * 1400, LineSplitter("peer", 2**25)
    begun = time.process_time()
    for _ in range(2**24 // 1400):
        assert not list(splitter.feed(piece))
    lines = list(splitter.feed(b"\n"))
    assert len(lines[0]) == 2**24 // 1400 * 1400
    assert time.process_time() - begun < 2.0  # it takes 0.02 s; the quadratic one 159 s


DEEP = b'{"a":' * 40 + b"1" + b"}" * 40
HOSTILE = {
    "random bytes": b"\x8f\x00\xff\x12\x9c",
    "an HTTP request": b"GET / HTTP/1.1",
    "nothing": b"",
    "NUL bytes": b"\0\0\0",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "UTF-16 without mark": '{"a":1}'.encode("utf-16-le"),
    "half a character": b'{"a":"\\ud800"}',
    "half a character as a key": b'{"\\udc00":1}',
    "half a character, raw": b'{"a":"\xed\xa0\x80"}',
    "a NUL in a string": b'{"a":"\\u0000"}',
    "a NUL deep inside": b'{"a":[{"b":["\\u0000"]}]}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "a number above doubles": b'{"a":1e999}',
    "the same key twice": b'{"a":1,"a":2}',
    "the same key twice, inside": b'{"x":[{"a":1,"a":2}]}',
    "5000 digits": b'{"a":' + b"9" * 5000 + b"}",
    "2**64": b'{"a":18446744073709551616}',
    "33 levels": b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "100,000 levels": b"[" * 100_000,
    "deep objects": DEEP,
    "a list": b"[1,2]",
    "a text": b'"hello"',
    "a number": b"17",
    "null": b"null",
    "two objects": b"{}{}",
    "half an object": b'{"a":',
    "a bare word": b"{a:1}",
    "a control character": b'{"a":"\x01"}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_line_is_one_refusal_without_its_text(line):
    """Each is a Malformed that names the peer; nothing else is raised, and the line itself is not repeated."""
    with pytest.raises(Malformed) as error:
        read_object(line, "10.0.0.9:4")
    text = str(error.value)
    assert text.startswith("10.0.0.9:4 sent ")
    assert len(text) < 120
    assert "hello" not in text


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(line):
    """Whatever the bytes, the outcome is an object or a Malformed."""
    with suppress(Malformed):
        assert isinstance(read_object(line, "peer"), dict)


def test_32_levels_and_brackets_in_strings_pass():
    """The depth is counted outside strings, quotes in strings included."""
    line = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert read_object(line, "peer")
    text = '"[' * 100
    assert read_object(json.dumps({"a": text}).encode(), "peer") == {"a": text}


texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text('abc\\u0"', max_size=8), json_values, max_size=5))
def test_what_we_write_we_can_read(value):
    """Every object that JSON has comes back as it was."""
    line = write_line(value)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert read_object(line[:-1], "peer") == value


def test_output_that_no_peer_would_take_is_mended():
    """An engine's output with a NUL or an undecodable byte goes out readable instead of ending the link."""
    line = write_line({"tail": "a\0b \\u0000 \\\0", "path": "caf\udce9"})
    assert read_object(line[:-1], "peer") == {"tail": "a\ufffdb \\u0000 \\\ufffd", "path": "caf?"}


def test_what_cannot_be_sent_says_so():
    """NaN and lines over the limit are refused on our side, with the message's type."""
    with pytest.raises(Unsendable, match="a report cannot be written"):
        write_line({"type": "report", "a": float("nan")})
    with pytest.raises(Unsendable, match=r"a done of 1048\d+ bytes is longer"):
        write_line({"type": "done", "a": "x" * MAX_LINE})
