"""Multipart forms (audio, images), as far as the router reads them: where the field C{model} is, wherever it stands.

The form goes to the engine as it came; only the value of that field is exchanged where the engine serves another name. A form in
which the field stands twice is refused: the router and the engine might each believe another one.
"""

from __future__ import annotations

import re

from llmgw.router.body import Body, Piece
from llmgw.router.errors import Refusal
from llmgw.router.spool import Whole

_BOUNDARY = re.compile(
    rb'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*(?:;.*)?\Z', re.I | re.S
)
_NAME = re.compile(rb'content-disposition\s*:\s*form-data\s*;(?:[^\r\n]*;)?\s*name=(?:"([^"\r\n]*)"|([^\s;"\r\n]+))', re.I)
MAX_PART_HEAD = 4096
MAX_PARTS = 1000


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


def fields(raw: Whole, boundary: bytes) -> list[tuple[bytes, int, int]]:
    """(name, start, end) of each part's content.

    @raise Refusal: 400; it is no form of that boundary.
    """
    opening, between = b"--" + boundary, b"\r\n--" + boundary
    found: list[tuple[bytes, int, int]] = []
    at = 0 if raw[: len(opening)] == opening else raw.find(between) + 2
    if raw[at : at + len(opening)] != opening:
        raise _bad("it does not contain its boundary")
    while True:
        at += len(opening)
        if raw[at : at + 2] == b"--":
            return found
        head = raw.find(b"\r\n\r\n", at, at + MAX_PART_HEAD)
        end = raw.find(between, head + 2)
        if head < 0 or end < 0 or len(found) >= MAX_PARTS:
            raise _bad("a part of it does not end" if head >= 0 else "the head of a part does not end")
        name = _NAME.search(raw, at, head)
        found.append(((name[1] if name[1] is not None else name[2]) if name else b"", head + 4, max(head + 4, end)))
        at = end + 2


def read_form(raw: Whole, content_type: bytes) -> Form:
    """Read a multipart form.

    @raise Refusal: 400; it is none, or does not name one model.
    """
    boundary = _BOUNDARY.match(content_type)
    if boundary is None:
        raise _bad("its Content-Type is not multipart/form-data with a boundary")
    models = [(start, end) for name, start, end in fields(raw, boundary[1] or boundary[2]) if name == b"model"]
    if len(models) != 1:
        text = "The form names no model: add the field `model`." if not models else "The field `model` stands twice."
        raise Refusal(400, "model_missing" if not models else "bad_request", text, param="model")
    try:
        return Form(raw, *models[0])
    except UnicodeDecodeError:
        raise _bad("its field `model` is not UTF-8") from None


def _bad(text: str) -> Refusal:
    return Refusal(400, "bad_form", f"The body is not the form that this call takes: {text}.")
