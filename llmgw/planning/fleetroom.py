"""The fleet's free room as the leader's records and the nodes' reports say: candidates for a L{Ledger}."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from attrs import evolve

from llmgw.fleet.model import Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardReport, ShardState, replica_of
from llmgw.fleet.units import show_duration
from llmgw.planning.checks import Want
from llmgw.planning.hints import freed
from llmgw.planning.lifecycle import failed_there, in_quarantine
from llmgw.planning.peaks import peak_of
from llmgw.planning.placement import Ledger, claim_of
from llmgw.planning.room import Candidate, Claim
from llmgw.planning.world import Draft, World

# After the signals an engine's memory may take a while to be back.
STOPPING = 30.0
_FREE = (ShardState.FAILED, ShardState.STOPPED)
_RESIDENT = (ShardState.LOADING, ShardState.READY, ShardState.DRAINING, ShardState.STOPPING, ShardState.UNKNOWN)


def ledger(draft: Draft, without: frozenset[str] = frozenset()) -> Ledger:
    """What is free now; C{without} names shards whose room counts as free already, what their engines use included."""
    claims: dict[str, list[Claim]] = defaultdict(list)
    gone: dict[str, list[Claim]] = defaultdict(list)
    for record in draft.shards.values():
        if record.allocation and record.state not in _FREE:
            (gone if record.shard in without else claims)[record.allocation.node].append(_claim(draft, record))
    for node, told in draft.world.told.items():
        claims[node] += [_stray(report) for report in told.shards.values() if _is_stray(draft, node, report)]
    twice = _told_twice(draft, claims)
    return Ledger(
        _candidate(draft.world, _vacated(node, gone[node.name]), claims[node.name], twice.get(node.name, {}))
        for node in draft.nodes.values()
    )


def _told_twice(draft: Draft, claims: Mapping[str, list[Claim]]) -> dict[str, dict[str, str]]:
    """By node, the devices that another one tells of, too, and why they are that one's: agents of one machine see the same ones.

    They belong to who has engines on them, else to the first by name.
    """
    tellers: dict[str, list[str]] = defaultdict(list)
    for name in sorted(draft.world.told):
        node = draft.nodes.get(name)
        for device in node.facts.inventory.devices if node and node.facts else ():
            tellers[device.uuid].append(name)
    closed: dict[str, dict[str, str]] = defaultdict(dict)
    for uuid, names in tellers.items():
        if len(names) > 1 and not uuid.startswith("index-"):
            owner = next((name for name in names if any(uuid in claim.devices for claim in claims.get(name, ()))), names[0])
            why = f"{owner} has this device, too: give each agent of a machine its own (agent.yaml, devices)"
            for name in names:
                closed[name] |= {uuid: why} if name != owner else {}
    return closed


def _vacated(node: NodeRecord, gone: list[Claim]) -> NodeRecord:
    """The node as it will be when the holders of these claims have ended."""
    if node.facts is None or not gone:
        return node
    inventory = node.facts.inventory
    devices, available = inventory.devices, inventory.memory_available
    for claim in (claim for claim in gone if claim.resident):
        devices = tuple(freed(device, replica_of(claim.holder), [claim]) for device in devices)
        if available is not None:
            available = min(inventory.memory_total, available + claim.host_memory)
    return evolve(node, facts=evolve(node.facts, inventory=evolve(inventory, devices=devices, memory_available=available)))


def leaving(draft: Draft) -> frozenset[str]:
    """Shards whose room will soon be free: they drain, or stop and have not been at it for longer than stopping takes."""
    patience = draft.world.timing.stop_grace + STOPPING
    return frozenset(
        record.shard
        for record in draft.shards.values()
        if record.state is ShardState.DRAINING
        or (record.state is ShardState.STOPPING and draft.world.now - record.since < patience)
    )


def _claim(draft: Draft, record: ShardRecord) -> Claim:
    assert record.allocation is not None
    share = bool(record.profile and record.profile.resources.share)
    if record.state is ShardState.SLEEPING and (held := _held(draft, record)) is not None:
        # It keeps only what it still holds. Others who share may have the rest; whoever wants the device alone may not.
        return evolve(claim_of(record.shard, record.allocation, share=True, resident=True), memory=held)
    resident = record.state in _RESIDENT or record.state is ShardState.SLEEPING
    return claim_of(record.shard, record.allocation, share, resident=resident)


def _held(draft: Draft, record: ShardRecord) -> int | None:
    """The most that a shard is seen to hold of one device, None where that cannot be seen."""
    node = draft.nodes.get(record.allocation.node) if record.allocation else None
    devices = node.facts.inventory.devices if node and node.facts else ()
    seen = [p.memory for device in devices for p in device.processes if p.shard == record.shard]
    known = [memory for memory in seen if memory is not None]
    return max(known) if known and len(known) == len(seen) else None


def _is_stray(draft: Draft, node: str, report: ShardReport) -> bool:
    """An engine that runs there and that no record of ours explains: it holds what it holds."""
    record = draft.shards.get(report.shard)
    ours = record is not None and record.allocation is not None and record.allocation.node == node
    return report.state.live and not ours


def _stray(report: ShardReport) -> Claim:
    given = report.order.allocation if report.order else None
    return Claim(
        report.shard,
        report.devices,
        given.memory if given else None,
        given.host_memory if given else 0,
        report.ports,
        share=bool(report.order and report.order.profile.resources.share),
        resident=True,
    )


def _candidate(world: World, node: NodeRecord, claims: list[Claim], closed: Mapping[str, str]) -> Candidate:
    state, note = node.state, ""
    if state is NodeState.READY and node.name not in world.told:
        state, note = NodeState.UNREACHABLE, "not back yet"
    elif state in (NodeState.UNREACHABLE, NodeState.LOST):
        note = show_duration(max(0.0, world.now - node.since))
    elif node.cordoned or node.draining:
        note = node.reason if node.draining else ""
    elif node.quarantined_until is not None and in_quarantine(node, world.now):
        note = f"for {show_duration(node.quarantined_until - world.now)}: {failed_there(node)}"
    weights = {name: files for (where, name), files in world.weights.items() if where == node.name}
    return Candidate(
        node.name,
        node.facts,
        state,
        note,
        cordoned=node.cordoned and not node.draining,
        device_cordons={**closed, **{uuid: cordon.text for uuid, cordon in node.device_cordons.items()}},
        draining=node.draining,
        quarantined=in_quarantine(node, world.now),
        claims=tuple(claims),
        weights=weights,
        last_port=world.last_ports.get(node.name, 0),
    )


def want(draft: Draft, model: Model, number: int, excluded: Mapping[str, str] | None = None) -> Want:
    """What one more replica of C{model} wants."""
    assert model.profile is not None
    needs = draft.world.reckon(model.profile, draft.world.files_of(model.profile))
    if needs.fixed and needs.devices and (seen := peak_of(draft.shards.values(), model)) is not None:
        needs = evolve(needs, memory=seen)
    return Want(f"{model.name}/{number}", model.name, model.profile, needs, excluded or {})
