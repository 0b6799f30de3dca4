"""Orphans: engines that run and that no record explains. What matches the catalog is adopted, as many as are wanted; the rest
is left running and listed."""

from __future__ import annotations

from collections import defaultdict

from attrs import frozen

from llmgw.fleet.model import Model, Profile
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import Allocation, ShardReport, ShardState
from llmgw.planning.orders import attempt_id
from llmgw.planning.replicas import group, wanted
from llmgw.planning.world import Draft

_SOUND = (ShardState.STARTING, ShardState.LOADING, ShardState.READY)


@frozen
class Orphan:
    """A running engine without a record. C{why} says why it was not adopted."""

    node: str
    report: ShardReport
    why: str = ""


def orphans(draft: Draft) -> list[Orphan]:
    """All engines that run without a record, by node and shard."""
    return [
        Orphan(node, report, _why(draft, report))
        for node, told in sorted(draft.world.told.items())
        for report in sorted(told.shards.values(), key=lambda report: report.shard)
        if report.state.live and not _explained(draft, node, report)
    ]


def _explained(draft: Draft, node: str, report: ShardReport) -> bool:
    record = draft.shards.get(report.shard)
    return record is not None and record.allocation is not None and record.allocation.node == node


def _why(draft: Draft, report: ShardReport) -> str:
    record = draft.shards.get(report.shard)
    model = draft.catalog.get(report.model)
    if record is not None:
        where = f" on {record.allocation.node}" if record.allocation else ""
        return f"its name belongs to another copy{where}"
    if model is None or model.profile is None:
        return f"the catalog runs no model {report.model}"
    if model.generation != report.generation:
        return f"generation {report.generation}, the catalog wants {model.generation}"
    if report.state not in _SOUND:
        return f"it is {report.state}"
    return f"{report.model} has all the replicas it wants"


def adopt_matching(draft: Draft) -> None:
    """Take over whole replicas whose model and generation match, up to the number wanted."""
    known = draft.world.shards.keys() | draft.shards.keys()
    found = [orphan for orphan in orphans(draft) if orphan.report.shard not in known and readable(orphan.report.shard)]
    if not found:
        return
    replicas: dict[tuple[str, int], list[Orphan]] = defaultdict(list)
    for orphan in found:
        model = draft.catalog.get(orphan.report.model)
        parts = orphan.report.shard.rsplit("/", 2)
        if model and model.profile and model.generation == orphan.report.generation and orphan.report.state in _SOUND:
            replicas[model.name, int(parts[1])].append(orphan)
    for (name, _), members in sorted(replicas.items()):
        model = draft.catalog.get(name)
        if model and _whole(members, model) and _has(draft, model) < wanted(model, draft.world.demand):
            for orphan in members:
                adopt(draft, orphan.node, orphan.report, model.profile)


def _whole(members: list[Orphan], model: Model) -> bool:
    count = model.profile.parallel.nodes if model.profile else 0
    ranks = {orphan.report.rank for orphan in members}
    return ranks == set(range(count)) and len(members) == count and len({m.report.attempt for m in members}) == 1


def _has(draft: Draft, model: Model) -> int:
    gone = (NodeState.LOST, NodeState.REMOVED)
    replicas = group(draft.shards.values()).get(model.name, [])
    return sum(
        not replica.leaving and all(n in draft.nodes and draft.nodes[n].state not in gone for n in replica.nodes)
        for replica in replicas
    )


def adopt(draft: Draft, node: str, report: ShardReport, profile: Profile | None) -> ShardRecord:
    """Make a record for a running engine from what its agent says of it."""
    order = report.order
    facts = draft.nodes[node].facts if node in draft.nodes else None
    made = Allocation(node, address=facts.address if facts else "", devices=report.devices, ports=report.ports)
    allocation = order.allocation if order else made
    record = ShardRecord(
        report.shard,
        report.model,
        int(report.shard.rsplit("/", 2)[1]),
        report.rank,
        (node,),
        report.generation,
        report.attempt,
        state=report.state,
        since=draft.world.now,
        reason="adopted",
        profile=order.profile if order else profile,
        allocation=allocation,
        served=order.served if order else (report.model,),
        placed_revision=draft.world.revision,
        operation=attempt_id(report.shard, report.attempt, draft.world.epoch, draft.world.revision),
        url=report.url if report.state is ShardState.READY else "",
        key=report.key if report.state is ShardState.READY else "",
        served_since=report.since if report.state is ShardState.READY else 0.0,
        adopted=True,
    )
    draft.say("adopted", report.shard, f"{report.shard} {node}: found running and adopted ({report.state})", node)
    return draft.put(record)


def readable(shard: str) -> bool:
    """Whether a reported name is one of ours: C{MODEL/NUMBER/RANK}."""
    parts = shard.rsplit("/", 2)
    return len(parts) == 3 and all(part.isdecimal() for part in parts[1:])
