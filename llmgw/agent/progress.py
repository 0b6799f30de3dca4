"""Two judgements over time, pure: how long a start may take, and whether a serving engine is healthy."""

from __future__ import annotations

from attrs import define, field

from llmgw.fleet.shard import EngineLoad

LONGEST_START = 7200.0
QUIET = 60.0
FAILURES = 3
HUNG_AFTER = 60.0
RECOVERIES = 2
STILL, STILL_FULL = 60.0, 600.0


@define
class StartDeadline:
    """A start may take C{timeout} seconds, and longer as long as something moves: its output or its memory. 2 h is the end.

    Memory that only flutters is no movement: it has to grow by 1 MiB and half a per cent over the most there ever was.
    """

    began: float
    timeout: float
    moved: float = field(init=False)
    _written: int = 0
    _memory: int = 0

    def __attrs_post_init__(self) -> None:
        self.moved = self.began

    def saw(self, now: float, written: int, memory: int | None = None) -> None:
        """What the engine has written and, where somebody looked, holds in memory."""
        if written > self._written:
            self._written, self.moved = written, now
        if memory is not None and memory > self._memory + max(2**20, self._memory // 200):
            self._memory, self.moved = memory, now

    def quiet(self, now: float) -> float:
        """For how long nothing has moved."""
        return now - self.moved

    def over(self, now: float) -> bool:
        """Whether to give up."""
        spent = now - self.began
        still = self.quiet(now) >= min(QUIET, self.timeout)
        return spent >= self.timeout and (still or spent >= max(LONGEST_START, self.timeout))


@define
class Stillness:
    """An engine that has requests and makes nothing of them, no token and no output, for 60 s may hang although it says that it
    is well; for 10 minutes, unless it surely has a place free: a token asked of a full one waits, and says nothing.

    @ivar full: whether it may have no place free.
    """

    since: float | None = None
    full: bool = False
    _tokens: int | None = None
    _written: int = 0

    def saw(self, now: float, load: EngineLoad, written: int, limit: int | None) -> None:
        """What it says of itself, and how many requests it runs at once; of one that tells no tokens nothing can be said."""
        moved = load.tokens != self._tokens or written != self._written or not load.running or load.tokens is None
        self._tokens, self._written = load.tokens, written
        self.full = bool(load.waiting) or limit is None or load.running is None or load.running >= limit
        if moved:
            self.since = None
        elif self.since is None:
            self.since = now

    def doubtful(self, now: float) -> bool:
        """Whether to try if it still works."""
        return self.since is not None and now - self.since >= (STILL_FULL if self.full else STILL)


@define
class Health:
    """Three failed probes in a row make an engine unhealthy, two good ones healthy again; after 60 s of failures it hangs.

    A failure does not count while the engine makes tokens or prints: a busy one may be slow to answer.

    A token that is asked of an engine that may be full can wait long: that is weak evidence, and takes 10 minutes to end it.

    @ivar failing_since: when the first of the present failures was, None without one; C{sure_since} the same of those that are
        not weak.
    """

    healthy: bool = True
    reason: str = ""
    failing_since: float | None = None
    sure_since: float | None = None
    _failed: int = 0
    _good: int = 0
    _tokens: int | None = None
    _written: int = 0

    def saw(self, now: float, problem: str, tokens: int | None, written: int = 0, weak: bool = False) -> None:
        """One probe's result, C{problem} empty for a good one; tokens made so far where they are known, and bytes printed."""
        progress = written > self._written or (tokens is not None and self._tokens is not None and tokens > self._tokens)
        self._tokens = self._tokens if tokens is None else tokens
        self._written = written
        failed = bool(problem) and not progress
        self.failing_since = (now if self.failing_since is None else self.failing_since) if failed else None
        self.sure_since = (now if self.sure_since is None else self.sure_since) if failed and not weak else None
        self._failed, self._good = (self._failed + 1, 0) if failed else (0, self._good + 1)
        if self._failed >= FAILURES:
            self.healthy, self.reason = False, problem
        elif self._good >= RECOVERIES:
            self.healthy, self.reason = True, ""

    def hangs(self, now: float) -> bool:
        """Whether it has done nothing at all for so long that only an end helps."""
        waited = ((self.sure_since, HUNG_AFTER), (self.failing_since, STILL_FULL))
        return not self.healthy and any(since is not None and now - since >= most for since, most in waited)
