"""The node as the link sees it: executes orders, says what runs. Engines go on whatever happens to link, leader or agent.

Orders are levels, not edges. The same list may come any number of times, and a shard that it does not name is left as it is.

    run    attempt above the one we have    start it (an older one that still lives is ended first)
           the same attempt, alive          keep it
           the same attempt, over           answer that it failed; only the leader raises the attempt
    drain                                   show it as draining, keep it running
    stop                                    end all of its tree

What was answered to an operation is answered again, also after a restart. An attempt that could not even be started leaves
no trace but that answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import implementer

from llmgw import __version__
from llmgw.agent.adoption import adopt_all, begin
from llmgw.agent.checks import Checks, Equipment, Prepared
from llmgw.agent.fetching import Fetching
from llmgw.agent.inode import INode
from llmgw.agent.operations import Operations
from llmgw.agent.output import read_output
from llmgw.agent.probe import EngineProbe
from llmgw.agent.processes import boot_id, read_stat
from llmgw.agent.reports import Surroundings, Transition
from llmgw.agent.shardfolder import Intent, ShardFolders
from llmgw.agent.statefolder import StateFolder
from llmgw.agent.supervisor import Supervisor
from llmgw.agent.turns import Turns
from llmgw.config.agent import AgentSettings
from llmgw.errors import LlmgwError
from llmgw.fleet.node import Installation, Inventory, NodeFacts
from llmgw.fleet.plain import to_plain
from llmgw.fleet.shard import ShardOrder, ShardReport, ShardState, Wanted
from llmgw.interfaces import IEngineAdapter
from llmgw.wire.messages import PROTOCOL, AgentMessage, Desired, Done, Event, FetchLog, FetchWeights, Inspect, Register, Report

EVENTS_KEPT = 200
# A character may take six bytes as JSON, and a line of the link 1 MiB.
LOG_LIMIT = 128 * 1024

# Where the effect of an order is there; one that is over has been stopped, and drained, too.
_STARTS = (ShardState.STARTING, ShardState.LOADING)
_STARTED = (ShardState.READY, ShardState.DRAINING)
_REACHED = {
    Wanted.RUN: (ShardState.READY, ShardState.DRAINING),
    Wanted.DRAIN: (ShardState.DRAINING, ShardState.STOPPING),
    Wanted.STOP: (),
    Wanted.SLEEP: (ShardState.SLEEPING,),
}

Released = Callable[[tuple[str, ...], frozenset[int]], Deferred[str]]


@implementer(INode)
class Node:
    """One node.

    @param equipment: its hardware, engines and weights.
    @param released: see L{Surroundings.released}.
    @param fetching: the downloads; they begin and end with the node.
    @param new_key: a new random secret for an engine.
    @param clock: wall time, for people only.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        settings: AgentSettings,
        state: StateFolder,
        adapters: Mapping[str, IEngineAdapter],
        equipment: Equipment,
        released: Released,
        new_key: Callable[[], str],
        fetching: Fetching,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._state = state
        self._adapters = adapters
        self._equipment = equipment
        self._released = released
        self._fetching = fetching
        fetching.changed = self._report_now
        self._clock = clock
        self._folders = ShardFolders(settings.state / "shards")
        self._operations = Operations(settings.state / "operations.jsonl")
        self._shards: dict[str, Supervisor] = {}
        self._replaced: set[Supervisor] = set()
        self._pending: dict[str, tuple[Supervisor, Wanted]] = {}
        self._turns = Turns()
        self._unsent: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._send: Callable[[AgentMessage], None] | None = None
        self._reporting: Any = None
        self._shown: Inventory | None = None
        self._facts: NodeFacts | None = None
        self._installed: tuple[Installation, ...] = ()
        self._around: Surroundings
        self._checks = Checks(settings, adapters, equipment, self._held, lambda: self._facts, new_key, clock)

    async def start(self) -> None:
        """Find out what runs. Nothing may be asked or told before this is over."""
        serials = count(self._state.starts << 32).__next__
        probe = EngineProbe(self._reactor)
        self._around = Surroundings(
            self._reactor, self._state.instance, probe, self._told, serials, self._released, self._equipment.weights, self._clock
        )
        self._operations.load()
        found = await adopt_all(self._around, self._folders, self._adapters)
        self._shards = {supervisor.intent.order.shard: supervisor for supervisor, _ in found}
        for supervisor, run in found:
            begin(supervisor, run)
            if supervisor.state in _STARTS:
                self._turns.began(supervisor, _shared(supervisor.intent.order))
        self._prune()
        self._fetching.start()

    def leave(self) -> None:
        """The agent ends; the engines do not."""
        self._send = None
        self._fetching.stop()
        if self._reporting is not None and self._reporting.active():
            self._reporting.cancel()
        for supervisor in (*self._shards.values(), *self._replaced):
            supervisor.leave()

    def reload(self, settings: AgentSettings) -> None:
        """Register and start by these settings from now on."""
        self._settings = self._checks.settings = settings

    @property
    def running(self) -> dict[str, ShardState]:
        """The shards with a process, by state."""
        return {name: supervisor.state for name, supervisor in self._shards.items() if not supervisor.is_over}

    def shard_of(self, pid: int) -> str | None:
        """The shard that C{pid} belongs to by descent, None for a stranger."""
        trees = {shard: supervisor.tree for shard, supervisor in self._shards.items()}
        owners = {process.pid: shard for shard, tree in trees.items() for process in (tree.shim, tree.engine) if process}
        while pid > 1 and pid not in owners and (stat := read_stat(pid)) is not None:
            pid = stat.parent
        return owners.get(pid)

    def _supervisors(self) -> Iterator[Supervisor]:
        yield from self._shards.values()
        yield from self._replaced

    def _held(self) -> Iterable[ShardOrder]:
        return [supervisor.intent.order for supervisor in self._supervisors() if not supervisor.is_over]

    def _prune(self) -> None:
        try:
            self._folders.prune(supervisor.folder.path for supervisor in self._supervisors())
        except OSError as error:
            self.log.error("cannot delete old attempts: {error}", error=str(error))

    # INode: the link.

    def register(self, fleet: str, local_address: str) -> Register:
        """Everything."""
        inventory = self._shown = self._equipment.inventory or Inventory(0, 0, problem="not taken yet")
        installations = self._installed = self._equipment.installations()
        settings = self._settings
        self._facts = NodeFacts(
            name=settings.node,
            address=settings.address or local_address,
            inventory=inventory,
            ports=settings.ports,
            labels=settings.labels,
            fabrics=settings.fabrics,
            installations=installations,
            model_roots=tuple(map(str, settings.models)),
            version=__version__,
        )
        shards, clock = self._reports(), self._clock()
        instance = self._state.instance
        return Register(PROTOCOL, settings.node, instance, boot_id(), 0, "", self._facts, shards, fleet, clock, __version__)

    def accepted(self, epoch: int, leader: str, revision: int) -> None:
        """Nothing changes: what runs goes on."""

    def connected(self, send: Callable[[AgentMessage], None]) -> None:
        """Say what happened while nobody listened."""
        self._send = send
        while self._unsent:
            send(self._unsent.popleft())

    def disconnected(self, reason: str) -> None:
        """Nothing changes: what runs goes on."""
        self._send = None

    def report(self, beat: int = 0) -> Report:
        """All shards; inventory and installations if they are others than the server has."""
        inventory, before = self._equipment.inventory, self._shown
        self._shown = inventory or before
        installed, former = self._equipment.installations(), self._installed
        self._installed = installed
        news = None if inventory == before else inventory
        installations = None if installed == former else installed
        return Report(0, 0, self._reports(), news, beat, self._clock(), installations, self._fetching.all())

    def _reports(self) -> tuple[ShardReport, ...]:
        return tuple(supervisor.report() for _, supervisor in sorted(self._shards.items()))

    # INode: orders.

    def desired(self, message: Desired) -> None:
        """Do what is ordered. One order that cannot be followed never keeps another from being followed."""
        for order in message.orders:
            try:
                self._follow(order)
            except Exception as error:
                self.log.failure("while following the order for {shard}", shard=order.shard)
                self._say(Done(order.operation, False, "internal", {"text": str(error)}))
        listed = {order.shard for order in message.orders}
        for shard in [name for name, supervisor in self._shards.items() if supervisor.is_over and name not in listed]:
            self._shards.pop(shard).leave()

    def _follow(self, order: ShardOrder) -> None:
        self._equip(order)
        if (done := self._operations.get(order.operation)) is not None:
            self._say(done)
        elif order.wanted is Wanted.RUN:
            self._run(order)
        else:
            self._wind_down(order)

    def _equip(self, order: ShardOrder) -> None:
        """Adapters of an engine that takes them while it runs, and a doubt of it, are levels: no operation is named for them."""
        current = self._shards.get(order.shard)
        if current is None or current.attempt != order.attempt:
            return
        noted = evolve(current.intent.order, doubted=order.doubted)
        if current.intent.loras.load:
            noted = evolve(noted, profile=evolve(noted.profile, loras=order.profile.loras))
        current.order(noted)

    def _run(self, order: ShardOrder) -> None:
        current = self._shards.get(order.shard) or self._remembered(order)
        if current is None or order.attempt > current.attempt:
            self._start(order, current)
        else:
            self._keep(order, current)

    def _wind_down(self, order: ShardOrder) -> None:
        current = self._shards.get(order.shard)
        if current is None:
            # Not remembered: nothing was done, and after an older store is in place it may have to be.
            self._say(Done(order.operation, True))
        else:
            self._keep(order, current)

    def _keep(self, order: ShardOrder, current: Supervisor) -> None:
        """Have what is there as it is wanted, unless the order is about what was there before it."""
        if order.attempt >= current.attempt:
            self._expect(order, current)
            return
        text = f"{order.shard} is at attempt {current.attempt} here, {order.attempt} was ordered"
        self._finish(order.operation, "stale_attempt", text)

    def _expect(self, order: ShardOrder, current: Supervisor) -> None:
        """Note what is wanted of what runs, set it going, and answer now or when it has come about.

        How it was started is left as it was noted then.
        """
        before, wanted = current.intent.order, order.wanted
        now = evolve(before, wanted=wanted, operation=order.operation, deadline=order.deadline)
        current.order(evolve(now, grace=order.grace, patience=order.patience))
        self._pending[order.operation] = current, wanted
        if wanted is Wanted.DRAIN:
            current.drain()
        elif wanted is Wanted.STOP:
            current.stop()
        elif wanted is Wanted.SLEEP:
            current.sleep()
        else:
            current.wake()
        self._settle(current)

    def _remembered(self, order: ShardOrder) -> Supervisor | None:
        """An attempt that ended before this agent began, if this very operation started it; it is not to be repeated."""
        folder = self._folders.attempt(order.shard, order.attempt)
        intent, outcome = folder.intent(), folder.outcome()
        if intent is None or outcome is None or intent.order.operation != order.operation:
            return None
        supervisor = self._shards[order.shard] = Supervisor(self._around, folder, intent)
        supervisor.restore(outcome)
        return supervisor

    def _start(self, order: ShardOrder, current: Supervisor | None) -> None:
        self._prune()
        folder = self._folders.attempt(order.shard, order.attempt)
        folder.remove()
        intent = Intent(order, adapter="", installation=order.profile.engine)
        supervisor = self._shards[order.shard] = Supervisor(self._around, folder, intent)
        self._pending[order.operation] = supervisor, Wanted.RUN
        if current is not None and not current.is_over:
            self._replaced.add(current)

        async def prepare() -> Prepared:
            if current is not None:
                await self._replace(current, order)
            await self._turn(supervisor, order)
            return await self._checks.prepare(order)

        supervisor.start(prepare)

    async def _turn(self, supervisor: Supervisor, order: ShardOrder) -> None:
        """Wait until nobody else starts on its devices; who does not share them needs no turn, but to be alone there."""
        turn = self._turns.take(supervisor, _shared(order))
        before = [other.intent.order.shard for other in self._turns.before(supervisor) if isinstance(other, Supervisor)]
        if before:
            supervisor.waits(f"waits for the start of {before[0]} on the same device")
        await turn

    async def _replace(self, current: Supervisor, order: ShardOrder) -> None:
        """End an attempt that another follows; two of one shard never run at once."""
        if not current.is_over:
            current.order(evolve(current.intent.order, wanted=Wanted.STOP))
            current.stop(f"attempt {order.attempt} takes its place")
            await current.when_over()

    # Answers.

    def _settle(self, supervisor: Supervisor) -> None:
        """Answer the operations on an attempt whose effect is there by now, or cannot be."""
        for operation, (whose, wanted) in list(self._pending.items()):
            if whose is not supervisor:
                continue
            if wanted is Wanted.RUN and supervisor.is_over:
                self._finish(operation, supervisor.code or str(supervisor.state), supervisor.reason)
            elif supervisor.is_over or supervisor.state in _REACHED[wanted]:
                self._finish(operation)

    def _finish(self, operation: str, error: str = "", text: str = "") -> None:
        self._pending.pop(operation, None)
        done = Done(operation, not error, error, {"text": text} if text else {})
        self._operations.add(done)
        self._say(done)

    def _say(self, message: AgentMessage) -> None:
        if self._send is not None:
            self._send(message)

    def _told(self, said: Transition | ShardReport) -> None:
        if isinstance(said, Transition):
            self._tell_event(said)
            for supervisor in list(self._supervisors()):
                self._settle(supervisor)
                if supervisor.is_over or supervisor.state in _STARTED:
                    self._turns.end(supervisor)
            self._replaced = {supervisor for supervisor in self._replaced if not supervisor.is_over}
            self._shards = {name: supervisor for name, supervisor in self._shards.items() if not supervisor.refused}
        self._report_now()

    def _report_now(self) -> None:
        """Once for all that happens in this turn."""
        if self._send is not None and (self._reporting is None or not self._reporting.active()):
            self._reporting = self._reactor.callLater(0, self._report_soon)

    def _report_soon(self) -> None:
        self._say(self.report())

    def _tell_event(self, said: Transition) -> None:
        now, why = said.report, said.diagnosis
        self.log.info(
            "{shard} attempt {attempt}: {before} -> {after}: {reason}",
            shard=now.shard,
            attempt=now.attempt,
            before=str(said.before),
            after=str(now.state),
            reason=str(evolve(why, text=said.reason)) if why else said.reason,
        )
        event = Event(now.shard, now.attempt, str(said.before), str(now.state), said.reason, why, said.tail, self._clock())
        if self._send is not None:
            self._send(event)
        else:
            self._unsent.append(event)

    # INode: questions.

    def inspect(self, message: Inspect) -> Deferred[Done]:
        """Look at weights, and what the adapter has to say of them."""
        return Deferred.fromCoroutine(self._inspect(message))

    async def _inspect(self, message: Inspect) -> Done:
        try:
            files = await self._equipment.weights(message.weights)
        except LlmgwError as error:
            return Done(message.operation, False, "failed", {"text": str(error)})
        return Done(message.operation, True, "", {"files": to_plain(files)})

    def fetch(self, message: FetchWeights) -> Deferred[Done]:
        """Begin a download, or end it."""
        return Deferred.fromCoroutine(self._fetch(message))

    async def _fetch(self, message: FetchWeights) -> Done:
        fetching, weights = self._fetching, message.weights
        found = fetching.cancel(weights) if message.cancel else await fetching.order(weights)
        if found is None:
            text = f"nothing of {message.weights} is being downloaded on {self._settings.node}"
            return Done(message.operation, False, "not_found", {"text": text})
        return Done(message.operation, True, "", {"fetch": to_plain(found)})

    def fetch_log(self, message: FetchLog) -> Deferred[Done]:
        """Read output; the folder is found by shard and number, never by a path that somebody sent."""
        done: Deferred[Done] = Deferred()
        done.callback(self._fetch_log(message))
        return done

    def _fetch_log(self, message: FetchLog) -> Done:
        attempts = self._folders.attempts(message.shard)
        chosen = [folder for folder in attempts if message.attempt in (0, folder.attempt)]
        if not chosen:
            there = ", ".join(str(folder.attempt) for folder in attempts) or "none"
            text = (
                f"{self._settings.node} has no output of attempt {message.attempt} of {message.shard} (attempts there: {there})"
            )
            return Done(message.operation, False, "not_found", {"text": text})
        folder = chosen[-1]
        try:
            chunk = read_output(folder.path, message.offset, max(0, min(message.limit, LOG_LIMIT)))
        except (OSError, ValueError) as error:
            return Done(message.operation, False, "failed", {"text": f"{folder.path}: {error}"})
        intent = folder.intent()
        text, after = chunk.text(intent.key if intent else "")
        found = {"attempt": folder.attempt, "offset": chunk.offset, "next": after, "size": chunk.size, "text": text}
        return Done(message.operation, True, "", found)


def _shared(order: ShardOrder) -> tuple[str, ...]:
    """The devices on which others may start, too."""
    return order.allocation.devices if order.profile.resources.share else ()
