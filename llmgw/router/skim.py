"""Finding the top-level members of a large JSON object without decoding it, a slice at a time.

A decoder holds the interpreter until it is done: for 60 MB up to half a second, in which no stream of the worker moves, and a
thread would change nothing. Here a turn is a few milliseconds long whatever the body is, since it looks at one slice. What is
inside of a value is only skipped: brackets outside of strings are counted, by the slice, not one by one. Whether it is JSON
otherwise is for the engine to say, which gets the bytes as they came.

A member that is looked for and stands twice is refused: the engine might believe the other one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from itertools import accumulate

import msgspec

from llmgw.router.errors import Refusal
from llmgw.router.spool import Whole

SLICE = 64 * 1024
NEAR = 4096
MAX_MEMBERS = 1000
MAX_NAME = 256

Span = tuple[int, int]
Steps = Generator[None, None, int]

_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.S)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.S)
_SCALAR = re.compile(rb"[-+.0-9a-zA-Z]++")
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"{}[]")
_STEP = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}


def skim(data: Whole, wanted: Collection[str]) -> Generator[None, None, dict[str, Span]]:
    """Where the values of these members stand. Yields after each slice; the spans are what it returns.

    @raise Refusal: 400; it is no JSON object as far as was looked, or a wanted member stands twice.
    """
    found: dict[str, Span] = {}
    at = _expect(data, 0, b"{")
    for _ in range(MAX_MEMBERS):
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
    near = _close(data[at : at + NEAR], 0)
    if near:
        return at + near
    depth = 0
    while at < len(data):
        piece = data[at : at + SLICE]
        rest = _STRING.sub(b"", piece)
        outside, open_quote, inside = rest.partition(b'"')
        steps = [_STEP[byte] for byte in outside.translate(None, _NO_BRACKET)]
        if depth + min(accumulate(steps), default=1) <= 0 and (end := _close(piece, depth)):
            return at + end
        depth += sum(steps)
        at += len(piece)
        yield
        if open_quote:
            # A slice that ends in an escape: the next one has to see it whole.
            at -= (len(inside) - len(inside.rstrip(b"\\"))) % 2
            at = (yield from _string_end(data, at)) + 1
    raise _bad("a list or an object does not end")


def _close(piece: bytes, depth: int) -> int:
    """After which byte of the piece everything is closed that was open; 0 if it is not."""
    for token in _TOKEN.finditer(piece):
        byte = token[0]
        if byte == b'"':
            return 0
        depth += _STEP.get(byte[0], 0)
        if not depth:
            return token.end()
    return 0
