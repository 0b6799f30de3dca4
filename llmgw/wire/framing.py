"""Lines of JSON out of a stream of bytes, and back; whatever a peer sends costs us linear time and at most one refusal.

C{json.loads} alone would take NaN, doubled keys, lone surrogates, UTF-16 and 5000-digit integers, or end in a
C{RecursionError}. Here each of them is a L{Malformed}, which names the peer, what is wrong and the limit, never the text
itself. What we write obeys the same rules: an engine's output may hold a NUL or half a character, and must not end a link.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from llmgw.errors import LlmgwError
from llmgw.wire.messages import MAX_DEPTH, MAX_LINE

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_SUSPECT = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_NUL_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_BIGGEST = 2**64


class Malformed(LlmgwError):
    """A peer sent what the protocol does not allow.

    @ivar peer: who, as in logs.
    @ivar what: what was sent, as the end of a sentence; never the bytes themselves.
    @ivar limit: the limit that was broken, None where it is not about a size.
    """

    def __init__(self, peer: str, what: str, limit: int | None = None) -> None:
        super().__init__(f"{peer} sent {what}")
        self.peer = peer
        self.what = what
        self.limit = limit


class Unsendable(LlmgwError):
    """A message of ours that the peer would have to refuse: too long, too deep or with a number that JSON lacks."""


class LineSplitter:
    """Bytes in, complete lines out, in time linear in the bytes however they are cut into pieces."""

    def __init__(self, peer: str, limit: int = MAX_LINE) -> None:
        self._peer = peer
        self._limit = limit
        self._begun = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Each line that C{data} completes, without its newline. Exhaust it or never call again.

        @raise Malformed: a line is longer than the limit, whether or not its end has come yet.
        """
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._check(end - start)
            self._begun += data[start:end]
            line = bytes(self._begun)
            self._begun.clear()
            start = end + 1
            yield line
        self._check(len(data) - start)
        self._begun += data[start:]

    def _check(self, more: int) -> None:
        if len(self._begun) + more > self._limit:
            raise Malformed(self._peer, f"a line longer than {self._limit} bytes", self._limit)


def read_object(line: bytes, peer: str) -> dict[str, Any]:
    """The JSON object in C{line}.

    @raise Malformed: anything else.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(peer, f"a line that is not UTF-8 (byte {error.start})") from None
    _check_depth(text, peer)
    try:
        value = _DECODER.decode(text)
        if _SUSPECT.search(text):
            _check_strings(value)
    except json.JSONDecodeError as error:
        raise Malformed(peer, f"a line that is not JSON ({error.msg} at character {error.pos})") from None
    except ValueError as error:
        raise Malformed(peer, f"a line with {error}") from None
    if not isinstance(value, dict):
        raise Malformed(peer, "a line that is JSON but not an object")
    return value


def write_line(value: dict[str, Any]) -> bytes:
    """C{value} as one line with its newline. NUL becomes U+FFFD and half a character C{?}, since no peer takes them.

    @raise Unsendable: it is too long, or holds a number that is not finite.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise Unsendable(f"a {value.get('type')} cannot be written as JSON: {error}") from None
    if "\\u0000" in text:
        text = _NUL_ESCAPE.sub("\\1\ufffd", text)
    line = text.encode("utf-8", "replace")
    if len(line) > MAX_LINE:
        raise Unsendable(f"a {value.get('type')} of {len(line)} bytes is longer than a line may be ({MAX_LINE})")
    return line + b"\n"


def _check_depth(text: str, peer: str) -> None:
    """Counted before parsing: the parser recurses, and this does not."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return
    level = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        level += 1 if bracket[0] in "[{" else -1
        if level > MAX_DEPTH:
            raise Malformed(peer, f"JSON that is more than {MAX_DEPTH} levels deep", MAX_DEPTH)


def _check_strings(value: object) -> None:
    """Depth is bounded already, so recursion is, too."""
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a NUL in a string")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError("half a character (a lone surrogate)")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_strings(key)
            _check_strings(inner)
    elif isinstance(value, list):
        for inner in value:
            _check_strings(inner)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice in one object")
    return found


def _integer(digits: str) -> int:
    if len(digits) > 21 or abs(number := int(digits)) >= _BIGGEST:
        raise ValueError("an integer of more than 64 bits")
    return number


def _real(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError("a number too large for a double")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name}, which JSON does not have")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=_real, parse_constant=_no_constant)
