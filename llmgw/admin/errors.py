"""From what went wrong to an HTTP answer with a sentence: C{{"error": {"code", "message", "problems"}}}."""

from __future__ import annotations

from typing import Any

from llmgw.errors import Invalid, LlmgwError
from llmgw.server.catalogs import Moved
from llmgw.server.commits import NotLeading
from llmgw.server.imembers import NodeAway, NotActing, Unanswered
from llmgw.server.keys import NoSuchKey, NotOneKey
from llmgw.server.operations import Conflict, Outage, Unknown
from llmgw.store.errors import NotLeader, StoreError

Answer = tuple[int, dict[str, Any]]


class BadRequest(LlmgwError):
    """The request itself cannot be used. C{code} and C{status} as they go into the answer."""

    def __init__(self, text: str, code: str = "bad_request", status: int = 400) -> None:
        super().__init__(text)
        self.code = code
        self.status = status


_KINDS: tuple[tuple[type[LlmgwError], int, str], ...] = (
    (NotLeading, 503, "not_leader"),
    (NotLeader, 503, "not_leader"),
    (NotActing, 503, "not_leader"),
    (NodeAway, 503, "node_away"),
    (Unanswered, 504, "unanswered"),
    (Unknown, 404, "not_found"),
    (NoSuchKey, 404, "not_found"),
    (NotOneKey, 409, "conflict"),
    (Outage, 409, "outage"),
    (Conflict, 409, "conflict"),
    (Moved, 409, "moved"),
)


def answer_for(error: LlmgwError) -> Answer:
    """Status and body for an error that was expected to be possible."""
    if isinstance(error, BadRequest):
        return error.status, body(error.code, str(error))
    if isinstance(error, Invalid):
        problems = [{"where": p.where, "text": p.text, "code": p.code} for p in error.problems]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return 400, body("invalid", f"the catalog has {count}; nothing was changed", problems)
    for kind, status, code in _KINDS:
        if isinstance(error, kind):
            return status, _told_where(body(code, str(error)), error) if code == "not_leader" else body(code, str(error))
    if isinstance(error, StoreError):
        return 503, body(f"store_{error.code}", str(error))
    return 409, body("refused", str(error))


def _told_where(said: dict[str, Any], error: LlmgwError) -> dict[str, Any]:
    """With C{leader}, who leads, and C{address}, where operators reach that one; each empty if it is not known."""
    leader = str(getattr(error, "leader", "")).partition("@")[0]
    said["error"] |= {"leader": leader, "address": getattr(error, "address", "")}
    return said


def body(code: str, message: str, problems: list[Any] | None = None) -> dict[str, Any]:
    """The error's object."""
    return {"error": {"code": code, "message": message, "problems": problems or []}}
