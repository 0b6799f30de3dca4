"""What becomes of a request that no replica of its model can take: which model answers in its place, or why nobody does."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from llmgw.router.errors import Refusal
from llmgw.router.reading import leaving

if TYPE_CHECKING:
    from llmgw.router.routes import Caller, Routes, Served

_monotonic = time.monotonic


def fallback(routes: Routes, asked: Served, caller: Caller | None, passed: Collection[str]) -> Served | None:
    """The first of a model's fallbacks that has a usable endpoint and that the key may use, too.

    An endpoint is usable unless its breaker is open: one that is due for a probe gets it.

    @param passed: names of models that the request has been at.
    """
    allowed = caller.entry.models if caller is not None else ()
    for name in asked.config.fallbacks:
        other = routes.models.get(name)
        if other is None or not other.upstreams or other.name in passed or (allowed and other.name not in allowed):
            continue
        if other.line.group.state(_monotonic()) in ("room", "full"):
            return other
    return None


def nothing(served: Served, why: str, tried: int) -> Refusal:
    """Why none of a model's endpoints can be tried.

    @param why: a word of L{llmgw.router.choose.Group.choose}.
    @param tried: how many failed this request.
    """
    if not served.upstreams:
        reason = served.config.reason or "no replica is ready"
        return Refusal(503, "not_ready", f"{served.name} is not ready: {reason}.", retry_after=served.config.retry_after)
    if why == "open":
        wait = min(up.breaker.blocked_until for up in served.upstreams) - _monotonic()
        text = f"All replicas of {served.name} have failed repeatedly and are left alone for a while."
        return Refusal(503, "engines_failing", text, retry_after=max(1, int(wait) + 1))
    return Refusal(502, "engines_failed", f"{tried} replicas of {served.name} failed this request, and there is no other.",
                   retry_after=1)  # fmt: skip


def turned_out(reason: str, served: Served, patience: float) -> tuple[str, Refusal]:
    """The outcome and the answer of a request that got no turn.

    @param reason: a word of L{llmgw.router.admission.Waiter}.
    @param patience: how many seconds a request may wait.
    """
    name, after = served.name, served.line.retry_after()
    if reason == "timeout" and not served.upstreams and not served.config.on_demand:
        return "refused", nothing(served, "none", 0)
    if reason == "timeout":
        text = f"No replica of {name} had room within {patience:g} s (timeouts.queue)."
        if not served.upstreams:
            text = f"{name} was not ready within {patience:g} s: {served.config.reason or 'it is starting'}."
        return "timeout", Refusal(504, "queue_timeout", text, retry_after=after)
    if reason == "leaving":
        return "refused", leaving()
    if reason == "displaced":
        text = f"All replicas of {name} are busy, and a request of a higher class took the last place in line."
        return "refused", Refusal(429, "queue_full", text, retry_after=after)
    return "refused", Refusal(404, "model_not_found", f"There is no model {name} here any more.", param="model")
