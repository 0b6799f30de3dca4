"""Ends everything that belongs to an attempt, and returns only when nothing of it is left.

Surprising: one SIGTERM is not enough. An engine that is still loading may ignore the first and take the second; one that is
stopped (SIGSTOP) takes none until it is continued; one that hangs in the kernel takes not even SIGKILL: then we say so and go on
asking, since its devices are not free. A live shim's exit is the proof that nothing is left; without a shim, two looks must
find nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from llmgw.agent.processes import ProcessId, Tree, is_alive, send_signal

SCAN_DEADLINE = 5.0
SHIM_PATIENCE = 2.0
STUCK_AFTER = 5.0

log = Logger()


async def scan(reactor: Any, tree: Tree) -> frozenset[ProcessId]:
    """The members of C{tree}. Environments are read in a thread: a process that hangs in the kernel would block us with it."""
    try:
        looked: Deferred[frozenset[ProcessId]] = deferToThreadPool(reactor, reactor.getThreadPool(), tree.members)
        return await looked.addTimeout(SCAN_DEADLINE, reactor)
    except TimeoutError:
        log.warn("reading the environments of processes took more than {limit:g} s", limit=SCAN_DEADLINE)
        return tree.members(deep=False)


def signal_all(members: frozenset[ProcessId], number: int) -> None:
    """Signal each of C{members}; SIGTERM is followed by SIGCONT, without which a stopped process would never see it."""
    for process in members:
        send_signal(process, number)
        if number == signal.SIGTERM:
            send_signal(process, signal.SIGCONT)


class Ending:
    """One attempt's end.

    @param tree: what to end.
    @param grace: seconds between SIGTERM and SIGKILL; 0 kills at once.
    @param patience: seconds before SIGTERM, in which it may end by itself.
    @param stuck: called with the pids that SIGKILL did not end within 5 s, each second; with none when they are gone after all.
    @ivar forced: whether SIGKILL was needed.
    @ivar pids: every process that was met.
    """

    def __init__(
        self,
        reactor: Any,
        tree: Tree,
        grace: float,
        stuck: Callable[[list[int]], None] = lambda pids: None,
        patience: float = 0.0,
    ) -> None:
        self._reactor = reactor
        self._tree = tree
        self._grace = grace
        self._stuck = stuck
        self._due = reactor.seconds() + patience
        self._empty_since: float | None = None
        self.forced = False
        self.pids: set[int] = set()

    def hasten(self, patience: float) -> None:
        """Wait no longer than C{patience} seconds from now for it to end by itself."""
        self._due = min(self._due, self._reactor.seconds() + patience)

    def _spent(self) -> float:
        """Seconds since the first SIGTERM was due; below 0 before that."""
        spent: float = self._reactor.seconds() - self._due
        return spent

    async def run(self) -> None:
        """End it all; returns when nothing is left, however long that takes."""
        terms, pause = [0.0, self._grace / 2], 0.02
        while not self._is_over(members := await scan(self._reactor, self._tree)):
            self.pids |= {process.pid for process in members}
            if self._spent() >= self._grace:
                self.forced = self.forced or bool(members)
                signal_all(members, signal.SIGKILL)
                self._tell_stuck(members)
            elif members and terms and self._spent() >= terms[0]:
                terms.pop(0)
                signal_all(members, signal.SIGTERM)
            await deferLater(self._reactor, pause)
            pause = min(1.0 if self._spent() > self._grace + STUCK_AFTER else 0.25, pause * 1.5)
        self._stuck([])

    def _is_over(self, members: frozenset[ProcessId]) -> bool:
        """Nothing is left, and nothing can come any more: the shim is gone, and this is not the first look that found nothing."""
        if members:
            self._empty_since = None
            return False
        if (first := self._empty_since) is None:
            self._empty_since = self._spent()
            return False
        if self._tree.shim and is_alive(self._tree.shim):
            if self._spent() - first > SHIM_PATIENCE:
                send_signal(self._tree.shim, signal.SIGKILL)
                self._empty_since = None
            return False
        return True

    def _tell_stuck(self, members: frozenset[ProcessId]) -> None:
        if self._spent() > self._grace + STUCK_AFTER:
            self._stuck(sorted(process.pid for process in members))
