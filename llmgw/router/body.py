"""The body of a request, as far as the router reads it.

Only the fields that matter are decoded, once; the bytes go to the engine as they came. Where the engine serves the model under
another name than the caller used, the top level is taken apart and put together again: values are not decoded then either, and a
field that stood twice goes out once, as the engine would have read it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from llmgw.router.errors import Refusal


class _Fields(Struct):
    model: str | UnsetType = UNSET
    stream: bool | None = False


_decode = msgspec.json.Decoder(_Fields).decode
_take_apart: Any = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


class Body:
    """A body with what was read of it. C{model} is the name as the caller wrote it, alias or not."""

    __slots__ = ("model", "raw", "stream")

    def __init__(self, raw: bytes, model: str, stream: bool = False) -> None:
        self.raw = raw
        self.model = model
        self.stream = stream

    def sent_to(self, name: str) -> bytes:
        """The body for an engine that serves the model as C{name}."""
        if name == self.model:
            return self.raw
        fields = _take_apart(self.raw)
        fields["model"] = Raw(_encode(name))
        return _encode(fields)


def read_json(raw: bytes) -> Body:
    """Read a JSON body.

    @raise Refusal: 400; it is no JSON object, or names no model.
    """
    try:
        fields = _decode(raw)
    except msgspec.ValidationError as error:
        where = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else None
        raise Refusal(400, "bad_request", f"The body is not what this call takes: {error}.", param=where) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, "bad_json", f"The body is not JSON: {error}.") from None
    if fields.model is UNSET or not fields.model:
        raise Refusal(400, "model_missing", "The body names no model: set `model`.", param="model")
    return Body(raw, fields.model, bool(fields.stream))
