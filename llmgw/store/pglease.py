"""Leadership over PostgreSQL: a lease's row, renewed by a thread of its own over a connection of its own.

The thread only ever reads and writes the row; who leads is decided in the reactor's thread, from what the thread reports and
from the clock. So a database that hangs cannot keep a leader in office, nor can a slow query of somebody else's put one out.
Every query is cut at C{timing.store_timeout} by the database and, where that hangs itself, by closing its socket.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from llmgw.fleet.timing import Timing
from llmgw.interfaces import ILeadership
from llmgw.store import leaserow
from llmgw.store.clock import boottime
from llmgw.store.errors import NotLeader, StoreError
from llmgw.store.leaserow import LeaseRow
from llmgw.store.pgtable import CONNECT, LeaseTable
from llmgw.store.tenure import Tenure, Watch

T = TypeVar("T")


@implementer(ILeadership)
class PostgresLeadership:
    """See L{llmgw.interfaces.ILeadership}. Contends from C{start} to C{release}, and again after each loss.

    @ivar leader: who holds the lease, as agents get it: ours while we lead, else the one last seen.
    @ivar addresses: where that one is reached.
    @ivar problem: why the row cannot be read or renewed, empty while it can; C{problem_since} since when (C{clock}).
    """

    log = Logger()

    def __init__(
        self,
        url: str,
        holder: str,
        timing: Timing,
        reactor: Any,
        random: Random,
        addresses: Sequence[str] = (),
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.epoch = 0
        self.leader = ""
        self.addresses: tuple[str, ...] = ()
        self.problem = ""
        self.problem_since = 0.0
        self._holder, self._own = holder, tuple(addresses)
        self._timing, self._reactor, self._random, self._clock = timing, reactor, random, clock
        self._patience = CONNECT + 3 * timing.store_timeout
        self._table = LeaseTable(url, timing.store_timeout, clock)
        self._watch = Watch(timing.lease)
        self._tenure: Tenure | None = None  # the reactor's: it may act by this one
        self._mine: Tenure | None = None  # the thread's: it renews this one, which the reactor may not know yet
        self._failed = False
        self._ticked = 0.0
        self._ticker = LoopingCall(self._tick)
        self._ticker.clock = reactor
        self._jobs: queue.Queue[tuple[Callable[[], Any], Deferred[Any]] | None] = queue.Queue(16)
        self._thread: threading.Thread | None = None
        self._watchers: list[Callable[[], None]] = []

    def may_act(self) -> bool:
        """Whether this process may send a command right now; reckoned anew at each call."""
        return self._tenure is not None and self._tenure.may_act(self._clock())

    def watch(self, changed: Callable[[], None]) -> None:
        """Have C{changed} called, in the reactor's thread, each time leadership was won, lost, raised or seen to move."""
        self._watchers.append(changed)

    def start(self) -> Deferred[None]:
        """Begin to contend; fires when the row has been read once.

        @raise StoreError: the database cannot be reached; it is contended for all the same, as soon as it can.
        """
        self._thread = threading.Thread(target=self._loop, name="llmgw-lease", daemon=True)
        self._thread.start()
        self._ticked = self._clock()
        self._ticker.start(min(1.0, self._timing.lease / 15), now=False)
        return self._ask(self._contend)

    def outrank(self, epoch: int) -> Deferred[int]:
        """See L{ILeadership.outrank}."""
        return Deferred.fromCoroutine(self._outrank(epoch))

    async def _outrank(self, seen: int) -> int:
        tenure = self._tenure
        if tenure is None:
            raise NotLeader(f"not leader: {self.leader or 'nobody'} leads with epoch {self.epoch}", self.epoch, self.leader)
        raised: int = await self._ask(lambda: self._raise(tenure, seen))
        if self._tenure is tenure:
            self.epoch = tenure.epoch
            self._tell()
        return raised

    def _raise(self, tenure: Tenure, seen: int) -> int:
        # In the lease's own thread, so that no renewal of the old epoch can come between and take the lease for lost.
        if not tenure.may_act(self._clock()):
            raise StoreError("the epoch cannot be raised: the lease may have run out", "not_leader")
        epoch, statements = leaserow.outranking(self._holder, tenure.epoch, seen)
        if not self._table.change(statements):
            raise leaserow.not_held(self._holder, tenure.epoch)
        tenure.epoch = epoch
        return epoch

    def release(self) -> Deferred[None]:
        """Stop contending, and let go on purpose, so that another takes over at its next look."""
        return Deferred.fromCoroutine(self._release())

    async def _release(self) -> None:
        if self._ticker.running:
            self._ticker.stop()
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            tenure.over = True
            self._tell()
        if self._thread is None:
            return
        try:
            if tenure is not None:
                await self._ask(lambda: self._table.change(leaserow.releasing(self._holder, tenure.epoch)))
        finally:
            self._thread = None
            with suppress(queue.Full):
                self._jobs.put_nowait(None)

    # In the reactor's thread.

    def _tick(self) -> None:
        now, tenure = self._clock(), self._tenure
        self._ticked = now
        if self._table.cut_late():
            self.log.warn("lease: {place} has not answered; its connection was cut", place=self._table.place)
        if tenure is None:
            return
        gap = tenure.tick(now)
        if gap:
            self.log.warn("lease: no tick for {gap:.1f} s: no command until the lease is seen to be ours", gap=gap)
            self._ask(self._contend).addErrback(lambda failure: failure.trap(StoreError) and None)
        if not tenure.in_time(now):
            self._lost(tenure, f"it could not be renewed for {now - tenure.renewed:.1f} s ({self.problem or 'no answer'})")

    def _won(self, tenure: Tenure) -> None:
        if not self._ticker.running or not tenure.in_time(self._clock()):
            tenure.over = True
            return
        tenure.ticked = self._ticked = self._clock()
        self._tenure = tenure
        self.epoch, self.leader, self.addresses = tenure.epoch, self._holder, self._own
        self.log.info("lease: {holder} leads with epoch {epoch}", holder=self._holder, epoch=tenure.epoch)
        self._tell()

    def _lost(self, tenure: Tenure, why: str) -> None:
        if self._tenure is not tenure:
            return
        tenure.over = True
        self._tenure = None
        self.log.warn("lease: stepping down from epoch {epoch}: {why}", epoch=tenure.epoch, why=why)
        self._tell()

    def _seen(self, row: LeaseRow) -> None:
        leader = "" if row.released or row.holder == self._holder else row.holder
        if self._tenure is None and (row.epoch, leader) != (self.epoch, self.leader):
            self.epoch, self.leader, self.addresses = row.epoch, leader, row.addresses if leader else ()
            self.log.info("lease: {leader} leads with epoch {epoch}", leader=leader or "nobody", epoch=row.epoch)
            self._tell()

    def _trouble(self, problem: str) -> None:
        if problem and not self.problem:
            self.problem_since = self._clock()
            self.log.warn("lease: {problem}", problem=problem)
        elif self.problem and not problem:
            self.log.info("lease: {place} answers again", place=self._table.place)
        self.problem = problem

    def _tell(self) -> None:
        for changed in list(self._watchers):
            changed()

    def _ask(self, job: Callable[[], T]) -> Deferred[T]:
        answer: Deferred[T] = Deferred()
        try:
            self._jobs.put_nowait((job, answer))
        except queue.Full:
            return fail(StoreError(f"{self._table.place}: the lease's thread hangs", "busy"))
        return answer.addTimeout(self._patience, self._reactor, self._impatient)

    def _impatient(self, failure: Any, seconds: float) -> Any:
        failure.trap(CancelledError)
        raise StoreError(f"{self._table.place}: no answer about the lease within {seconds:g} s", "timeout")

    # In the lease's own thread.

    def _loop(self) -> None:
        while True:
            try:
                asked = self._jobs.get(timeout=self._pause())
            except queue.Empty:
                self._turn()
                continue
            if asked is None:
                return self._table.close()
            job, answer = asked
            try:
                outcome: Any = job()
            except BaseException:
                outcome = Failure()
            self._reactor.callFromThread(answer.callback, outcome)

    def _turn(self) -> None:
        try:
            self._contend()
        except StoreError:
            pass  # it has been reported, and the next turn comes soon
        except Exception:
            self._failed = True
            self.log.failure("lease: a turn failed; the next one comes")

    def _pause(self) -> float:
        if self._failed:
            return self._timing.lease / 15
        if self._mine is not None:
            return self._timing.lease_renew
        return self._timing.lease / 10 * self._random.uniform(0.8, 1.0)

    def _contend(self) -> None:
        """Renew what we hold, else look at the row and take it if it is free."""
        if self._mine is not None and self._mine.over:
            self._mine = None
        try:
            if self._mine is None:
                self._look()
            elif not self._renew(self._mine):
                return
        except StoreError as error:
            self._failed = True
            self._report(self._trouble, str(error))
            raise
        self._failed = False
        self._report(self._trouble, "")

    def _renew(self, tenure: Tenure) -> bool:
        """Renew it if that makes sense; whether the database was asked at all."""
        sent = self._clock()
        if not tenure.in_time(sent):
            tenure.over = True  # the reactor's tick says so, too, and steps down
            return False
        if not tenure.awake(sent):
            return False
        if self._table.change(leaserow.renewing(self._holder, tenure.epoch)):
            tenure.renewed = sent
        else:
            tenure.over = True
            self._report(self._lost, tenure, "another server holds the lease")
        return True

    def _look(self) -> None:
        row = self._table.read()
        if self._watch.look(row, self._clock()):
            self._report(self._seen, row)
        awake = self._clock() - self._ticked <= self._timing.lease / 3
        if awake and self._watch.free(self._clock(), self._holder):
            sent = self._clock()
            if self._table.change(leaserow.taking(row, self._holder, self._own)):
                self._mine = Tenure(self._timing, row.epoch + 1, sent, sent)
                self._report(self._won, self._mine)

    def _report(self, receiver: Callable[..., None], *words: object) -> None:
        self._reactor.callFromThread(receiver, *words)
