"""The API: which paths there are, and for each where its model is named and which shape its errors and streams have.

All calls go through the same relay; a call is a row of this table. Paths under C{/v1} are the ones of OpenAI and Anthropic;
C{/tokenize}, C{/rerank} and their like are those of the engines, and are taken with and without the prefix.
"""

from __future__ import annotations

from typing import NamedTuple

from llmgw.router.errors import ANTHROPIC, OPENAI, RESPONSES
from llmgw.router.usage import PROMPT, TOLD

BODY = "body"
MULTIPART = "multipart"
LOCAL = "local"


class Call(NamedTuple):
    """One endpoint of the API.

    @ivar name: what metrics and logs call it.
    @ivar path: the engine's path for it, after the endpoint's base.
    @ivar shape: how its errors look.
    @ivar model: where the model's name is: C{body} (JSON), C{multipart} (a form field), C{local} (answered by the router).
    @ivar usage: the kind of token counts in its answers (see router/usage.py): C{openai}, C{responses} and C{anthropic} write
        text, C{prompt} only reads it, C{told} may have used tokens if its answer says so, and an empty one never has.
    """

    name: str
    path: bytes
    shape: str = OPENAI
    model: str = BODY
    usage: str = ""
    method: bytes = b"POST"


_V1 = (
    Call("chat", b"/v1/chat/completions", usage="openai"),
    Call("completions", b"/v1/completions", usage="openai"),
    Call("embeddings", b"/v1/embeddings", usage=PROMPT),
    Call("responses", b"/v1/responses", RESPONSES, usage="responses"),
    Call("messages", b"/v1/messages", ANTHROPIC, usage="anthropic"),
    Call("count_tokens", b"/v1/messages/count_tokens", ANTHROPIC),
    Call("transcriptions", b"/v1/audio/transcriptions", model=MULTIPART, usage=TOLD),
    Call("translations", b"/v1/audio/translations", model=MULTIPART, usage=TOLD),
    Call("speech", b"/v1/audio/speech"),
    Call("images", b"/v1/images/generations", usage=TOLD),
    Call("edits", b"/v1/images/edits", model=MULTIPART, usage=TOLD),
    Call("models", b"/v1/models", model=LOCAL, method=b"GET"),
)
# Engines differ in whether these lie under /v1: each goes out as it came in.
_BOTH = (
    Call("rerank", b"/rerank", usage=PROMPT),
    Call("score", b"/score", usage=PROMPT),
    Call("tokenize", b"/tokenize"),
    Call("detokenize", b"/detokenize"),
)

CALLS: dict[bytes, Call] = {
    **{call.path: call for call in _V1},
    **{call.path: call for call in _BOTH},
    **{b"/v1" + call.path: call._replace(path=b"/v1" + call.path) for call in _BOTH},
    b"/health": Call("health", b"/health", model=LOCAL, method=b"GET"),
    b"/ready": Call("ready", b"/ready", model=LOCAL, method=b"GET"),
}
_MODELS = b"/v1/models/"
MODEL = Call("model", _MODELS, model=LOCAL, method=b"GET")
MEASURED = frozenset(call.name for call in CALLS.values() if call.model is not LOCAL)


def find_call(path: bytes) -> Call | None:
    """The call at this path (without query), None if there is none."""
    call = CALLS.get(path)
    if call is None and path.startswith(_MODELS) and len(path) > len(_MODELS):
        return MODEL
    return call


def shape_of(path: bytes) -> str:
    """The shape for errors at a path that may not exist."""
    return ANTHROPIC if path.startswith(b"/v1/messages") else OPENAI
