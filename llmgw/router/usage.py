"""How many tokens a request took: asking engines for it, reading it from their answers, and hiding what nobody asked for.

An engine reports the usage of a stream only if asked to (C{stream_options.include_usage}), so the router asks. The one chunk
that comes of it, with usage and no choices, is taken out again where the client had not asked; all else goes out as it came.

What may surprise:

  - Nothing here looks at an event without usage. The relay tests each read for L{MARKS}, which cannot stand inside a JSON
    string (its quotes would be escaped), and hands over only reads that have one, cut at the ends of events.
  - A stream that ends before its usage came (the client left, the engine died) is counted by its events: engines send about
    one token in each. Its prompt is estimated from its size. Such numbers are marked C{exact=False}.
  - So is an answer that leaves its usage out, and one whose client left before it began: an engine has read the prompt. What
    is put down here is what limits count, too (router/account.py).
  - Anthropic counts what was read from the cache apart from C{input_tokens}; here C{prompt} is always the whole prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

OPENAI, RESPONSES, ANTHROPIC, PROMPT, TOLD = "openai", "responses", "anthropic", "prompt", "told"
MARKS = (b'"usage":{', b'"usage": {')
BYTES_PER_TOKEN = 4
LONGEST_PROMPT = 2**17
TAIL = 65536
LONGEST_USAGE = 4096

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_ASK = b'"stream_options":{"include_usage":true},'
_ONCE = b'{"include_usage":true}'


class Usage(NamedTuple):
    """Tokens of one request. C{cached} is the part of C{prompt} that the engine had not to compute."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    exact: bool = True


def prompt_tokens(size: int) -> int:
    """About how many a body of so many bytes has; one of megabytes is mostly a picture or a sound in a text's clothes."""
    return min(size // BYTES_PER_TOKEN, LONGEST_PROMPT)


def guessed(kind: str, prompt_bytes: int, answer_bytes: int = 0) -> Usage | None:
    """What a request of this kind (see router/surface.py) took whose engine did not say it; None if it takes no tokens."""
    if kind in ("", TOLD):
        return None
    return Usage(prompt_tokens(prompt_bytes), 0, 0 if kind == PROMPT else answer_bytes // BYTES_PER_TOKEN, False)


class _Details(Struct):
    cached_tokens: int | None = 0


class _Counts(Struct):
    """Every API's names at once; those of another API are simply absent."""

    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = 0
    cache_creation_input_tokens: int | None = 0


class _Holder(Struct):
    usage: _Counts | None = None


class _Chunk(Struct):
    """An event's data, or a whole answer, of any of the three APIs."""

    usage: _Counts | None = None
    choices: list[Raw] | UnsetType | None = UNSET
    message: _Holder | None = None
    response: _Holder | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_counts = msgspec.json.Decoder(_Counts).decode
_take_apart: Any = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


def _usage(counts: _Counts) -> Usage:
    details = counts.prompt_tokens_details or counts.input_tokens_details
    read = counts.cache_read_input_tokens or 0
    cached = read or (details.cached_tokens or 0 if details else 0)
    prompt = (counts.prompt_tokens or counts.input_tokens or 0) + read + (counts.cache_creation_input_tokens or 0)
    return Usage(prompt, cached, counts.completion_tokens or counts.output_tokens or 0)


# Asking.


def asks(stream_options: bytes | memoryview | None) -> bool:
    """Whether a client's C{stream_options} (its raw JSON) ask for usage."""
    try:
        return stream_options is not None and bytes(_take_apart(stream_options).get("include_usage", b"")) == b"true"
    except (msgspec.MsgspecError, RecursionError):
        return False


def ask(body: bytes, stream_options: bytes | memoryview | None) -> bytes:
    """The body of a streaming request, asking for usage as well.

    @param body: a JSON object that is not empty.
    @param stream_options: what it has under that name, raw; None if it has nothing.
    """
    if stream_options is None:
        start = body.index(b"{") + 1
        return b"".join((body[:start], _ASK, body[start:]))
    fields = _take_apart(body)
    fields["stream_options"] = Raw(options_asking(stream_options))
    return _encode(fields)


def options_asking(stream_options: bytes | memoryview) -> bytes:
    """A client's C{stream_options}, asking for usage as well."""
    try:
        options = _take_apart(stream_options)
    except (msgspec.MsgspecError, RecursionError):
        options = {}
    # Usage in every chunk is sent only to clients that asked for usage: this one would suddenly see it.
    options.pop("continuous_usage_stats", None)
    return _encode({**options, "include_usage": True}) if options else _ONCE


# Reading.


def of_body(body: bytes) -> Usage | None:
    """The usage in a whole answer, or in the end of a long one (its last L{TAIL} bytes will do); None if there is none."""
    try:
        counts = _decode_chunk(body).usage
        return _usage(counts) if counts is not None else None
    except (msgspec.MsgspecError, RecursionError):
        return _of_tail(body)


def _of_tail(tail: bytes) -> Usage | None:
    at = max(tail.rfind(mark) for mark in MARKS)
    if at < 0:
        return None
    start = tail.index(b"{", at)
    depth = 0
    for match in re.compile(rb"[{}]").finditer(tail, start, start + LONGEST_USAGE):
        depth += 1 if match.group() == b"{" else -1
        if not depth:
            try:
                return _usage(_decode_counts(tail[start : match.end()]))
            except (msgspec.MsgspecError, RecursionError):
                return None
    return None


def has_usage(data: bytes) -> bool:
    """Whether a read of a stream is to be handed to L{StreamUsage.look}. (The hot path may test L{MARKS} itself.)"""
    return MARKS[0] in data or MARKS[1] in data


class StreamUsage:
    """The usage of one stream, read as it goes by.

    @ivar hide: the client did not ask; take the chunk out that has nothing but usage.
    @ivar seen: it has told something.
    """

    __slots__ = ("_cached", "_completion", "_prompt", "hide", "seen")

    def __init__(self, hide: bool = False) -> None:
        self.hide = hide
        self._prompt = self._cached = self._completion = 0
        self.seen = False

    def look(self, data: bytes) -> bytes:
        """Read what whole events say of usage.

        @param data: whole events, each with its blank line.
        @return: the same without the chunk to be hidden; mostly C{data} itself.
        """
        kept: list[bytes] = []
        start = hidden = 0
        for match in _EVENT_END.finditer(data):
            event = data[start : match.end()]
            start = match.end()
            if has_usage(event) and self._read(event):
                hidden += 1
            else:
                kept.append(event)
        if not hidden:
            return data
        kept.append(data[start:])
        return b"".join(kept)

    def _read(self, event: bytes) -> bool:
        """Take the counts of one event; returns whether it is the one to be hidden."""
        try:
            chunk = _decode_chunk(_data_of(event))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        counts = chunk.usage
        for holder in (chunk.message, chunk.response):
            if counts is None and holder is not None:
                counts = holder.usage
        if counts is None:
            return False
        usage = _usage(counts)
        self.seen = True
        # Counts of later events include those of earlier ones, but may leave parts of them out.
        self._prompt = max(self._prompt, usage.prompt)
        self._cached = max(self._cached, usage.cached)
        self._completion = max(self._completion, usage.completion)
        return self.hide and chunk.choices == []

    def result(self, done: bool, events: int, prompt_bytes: int) -> Usage:
        """What to put down for this stream.

        @param done: it ended well.
        @param events: how many events have gone out, for a stream that did not say its usage.
        @param prompt_bytes: the size of the request's body, for the same case.
        """
        if self.seen and done:
            return Usage(self._prompt, self._cached, self._completion)
        prompt = self._prompt or prompt_tokens(prompt_bytes)
        return Usage(prompt, self._cached, max(self._completion, events), False)


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data:") and event.count(b"data:") == 1:
        return event[5:]
    lines = re.split(rb"\r\n|\n|\r", event)
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


# Adding up.


class Tally:
    """What a worker's requests have used since it last told its server: a few rows, however many requests."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[float]] = {}

    def add(self, key: str, model: str, usage: Usage | None, seconds: float, failed: bool = False) -> None:
        """Count a request that has ended."""
        row = self._rows.get((key, model))
        if row is None:
            row = self._rows[key, model] = [0, 0, 0, 0, 0, 0.0]
        row[0] += 1
        row[1] += failed
        if usage is not None:
            row[2] += usage.prompt
            row[3] += usage.completion
            row[4] += usage.cached
        row[5] += seconds

    def take(self) -> list[dict[str, Any]]:
        """The rows for the channel's C{usage} message; the count begins anew."""
        rows, self._rows = self._rows, {}
        names = ("requests", "failures", "prompt_tokens", "completion_tokens", "cached_tokens", "seconds")
        return [{"key": key, "model": model, **dict(zip(names, row, strict=True))} for (key, model), row in rows.items()]

    def put_back(self, rows: Iterable[dict[str, Any]]) -> None:
        """The rows could not be sent: keep them for the next time."""
        for row in rows:
            mine = self._rows.setdefault((row["key"], row["model"]), [0, 0, 0, 0, 0, 0.0])
            names = ("requests", "failures", "prompt_tokens", "completion_tokens", "cached_tokens", "seconds")
            for index, name in enumerate(names):
                mine[index] += row[name]
