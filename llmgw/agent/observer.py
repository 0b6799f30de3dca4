"""Looks at a running engine again and again: how its start goes, then whether it is healthy and how loaded.

One look never stops the next: whatever it raises is logged, and the loop goes on.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, Protocol
from urllib.parse import urlsplit

from twisted.internet.task import deferLater
from twisted.logger import Logger

from llmgw.agent.loras import Look, Loras
from llmgw.agent.output import last_lines, read_output, written
from llmgw.agent.ports import has_address
from llmgw.agent.probe import EngineProbe
from llmgw.agent.processes import ProcessId, Tree
from llmgw.agent.progress import QUIET, Health, StartDeadline, Stillness
from llmgw.agent.shardfolder import AttemptFolder, Intent
from llmgw.engines.failures import given_up
from llmgw.fleet.causes import UNKNOWN
from llmgw.fleet.shard import ADDRESS_GONE, Diagnosis, EngineLoad, ShardExit, ShardState
from llmgw.fleet.units import show_duration
from llmgw.interfaces import IEngineAdapter, Phase

EVERY = 5.0
EAGER, EAGER_FOR, LOADING_EVERY = 0.2, 10.0, 1.0
PER_LOOK = 64 * 1024
SERVING = (ShardState.READY, ShardState.DRAINING, ShardState.SLEEPING)


class Watched(Protocol):
    """The attempt that is looked at, and what to tell it."""

    folder: AttemptFolder
    intent: Intent
    tree: Tree
    adapter: IEngineAdapter | None
    state: ShardState

    def phase_seen(self) -> None:
        """It has begun to load."""

    def serves(self, reason: str) -> None:
        """It answers for its model."""

    def waits(self, reason: str) -> None:
        """What it still lacks to be ready."""

    def cannot(self, code: str, reason: str, why: Diagnosis | None = None) -> None:
        """It will never be ready, or never again; C{code} is a stable word, C{why} the reason with its cause and what to do."""

    def changed(self) -> None:
        """Its health is another, or its adapters are."""

    def go(self, work: Coroutine[Any, Any, None]) -> object:
        """Have a coroutine run that ends with the attempt."""


class Observer:
    """The eyes on one engine.

    @ivar phase: what it does, in its own words; C{progress} from 0 to 1.
    @ivar load: the last load it told.
    @ivar loras: its adapters.
    @ivar ended: it looks no more.
    """

    log = Logger()

    def __init__(self, reactor: Any, probe: EngineProbe, watched: Watched, look: Look) -> None:
        self._reactor = reactor
        self._probe = probe
        self._watched = watched
        self._began = reactor.seconds()
        age = _age(watched.tree.engine)
        self._deadline = StartDeadline(self._began - age, watched.intent.order.profile.start_timeout)
        self._deadline.moved = self._began
        self._read = 0
        self._rest = b""
        self._obstacle = ""
        self._refusing: float | None = None
        self._mute = False
        self._joined = False
        self._memory_at = self._began
        self.phase = ""
        self.progress: float | None = None
        self.load = EngineLoad()
        self.loras = Loras(reactor, probe, watched, look)
        self.health = Health()
        self._still = Stillness()
        self.conditions: frozenset[str] = frozenset()
        self.ended = False

    async def run(self) -> None:
        """Look until the engine is being ended, or until C{ended} is set and what is under way is cancelled."""
        while self._watched.state in (ShardState.STARTING, ShardState.LOADING, *SERVING):
            try:
                await (self._look_at_service() if self._watched.state in SERVING else self._look_at_start())
            except Exception:
                if not self.ended:
                    self.log.failure("while looking at {shard}", shard=self._watched.folder.shard)
            if self.ended:
                return
            await deferLater(self._reactor, self._pause())

    def end(self) -> None:
        """Look no more, and touch the engine no more."""
        self.ended = self.loras.ended = True

    def _pause(self) -> float:
        if self._watched.state in SERVING:
            return EVERY
        return EAGER if self._reactor.seconds() - self._began < EAGER_FOR else LOADING_EVERY

    # While it starts.

    async def _look_at_start(self) -> None:
        self._read_output()
        now = self._reactor.seconds()
        if self._watched.intent.ready is None:
            self._judge_follower(now)
        else:
            await self._ask()
        self._deadline.saw(now, self._read, self._memory(now))
        if self._deadline.over(self._reactor.seconds()):
            spent = show_duration(self._reactor.seconds() - self._deadline.began)
            at = ", ".join(filter(None, [self.phase and f"it is at: {self.phase}", self._obstacle]))
            self._give_up("start_timeout", f"not ready after {spent}: {at or 'it said nothing'}")

    def _give_up(self, code: str, text: str) -> None:
        """It will not be ready, or works no more, and does not end by itself."""
        watched = self._watched
        tail = last_lines(watched.folder.path, watched.intent.key)
        judged = watched.adapter.diagnose(ShardExit(), tail) if watched.adapter else Diagnosis(UNKNOWN, "")
        watched.cannot(code, text, given_up(code, text, self.phase, judged))

    def _judge_follower(self, now: float) -> None:
        """A rank without HTTP is ready when it has said so once, or when it lives and says nothing."""
        if self._joined or (not self.phase and now - self._deadline.began > EVERY):
            self._watched.serves("the engine runs; this rank serves no HTTP")

    async def _ask(self) -> None:
        verdict = await self._probe.serving(self._watched.intent, self._pids)
        self._obstacle = verdict.text
        if not verdict.refuses:
            self._refusing = None
        if verdict.stolen:
            self._watched.cannot("port_in_use", verdict.text)
        elif verdict.refuses:
            self._judge_refusal(verdict.text)
        elif verdict.serves:
            self.conditions = frozenset({"port_unverified"} if verdict.unverified else ())
            # Whoever takes the place of another serves all that it does before that one goes.
            await self.loras.follow(fresh=True)
            self.phase, self.progress = "", None
            spent = show_duration(max(0.0, self._reactor.seconds() - self._deadline.began))
            self._watched.serves(f"it serves after {spent}")
        elif verdict.answered:
            self._watched.phase_seen()

    def _judge_refusal(self, text: str) -> None:
        """It says that it serves and fails what it is asked. That may pass in the first moments."""
        self._watched.phase_seen()
        now = self._reactor.seconds()
        if self._refusing is None:
            self._refusing = now
            self._watched.waits(text)
        elif now - self._refusing >= min(QUIET, self._watched.intent.order.profile.start_timeout):
            self._give_up("first_answer", f"it failed every request for {show_duration(now - self._refusing)}: {text}")

    def _pids(self) -> list[int]:
        return [process.pid for process in self._watched.tree.members(deep=False)]

    def _memory(self, now: float) -> int | None:
        """Looked at only when nothing else moves: it reads the whole process table."""
        if self._deadline.quiet(now) < EVERY or now - self._memory_at < EVERY:
            return None
        self._memory_at = now
        return self._watched.tree.memory()

    def _read_output(self) -> None:
        """The lines since the last look, at most 64 KiB: a flood is skipped, not followed."""
        size = written(self._watched.folder.path)
        if size - self._read > PER_LOOK:
            self._read, self._rest = size - PER_LOOK, b""
        chunk = read_output(self._watched.folder.path, self._read, PER_LOOK)
        self._read = chunk.next
        *lines, self._rest = (self._rest + chunk.data).split(b"\n")
        self._rest = self._rest[-PER_LOOK:]
        for line in lines:
            if (phase := self._phase(line.decode("utf-8", "replace").rstrip("\r"))) is not None:
                self._joined = self._joined or phase.name == "ready" or phase.progress == 1.0
                self.phase, self.progress = phase.name, phase.progress
                self._watched.phase_seen()

    def _phase(self, line: str) -> Phase | None:
        return self._watched.adapter.phase(line) if self._watched.adapter else None

    # While it serves.

    async def _look_at_service(self) -> None:
        intent = self._watched.intent
        if intent.ready is None or self._watched.state is ShardState.SLEEPING:
            return
        self.equip()
        problem = await self._probe.healthy(intent)
        await self._ask_load(intent)
        self._still.saw(self._reactor.seconds(), self.load, written(self._watched.folder.path), intent.limit)
        doubtful = self._still.doubtful(self._reactor.seconds())
        refuses, weak, printed = False, False, written(self._watched.folder.path)
        if not problem and (self._mute or intent.order.doubted or doubtful):
            verdict = await self._probe.works(intent)
            problem, self._mute, refuses = verdict.text, not verdict.serves, verdict.refuses
            weak = self._still.full and not refuses and not doubtful
            # An engine may print a line for each request that it fails; that is no work.
            printed = 0 if refuses else printed
        host = urlsplit(intent.url).hostname or ""
        if gone := bool(problem) and not has_address(host):
            problem = f"{host} is no address of this node any more"
        before = self.health.healthy
        now = self._reactor.seconds()
        self.health.saw(now, problem, self.load.tokens, printed, weak)
        standing = {text for text in self.conditions if not text.startswith("unhealthy")} - {ADDRESS_GONE}
        standing |= {ADDRESS_GONE} if gone else set()
        self.conditions = frozenset(standing if self.health.healthy else {*standing, f"unhealthy: {self.health.reason}"})
        if before != self.health.healthy:
            self._watched.changed()
        # An engine that cannot be asked does not hang for that: the address may return, or the leader starts it at another.
        if self.health.hangs(now) and not gone:
            nothing = "no answer and no token" if refuses else "no answer, no token and no output"
            spent = show_duration(now - (self.health.failing_since or now))
            self._give_up("hung", f"it hangs: {nothing} for {spent} ({problem})")

    def equip(self) -> None:
        """Have the engine load and unload adapters, if it serves and there is something to do. Requests go on meanwhile."""
        if self._watched.state is ShardState.READY:
            self._watched.go(self.loras.follow())

    async def _ask_load(self, intent: Intent) -> None:
        if not intent.metrics or self._watched.adapter is None:
            return
        answer = await self._probe.get(intent.url + intent.metrics, intent.key)
        self.load = self._watched.adapter.load(answer.body.decode("utf-8", "replace")) if answer.status == 200 else EngineLoad()


def _age(process: ProcessId | None) -> float:
    """Seconds since it began, by the boot clock, so that a changed wall clock changes nothing."""
    if process is None:
        return 0.0
    with open("/proc/uptime") as file:
        return max(0.0, float(file.read().split()[0]) - process.start / os.sysconf("SC_CLK_TCK"))
