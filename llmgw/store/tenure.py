"""How long a leadership may be relied on, as arithmetic over one clock. Pure; the clock's readings are arguments.

The clock is C{CLOCK_BOOTTIME}: it runs on while the process is stopped and while the machine sleeps, and nobody sets it.
What counts is the moment before a renewal was sent, never the one its answer came: the database may have acted on it at any
time between. A lease is not mutual exclusion; the agents' own check of the epoch is. This keeps the two from ever differing
in practice.
"""

from __future__ import annotations

from attrs import define, field

from llmgw.fleet.timing import Timing
from llmgw.store.leaserow import LeaseRow


@define
class Tenure:
    """One leadership, from winning it to its end; then it is thrown away.

    @ivar renewed: when the last renewal that worked was sent.
    @ivar ticked: when the reactor last ticked.
    @ivar doubt: when a gap between ticks was last noticed; only a renewal sent after it dispels it.
    """

    timing: Timing
    epoch: int
    renewed: float
    ticked: float
    doubt: float = float("-inf")
    over: bool = False

    def may_act(self, now: float) -> bool:
        """Whether a command may go out at this moment."""
        return not self.over and self.in_time(now) and self.awake(now) and self.renewed > self.doubt

    def in_time(self, now: float) -> bool:
        """Whether the last renewal is recent enough; if not, stepping down is due."""
        return now < self.renewed + self.timing.lease_deadline

    def awake(self, now: float) -> bool:
        """Whether the reactor has ticked lately: one that hangs or was stopped must not be kept in office by the renewals."""
        return now - self.ticked <= self.timing.lease / 3

    def tick(self, now: float) -> float:
        """The reactor ticks; returns how long it had not, if that was too long, else 0."""
        gap = 0.0 if self.awake(now) else now - self.ticked
        if gap:
            self.doubt = now
        self.ticked = now
        return gap


@define
class Watch:
    """What a standby has seen of the lease's row, and since when it has not changed."""

    lease: float
    seen: LeaseRow | None = None
    since: float = field(default=0.0)

    def look(self, row: LeaseRow, now: float) -> bool:
        """Take note of the row; whether it changed.

        @param now: after the answer came, so that the last change certainly lies before it.
        """
        if self.seen is not None and _triple(row) == _triple(self.seen):
            return False
        self.seen, self.since = row, now
        return True

    def free(self, now: float, holder: str) -> bool:
        """Whether the row may be taken: released, ours from a tenure that is over, or unchanged for a lease."""
        row = self.seen
        return row is not None and (row.released or row.holder == holder or now - self.since >= self.lease * 1.01)


def _triple(row: LeaseRow) -> tuple[object, ...]:
    return (row.holder, row.epoch, row.renewals, row.released)
