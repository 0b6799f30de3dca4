"""Who may wait at the door: bounds on peers that nobody knows yet, and a memory of those that were not let in.

A peer that has not shown a certificate costs memory, a descriptor and processor time for TLS. So there may be only so many at
once, in all and from one address; and a flood of refusals fills neither the log nor the memory.
"""

from __future__ import annotations

from collections import Counter, deque

from attrs import define, field
from twisted.logger import Logger

from llmgw.server.imembers import Refusal

MOST = 1024
MOST_PER_HOST = 128
LINES, WINDOW = 50, 10.0


@define
class Doorway:
    """Counts the peers that are not accepted yet, by host."""

    most: int = MOST
    most_per_host: int = MOST_PER_HOST
    _waiting: Counter[str] = field(factory=Counter)

    def enter(self, host: str) -> str:
        """Let one more wait; returns why not, if not."""
        if self._waiting.total() >= self.most:
            return f"{self.most} peers are waiting already"
        if self._waiting[host] >= self.most_per_host:
            return f"{self.most_per_host} peers of this address are waiting already"
        self._waiting[host] += 1
        return ""

    def leave(self, host: str) -> None:
        """One of those has been accepted, or is gone."""
        self._waiting[host] -= 1
        if self._waiting[host] <= 0:
            del self._waiting[host]


@define
class Refusals:
    """The last 50 refusals, and their log lines: at most 50 in 10 s, then a count."""

    log = Logger()
    _last: deque[Refusal] = field(factory=lambda: deque(maxlen=50))
    _begun: float = 0.0
    _lines: int = 0

    def add(self, refusal: Refusal, server: str, now: float) -> None:
        """Remember C{refusal} and log it.

        @param now: a clock for the window, which need not be the wall's.
        """
        self._last.append(refusal)
        if now - self._begun > WINDOW:
            if self._lines > LINES:
                self.log.warn("{server}: {count} more refusals were not logged", server=server, count=self._lines - LINES)
            self._begun, self._lines = now, 0
        self._lines += 1
        if self._lines <= LINES:
            self.log.warn(
                "{server}: refused {peer}: {reason}: {text}",
                server=server,
                peer=refusal.peer,
                reason=refusal.reason,
                text=refusal.text,
                event="link_refused",
            )

    def list(self) -> list[Refusal]:
        """From the oldest to the newest."""
        return [*self._last]
