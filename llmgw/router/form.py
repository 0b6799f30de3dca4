"""Multipart forms (audio, images), as far as the router reads them: where the field C{model} is, wherever it stands.

The form goes to the engine as it came; only the value of that field is exchanged where the engine serves another name. A form in
which the field stands twice is refused, and one with a part that names itself twice: the router and the engine might each believe
another one.

Like large JSON (router/skim.py) it is read in short steps, whatever is in it: its patterns are possessive.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

from llmgw.router.body import Body, Piece
from llmgw.router.errors import Refusal
from llmgw.router.spool import Whole

_BOUNDARY = re.compile(
    rb'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*(?:;.*)?\Z', re.I | re.S
)
_PARAMETER = rb'[^\s=;"]*+(?:[ \t]*+=[ \t]*+(?:"(?:[^"\\\r\n]|\\[^\r\n])*+"|[^\s;"]*+))?+[ \t]*+'
_DISPOSITION = re.compile(rb"\r\ncontent-disposition[ \t]*+:[ \t]*+form-data[ \t]*+", re.I)
_NAME = re.compile(
    rb';[ \t]*+(?:(?!name[ \t]*+=)%b;[ \t]*+)*+name[ \t]*+=[ \t]*+(?:"([^"\r\n]*+)"|([^\s;"]++))[ \t]*+' % _PARAMETER, re.I
)
MAX_TYPE = 1024
MAX_PART_HEAD = 4096
MAX_PARTS = 1000
STRIDE = 64 * 1024
"""How far is looked for a boundary at once. (In mapped memory that is about 1 ns for each byte.)"""

T = TypeVar("T")
Steps = Generator[None, None, T]


class Form(Body):
    """A form with the place of its model field."""

    __slots__ = ("_end", "_start")

    def __init__(self, raw: Whole, start: int, end: int) -> None:
        super().__init__(raw, raw[start:end].decode())
        self._pieces = (memoryview(raw),)
        self._start, self._end = start, end

    def sent_to(self, name: str) -> tuple[Piece, ...]:
        """The form for an engine that serves the model as C{name}."""
        if name == self.model:
            return self._pieces
        view = memoryview(self._raw)
        return view[: self._start], name.encode(), view[self._end :]


def fields(raw: Whole, boundary: bytes) -> Steps[list[tuple[bytes, int, int]]]:
    """(name, start, end) of each part's content. Yields after each part, and each L{STRIDE} within one.

    @raise Refusal: 400; it is no form of that boundary.
    """
    opening, between = b"--" + boundary, b"\r\n--" + boundary
    found: list[tuple[bytes, int, int]] = []
    at = 0 if raw[: len(opening)] == opening else (yield from _find(raw, between, 0)) + 2
    if raw[at : at + len(opening)] != opening:
        raise _bad("it does not contain its boundary")
    while True:
        at += len(opening)
        if raw[at : at + 2] == b"--":
            return found
        head = raw.find(b"\r\n\r\n", at, at + MAX_PART_HEAD)
        if head < 0:
            raise _bad(f"the head of a part does not end within {MAX_PART_HEAD} bytes")
        end = yield from _find(raw, between, head + 2)
        if end < 0:
            raise _bad("a part of it does not end")
        if len(found) >= MAX_PARTS:
            raise _bad(f"it has more than {MAX_PARTS} parts")
        found.append((_name(raw, at, head), head + 4, max(head + 4, end)))
        at = end + 2
        yield


def _find(raw: Whole, what: bytes, at: int) -> Steps[int]:
    while True:
        found = raw.find(what, at, at + STRIDE + len(what))
        if found >= 0 or at + STRIDE >= len(raw):
            return found
        at += STRIDE
        yield


def _name(raw: Whole, at: int, head: int) -> bytes:
    """What the part says which field it is."""
    said = _DISPOSITION.search(raw, at, head)
    name = _NAME.match(raw, said.end(), head) if said else None
    if said is None or name is None:
        return b""
    if _NAME.match(raw, name.end(), head) or _DISPOSITION.search(raw, name.end(), head):
        raise _bad("a part of it says twice which field it is")
    return name[1] if name[1] is not None else name[2]


def skim_form(raw: Whole, content_type: bytes) -> Steps[Body]:
    """Read a multipart form; yields every millisecond or so.

    @raise Refusal: 400; it is none, or does not name one model.
    """
    boundary = _BOUNDARY.match(content_type) if len(content_type) <= MAX_TYPE else None
    if boundary is None:
        raise _bad("its Content-Type is not multipart/form-data with a boundary")
    found = yield from fields(raw, boundary[1] or boundary[2])
    models = [(start, end) for name, start, end in found if name == b"model"]
    if len(models) != 1:
        text = "The form names no model: add the field `model`." if not models else "The field `model` stands twice."
        raise Refusal(400, "model_missing" if not models else "bad_request", text, param="model")
    try:
        return Form(raw, *models[0])
    except UnicodeDecodeError:
        raise _bad("its field `model` is not UTF-8") from None


def _bad(text: str) -> Refusal:
    return Refusal(400, "bad_form", f"The body is not the form that this call takes: {text}.")
