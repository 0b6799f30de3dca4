"""Why a request was not served, told truthfully and in the shape of the API that was called.

The status is a promise: 404 nobody knows this model; 503 it is known and not ready; 429 it is full, or a limit of the key is
reached; 502 an engine broke before it answered; 504 it took too long. The official clients turn the status into their exception,
so the shape only has to carry the message and a stable C{code}, which stands in C{X-Llmgw-Reason}, too.
"""

from __future__ import annotations

import re
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

import msgspec
from msgspec import Raw, Struct

from llmgw.errors import LlmgwError

OPENAI = "openai"
ANTHROPIC = "anthropic"
RESPONSES = "responses"
# What an engine's error event has, in any of the three APIs. It cannot stand inside a JSON string: there quotes are escaped.
_ERROR = re.compile(rb'"error": ?\{|"type": ?"(?:error|response\.failed)"')

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_encode = msgspec.json.Encoder().encode


class Refusal(LlmgwError):
    """An answer that is an error of ours.

    @ivar status: HTTP's status code.
    @ivar code: a stable word for programs (C{model_not_found}, C{not_ready}, C{queue_full}, ...).
    @ivar param: the field of the request that is wrong, None where none is.
    @ivar retry_after: seconds, None where trying again is no use.
    """

    def __init__(
        self, status: int, code: str, text: str, *, param: str | None = None, retry_after: int | None = None, allow: str = ""
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.param = param
        self.retry_after = retry_after
        self.allow = allow


def _openai(refusal: Refusal) -> dict[str, object]:
    kind = _OPENAI_TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    return {"message": refusal.text, "type": kind, "param": refusal.param, "code": refusal.code}


def _anthropic(refusal: Refusal) -> dict[str, object]:
    kind = _ANTHROPIC_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.text}}


def error_body(shape: str, refusal: Refusal) -> bytes:
    """The error as a body of its own."""
    return _encode(_anthropic(refusal) if shape == ANTHROPIC else {"error": _openai(refusal)})


def error_event(shape: str, refusal: Refusal) -> bytes:
    """The error as the last event of a stream that has broken: what makes the caller's client raise instead of stopping short."""
    if shape == ANTHROPIC:
        return b"event: error\ndata: " + _encode(_anthropic(refusal)) + b"\n\n"
    error = _openai(refusal)
    if shape == RESPONSES:
        body = {"type": "error", "code": refusal.code, "message": refusal.text, "param": refusal.param, "error": error}
        return b"event: error\ndata: " + _encode(body) + b"\n\n"
    return b"data: " + _encode({"error": error}) + b"\n\n"


def tells_error(data: bytes) -> bool:
    """Whether these events of an engine's stream tell that it failed."""
    return b"error" in data and _ERROR.search(data) is not None


class _Said(Struct):
    error: Raw = Raw(b"null")
    status: Raw = Raw(b"null")


_decode_said = msgspec.json.Decoder(_Said).decode


def says_failed(body: bytes) -> bool:
    """Whether a whole answer, under a status that says it did well, tells by itself that it did not."""
    if b'"error"' not in body:
        return False
    try:
        said = _decode_said(body)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return bytes(said.error)[:1] == b"{" or bytes(said.status) == b'"failed"'


_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


def reason_phrase(status: int) -> bytes:
    """The words after the status code; nobody reads them, but the grammar wants the space before them."""
    return _PHRASES.get(status, b"")


def date() -> bytes:
    """Now, for the C{Date} field of an answer of our own; an engine's has its own."""
    return _date(int(time.time()))


@lru_cache(1)
def _date(now: int) -> bytes:
    return formatdate(now, usegmt=True).encode()


def error_head(refusal: Refusal) -> list[tuple[bytes, bytes]]:
    """The header fields that go with an error."""
    fields = [(b"content-type", b"application/json"), (b"x-llmgw-reason", refusal.code.encode())]
    if refusal.retry_after is not None:
        fields.append((b"retry-after", b"%d" % refusal.retry_after))
    if refusal.status == 401:
        fields.append((b"www-authenticate", b"Bearer"))
    if refusal.allow:
        fields.append((b"allow", refusal.allow.encode()))
    return fields
