"""Who may go now and who waits: a model's line, over all workers of a server.

The bounds (requests at a replica, requests of a model, requests waiting) are those of the scoreboard and so hold over all
processes. A line is first come, first served within a class. The high class goes before the low one, but a low request
that came L{AGEING} seconds before a high one goes first, so none waits for ever: both have a single order, their time of
arrival, with the high class counted as if it had come that much earlier.

Workers share the line without talking to each other: each writes the place of its first waiter into its column. A worker
with room leaves it alone while another worker's first waiter came earlier, and looks every L{POLL} seconds whether it is its
own turn, but only while somebody waits in it. So a freed place is taken within some milliseconds, by whoever is next, in
whichever worker; nothing ticks when nobody waits, and workers of different servers need no descriptors in common, as a pipe to
wake each other would. A worker that does not take its turn for L{PATIENCE} seconds is passed over until its first waiter is
another one: it is stopped, or dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from math import ceil
from typing import Any, Protocol

from twisted.logger import Logger

from llmgw.router.choose import NOTHING, Candidate, Group
from llmgw.router.scoreboard import DONE, HEAD, WAITING, Scoreboard

POLL = 0.003
PATIENCE = 0.025
AGEING = 20.0
LONGEST_RETRY = 30
_FAR = 1 << 40


class CallLater(Protocol):
    """C{loop.call_later}, or a reactor's C{callLater}."""

    def __call__(self, delay: float, callable: Callable[[], None], /) -> Any:
        """Call it that much later."""


class Waiter:
    """One request in line.

    @ivar attempt: called when it may be its turn; true if it has gone on (or given up for a reason of its own), false if there
        was no room after all.
    @ivar ended: called instead if it leaves the line without its turn: C{timeout}, C{displaced} (by a high one, the line being
        full), C{gone} (the model is no longer routed).
    """

    __slots__ = ("_line", "attempt", "deadline", "ended", "high", "place", "since")

    def __init__(
        self, line: Line, high: bool, since: float, deadline: float, attempt: Callable[[], bool], ended: Callable[[str], None]
    ) -> None:
        self._line: Line | None = line
        self.high, self.since, self.deadline, self.attempt, self.ended = high, since, deadline, attempt, ended
        self.place = _FAR + int((since - (AGEING if high else 0.0)) * 1000)

    def leave(self) -> None:
        """The client has left: nothing will be called any more."""
        line, self._line = self._line, None
        if line is not None:
            line.forget(self)

    def end(self, reason: str) -> None:
        """Called by the line, once it has forgotten the waiter."""
        self._line = None
        self.ended(reason)


class WaitingRoom:
    """All lines of one worker in which somebody waits, and the one timer that looks after them."""

    def __init__(self, call_later: CallLater, now: Callable[[], float]) -> None:
        self._call_later, self.now = call_later, now
        self._busy: set[Line] = set()
        self._timer: Any = None
        self._soon = False

    def add(self, line: Line) -> None:
        """Somebody waits in this line, or the first place in it may be free: look at it in this turn of the loop."""
        self._busy.add(line)
        if not self._soon:
            self._soon = True
            self._cancel()
            self._timer = self._call_later(0, self._look)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer, self._soon = None, False
        for line in list(self._busy):
            line.pump()
            if not line.waiting:
                self._busy.discard(line)
        if self._busy and not self._soon:
            self._timer = self._call_later(POLL, self._look)


class Line:
    """One model's, in one worker. It lives as long as the model is routed, over all tables (L{update})."""

    log = Logger()

    def __init__(self, room: WaitingRoom, board: Scoreboard, group: Group, row: int, limit: int = 0, most: int = 100) -> None:
        """
        @param row: the model's row in the scoreboard.
        @param limit: how many requests of the model may be in flight (0: as many as its replicas take).
        @param most: how many may wait, over all workers.
        """
        self._room, self._board = room, board
        self.row = row
        self._high: deque[Waiter] = deque()
        self._low: deque[Waiter] = deque()
        self._yielding: dict[int, tuple[int, float]] = {}
        self._drain = _Rate(room.now(), board.total(row + DONE))
        self.update(group, limit, most)

    def update(self, group: Group, limit: int, most: int) -> None:
        """A new table is in force."""
        self.group, self._limit, self._most = group, limit, most
        if self.waiting:
            self._room.add(self)

    @property
    def waiting(self) -> int:
        """How many wait in this worker."""
        return len(self._high) + len(self._low)

    def waiting_by_class(self) -> tuple[int, int]:
        """High and low."""
        return len(self._high), len(self._low)

    # The hot path.

    def crowded(self) -> bool:
        """Whether somebody waits in any worker, so that a new request has to get in line rather than L{take} a place."""
        return self._board.total(self.row + WAITING) > 0

    def take(
        self,
        now: float,
        held: Mapping[int, int] = NOTHING,
        blocks: int = 0,
        session: int | None = None,
        excluded: Collection[Candidate] = (),
    ) -> tuple[Candidate | None, str]:
        """Choose an endpoint (see L{Group.choose}) and take a place there and in the model's own bound.

        @return: the endpoint, to be given back with L{give}, and why it; or None and why not.
        """
        board = self._board
        if not board.enter(self.row, self._limit):
            return None, "full"
        lost = False
        while True:
            found, why = self.group.choose(now, held, blocks, session, excluded)
            if found is None:
                board.leave(self.row)
                return None, "full" if lost and why == "none" else why
            if board.enter(found.row, found.limit):
                return found, why
            lost = True
            excluded = [*excluded, found]

    def give(self, candidate: Candidate) -> None:
        """A request has ended at this endpoint, however; once for each L{take}."""
        board = self._board
        board.leave(candidate.row)
        board.leave(self.row)
        board.own[self.row + DONE] += 1
        if self._high or self._low:
            self._room.add(self)

    # Waiting.

    def wait(self, high: bool, seconds: float, attempt: Callable[[], bool], ended: Callable[[str], None]) -> Waiter | None:
        """Get in line.

        @param seconds: after which it is told C{timeout}.
        @return: None if the line is full (see L{retry_after}).
        """
        displaced = None
        if not self._most or not self._board.enter(self.row + WAITING, self._most):
            if not high or not self._low:
                return None
            displaced = self._low.pop()
        now = self._room.now()
        waiter = Waiter(self, high, now, now + seconds, attempt, ended)
        (self._high if high else self._low).append(waiter)
        self._tell()
        self._room.add(self)
        if displaced is not None:
            displaced.end("displaced")
        return waiter

    def retry_after(self) -> int:
        """Seconds until as many requests have ended as wait now, at the pace of late; between 1 and L{LONGEST_RETRY}."""
        rate = self._drain.per_second(self._room.now(), self._board.total(self.row + DONE))
        ahead = self._board.total(self.row + WAITING) + 1
        return LONGEST_RETRY if rate * LONGEST_RETRY <= ahead else max(1, ceil(ahead / rate))

    def forget(self, waiter: Waiter) -> None:
        """Take a waiter out (L{Waiter.leave})."""
        (self._high if waiter.high else self._low).remove(waiter)
        self._board.leave(self.row + WAITING)
        self._tell()

    def close(self, reason: str = "gone") -> None:
        """Nobody who waits here will get a turn: the model is no longer routed, or this worker hears no more of replicas."""
        while self.waiting:
            self._dismiss(self._first(), reason)

    def pump(self) -> None:
        """Let go whoever may go. Called by the room."""
        now = self._room.now()
        self._drain.per_second(now, self._board.total(self.row + DONE))
        for queue in (self._high, self._low):
            while queue and queue[0].deadline <= now:
                self._dismiss(queue[0], "timeout")
        while self.waiting:
            state = self.group.state(now)
            if state in ("full", "none") or (self._limit and self._board.total(self.row) >= self._limit):
                self._yielding.clear()
                return
            waiter = self._first()
            if self._others_turn(waiter.place, now) or not self._let_go(waiter):
                return

    def _first(self) -> Waiter:
        if self._high and (not self._low or self._high[0].place <= self._low[0].place):
            return self._high[0]
        return self._low[0]

    def _let_go(self, waiter: Waiter) -> bool:
        queue = self._high if waiter.high else self._low
        queue.popleft()
        waiter._line = None
        self._tell()
        try:
            gone = waiter.attempt()
        except Exception:
            self.log.failure("A request that waited could not go on")
            gone = True
        if gone:
            self._board.leave(self.row + WAITING)
        else:
            waiter._line = self
            queue.appendleft(waiter)
            self._tell()
        return gone

    def _dismiss(self, waiter: Waiter, reason: str) -> None:
        self.forget(waiter)
        waiter.end(reason)

    def _tell(self) -> None:
        """Show the other workers whose turn it is here."""
        self._board.own[self.row + HEAD] = self._first().place if self._high or self._low else 0

    def _others_turn(self, place: int, now: float) -> bool:
        """Whether another worker's first waiter came earlier, and that worker takes its turns."""
        at, yielding = self.row + HEAD, {}
        turn = False
        for number, column in enumerate(self._board.every_column()):
            head = column[at]
            if number and 0 < head < place:
                since = self._yielding.get(number, (0, 0.0))
                since = since if since[0] == head else (head, now)
                yielding[number] = since
                turn = turn or now - since[1] < PATIENCE
        self._yielding = yielding
        return turn


class _Rate:
    """How many per second of late, from a count that only grows (or falls when a worker dies)."""

    __slots__ = ("_at", "_count", "_rate")

    def __init__(self, now: float, count: int) -> None:
        self._at, self._count, self._rate = now, count, 0.0

    def per_second(self, now: float, count: int) -> float:
        passed = now - self._at
        if count < self._count:
            self._at, self._count = now, count
        elif passed >= 1.0:
            share = min(1.0, passed / 10.0)
            self._rate += ((count - self._count) / passed - self._rate) * share
            self._at, self._count = now, count
        return self._rate
