"""The body of a request, as far as the router reads it.

Only the fields that matter are decoded, once; the bytes go to the engine as they came. Where the engine serves the model under
another name than the caller used, the top level is taken apart and put together again: values are not decoded then either, and a
field that stood twice goes out once, as the engine would have read it.

A large body is not decoded at all: where its fields stand is found piece by piece (router/skim.py), and what is to be another is
exchanged there.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from llmgw.router.errors import Refusal
from llmgw.router.skim import Span, skim
from llmgw.router.spool import Whole
from llmgw.router.usage import ask, asks, options_asking

Piece = bytes | memoryview


class _Fields(Struct):
    """What is looked at. All but the first two stay raw: whether their types are right is for the engine to say."""

    model: str | UnsetType = UNSET
    stream: bool | None = False
    stream_options: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    max_tokens: Raw | UnsetType = UNSET
    max_completion_tokens: Raw | UnsetType = UNSET
    max_output_tokens: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    session_id: Raw | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Fields).decode
_take_apart: Any = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


class Body:
    """A body with what was read of it.

    @ivar model: the name as the caller wrote it, alias or not.
    @ivar size: of the body as it came, in bytes.
    @ivar hides_usage: L{ask_usage} has asked for something that the caller did not ask for.
    """

    __slots__ = ("_fields", "_pieces", "_raw", "hides_usage", "model", "size", "stream")

    def __init__(self, raw: Whole, model: str, fields: _Fields | None = None) -> None:
        self._raw = raw
        self._pieces: tuple[Piece, ...] = (raw,)  # type: ignore[assignment]
        self.size = len(raw)
        self.model = model
        self.stream = bool(fields is not None and fields.stream)
        self.hides_usage = False
        self._fields = fields

    def sent_to(self, name: str) -> tuple[Piece, ...]:
        """The body for an engine that serves the model as C{name}, in one piece or several."""
        if name == self.model:
            return self._pieces
        fields = _take_apart(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))
        fields["model"] = Raw(_encode(name))
        return (_encode(fields),)

    def ask_usage(self) -> None:
        """Have the engine say what a stream used, unless the caller asks already."""
        fields = self._fields
        if fields is None or not self.stream:
            return
        options = None if fields.stream_options is UNSET else memoryview(fields.stream_options)
        if asks(options):
            return
        self.hides_usage = True
        self._ask(options)

    def _ask(self, options: memoryview | None) -> None:
        """Put the question in, beside the options that the caller has."""
        assert isinstance(self._raw, bytes)
        self._pieces = (ask(self._raw, options),)

    def release(self) -> None:
        """The request is over: only what is small is kept for the log."""
        self._raw = b""
        self._pieces = ()
        self._fields = None

    def prompt(self) -> tuple[memoryview, bytes]:
        """The raw prompt, and what an engine's template puts before it: the beginning that requests may share."""
        fields = self._fields
        if fields is None:
            return memoryview(b""), b""
        found = next((part for part in (fields.messages, fields.prompt, fields.input) if part is not UNSET), b"")
        before = [bytes(part) for part in (fields.tools, fields.system, fields.instructions) if part is not UNSET]
        return memoryview(found), b"".join(before)

    def session(self) -> bytes:
        """What the caller says belongs together, as raw JSON; empty if it says nothing."""
        fields = self._fields
        if fields is None:
            return b""
        found = fields.prompt_cache_key if fields.prompt_cache_key is not UNSET else fields.session_id
        return b"" if found is UNSET else bytes(found)

    def max_tokens(self) -> int | None:
        """The longest answer that the caller allows."""
        fields = self._fields
        if fields is None:
            return None
        for part in (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens):
            if part is not UNSET and bytes(part).isdigit():
                return int(bytes(part)[:9])
        return None


class LargeBody(Body):
    """A JSON body of which only the places of its fields are known."""

    __slots__ = ("_edits", "_spans")

    def __init__(self, raw: mmap.mmap, spans: dict[str, Span], fields: _Fields) -> None:
        assert isinstance(fields.model, str)
        super().__init__(raw, fields.model, fields)
        self._spans = spans
        self._edits: dict[Span, bytes] = {}

    def sent_to(self, name: str) -> tuple[Piece, ...]:
        """The body for an engine that serves the model as C{name}."""
        edits = self._edits if name == self.model else {**self._edits, self._spans["model"]: _encode(name)}
        view = memoryview(self._raw)
        pieces: list[Piece] = []
        at = 0
        for (start, end), fresh in sorted(edits.items()):
            pieces += [view[at:start], fresh]
            at = end
        return (*pieces, view[at:])

    def _ask(self, options: memoryview | None) -> None:
        if options is None:
            start = self._raw.find(b"{") + 1
            self._edits[start, start] = ask(b"{", None)[1:]
        else:
            self._edits[self._spans["stream_options"]] = options_asking(options)

    def release(self) -> None:
        """The request is over: only what is small is kept for the log."""
        super().release()
        self._edits = {}


_NAMES = frozenset(_Fields.__struct_fields__)
_DECODED = ("model", "stream")
_SMALL = 64 * 1024


def skim_json(raw: mmap.mmap) -> Generator[None, None, Body]:
    """Read a large JSON body; yields every few milliseconds.

    @raise Refusal: 400; it is no JSON object, or names no model.
    """
    spans = yield from skim(raw, _NAMES)
    view = memoryview(raw)
    for name in (*_DECODED, "stream_options"):
        start, end = spans.get(name, (0, 0))
        if end - start > _SMALL:
            raise Refusal(400, "bad_request", f"The body's {name} is larger than {_SMALL} bytes.", param=name)
    known = {name: bytes(view[slice(*spans[name])]) for name in _DECODED if name in spans}
    fields = _fields(b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in known.items()))
    for name, (start, end) in spans.items():
        if name not in _DECODED:
            setattr(fields, name, Raw(view[start:end]))
    return LargeBody(raw, spans, fields)


def read_json(raw: bytes) -> Body:
    """Read a JSON body.

    @raise Refusal: 400; it is no JSON object, or names no model.
    """
    fields = _fields(raw)
    assert isinstance(fields.model, str)
    return Body(raw, fields.model, fields)


def _fields(raw: Whole) -> _Fields:
    try:
        fields = _decode(raw)
    except msgspec.ValidationError as error:
        where = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else None
        raise Refusal(400, "bad_request", f"The body is not what this call takes: {error}.", param=where) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, "bad_json", f"The body is not JSON: {error}.") from None
    except RecursionError:
        raise Refusal(400, "bad_json", "The body's lists and objects are nested too deeply.") from None
    if fields.model is UNSET or not fields.model:
        raise Refusal(400, "model_missing", "The body names no model: set `model`.", param="model")
    return fields
