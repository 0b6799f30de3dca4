"""What a changed catalog, or the death of nodes, would lead to: the planner itself, run on until nothing moves any more.

Each round makes a plan and then a world in which all of it went well: what was ordered to start serves, what was ordered away
has ended and given its memory back. So a forecast says what llmgw would do, not whether engines will work; what rests after
failures stays as it is, since no time passes. Pure: the world is only read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardReport, ShardState, Wanted, replica_of
from llmgw.planning.hints import freed
from llmgw.planning.loras import allow_outage
from llmgw.planning.placement import claim_of
from llmgw.planning.profiles import follow_rollout
from llmgw.planning.reconcile import Outcome, reconcile
from llmgw.planning.replicas import group
from llmgw.planning.rollout import leave
from llmgw.planning.strategy import Decision, decisions
from llmgw.planning.world import Draft, World

ROUNDS = 400
_COMING = (ShardState.PLACED, ShardState.STARTING, ShardState.LOADING)
_LOST = (NodeState.LOST, NodeState.REMOVED)


@frozen
class Forecast:
    """How it would end.

    @ivar before: the world as it is, C{after} the one in which nothing moves any more, C{outcome} the last plan.
    @ivar reasons: why replicas leave, by replica.
    @ivar least: by model, the fewest replicas that are ready on the way.
    @ivar whole: whether it was followed to its end.
    @ivar decided: how models are brought to another profile, as it is decided at the beginning.
    """

    before: World
    after: World
    outcome: Outcome
    reasons: Mapping[str, str] = field(factory=dict)
    least: Mapping[str, int] = field(factory=dict)
    whole: bool = True
    decided: tuple[Decision, ...] = ()


def forecast(world: World, catalog: Catalog, without: Iterable[str] = (), outage: bool = False, rounds: int = ROUNDS) -> Forecast:
    """Follow C{catalog} through from C{world}.

    @param catalog: what would be in force. Models that the world's has and this one has not were removed on purpose.
    @param without: nodes that would be lost for good.
    @param outage: a changed model's only replica may stop before its successor is there.
    """
    began = _began(world, catalog, frozenset(without), outage)
    now, outcome, decided = began, reconcile(began), decisions(began)
    reasons: dict[str, str] = {}
    least = _ready(began.shards)
    for _ in range(rounds):
        for record in outcome.shards.values():
            if record.wanted is not Wanted.RUN and record.next_at is None and record.reason:
                reasons.setdefault(replica_of(record.shard), record.reason)
        ready = _ready(outcome.shards)
        least = Counter({model: min(count, ready[model]) for model, count in least.items()})
        then = _obeyed(now, outcome)
        if then.shards == now.shards and then.told == now.told and then.nodes == now.nodes:
            return Forecast(world, now, outcome, reasons, least, decided=decided)
        now, outcome = then, reconcile(then)
    return Forecast(world, now, outcome, reasons, least, whole=False, decided=decided)


def _began(world: World, catalog: Catalog, without: frozenset[str], outage: bool) -> World:
    """The world at the moment of the change."""
    gone = {name: evolve(world.nodes[name], state=NodeState.LOST, reason="what if") for name in without if name in world.nodes}
    told = {name: said for name, said in world.told.items() if name not in gone}
    away = {**world.away, **dict.fromkeys(gone, world.timing.lost_after)}
    begun = evolve(world, catalog=catalog, nodes={**world.nodes, **gone}, told=told, away=away, settling=False)
    draft = Draft(begun)
    removed = {model.name for model in world.catalog.models} - {model.name for model in catalog.models}
    for name, replicas in group(draft.shards.values()).items():
        for replica in replicas if name in removed else ():
            if not replica.leaving:
                leave(draft, replica, f"{name} was removed from the catalog")
    for model in catalog.models if outage else ():
        before = world.catalog.get(model.name)
        if model.profile is not None and before is not None and before.profile != model.profile:
            _allow_outage(draft, model)
    return evolve(begun, shards=draft.shards, rollouts=draft.rollouts)


def _allow_outage(draft: Draft, model: Model) -> None:
    """Begin a changed model's rollout as C{apply --allow-outage} does."""
    replicas = group(draft.shards.values()).get(model.name, [])
    follow_rollout(draft, model, replicas)
    allow_outage(draft, model, replicas)
    if (record := draft.rollouts.get(model.name)) is not None:
        draft.put_rollout(evolve(record, outage=True))


def _ready(shards: Mapping[str, ShardRecord]) -> Counter[str]:
    return Counter({name: sum(replica.ready for replica in replicas) for name, replicas in group(shards.values()).items()})


def _obeyed(world: World, outcome: Outcome) -> World:
    """The world in which every node did at once what it was told."""
    shards = dict(outcome.shards)
    told = {name: dict(said.shards) for name, said in world.told.items()}
    ended: dict[str, list[ShardRecord]] = defaultdict(list)
    for record in outcome.shards.values():
        node = record.allocation.node if record.allocation else ""
        if node not in told:
            continue
        if record.wanted is Wanted.RUN and record.state in _COMING:
            shards[record.shard] = evolve(record, state=ShardState.READY, reason="", served_since=world.now)
            told[node][record.shard] = _serving(record)
        elif _was_leaving(world, record) and (report := told[node].get(record.shard)) and report.state.live:
            told[node][record.shard] = evolve(report, state=ShardState.STOPPED, attempt=record.attempt)
            ended[node].append(record)
    said = {
        name: evolve(before, shards=_known(told[name], shards), complete=True, epoch=world.epoch, revision=world.revision)
        for name, before in world.told.items()
    }
    nodes = {name: _emptied(node, ended[name]) if name in ended else node for name, node in outcome.nodes.items()}
    demand = {name: count - outcome.gave.get(name, 0) for name, count in world.demand.items()}
    return evolve(
        world, shards=shards, told=said, nodes=nodes, rollouts=outcome.rollouts, declined={}, demand=demand, scaled={}, failing={}
    )


def _was_leaving(world: World, record: ShardRecord) -> bool:
    """Whether it was ordered away a round ago: a drain takes its time, so the plan after that order finds its room taken."""
    before = world.shards.get(record.shard)
    return record.wanted is not Wanted.RUN and before is not None and before.wanted is not Wanted.RUN


def _known(reports: Mapping[str, ShardReport], shards: Mapping[str, ShardRecord]) -> dict[str, ShardReport]:
    """What has ended and has no record any more is no longer told of."""
    return {name: report for name, report in reports.items() if report.state.live or name in shards}


def _serving(record: ShardRecord) -> ShardReport:
    given = record.allocation
    return ShardReport(
        record.shard,
        record.model,
        record.generation,
        record.attempt,
        ShardState.READY,
        rank=record.rank,
        url=record.url,
        key=record.key,
        devices=given.devices if given else (),
        ports=given.ports if given else (),
    )


def _emptied(node: NodeRecord, ended: list[ShardRecord]) -> NodeRecord:
    """The node with the memory of what has ended given back."""
    if node.facts is None:
        return node
    devices = node.facts.inventory.devices
    for record in ended:
        if record.allocation is not None:
            claims = [claim_of(record.shard, record.allocation, share=False)]
            devices = tuple(freed(device, replica_of(record.shard), claims) for device in devices)
    return evolve(node, facts=evolve(node.facts, inventory=evolve(node.facts.inventory, devices=devices)))


def is_lost(world: World, nodes: Iterable[str]) -> bool:
    """Whether a replica on these nodes has lost one of them."""
    return any(name not in world.nodes or world.nodes[name].state in _LOST for name in nodes)
