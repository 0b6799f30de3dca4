"""LoRA adapters of replicas that run: loaded and unloaded without a restart where the engine can, else by replacing the replica.

What is wanted of an engine stands in its record's profile, what it has in C{ShardRecord.loras}. An adapter that is not wanted any
more stays in the order until no router sends requests for it there. Where weights change under a name, one replica after another
lets go of the old ones, each when those before it have the new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attrs import evolve

from llmgw.fleet.model import Lora, Model, Profile
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardLora, ShardReport, ShardState, Wanted, replica_of
from llmgw.planning.replicas import Replica
from llmgw.planning.world import Draft


def part(shard: str, name: str) -> str:
    """What routers acknowledge of an adapter that is to be unloaded; no model's name has a C{#} in it."""
    return f"{replica_of(shard)}#{name}"


def loaded(record: ShardRecord) -> list[ShardLora]:
    """The adapters that its engine has, as far as its agent has said."""
    return [one for one in record.loras or () if not one.problem]


def routed(record: ShardRecord, name: str) -> ShardLora | None:
    """The adapter of this name if requests for it may go there: it is loaded, and is to stay."""
    wanted = record.profile.loras if record.profile else ()
    if record.loras is None:
        return next((ShardLora(one.name, one.weights, one.name) for one in wanted if one.name == name), None)
    return next((one for one in loaded(record) if one.name == name and Lora(name, one.weights) in wanted), None)


def parting(record: ShardRecord) -> list[Lora]:
    """What its engine has and is not to have any more."""
    if record.profile is None or record.wanted is not Wanted.RUN:
        return []
    has = (Lora(one.name, one.weights) for one in loaded(record))
    return [one for one in has if one not in record.profile.loras]


def ordered(record: ShardRecord, unrouted: Collection[str]) -> Profile:
    """The profile as its agent is told it: with what routers may still ask for, and without what would take that one's name."""
    profile = record.profile or Profile("")
    kept = tuple(one for one in parting(record) if part(record.shard, one.name) not in unrouted)
    names = {one.name for one in kept}
    return evolve(profile, loras=(*(one for one in profile.loras if one.name not in names), *kept)) if kept else profile


def heard(draft: Draft, record: ShardRecord, report: ShardReport) -> ShardRecord:
    """The record with what its agent says of its adapters, each change told as an event."""
    before, now = record.loras or (), report.loras
    if now is None or now == record.loras:
        return record
    for one in now:
        if one not in before:
            draft.say("adapter", record.shard, f"{record.shard}: {one.problem or f'adapter {one.name} is loaded'}")
    for one in before:
        if not one.problem and one.name not in [other.name for other in now if not other.problem]:
            draft.say("adapter", record.shard, f"{record.shard}: adapter {one.name} is unloaded")
    return evolve(record, loras=now)


def equip(draft: Draft, model: Model, replicas: Iterable[Replica]) -> None:
    """Want the catalog's adapters of those engines that take them while they run."""
    assert model.profile is not None
    wanted, heads = model.profile.loras, [replica.shards[0].shard for replica in replicas]
    for head in heads:
        record = draft.shards[head]
        if record.profile is None or record.profile.loras == wanted or record.generation != model.generation:
            continue
        names = {one.name for one in record.profile.loras}
        swapped = [one for one in wanted if one.name in names and one not in record.profile.loras]
        others = [draft.shards[other] for other in heads if other != head]
        if _takes(draft, record) and not any(_lacks(other, one.name) for other in others for one in swapped):
            draft.put(evolve(record, profile=evolve(record.profile, loras=wanted)))


def _lacks(record: ShardRecord, name: str) -> bool:
    """Whether an engine that serves is without an adapter that is wanted of it."""
    return record.state is ShardState.READY and record.loras is not None and routed(record, name) is None


def _report(draft: Draft, record: ShardRecord) -> ShardReport | None:
    told = draft.world.told.get(record.allocation.node) if record.allocation else None
    report = told.shards.get(record.shard) if told else None
    fits = report is not None and report.attempt == record.attempt and report.state is record.state is ShardState.READY
    return report if fits else None


def _takes(draft: Draft, record: ShardRecord) -> bool:
    report = _report(draft, record)
    return report is not None and report.loras is not None and not report.fixed


def why_anew(draft: Draft, model: Model, replica: Replica) -> str:
    """Why a replica that serves has to be replaced for the catalog's adapters; empty if it has not."""
    head = replica.shards[0]
    report, wanted = _report(draft, head), model.profile.loras if model.profile else ()
    if report is None or head.profile is None or head.generation != model.generation:
        return ""
    if _takes(draft, head):
        return next((one.problem for one in report.loras or () if one.anew and Lora(one.name, one.weights) in wanted), "")
    fresh = ", ".join(one.name for one in wanted if one not in head.profile.loras)
    fixed = report.fixed or "its agent cannot load any while it runs"
    return f"it has no adapter {fresh}: {fixed}" if fresh else ""


def allow_outage(draft: Draft, model: Model, replicas: Iterable[Replica]) -> None:
    """Let each replica that has to be replaced for an adapter go before its successor is there."""
    for replica in replicas:
        if why_anew(draft, model, replica):
            for shard in replica.shards:
                draft.put(evolve(draft.shards[shard.shard], outage=True))


def outlook(draft: Draft, model: Model, replicas: Iterable[Replica]) -> str:
    """What becomes of changed adapters in engines that take them while they run; empty if nothing does."""
    heads = [replica.shards[0] for replica in replicas if replica.serving]
    wanted = model.profile.loras if model.profile else ()
    count = sum(bool(head.profile) and head.profile.loras != wanted and _takes(draft, head) for head in heads)  # type: ignore[union-attr]
    return f"{count} replica{'s' if count > 1 else ''} changed while {'they run' if count > 1 else 'it runs'}" if count else ""


def remark(model: Model, replicas: Iterable[Replica]) -> str:
    """The first adapter that some engine should have and cannot load, and why."""
    wanted = model.profile.loras if model.profile else ()
    for replica in replicas:
        for one in replica.shards[0].loras or ():
            if one.problem and replica.ready and Lora(one.name, one.weights) in wanted:
                return f"{replica.id} serves without an adapter: {one.problem}"
    return ""
