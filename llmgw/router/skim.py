"""Finding the top-level members of a large JSON object without decoding it, a slice at a time.

A decoder holds the interpreter until it is done: for 60 MB up to half a second, in which no stream of the worker moves, and a
thread would change nothing. Here a step is about a millisecond long whatever the body is, since no more than a slice is looked
at between two of them, be it one value or a thousand. What is inside of a value is only skipped, in C: a short one that is not
nested deeply matches one pattern; of others, brackets outside of strings are counted by the slice. Every pattern is possessive,
and none is tried at a second place after it has failed, or some bodies would take quadratic time. Whether it is JSON otherwise is
for the engine to say, which gets the bytes as they came.

A member that is looked for and stands twice is refused: the engine might believe the other one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from itertools import accumulate, islice

import msgspec

from llmgw.router.errors import Refusal
from llmgw.router.spool import Whole

SLICE = 16 * 1024
NEAR = 4096
LEVELS = 5
MAX_MEMBERS = 1000
MAX_NAME = 256
MEMBER = 128
"""As how many bytes a member counts, however short it is."""

Span = tuple[int, int]
Steps = Generator[None, None, int]

_QUOTED = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.S)
_STRING = re.compile(_QUOTED, re.S)
_WHOLE_STRINGS = re.compile(rb'[^"]*+(?:%b[^"]*+)*+' % _QUOTED, re.S)
_TO_BRACKET = re.compile(rb'[^"{}\[\]]*+(?:%b[^"{}\[\]]*+)*+[{}\[\]]' % _QUOTED, re.S)
_SCALAR = re.compile(rb"[-+.0-9a-zA-Z]++")
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"{}[]")
_STEPS = bytes({ord("{"): 1, ord("["): 1, ord("}"): 255, ord("]"): 255}.get(byte, 0) for byte in range(256))
"""For each bracket the byte that is, read as a signed number, what it does to the depth."""


def _nested(levels: int) -> bytes:
    """The pattern of a list or object with no more than so many levels within."""
    inner = _QUOTED + (b"|" + _nested(levels - 1) if levels else b"")
    return rb'[\[{][^"{}\[\]]*+(?:(?:%b)[^"{}\[\]]*+)*+[\]}]' % inner


_SHALLOW = re.compile(_nested(LEVELS), re.S)


def skim(data: Whole, wanted: Collection[str]) -> Generator[None, None, dict[str, Span]]:
    """Where the values of these members stand. Yields about once a slice; the spans are what it returns.

    @raise Refusal: 400; it is no JSON object as far as was looked, or a wanted member stands twice.
    """
    found: dict[str, Span] = {}
    at = _expect(data, 0, b"{")
    rested = at
    for number in range(MAX_MEMBERS):
        if at + number * MEMBER - rested >= SLICE:
            rested = at + number * MEMBER
            yield
        at = _skip_space(data, at)
        if data[at : at + 1] == b"}" and not found:
            return found
        start = _expect(data, at, b'"')
        end = yield from _string_end(data, start)
        name = _name(data[start : min(end, start + MAX_NAME)])
        begin = _skip_space(data, _expect(data, end + 1, b":"))
        at = yield from _value_end(data, begin)
        if name in wanted:
            if name in found:
                raise Refusal(400, "bad_request", f"The body's member {name!r} stands twice.", param=name)
            found[name] = begin, at
        at = _skip_space(data, at)
        if data[at : at + 1] == b"}":
            return found
        at = _expect(data, at, b",")
    raise _bad(f"it has more than {MAX_MEMBERS} members")


def _bad(text: str) -> Refusal:
    return Refusal(400, "bad_json", f"The body is not JSON: {text}.")


def _skip_space(data: Whole, at: int) -> int:
    end = _end_of(_SPACE, data, at, SLICE)
    if end - at >= SLICE:
        raise _bad(f"nothing but blanks from byte {at}")
    return end


def _end_of(pattern: re.Pattern[bytes], data: Whole, at: int, most: int) -> int:
    match = pattern.match(data, at, min(len(data), at + most))
    return match.end() if match else at


def _expect(data: Whole, at: int, byte: bytes) -> int:
    at = _skip_space(data, at)
    if data[at : at + 1] != byte:
        raise _bad(f"no {byte.decode()!r} at byte {at}")
    return at + 1


def _name(raw: bytes) -> str:
    """A member's name; one that cannot be read is none of those that are looked for."""
    try:
        name = msgspec.json.decode(b'"%b"' % raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return name if isinstance(name, str) else ""


def _string_end(data: Whole, at: int) -> Steps:
    """Where the string ends in which C{at} stands: the place of its closing quote."""
    while True:
        piece = data[at : at + SLICE]
        plain = b'"' not in piece and b"\\" not in piece
        end = len(piece) if plain else _end_of(_IN_STRING, piece, 0, SLICE)
        if piece[end : end + 1] == b'"':
            return at + end
        if at + len(piece) == len(data):
            raise _bad("a string does not end")
        at += end
        yield


def _value_end(data: Whole, at: int) -> Steps:
    first = data[at : at + 1]
    if first == b'"':
        end = yield from _string_end(data, at + 1)
        return end + 1
    if first in (b"{", b"["):
        return (yield from _container_end(data, at))
    end = _end_of(_SCALAR, data, at, SLICE)
    if end == at:
        raise _bad(f"no value at byte {at}")
    return end


def _container_end(data: Whole, at: int) -> Steps:
    """Where the object or list ends that begins at C{at}."""
    near = _end_of(_SHALLOW, data, at, NEAR)
    if near > at:
        return near
    depth, size = 0, NEAR
    while at < len(data):
        yield
        piece = data[at : at + size]
        size = min(2 * size, SLICE)
        whole = _end_of(_WHOLE_STRINGS, piece, 0, len(piece))
        outside = piece if whole == len(piece) else piece[:whole]
        brackets = _STRING.sub(b"", outside).translate(None, _NO_BRACKET)
        depths = list(accumulate(memoryview(brackets.translate(_STEPS)).cast("b"), initial=depth))
        if min(depths[1:], default=1) <= 0:
            return at + _after_bracket(outside, depths.index(0, 1))
        depth = depths[-1]
        at += len(piece)
        if whole < len(piece):
            # A slice that ends in an escape: the next one has to see it whole.
            at -= (len(piece) - len(piece.rstrip(b"\\"))) % 2
            at = (yield from _string_end(data, at)) + 1
    raise _bad("a list or an object does not end")


def _after_bracket(piece: bytes, count: int) -> int:
    """Where this bracket of the piece ends, counted from 1, strings left out."""
    return next(islice(_TO_BRACKET.finditer(piece), count - 1, None)).end()
