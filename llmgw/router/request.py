"""One request as it was parsed, and what is wrong with a head that the grammar allows."""

from __future__ import annotations

from typing import Any

from llmgw.router.errors import Refusal
from llmgw.router.spool import Spool, Whole
from llmgw.router.surface import Call

MAX_FIELDS = 500
MAX_HEAD = 16 * 1024

# Fields that end at this hop, or that we set ourselves. None of them is ever passed on.
OURS = frozenset(
    b"host content-length transfer-encoding connection keep-alive te trailer upgrade expect authorization x-api-key cookie "
    b"proxy-authorization proxy-authenticate proxy-connection http2-settings accept-encoding x-request-id "
    b"x-session-id x-forwarded-for x-forwarded-host x-forwarded-proto x-real-ip forwarded".split()
)
ONCE = frozenset((b"host", b"authorization", b"x-api-key", b"content-length", b"expect"))
LISTS = frozenset((b"connection", b"x-forwarded-for"))  # several fields mean the same as one with all of them
_PLAIN_CONNECTION = frozenset((b"", b"keep-alive", b"close", b"upgrade", b"http2-settings", b"te"))

Field = tuple[bytes, bytes]


class Request:
    """One request as parsed. C{fields} are those that may be passed on; C{ours} holds the rest, by lower-case name.

    @ivar refusal: it was refused on the strength of its head alone; the body is not kept.
    @ivar id: ours, which no other request has; empty until it is answered or sent.
    @ivar context: whose key it has.
    @ivar model: the name of the model it is for, once that is known.
    @ivar logged: it is in the access log already.
    @ivar began, whole: monotonic time at which its first byte was here, and its last.
    """

    __slots__ = (
        "began", "call", "context", "expects", "fields", "http11", "id", "keep_alive", "length", "logged", "method", "model",
        "ours", "path", "query", "refusal", "spool", "whole",
    )  # fmt: skip

    def __init__(self, began: float) -> None:
        self.began = self.whole = began
        self.method = b""
        self.path = b""
        self.query = b""
        self.fields: list[Field] = []
        self.ours: dict[bytes, bytes] = {}
        self.http11 = True
        self.keep_alive = False
        self.expects = False
        self.length: int | None = 0
        self.spool: Spool | None = None
        self.refusal: Refusal | None = None
        self.call: Call | None = None
        self.context: Any = None
        self.id = b""
        self.model = ""
        self.logged = False

    def body(self) -> Whole:
        """The whole body, to be asked once. @raise OSError: the disk is full."""
        return self.spool.whole() if self.spool is not None else b""


def check_head(request: Request, version: str, limit: int) -> None:
    """Refuse what llhttp lets through and we do not take, and fill in what follows from the head.

    @param version: C{1.1} or whatever else the request line says.
    @param limit: how large a body may be.
    @raise Refusal: 400, 413 or 505.
    """
    ours = request.ours
    if version != "1.1":
        if version != "1.0":
            raise Refusal(505, "http_version", f"HTTP/{version} is not spoken here: use HTTP/1.1.")
        request.http11 = False
    elif b"host" not in ours:
        raise bad_request("HTTP/1.1 needs a Host field")
    coding = ours.get(b"transfer-encoding")
    if coding is not None:
        if coding.strip().lower() != b"chunked" or not request.http11:
            raise bad_request("the only transfer coding taken is `chunked`, in HTTP/1.1")
        request.length = None
    elif b"content-length" in ours:
        request.length = int(ours[b"content-length"])
        if request.length > limit:
            raise too_large(limit)
    request.expects = b"expect" in ours and request.http11 and request.length != 0
    if not request.path.startswith(b"/"):
        request.path = _origin_form(request.path)
    request.path, _, request.query = request.path.partition(b"?")
    connection = ours.get(b"connection")
    if connection is not None:
        named = {token.strip().lower() for token in connection.split(b",")}
        if not named <= _PLAIN_CONNECTION:
            request.fields = [field for field in request.fields if field[0] not in named]


def _origin_form(target: bytes) -> bytes:
    if not target.lower().startswith((b"http://", b"https://")):
        raise bad_request("the target is no path")
    _, _, rest = target.partition(b"//")
    host, slash, path = rest.partition(b"/")
    host, mark, query = host.partition(b"?")
    return b"/?" + query + slash + path if mark else b"/" + path


def plain_head(request: Request) -> bytes:
    """The head again, from its parts, without a wish for another protocol."""
    target = request.path + (b"?" + request.query if request.query else b"")
    lines = [b"%b %b HTTP/1.1" % (request.method, target)]
    lines += [b"%b: %b" % field for field in request.fields]
    unwanted = (b"upgrade", b"http2-settings", b"connection")
    lines += [b"%b: %b" % field for field in request.ours.items() if field[0] not in unwanted]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def too_large(limit: int) -> Refusal:
    """413."""
    return Refusal(
        413, "body_too_large", f"The body is larger than the {limit} bytes that this router takes (router.body_limit)."
    )


def head_too_large() -> Refusal:
    """431."""
    return Refusal(431, "head_too_large", f"The header fields are more than {MAX_FIELDS} or larger than {MAX_HEAD} bytes.")


def bad_request(text: str) -> Refusal:
    """400, for what is not well-formed HTTP."""
    return Refusal(400, "bad_request", f"This is not HTTP/1.1 as it is spoken here: {text}.")


def internal_error() -> Refusal:
    """500, for what we did not expect."""
    return Refusal(500, "internal", "The router failed on this request; its log says how.")


def no_space(error: OSError) -> Refusal:
    """507, for a body that does not fit on the disk of the state folder."""
    return Refusal(507, "no_space", f"The router cannot keep this body while it arrives: {error.strerror}.", retry_after=30)
