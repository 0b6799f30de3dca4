"""The leader's loop: whatever happens leads to one plan, the plan to one commit, and only the commit to orders and routes.

Surprising: nothing is ordered from what is merely planned. When the store does not take a plan, the fleet goes on as it was,
the old truth stays in force and the plan is made anew from it. Plans and operators' changes take turns under one lock, so that
each is made from the result of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from attrs import evolve, frozen
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from llmgw.config.catalog import names
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.fetch import FetchState
from llmgw.fleet.model import Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardReport, ShardState
from llmgw.fleet.timing import Timing
from llmgw.interfaces import ILeadership, IStore
from llmgw.planning.orders import orders
from llmgw.planning.reconcile import Outcome, reconcile
from llmgw.planning.replicas import group
from llmgw.planning.wallclock import JUMP, moved
from llmgw.planning.world import World
from llmgw.server.commits import Commits
from llmgw.server.demand import Demand
from llmgw.server.emission import Emission, Port
from llmgw.server.imembers import IMembers
from llmgw.server.membership import Membership
from llmgw.server.notes import Notes
from llmgw.server.reckoning import Reckoner, Weights
from llmgw.server.refusals import Refusals
from llmgw.server.routing import Routers, Routing
from llmgw.server.truth import Truth, differences
from llmgw.store.records import Change, Snapshot, ToldBy
from llmgw.wire.identity import PeerCertificate
from llmgw.wire.messages import Done, Event, Refused, Register, Report


@frozen
class Clocks:
    """C{wall} for people and records, C{steady} for decisions: it goes on during a suspend and nobody can set it."""

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)


class Randomness(Protocol):
    """The part of C{random.Random} that is used."""

    def uniform(self, a: float, b: float) -> float:
        """A number between both."""


@implementer(IMembers)
class Controller:
    """The control plane's head.

    @param leadership: asked at each emission.
    @param routers: the router workers.
    @ivar truth: what the store has.
    @ivar outcome: the last plan, for C{status} and C{explain}.
    @ivar remarks: sentences that C{status} shows until the next start.
    """

    log = Logger()
    COALESCE = 0.05
    REST = 3.0
    RETRY = 1.0

    def __init__(
        self,
        reactor: Any,
        name: str,
        timing: Timing,
        store: IStore,
        leadership: ILeadership,
        routers: Routers,
        random: Randomness,
        clocks: Clocks | None = None,
        reckoner: Reckoner | None = None,
    ) -> None:
        self._reactor = reactor
        self._call: Any = None
        self._tick = LoopingCall(self._ticked)
        self._tick.clock = reactor
        self._random = random
        self._planning = False
        self._began = 0
        self._began_at = 0.0
        self._fresh = False
        self._last_plan = 0.0
        self._ahead = 0.0
        self._took = 0.0
        self._expires: dict[str, float] = {}
        self._given_ports: dict[str, tuple[int, int]] = {}
        self._broken: dict[str, str] = {}
        self._to_route: list[Deferred[str]] = []
        self.clocks = clocks or Clocks()
        self.name = name
        self.timing = timing
        self.leadership = leadership
        self.leading = False
        self.remarks: tuple[str, ...] = ()
        self.truth = Truth()
        self.commits = Commits(name, store, leadership, self.truth, self.end, lambda: ToldBy(self._ahead))
        self.notes = Notes(name, self.commits, leadership, self.clocks)
        self.members = Membership(self.clocks.steady, self.touch, self._more_room)
        self.reckoner = reckoner or Reckoner()
        self.weights = Weights(self.clocks.steady, self.touch)
        self.emission = Emission(leadership, self.clocks.steady)
        self.routing = Routing(routers, self.touch, self.clocks.steady)
        self.demand = Demand(self.clocks.steady, routers, self._model, self._said_of, self.touch)
        self.refusals = Refusals(self.clocks.steady, self.clocks.wall)
        self.outcome: Outcome | None = None

    # Leading.

    def attach(self, port: Port) -> None:
        """The fleet port, which is made after us since it needs us."""
        self.emission.port = port

    def begin(self, snapshot: Snapshot, fresh: bool) -> None:
        """Lead from what the store has. C{fresh}: it was made just now, so a fleet may run that it knows nothing of."""
        self.truth.load(snapshot)
        self._given_ports.clear()
        self.members.begin()
        self.demand.begin(self.truth.shards.values())
        self._began, self._began_at = snapshot.revision, self.clocks.steady()
        self._ahead = self.clocks.wall() - self._began_at if snapshot.ahead is None else snapshot.ahead
        self._fresh = fresh
        self.leading = self.commits.open = True

    def go(self) -> None:
        """Begin to plan. Apart from L{begin}, so that the catalog can be there first: a plan without one routes to nothing."""
        self._planning = True
        if not self._tick.running:
            self._tick.start(1.0, now=False).addErrback(self._surprised, "in the tick")
        self.touch()

    def end(self) -> None:
        """Lead no more. Engines and routes stay as they are."""
        self.leading = self.commits.open = self._planning = False
        if self._tick.running:
            self._tick.stop()
        if self._call is not None:
            self._call.cancel()
            self._call = None
        waiting, self._to_route = self._to_route, []
        for each in waiting:
            each.callback(f"{self.name} leads no more; whoever does tells the routers")

    def touch(self) -> None:
        """Something happened: plan soon, once for all that happens until then. A plan that took long is given more time to come
        together, so that planning never fills the reactor.
        """
        self._plan_in(max(self.COALESCE, self.REST * self._took))

    def _more_room(self) -> None:
        """Some node has more memory free: news only while something waits for room."""
        if self.outcome is None or self.outcome.pending or self.outcome.notes:
            self.touch()

    def _plan_in(self, seconds: float) -> None:
        if not self._planning:
            return
        if self._call is not None:
            if self._call.getTime() - self._reactor.seconds() <= seconds:
                return
            self._call.cancel()
        self._call = self._reactor.callLater(seconds, self._due)

    def _due(self) -> None:
        self._call = None
        self.commits.in_turn(self._cycle).addErrback(self._surprised, "while planning")

    def _surprised(self, failure: Failure, what: str) -> None:
        self.log.failure("{what}", failure, what=what)
        self._plan_in(self.RETRY)

    def _ticked(self) -> None:
        try:
            self._look_at_clocks()
        except Exception:
            self.log.failure("in the tick")

    def _look_at_clocks(self) -> None:
        """What no message tells of: timers of nodes, retries, drains that have come to an end."""
        self.demand.look(self.truth.catalog, lambda: group(self.truth.shards.values()))
        self.routing.doubts.look()
        outcome = self.outcome
        draining = self.routing.draining
        waited = self.clocks.steady() - self._last_plan
        due = outcome is not None and outcome.wake is not None and waited >= outcome.wake
        waiting = outcome is not None and (outcome.pending or outcome.notes) and waited >= 10.0
        if draining or due or waiting or self.routing.due or abs(self._jumped()) > JUMP:
            self.touch()
        self.emission.repeat()

    async def _cycle(self) -> None:
        if not self._planning:
            return
        self._last_plan = self.clocks.steady()
        if not await self.follow_clock():
            self._plan_in(self.RETRY)
            return
        began = self.clocks.steady()
        world = self.world()
        outcome = reconcile(world)
        self._report_broken(outcome)
        events = [*map(self._with_tail, outcome.events), *self.refusals.news(outcome.pending, world.epoch)]
        changes = differences(self.truth, outcome.nodes, outcome.shards, events, outcome.rollouts)
        made = self.clocks.steady()
        if changes and not await self.commits.commit(changes):
            self._plan_in(self.RETRY)
            return
        taken = self.clocks.steady()
        for event in events:
            if event.tail:
                self.members.told_tail(event.node, event.subject)
        self.demand.said(world.scaled)
        self.routing.doubts.said(world.failing)
        self.refusals.said(outcome.pending)
        self.demand.gave_way(outcome.gave)
        self.truth.nodes.update(outcome.nodes)
        self.outcome = outcome
        if not self._planning:
            return
        self._search(outcome)
        self.emit()
        # A store that is waited for fills no reactor.
        self._took = made - began + self.clocks.steady() - taken

    def _jumped(self) -> float:
        """How many seconds our wall clock is ahead of the one that records are told by."""
        return self.clocks.wall() - self.clocks.steady() - self._ahead

    async def follow_clock(self) -> bool:
        """Tell the records by our wall clock, so that drains and the like keep the time that they have; whether that is so.

        To be called in turn.
        """
        by, truth = self._jumped(), self.truth
        if abs(by) <= JUMP:
            return True
        changes: list[Change] = [*moved(truth.nodes, truth.shards, truth.rollouts, by)]
        if changes:
            changes.insert(0, ToldBy(self._ahead + by))
            way = "ahead of" if by > 0 else "behind"
            text = f"the clock of {self.name} is {abs(by):.0f} s {way} the one before it (it was set, or another server led)"
            text = f"{text}; drains and retries take as long as before"
            changes.append(FleetEvent(self.clocks.wall(), "clock", self.name, text, epoch=self.leadership.epoch))
            if not await self.commits.commit(changes):
                return False
        self._ahead += by
        return True

    def _report_broken(self, outcome: Outcome) -> None:
        """Log what raised, once for each: the next plans will meet it again."""
        now = {subject: repr(error) for subject, error in outcome.broken}
        for subject, error in outcome.broken:
            if self._broken.get(subject) != now[subject]:
                self.log.failure("planning for {subject}", Failure(error), subject=subject)
        self._broken = now

    def _with_tail(self, event: FleetEvent) -> FleetEvent:
        """The event of a failure gets the end of the engine's output."""
        failed = event.after in (ShardState.BACKOFF, ShardState.FAILED)
        return evolve(event, tail=self.members.tail(event.node, event.subject)) if failed else event

    def epoch_moved(self) -> None:
        """The leadership was raised or lost: what was sent under the epoch before has to be said anew."""
        self.emission.forget_all()
        self.touch()

    def world(self) -> World:
        """One look at everything."""
        members, now = self.members, self.clocks.steady()
        self.reckoner.learn(self.truth.nodes.values())
        nodes = {**self.truth.nodes, **{name: self._present(name) for name in members.present}}
        replicas = self.routing
        return World(
            now=self.clocks.wall(),
            epoch=self.leadership.epoch,
            revision=self.truth.revision + 1,
            timing=self.timing,
            catalog=self.truth.catalog,
            reckon=self.reckoner.needs,
            nodes=nodes,
            shards=self.truth.shards,
            rollouts=self.truth.rollouts,
            told={name: here.told for name, here in members.present.items()},
            away={name: now - members.left_at.get(name, self._began_at) for name in nodes if name not in members.present},
            left=members.left,
            reported=frozenset(members.reported),
            leading_for=now - self._began_at,
            began=self._began,
            settling=self._fresh and members.history and now - self._began_at < self.timing.failover_grace,
            weights=self.weights.found,
            declined=members.declined(self.truth.shards.values()),
            unrouted=frozenset(replicas.unrouted),
            idle=replicas.idle(),
            demand=self.demand.wanted,
            scaled=dict(self.demand.scaled),
            failing=dict(self.routing.doubts.news),
            unused=self.demand.unused(),
            load=self.routing.load,
            last_ports=self._last_ports(),
            jitter=lambda: self._random.uniform(0.75, 1.25),
        )

    def _model(self, name: str) -> Model | None:
        return next((model for model in self.truth.catalog.models if name in names(model)), None)

    def _said_of(self, shard: ShardRecord) -> ShardReport | None:
        """What a shard's node says of it, while it says anything."""
        here = self.members.present.get(shard.allocation.node) if shard.allocation else None
        return here.told.shards.get(shard.shard) if here is not None else None

    def _present(self, name: str) -> NodeRecord:
        here = self.members.present[name]
        record = self.truth.nodes.get(name) or NodeRecord(name, since=self.clocks.wall())
        same = record.facts is here.facts and (record.instance, record.boot) == (here.register.instance, here.register.boot)
        if same and here.certificate_expires in (None, record.certificate_expires):
            return record
        return evolve(
            record,
            facts=here.facts,
            instance=here.register.instance,
            boot=here.register.boot,
            certificate_expires=here.certificate_expires or record.certificate_expires,
        )

    def _last_ports(self) -> Mapping[str, int]:
        """By node, the last port of the newest placement, also when what was placed there has ended: so its port rests."""
        newest = self._given_ports
        for record in self.truth.shards.values():
            if record.allocation and record.allocation.ports:
                found = (record.placed_revision, record.allocation.ports[-1])
                newest[record.allocation.node] = max(newest.get(record.allocation.node, (0, 0)), found)
        return {node: port for node, (_, port) in newest.items()}

    def _search(self, outcome: Outcome) -> None:
        """Ask the nodes on which only the weights are in question."""
        for model, pending in [*outcome.pending.items(), *outcome.sought.items()]:
            profile = pending.want.profile
            for verdict in pending.explanation.verdicts:
                if profile.weights and verdict.checks[0].name == "weights":
                    for weights in (profile.weights, *(lora.weights for lora in profile.loras)):
                        self.weights.look(verdict.node, weights, profile.engine)
            if pending.searching:
                self.log.debug("looking for the weights of {model}", model=model)
        if self.emission.port is not None and self.leadership.may_act():
            self.weights.pump(self.emission.port, self.leadership.epoch, self.leadership.leader)

    def emit(self) -> None:
        """Tell routers and nodes what is in force. Routers first: an order to drain waits for them."""
        truth = self.truth
        self.routing.publish(truth, self.members, self.outcome, self.leadership.epoch)
        waiting, self._to_route = self._to_route, []
        for each in waiting:
            each.callback("")
        wanted = orders(truth.shards.values(), truth.nodes, self.routing.unrouted, self.timing, self.routing.doubts.all())
        if self.emission.port is not None:
            self.emission.port.expected = len(truth.nodes)
        self.emission.send(wanted, {name: here.session for name, here in self.members.present.items()}, truth.revision)

    def when_routed(self) -> Deferred[str]:
        """Fires with an empty text when all routers route by what is in force after the next plan; or after a while, with who
        does not, or why there was no plan.
        """
        planned: Deferred[str] = Deferred(lambda _: self._to_route.remove(planned))
        self._to_route.append(planned)
        self.touch()
        planned.addTimeout(self.routing.PATIENCE, self._reactor, self._not_planned)
        return planned.addCallback(lambda problem: problem or self.routing.when_current())

    def _not_planned(self, failure: Any, seconds: float) -> Any:
        failure.trap(CancelledError)
        return self.commits.failing or f"no plan was made for {seconds:g} s"

    def change(self, make: Callable[[], Iterable[Change]]) -> Deferred[int]:
        """What an operator changes: see L{Commits.change}. A plan follows."""
        return self.commits.change(make).addCallback(self._changed)

    def _changed(self, revision: int) -> int:
        self.touch()
        return revision

    # IMembers.

    def readiness(self) -> Refused | None:
        """See L{IMembers}."""
        if self.leading:
            return None
        return Refused("starting", f"{self.name} has not begun to lead yet", retry_after=1.0)

    def judge(self, register: Register, certificate: PeerCertificate) -> Refused | None:
        """See L{IMembers}."""
        record = self.truth.nodes.get(register.node)
        if record is not None and record.state is NodeState.REMOVED:
            text = f"node {register.node} was removed; `llmgw node reset {register.node}` lets it in again"
            return Refused("revoked", text)
        if record is not None and record.state is NodeState.LOST and record.instance not in ("", register.instance):
            text = (
                f"node {register.node} was lost and this is another machine or state folder (instance {register.instance[:8]}, "
                f"was {record.instance[:8]}). If it takes the lost one's place: llmgw node reset {register.node}"
            )
            return Refused("name_in_use", text)
        self._expires[register.node] = certificate.not_after
        return None

    def joined(self, node: str, session: str, register: Register) -> int:
        """See L{IMembers}."""
        self.weights.forget(node)
        self.emission.forget(node)
        self.members.joined(node, session, register, self._expires.get(node))
        return self.truth.revision

    def report(self, node: str, session: str, message: Report) -> None:
        """See L{IMembers}."""
        before = here.fetches if (here := self.members.present.get(node)) else ()
        if self.members.report(node, session, message):
            for fetch in set(message.fetches) - set(before):
                if fetch.state is FetchState.DONE:
                    self.weights.renew(node, fetch.weights)
            self.routing.heard(message.shards)

    def event(self, node: str, session: str, message: Event) -> None:
        """See L{IMembers}."""
        self.members.event(node, session, message)

    def done(self, node: str, session: str, message: Done) -> None:
        """See L{IMembers}."""
        self.members.done(node, session, message)

    def left(self, node: str, session: str, reason: str) -> None:
        """See L{IMembers}."""
        if self.members.gone(node, session, reason):
            self.routing.heard(self.members.last[node].shards.values(), away=True)
