"""The store's own thread: one job after another, each with a deadline, in a queue with a bound.

A database call can block for as long as a disk or a network likes, and a reactor must never wait for it; nor must it share
the reactor's pool, whose threads keep a process from ending. This one is a daemon thread: if its job hangs, the process can
still exit. A job whose deadline passes before it is begun is never begun.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.python.failure import Failure

from llmgw.store.errors import StoreError

T = TypeVar("T")


class _Job(Generic[T]):
    """One call on its way to the thread and back. Whoever takes C{claim} decides: the thread to run it, the clock to drop it."""

    def __init__(self, name: str, what: str, call: Callable[[], T], timeout: float, reactor: Any) -> None:
        self.name, self.what, self.call, self.timeout = name, what, call, timeout
        self.claim = threading.Lock()
        self.result: Deferred[T] = Deferred()
        self.timer = reactor.callLater(timeout, self.expired)

    def expired(self) -> None:
        """The deadline passed: say whether it was begun."""
        unbegun = self.claim.acquire(blocking=False)
        state = "it was not begun" if unbegun else "it had begun, so whether it happened is not known"
        self.result.errback(StoreError(f"the {self.name} did not {self.what} within {self.timeout:g} s: {state}", "timeout"))

    def done(self, outcome: T | Failure) -> None:
        """The thread is through; in the reactor's thread."""
        if self.timer.active():
            self.timer.cancel()
            self.result.callback(outcome)


class StoreThread:
    """Runs jobs in order.

    @param name: of what it does them to, for errors.
    @param limit: how many may wait; more are refused at once with code C{busy}.
    """

    def __init__(self, reactor: Any, name: str = "store", limit: int = 256) -> None:
        self._reactor = reactor
        self._name = name
        self.limit = limit
        self._jobs: queue.Queue[_Job[Any] | None] = queue.Queue(limit)
        self._thread: threading.Thread | None = None
        self.closing = False

    def run(self, what: str, call: Callable[[], T], timeout: float) -> Deferred[T]:
        """What C{call} returns, run in the thread.

        @param what: the verb phrase for errors: C{"write the catalog"}.
        @raise StoreError: closed, too many jobs waiting, or not done in time; besides what C{call} raises.
        """
        if self.closing:
            return fail(StoreError(f"the {self._name} is closed and cannot {what}", "closed"))
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=f"llmgw-{self._name}", daemon=True)
            self._thread.start()
        job = _Job(self._name, what, call, timeout, self._reactor)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            job.timer.cancel()
            why = f"{self.limit} jobs wait already; its disk or database hangs"
            return fail(StoreError(f"the {self._name} cannot {what}: {why}", "busy"))
        return job.result

    def close(self, last: Callable[[], None], timeout: float) -> Deferred[None]:
        """Finish what waits, then run C{last} and end the thread; a thread that hangs is left behind after C{timeout}."""
        if self.closing:
            return fail(StoreError(f"the {self._name} is closed already", "closed"))
        done: Deferred[None] = self.run("close", last, timeout)
        self.closing = True
        with suppress(queue.Full):  # full means that it hangs; as a daemon thread it then ends with the process
            self._jobs.put_nowait(None)
        return done

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.claim.acquire(blocking=False):
                continue
            try:
                outcome: Any = job.call()
            except BaseException:  # whatever it was, the caller gets it and the thread goes on
                outcome = Failure()
            self._reactor.callFromThread(job.done, outcome)
