"""C{It would fit if ...}: single changes after which a refused replica has room. Each is tried by placing before it is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import evolve

from llmgw.fleet.estimate import largest_context
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Device, Installation, NodeState
from llmgw.fleet.shard import WeightFiles, replica_of
from llmgw.interfaces import Needs
from llmgw.planning.checks import Want
from llmgw.planning.explanation import Explanation, Hint, Verdict
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.room import Candidate, Claim

TRIES = 24
ENOUGH = 4


def with_hints(explanation: Explanation, ledger: Ledger, want: Want, variants: Sequence[tuple[Want, str]] = ()) -> Explanation:
    """C{explanation} with the changes that would help, nearest misses first.

    @param variants: other forms of C{want} worth trying (a smaller context), each with the words for it.
    """
    hints = []
    for other, text in variants:
        if isinstance(Ledger(map(ledger.candidate, ledger.candidates)).place(other), Placement):
            hints.append(Hint("profile", text))
            break
    nearest = sorted(explanation.verdicts, key=lambda verdict: (len(verdict.checks), verdict.node))
    changes = (found for verdict in nearest for found in _changes(ledger.candidate(verdict.node), verdict, want.profile))
    for (hint, changed), _ in zip(changes, range(TRIES), strict=False):
        if len(hints) < ENOUGH and _helps(ledger, want, changed):
            hints.append(hint)
    return evolve(explanation, hints=tuple(hints))


def smaller_context(explanation: Explanation, want: Want, reckon: Callable[[Profile], Needs]) -> list[tuple[Want, str]]:
    """The want with the largest context whose memory some node has, with the words for it; none where memory is not what lacks.

    @param reckon: what one shard of a profile takes.
    """
    now = want.needs.context
    memory, host = (_most(explanation, name) for name in ("device_memory", "host_memory"))
    if now is None or (memory is None and host is None):
        return []

    def needs(context: int) -> Needs:
        return reckon(evolve(want.profile, context=context))

    def fits(context: int) -> bool:
        found = needs(context)
        return (memory is None or (found.memory or math.inf) <= memory) and (host is None or found.host_memory <= host)

    context = largest_context(fits, now - 1)
    if not context:
        return []
    changed = evolve(want, profile=evolve(want.profile, context=context), needs=needs(context))
    return [(changed, f"context were at most {context} (now {now})")]


def _most(explanation: Explanation, check: str) -> float | None:
    """The most that a node has of what it fails first by; None where no node fails by that."""
    firsts = (verdict.checks[0] for verdict in explanation.verdicts if verdict.checks)
    return max((found.have for found in firsts if found.name == check), default=None)


def _helps(ledger: Ledger, want: Want, changed: Candidate) -> bool:
    others: Iterable[str] = ledger.candidates if want.count > 1 else ()
    fleet = [ledger.candidate(name) for name in others if name != changed.name]
    return isinstance(Ledger([*fleet, changed]).place(want), Placement)


def _changes(node: Candidate, verdict: Verdict, profile: Profile) -> Iterator[tuple[Hint, Candidate]]:
    """What could be different about one node, by what it failed."""
    names = {check.name for check in verdict.checks}
    if "state" in names:
        yield Hint("node_back", f"{node.name} came back", node.name), evolve(node, state=NodeState.READY)
    for flag, text in (("cordoned", "were uncordoned"), ("draining", "were uncordoned"), ("quarantined", "left quarantine")):
        if flag in names:
            yield Hint(flag, f"{node.name} {text}", node.name), _unflagged(node, flag)
    if node.facts is None:
        return
    if "installation" in names:
        has = (*(i for i in node.facts.installations if i.name != profile.engine), Installation(profile.engine, profile.engine))
        hint = Hint("installation", f"{profile.engine} were installed on {node.name}", node.name)
        yield hint, evolve(node, facts=evolve(node.facts, installations=has))
    if "weights" in names and profile.weights:
        found = WeightFiles(profile.weights, found=True)
        hint = Hint("weights", f"{profile.weights} were on {node.name}", node.name)
        yield hint, evolve(node, weights={**node.weights, profile.weights: found})
    if names & {"devices", "device_memory", "host_memory"}:
        yield from _cordons(node)
        yield from _strangers(node)
        yield from _replicas(node)


def _unflagged(node: Candidate, flag: str) -> Candidate:
    """A drain cordons, too, and uncordoning ends both."""
    if flag == "quarantined":
        return evolve(node, quarantined=False)
    return evolve(node, cordoned=False, draining=False)


def _cordons(node: Candidate) -> Iterator[tuple[Hint, Candidate]]:
    """Each device that somebody has closed, open; one that is sick or missing stays out all the same."""
    assert node.facts is not None
    for device in node.facts.inventory.devices:
        if device.uuid in node.device_cordons and not device.problem and device.missing_since is None:
            cordons = {uuid: why for uuid, why in node.device_cordons.items() if uuid != device.uuid}
            hint = Hint("device_cordon", f"gpu {device.index} on {node.name} were uncordoned", node.name)
            yield hint, evolve(node, device_cordons=cordons)


def _strangers(node: Candidate) -> Iterator[tuple[Hint, Candidate]]:
    """Each process that is not ours and holds device memory, gone."""
    assert node.facts is not None
    inventory = node.facts.inventory
    for pid in sorted({p.pid for device in inventory.devices for p in device.processes if p.shard is None}):
        devices = tuple(_without(device, pid) for device in inventory.devices)
        facts = evolve(node.facts, inventory=evolve(inventory, devices=devices))
        yield Hint("process", f"pid {pid} on {node.name} ended", node.name), evolve(node, facts=facts)


def _without(device: Device, pid: int) -> Device:
    held = sum(process.memory or 0 for process in device.processes if process.pid == pid)
    left = tuple(process for process in device.processes if process.pid != pid)
    used = None if device.memory_used is None else max(0, device.memory_used - held)
    return evolve(device, processes=left, memory_used=used)


def _replicas(node: Candidate) -> Iterator[tuple[Hint, Candidate]]:
    """Each replica there, stopped: its claim and what its engine was seen to use are back."""
    assert node.facts is not None
    inventory = node.facts.inventory
    for replica in sorted({replica_of(claim.holder) for claim in node.claims}):
        left = tuple(claim for claim in node.claims if replica_of(claim.holder) != replica)
        gone = [claim for claim in node.claims if claim not in left]
        devices = tuple(freed(device, replica, gone) for device in inventory.devices)
        facts = evolve(node.facts, inventory=evolve(inventory, devices=devices))
        yield Hint("replica", f"{replica} on {node.name} stopped", node.name), evolve(node, claims=left, facts=facts)


def freed(device: Device, replica: str, gone: Sequence[Claim]) -> Device:
    """A device as it will be when this replica has ended, with its claims C{gone}."""
    pids = {p.pid for p in device.processes if p.shard is not None and replica_of(p.shard) == replica}
    for pid in pids:
        device = _without(device, pid)
    held = [claim for claim in gone if device.uuid in claim.devices]
    if pids or not held or device.memory_used is None:
        return device
    # What is used, and by none of the processes that the device lists, counts as the claim's.
    nobodys = max(0, device.memory_used - sum(process.memory or 0 for process in device.processes))
    used = sum(nobodys if claim.memory is None else claim.memory for claim in held)
    return evolve(device, memory_used=device.memory_used - min(used, nobodys))
