"""How many replicas a model's load asks for, between its C{min} and C{max}: pure, from samples of the load.

Each sample is turned into the number of replicas that would hold it with C{target} requests each. More are asked for when every
sample of the last C{up_after} seconds wanted more, and so many as the least of them wanted; fewer when every sample of the last
C{down_after} did with fewer, and no fewer than the most of them needed. So a burst starts nothing, and a pause ends nothing.

Surprising: what is not known is not zero. A window with a moment in it at which nobody knew the load, or that is not full yet
(a server has just begun to lead, was stopped for a while), says nothing, and the number stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from attrs import frozen

from llmgw.fleet.model import Scale
from llmgw.fleet.units import show_duration

TARGET = 32  # requests per replica where neither the catalog nor the engines say: what small engines batch at least
GAP = 10.0  # seconds between two samples, above which nobody was looking


@frozen
class Load:
    """The load of a model at an instant.

    @ivar at: steady clock, seconds.
    @ivar in_flight: requests under way at its replicas, None unknown.
    @ivar waiting: requests in the routers' lines for it, None unknown.
    @ivar limit: how many requests one of its engines runs at once, None unknown.
    """

    at: float
    in_flight: int | None = 0
    waiting: int | None = 0
    limit: int | None = None

    @property
    def known(self) -> bool:
        """Whether it says anything."""
        return self.in_flight is not None and self.waiting is not None

    @property
    def requests(self) -> int:
        """All requests; 0 where it is not known."""
        return (self.in_flight or 0) + (self.waiting or 0)


@frozen
class Advice:
    """How many replicas there should be; C{why} is a sentence, empty where nothing changes."""

    count: int
    why: str = ""


def target_of(scale: Scale, load: Load) -> int:
    """Requests per replica: the catalog's word, else what an engine runs at once."""
    return max(1, scale.target or load.limit or TARGET)


def needed(scale: Scale, load: Load) -> int:
    """How many replicas hold this load, within the catalog's bounds. Only idleness leads to none, so here one is the least."""
    return min(scale.max, max(scale.min, 1, ceil(load.requests / target_of(scale, load))))


def advise(scale: Scale, samples: Sequence[Load], now: float, current: int) -> Advice:
    """How many replicas instead of C{current}.

    @param samples: of the last C{max(up_after, down_after)} seconds and a little more, the oldest first.
    @param now: the same clock.
    """
    if current < 1 or not samples:
        return Advice(current)
    up = _window(samples, now, scale.up_after)
    if up and (low := min(needed(scale, load) for load in up)) > current:
        return Advice(low, _text(scale, min(up, key=lambda load: load.requests), "at least", scale.up_after))
    down = _window(samples, now, scale.down_after)
    if down and (high := max(needed(scale, load) for load in down)) < current:
        return Advice(high, _text(scale, max(down, key=lambda load: load.requests), "at most", scale.down_after))
    return Advice(current)


def kept(scale: Scale) -> float:
    """For how many seconds samples are needed."""
    return max(scale.up_after, scale.down_after) + GAP


def _window(samples: Sequence[Load], now: float, seconds: float) -> list[Load]:
    """The samples that cover the last C{seconds}; empty where they do not, or one of them knows nothing."""
    found: list[Load] = []
    later = now
    for load in reversed(samples):
        if not load.known or later - load.at > GAP:
            return []
        found.append(load)
        later = load.at
        if load.at <= now - seconds:
            return found
    return []


def _text(scale: Scale, load: Load, bound: str, seconds: float) -> str:
    requests = f"{load.in_flight} requests in flight and {load.waiting} waiting"
    return f"{bound} {requests} for {show_duration(seconds)}, {target_of(scale, load)} per replica"


def total(parts: Iterable[int | None]) -> int | None:
    """The sum, None where a part is not known."""
    found = list(parts)
    return None if None in found else sum(part or 0 for part in found)
