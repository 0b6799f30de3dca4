"""What a plan is made from, and what it is written on.

L{World} is one look at everything the leader knows; nothing in it changes while a plan is made. L{Draft} is where the plan
writes records and events. Wall time (C{now}) only goes into records; what decides about nodes is C{away} and C{leading_for},
which come from a clock that nobody can set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import evolve, field, frozen

from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Catalog, Profile
from llmgw.fleet.node import IllegalTransition, NodeState
from llmgw.fleet.records import NodeRecord, RolloutRecord, ShardRecord
from llmgw.fleet.shard import ShardReport, ShardState, WeightFiles, move_shard
from llmgw.fleet.timing import Timing
from llmgw.interfaces import Needs

Reckon = Callable[[Profile, WeightFiles | None], Needs]


@frozen
class Told:
    """What a node with a link said last. Before the first report of a session C{complete} is false: then a shard that is not
    listed may still be there.

    @ivar epoch: of the orders the node has last applied, C{revision} theirs.
    """

    shards: Mapping[str, ShardReport]
    epoch: int = 0
    revision: int = 0
    complete: bool = False


@frozen
class Declined:
    """An agent's answer that it could not follow the order for one attempt of a shard."""

    attempt: int
    code: str
    text: str


@frozen
class World:
    """Everything a plan is made from.

    @ivar revision: the state revision that the commit of this plan will have; C{began} the one this leadership began with.
    @ivar told: by node, for those that have a link now.
    @ivar away: seconds without a link, by node, counted from the beginning of this leadership at the earliest.
    @ivar left: why the last link of a node ended, by node.
    @ivar reported: nodes that have had a link in this leadership.
    @ivar settling: this store is new but the fleet is not: what runs may not have been seen yet.
    @ivar weights: what C{inspect} found, by node and weights.
    @ivar declined: by shard.
    @ivar unrouted: replicas of which every router has said that it no longer routes to them.
    @ivar idle: those of them on which no request runs any more.
    @ivar demand: how many replicas the load asks for, by model; the catalog's bounds hold.
    @ivar scaled: why the demand has changed since the last plan, a sentence by model.
    @ivar failing: of replicas, a sentence on whether their requests fail, where that has changed since the last plan.
    @ivar unused: seconds since a request last ran on or waited for a model, where that is known.
    @ivar load: how many requests run on an endpoint, by its id: a replica's, or that of a further shard that serves.
    @ivar jitter: a new factor around 1 at each call.
    """

    now: float
    epoch: int
    revision: int
    timing: Timing
    catalog: Catalog
    reckon: Reckon
    nodes: Mapping[str, NodeRecord] = field(factory=dict)
    shards: Mapping[str, ShardRecord] = field(factory=dict)
    rollouts: Mapping[str, RolloutRecord] = field(factory=dict)
    told: Mapping[str, Told] = field(factory=dict)
    away: Mapping[str, float] = field(factory=dict)
    left: Mapping[str, str] = field(factory=dict)
    reported: frozenset[str] = frozenset()
    leading_for: float = 0.0
    began: int = 0
    settling: bool = False
    weights: Mapping[tuple[str, str], WeightFiles] = field(factory=dict)
    declined: Mapping[str, Declined] = field(factory=dict)
    unrouted: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    demand: Mapping[str, int] = field(factory=dict)
    scaled: Mapping[str, str] = field(factory=dict)
    failing: Mapping[str, str] = field(factory=dict)
    unused: Mapping[str, float] = field(factory=dict)
    load: Callable[[str], int] = lambda endpoint: 0
    last_ports: Mapping[str, int] = field(factory=dict)
    jitter: Callable[[], float] = lambda: 1.0

    def fresh(self, told: Told, placed: int) -> bool:
        """Whether C{told} is not older than a placement of revision C{placed}, so that silence about the shard is news."""
        if not told.complete or told.revision < placed:
            return False
        return told.epoch == self.epoch or (told.epoch < self.epoch and placed <= self.began)

    def weights_of(self, weights: str | None) -> WeightFiles | None:
        """What is known of these weights from whichever node has them, rather from one on which they are whole."""
        found = [files for (_, name), files in self.weights.items() if name == weights and files.found]
        return next((files for files in found if not files.problem), next(iter(found), None))

    def files_of(self, profile: Profile) -> WeightFiles | None:
        """The same of a profile's weights, with what is known of its adapters."""
        found = self.weights_of(profile.weights)
        if found is None or not profile.loras:
            return found
        there = (self.weights_of(one.weights) or WeightFiles(one.weights, False) for one in profile.loras)
        return evolve(found, loras=tuple(there))


class Draft:
    """A plan in the making: the records as they shall be, and the events that say why."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.nodes = dict(world.nodes)
        self.shards = dict(world.shards)
        self.rollouts = dict(world.rollouts)
        self.events: list[FleetEvent] = []
        self._catalog: Catalog | None = None
        self._numbers: dict[str, int] = {}
        self._remembered: dict[str, list[str]] | None = None

    @property
    def remembered(self) -> dict[str, list[str]]:
        """By model, the first shards of replicas whose failures count for the next one, as they were when first asked for."""
        if self._remembered is None:
            self._remembered = {}
            for record in self.shards.values():
                if record.remembered and not record.rank:
                    self._remembered.setdefault(record.model, []).append(record.shard)
        return self._remembered

    @property
    def catalog(self) -> Catalog:
        """The models as their replicas shall be run now: those that are pinned to an earlier profile with that one."""
        if self._catalog is None:
            models = self.world.catalog.models
            found = tuple(self.rollouts[m.name].in_force(m) if m.name in self.rollouts else m for m in models)
            same = all(one is other for one, other in zip(found, models, strict=True))
            self._catalog = self.world.catalog if same else Catalog(found)
        return self._catalog

    def put_rollout(self, record: RolloutRecord) -> None:
        """Write how far a model's change is."""
        self.rollouts[record.model] = record
        self._catalog = None

    def say(self, kind: str, subject: str, text: str, node: str = "", before: str = "", after: str = "") -> None:
        """Note an event."""
        self.events.append(FleetEvent(self.world.now, kind, subject, text, node, self.world.epoch, before, after))

    def node(self, record: NodeRecord, state: NodeState, reason: str) -> NodeRecord:
        """Bring a node into another state."""
        fresh = evolve(record, state=state, since=self.world.now, reason=reason)
        self.nodes[record.name] = fresh
        text = f"{record.name}: {record.state} -> {state}" + (f": {reason}" if reason else "")
        self.say("node_state", record.name, text, record.name, record.state, state)
        return fresh

    def put(self, record: ShardRecord) -> ShardRecord:
        """Write a shard's record without a transition."""
        self.shards[record.shard] = record
        return record

    def move(self, record: ShardRecord, state: ShardState, reason: str) -> ShardRecord:
        """Bring a shard into another state, if the table allows it; else say so and leave it as it was."""
        try:
            move_shard(record.state, state)
        except IllegalTransition as error:
            self.say("illegal", record.shard, f"{record.shard}: {error}; ignored")
            return self.shards.get(record.shard, record)
        if state is not record.state:
            node = record.allocation.node if record.allocation else ""
            text = f"{record.shard} {node}: {record.state} -> {state}" + (f": {reason}" if reason else "")
            self.say("shard_state", record.shard, text, node, record.state, state)
            record = evolve(record, state=state, since=self.world.now)
            if state is ShardState.READY and not record.served_since:
                record = evolve(record, served_since=self.world.now)
        return self.put(evolve(record, reason=reason))

    def number(self, model: str) -> int:
        """The highest number that a replica of the model ever had, as far as records and nodes can tell."""
        if not self._numbers:
            for record in self.shards.values():
                self._numbers[record.model] = max(record.number, self._numbers.get(record.model, 0))
            for report in (report for told in self.world.told.values() for report in told.shards.values()):
                name, _, number = report.shard.rpartition("/")[0].rpartition("/")
                if number.isdecimal():
                    self._numbers[name] = max(int(number), self._numbers.get(name, 0))
        return self._numbers.get(model, 0)

    def take_number(self, model: str) -> int:
        """A number that no replica of the model ever had."""
        self._numbers[model] = self.number(model) + 1
        return self._numbers[model]

    def drop(self, record: ShardRecord) -> None:
        """Forget a shard; the newest of a model stays as a husk, since numbers of replicas never come back, and so does one whose
        failures are to be remembered."""
        if record.allocation is not None:
            self._emptied(record.allocation.node, record.shard)
        # Only a record may take over remembering: a node that merely reported a higher number can go away again.
        newer = any(other.model == record.model and other.number > record.number for other in self.shards.values())
        kept = record.remembered and record.failed_at > 0
        if record.rank or (newer and not kept):
            del self.shards[record.shard]
            return
        husk = ShardRecord(record.shard, record.model, record.number, generation=record.generation, attempt=record.attempt)
        husk = evolve(husk, wanted=record.wanted, state=ShardState.STOPPED, since=self.world.now, reason=record.reason)
        if kept:
            husk = husk.with_failures_of(record)
        self.put(evolve(husk, peak=record.peak, remembered=kept))

    def _emptied(self, node: str, last: str) -> None:
        found = self.nodes.get(node)
        others = (r.shard != last and r.allocation is not None and r.allocation.node == node for r in self.shards.values())
        if found is not None and found.draining and not any(others):
            self.say("drained", node, f"{node}: drained, nothing of ours runs there any more", node)
