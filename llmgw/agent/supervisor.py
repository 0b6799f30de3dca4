"""One attempt of a shard from its start, or its adoption, to the moment when nothing of it is left.

What happens is decided by L{llmgw.agent.life}; this is its hands and eyes: it starts the shim, watches both processes by
pidfd, reads the output's end a few times a second, asks the engine over HTTP, and ends the whole tree when told.

Surprising: C{leave} is not C{stop}. An agent that ends leaves its engines running, and the next one adopts them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from attrs import evolve
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.agent.checks import Prepared
from llmgw.agent.ending import Ending
from llmgw.agent.launching import OUTPUT_LIMIT, CannotStart, spawn_shim, write_launch
from llmgw.agent.life import begin_life
from llmgw.agent.observer import Observer
from llmgw.agent.output import last_lines
from llmgw.agent.ports import with_holders
from llmgw.agent.processes import ExitWatch, ProcessId, Tree, boot_id, hanging, is_alive, marks_of, oom_kills
from llmgw.agent.reports import Surroundings, Transition, describe
from llmgw.agent.shardfolder import AttemptFolder, Intent, Outcome, Reached, Run
from llmgw.agent.shim import keep_bounded
from llmgw.fleet.shard import NODE_RESTARTED, Diagnosis, ShardExit, ShardOrder, ShardReport, ShardState, Wanted
from llmgw.interfaces import IEngineAdapter

SPAWN_DEADLINE = 30.0
GRACE_OF_REMAINS = 2.0
TAIL_SENT = 100
TURN_DEADLINE = 120.0  # weights of hundreds of GiB go to the host or come back
OVER = frozenset({ShardState.FAILED, ShardState.STOPPED})


class Supervisor:
    """One attempt. Made for a fresh start (then C{start}), for a running engine (C{adopt}), or for one that is over.

    @ivar state: as the leader sees it.
    @ivar code: a stable word for why it failed: C{port_in_use}, C{start_timeout}, C{exited}, ...
    @ivar refused: it failed before anything was started.
    """

    log = Logger()

    def __init__(
        self, around: Surroundings, folder: AttemptFolder, intent: Intent, adapter: IEngineAdapter | None = None
    ) -> None:
        self._around = around
        self._reactor = around.reactor
        self._life = begin_life(self)
        self._watches: list[ExitWatch] = []
        self._jobs: dict[Deferred[None], Coroutine[Any, Any, None]] = {}
        self._starting: Deferred[None] | None = None
        self._ending: Ending | None = None
        self._observer: Observer | None = None
        self._over: list[Deferred[None]] = []
        self._drain_later = self._turning = self._left = False
        self._oom_kills: int | None = None
        self._last: ShardReport | None = None
        self.folder = folder
        self.intent = intent
        self.adapter = adapter
        self.state = ShardState.STARTING
        self.since = around.clock()
        self.reason = "the engine is being started"
        self.code = ""
        self.refused = False
        self.exit: ShardExit | None = None
        self.diagnosis: Diagnosis | None = None
        self.conditions: set[str] = set()
        self.tree = Tree(marks_of(around.instance, folder.shard, folder.attempt), cgroup=intent.cgroup)

    # What the node asks for.

    def start(self, prepare: Callable[[], Coroutine[Any, Any, Prepared]]) -> None:
        """Start it with what C{prepare} finds; what goes wrong is a transition to C{failed}."""
        self._starting = self.go(self._start(prepare))

    def adopt(self, run: Run) -> None:
        """Go on with an engine that an earlier agent started, in the state that it had come to."""
        self.reason = "the engine was found running"
        self._follow(run)
        if (reached := self.folder.reached()) is not None:
            self._life.serves("adopted: its engine was found running")
            self.since = reached.at
            if reached.state is ShardState.DRAINING:
                self.drain()
            elif reached.state is ShardState.SLEEPING:
                self._life.sleep("adopted: it was asleep")

    def restore(self, outcome: Outcome) -> None:
        """Stand for an attempt that is over."""
        self.state, self.reason, self.since = outcome.state, outcome.reason, outcome.at
        self.exit, self.diagnosis = outcome.exit, outcome.diagnosis

    def ended_meanwhile(self, run: Run | None) -> None:
        """It ended while no agent looked; what may be left of its tree is ended, and it has failed."""
        if run is not None:
            self.tree = evolve(self.tree, shim=run.shim, engine=run.engine)
        self.exit = (self.folder.exit() or (ShardExit(), ""))[0]
        self.code = "exited"
        rebooted = run is not None and run.engine.boot != boot_id()
        if not rebooted:  # What a shutdown did to it looks like a crash.
            self._judge()
        said = self.diagnosis.text if self.diagnosis else str(self.exit)
        self.conditions |= {NODE_RESTARTED} if rebooted else set()
        when = "the node was restarted" if rebooted else "it ended while no agent was running"
        self._life.fail(f"{when}: {said}", True)

    def drain(self) -> None:
        """Report it as draining; the engine goes on with what it has."""
        self._life.drain("draining: no new requests")

    def stop(self, reason: str = "stopped as ordered") -> None:
        """End it, all of its tree."""
        if self.state not in OVER or self.state is ShardState.FAILED:
            self._life.stop(reason)

    def sleep(self) -> None:
        """Have its engine give its memory back; one that cannot is stopped."""
        if self.state in (ShardState.READY, ShardState.DRAINING) and not self._turning:
            self.go(self._turn("sleep", self.intent.sleep))

    def wake(self) -> None:
        """Have a sleeping engine serve again."""
        if self.state is ShardState.SLEEPING and not self._turning:
            self.go(self._turn("wake", self.intent.wake))

    async def _turn(self, what: str, path: str) -> None:
        self._turning = True
        try:
            problem = "it has no way to" if not path else ""
            problem = problem or await self._around.probe.post(self.intent.url + path, self.intent.key, TURN_DEADLINE)
        finally:
            self._turning = False
        if problem and what == "sleep":
            self.stop(f"it does not fall asleep ({problem}), so it is stopped")
        elif problem:
            self.cannot("wake_failed", f"it does not wake up: {problem}")
        elif what == "sleep":
            self._life.sleep("it has given its memory back")
        else:
            self._life.wake("it is awake again")
        self._order_again()

    def _order_again(self) -> None:
        """What was ordered while it fell asleep or woke up."""
        if self.intent.order.wanted is Wanted.RUN:
            self.wake()
        elif self.intent.order.wanted is Wanted.SLEEP:
            self.sleep()

    def when_over(self) -> Deferred[None]:
        """Fires when nothing of it is left."""
        if self.is_over:
            return succeed(None)
        self._over.append(waiting := Deferred[None]())
        return waiting

    def leave(self) -> None:
        """The agent ends, the engine does not."""
        self._over.clear()
        self._let_go()

    @property
    def attempt(self) -> int:
        """Its number."""
        return self.folder.attempt

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""
        return self.state in OVER

    def order(self, order: ShardOrder) -> None:
        """What the leader wants of it now, kept on disk for an agent that adopts it."""
        if order == self.intent.order:
            return
        self.intent = evolve(self.intent, order=order)
        if self._ending is not None:
            self._ending.hasten(order.patience)
        if not self.is_over:
            self._note(self.folder.write_intent, self.intent)
        if self._observer is not None:
            self._observer.equip()

    def report(self) -> ShardReport:
        """As it is now; the serial grows when anything differs from the last report."""
        self._last = describe(self, self._observer, self._last, self._around.serials)
        return self._last

    # What the machine sets going.

    def enter(self, state: ShardState, reason: str) -> None:
        """Show C{state}, tell the node, and write it down where the next agent must know it."""
        before, self.state, self.reason, self.since = self.state, state, reason, self._around.clock()
        if state in (ShardState.READY, ShardState.DRAINING, ShardState.SLEEPING):
            self._note(self.folder.write, "state.json", Reached(state, self.since))
        if self.is_over:
            self._write_outcome()
            self._let_go()
        tail = last_lines(self.folder.path, self.intent.key)[-TAIL_SENT:] if state is ShardState.FAILED else ()
        self._around.tell(Transition(self.report(), before, reason, self.diagnosis, tail))
        if state is ShardState.READY and self._drain_later:
            self.drain()
        while self.is_over and self._over:
            self._over.pop(0).callback(None)

    def drain_when_ready(self) -> None:
        """Remember it."""
        self._drain_later = True

    def end_all(self, of_dead_engine: bool) -> None:
        """End the tree."""
        if self._ending is None:
            if self._starting is not None:
                self._starting.cancel()
            grace = GRACE_OF_REMAINS if of_dead_engine else self.intent.order.grace
            self._ending = Ending(self._reactor, self.tree, grace, self._stuck, self.intent.order.patience)
            self.go(self._end(self._ending))

    # What the observer sees; after C{leave} it means nothing any more.

    def phase_seen(self) -> None:
        """It has begun to load."""
        if not self._left:
            self._life.phase_seen()

    def serves(self, reason: str) -> None:
        """It answers for its model."""
        if not self._left:
            self._life.serves(reason)

    def cannot(self, code: str, reason: str, why: Diagnosis | None = None) -> None:
        """It will never be ready, or never again."""
        if not self._left and self._ending is None and not self.is_over:
            self.code, self.diagnosis = code, why
            self._life.fail(reason, False)

    def waits(self, reason: str) -> None:
        """Its start has to wait for another one."""
        self.reason = reason
        self.changed()

    def changed(self) -> None:
        """Something but its state is another."""
        self._around.tell(self.report())

    # Starting.

    async def _start(self, prepare: Callable[[], Coroutine[Any, Any, Prepared]]) -> None:
        try:
            self._prepare(await prepare())
            self.tree = evolve(self.tree, shim=spawn_shim(self._reactor, self.folder, self.tree.marks))
            run = await self._run_appears()
            self._starting = None  # It can no longer be cancelled, only ended.
            self._follow(run)
        except CannotStart as error:
            self._cannot_start(error.code, str(error))
        except OSError as error:
            code = "disk_full" if error.errno == errno.ENOSPC else "start_failed"
            self._cannot_start(code, f"cannot start: {error.strerror}: {error.filename or self.folder.path}")

    def _prepare(self, found: Prepared) -> None:
        self.adapter = found.adapter
        self.intent = evolve(found.intent, order=self.intent.order)
        self.tree = evolve(self.tree, cgroup=self.intent.cgroup)
        write_launch(self.folder, self.intent, found.launch, {**found.environment, **self.tree.marks}, found.user)

    def _cannot_start(self, code: str, reason: str) -> None:
        """Without a shim nothing can be there: then it was refused, and it leaves no trace."""
        self._starting = None
        self.code = code
        self.refused = self.tree.shim is None
        if self.refused:
            self._life.died(reason)
        else:
            self._life.fail(reason, True)

    async def _run_appears(self) -> Run:
        deadline = self._reactor.seconds() + SPAWN_DEADLINE
        while (run := self.folder.run()) is None:
            if not (self.tree.shim and is_alive(self.tree.shim)) and self.folder.run() is None:
                why = self.folder.complaint() or "it left no word"
                raise CannotStart("start_failed", f"the shim ended before it started anything: {why}")
            if self._reactor.seconds() > deadline:
                raise CannotStart("spawn_timeout", f"the shim started nothing within {SPAWN_DEADLINE:g} s")
            await deferLater(self._reactor, 0.02)
        return run

    def _follow(self, run: Run) -> None:
        self.tree = evolve(self.tree, shim=run.shim, engine=run.engine)
        self._oom_kills = oom_kills()
        self._observer = Observer(self._reactor, self._around.probe, self, self._around.look)
        self._watch(run.engine, lambda: self.go(self._engine_ended()))
        self._watch(run.shim, self._shim_ended)
        self.go(self._observer.run())

    def _watch(self, process: ProcessId, ended: Callable[[], object]) -> None:
        self._watches.append(ExitWatch(self._reactor, process, lambda: (ended(), None)[1]))
        self._watches[-1].start()

    # Ending.

    async def _engine_ended(self) -> None:
        self.exit, error = await self._exit_known()
        if self._ending is not None:
            return
        self._judge()
        self.code = "exited"
        said = error or (self.diagnosis.text if self.diagnosis else f"the engine ended: {self.exit}")
        # The driver frees memory after the process is gone, so with devices its end is not the end.
        if await self._shim_follows() and not self.intent.order.allocation.devices:
            self._life.died(said)
        else:
            self._life.fail(said, True)

    async def _exit_known(self) -> tuple[ShardExit, str]:
        for _ in range(100):
            if (found := self.folder.exit()) is not None:
                return found
            if not (self.tree.shim and is_alive(self.tree.shim)):
                break
            await deferLater(self._reactor, 0.02)
        return self.folder.exit() or (ShardExit(at=self._around.clock()), "")

    async def _shim_follows(self) -> bool:
        """Whether a shim that was there to see the end is gone by now: the proof that it has reaped everything."""
        if "shim_lost" in self.conditions:
            return False
        for _ in range(10):
            if not (self.tree.shim and is_alive(self.tree.shim)):
                return self.folder.exit() is not None
            await deferLater(self._reactor, 0.02)
        return False

    def _judge(self) -> None:
        """Ask the adapter why; an adapter that raises has no opinion. What the kernel says comes before it."""
        if self.exit is None:
            return
        # In a cgroup of its own it counts alone; of the machine's count nobody knows who was killed.
        mine = oom_kills(self.intent.cgroup) if self.intent.cgroup else None
        self.exit = evolve(self.exit, oom_kills=mine or 0)
        others = mine is None and self._oom_kills is not None and (oom_kills() or 0) > self._oom_kills
        if self.exit.signal == signal.SIGKILL and others:
            text = "it was killed by SIGKILL, and the kernel has killed for lack of memory meanwhile"
            self.diagnosis = Diagnosis(
                "node", text, "Give the node fewer engines or more memory (`dmesg` names what was killed)."
            )
        elif self.adapter is not None:
            try:
                found = self.adapter.diagnose(self.exit, last_lines(self.folder.path, self.intent.key))
                self.diagnosis = with_holders(found, self.intent.order.allocation)
            except Exception:
                self.log.failure("{adapter} could not diagnose {shard}", adapter=self.adapter.name, shard=self.folder.shard)

    def _shim_ended(self) -> None:
        if self.tree.engine and is_alive(self.tree.engine) and not self.is_over:
            self.conditions.add("shim_lost")
            self.log.warn("{shard}: its shim is gone, its engine runs on", shard=self.folder.shard)
            self.go(self._bound_output())
            self.changed()

    async def _bound_output(self) -> None:
        """What the shim did."""
        while True:
            try:
                keep_bounded(str(self.folder.path), OUTPUT_LIMIT)
            except OSError as error:
                self.log.warn("cannot bound the output of {shard}: {error}", shard=self.folder.shard, error=str(error))
            await deferLater(self._reactor, 1.0)

    async def _end(self, ending: Ending) -> None:
        self.folder.abandon()
        await ending.run()
        # One that died by itself was not met any more.
        pids = ending.pids | ({self.tree.engine.pid} if self.tree.engine else set())
        held = await self._around.released(self.intent.order.allocation.devices, frozenset(pids))
        if held:
            self.conditions.add(f"leaked_vram: {held}")
        if self.exit is None and (found := self.folder.exit()):
            self.exit = found[0]
        if self.exit is not None:
            self.exit = evolve(self.exit, forced=ending.forced)
        self._life.gone()

    def _stuck(self, pids: list[int]) -> None:
        before = set(self.conditions)
        self.conditions = {text for text in before if not text.startswith("stuck")}
        if pids:
            self.conditions.add(f"stuck: SIGKILL does not end {', '.join(map(hanging, pids[:10]))}: reboot the node")
        if self.conditions != before:
            self.changed()

    def _write_outcome(self) -> None:
        if self.intent.cgroup:
            with contextlib.suppress(OSError):
                os.rmdir(self.intent.cgroup)
        if self.refused:
            self.folder.remove()
            return
        self._note(self.folder.write_intent, self.intent)
        exit = self.exit or ShardExit()
        self._note(self.folder.write, "outcome.json", Outcome(self.state, self.reason, exit, self.diagnosis, self.since))

    def _note(self, write: Callable[..., None], *values: object) -> None:
        """On disk if it can be; a full disk must not keep anybody from being told."""
        try:
            self.folder.create()
            write(*values)
        except OSError as error:
            self.log.error("cannot note what becomes of {shard}: {error}", shard=self.folder.shard, error=str(error))

    # Jobs: coroutines that end with the attempt.

    def go(self, work: Coroutine[Any, Any, None]) -> Deferred[None]:
        """See L{Watched}."""
        job: Deferred[None] = Deferred.fromCoroutine(work)
        self._jobs[job] = work
        job.addErrback(self._broke)
        job.addBoth(lambda _: self._jobs.pop(job))
        return job

    def _broke(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        self.log.failure("while supervising {shard}", failure, shard=self.folder.shard)
        self.code = "internal"
        self._life.fail(f"the agent failed at it: {failure.getErrorMessage()}", False)

    def _let_go(self) -> None:
        """Watch and do nothing more. The job that has brought us here is at its end anyway, and cannot be cancelled."""
        self._left = True
        if self._observer is not None:
            self._observer.end()
        for watch in self._watches:
            watch.stop()
        for job, work in list(self._jobs.items()):
            if not getattr(work, "cr_running", False):
                job.cancel()
