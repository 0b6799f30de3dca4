"""What a replica will take of memory, reckoned before anything starts.

Unknown is None and never 0: a sum with an unknown part is unknown, and the estimate says in words what is not known. Whoever
reckons rounds up where the truth depends on the run, so that what fits by the estimate also starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import asdict, frozen

STEP = 256


@frozen
class RankMemory:
    """Bytes on one device, or on the host: weights, KV cache, and all else (runtime, buffers, graphs, adapters)."""

    weights: int | None = None
    cache: int | None = None
    overhead: int | None = 0

    @property
    def total(self) -> int | None:
        """All of it, None while a part is unknown."""
        if self.weights is None or self.cache is None or self.overhead is None:
            return None
        return self.weights + self.cache + self.overhead

    @property
    def known(self) -> int:
        """The parts that are known together: no less than that."""
        return sum(part for part in (self.weights, self.cache, self.overhead) if part is not None)


@frozen
class Estimate:
    """One replica of a profile.

    @ivar ranks: by the engine's rank, one device each; empty for an engine that runs on the host alone.
    @ivar host: what one shard takes of host memory, None where nobody reckons it.
    @ivar context: tokens of one request, None unknown.
    @ivar sequences: how many such requests the cache was reckoned for.
    @ivar per_token: bytes that one more token of C{context}, for all C{sequences}, takes on the fullest rank; on the host where
        there is none.
    @ivar share: the part of a device that the engine takes at most.
    @ivar elastic: it fills with cache whatever it is given, so that what it was seen to use says nothing of its need.
    @ivar unknown: what is not known, in words.
    @ivar observed: what the engine of such a profile was seen to use at most of one device: better than any reckoning.
    """

    ranks: tuple[RankMemory, ...] = ()
    host: RankMemory | None = None
    context: int | None = None
    sequences: int = 1
    per_token: int | None = None
    share: float = 1.0
    elastic: bool = False
    unknown: tuple[str, ...] = ()
    observed: int | None = None

    @property
    def need(self) -> int | None:
        """Bytes on the device that needs most; None without a device, or while a part is unknown."""
        if self.ranks and self.observed is not None:
            return self.observed
        totals = [rank.total for rank in self.ranks]
        return max((total for total in totals if total is not None), default=None) if None not in totals else None

    def data(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "ranks": [asdict(rank) | {"rank": number, "total": rank.total} for number, rank in enumerate(self.ranks)],
            "host": asdict(self.host) | {"total": self.host.total} if self.host else None,
            "context": self.context,
            "sequences": self.sequences,
            "per_token": self.per_token,
            "share": self.share,
            "need": self.need,
            "unknown": list(self.unknown),
            "observed": self.observed,
        }


def largest_context(fits: Callable[[int], bool], most: int, step: int = STEP) -> int:
    """The largest context for which C{fits} is true, a multiple of C{step} or C{most} itself; 0 if there is none.

    @param fits: true up to some context and false beyond it: more tokens never take less memory.
    """
    if most > 0 and fits(most):
        return most
    low, high = 0, -(-most // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step
