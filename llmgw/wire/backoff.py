"""How long to wait before the next round of dialing: full jitter under a ceiling that doubles.

Only a link that was accepted and then lasted counts as success. Neither TCP nor TLS nor a greeting does: a fleet with a bad
certificate gets that far each time, and would hammer its server for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define


@define
class Backoff:
    """@ivar random: uniform in [0, 1). C{base}, C{cap} and C{stable} are seconds."""

    random: Callable[[], float]
    base: float = 1.0
    cap: float = 15.0
    stable: float = 60.0
    failures: int = 0

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        ceiling = min(self.cap, self.base * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return self.random() * ceiling

    def again(self) -> float:
        """Seconds to wait after what was no failure of anybody's: the ceiling stays the least."""
        return self.random() * self.base

    def lasted(self, seconds: float) -> bool:
        """Tell how long an accepted link lived; returns whether that was long enough to begin anew."""
        if seconds < self.stable:
            return False
        self.failures = 0
        return True
