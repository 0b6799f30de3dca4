"""Where replicas go: all shards of one or none, deterministically, with an L{Explanation} for each refusal.

Default is binpack: the node with the fewest free devices that still fits, so that whole nodes stay free for large replicas;
among equals one without a copy of the same model. C{spread} turns both round. A replica of several nodes gets equal nodes
inside one fabric.

A plan only ever claims, so a node that refused a kind of want keeps refusing it: that is remembered, and what makes a
thousand replicas on a thousand nodes a matter of a second.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from attrs import evolve, frozen

from llmgw.fleet.model import Profile
from llmgw.fleet.node import Fabric
from llmgw.fleet.shard import Allocation, shard_id
from llmgw.planning.checks import Want, failed, fits, in_full
from llmgw.planning.explanation import Check, Explanation, Verdict
from llmgw.planning.room import Candidate, Claim, NodeRoom


@frozen
class Placement:
    """Where one replica goes, rank by rank; rank 0 is the head."""

    replica: str
    allocations: tuple[Allocation, ...]


class Ledger:
    """What is free in the fleet while one plan is made. Each successful L{place} claims what it gives."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self._rooms = {name: NodeRoom(candidate) for name, candidate in sorted(self.candidates.items())}
        self._by_free: dict[int, list[str]] = defaultdict(list)
        for name, room in self._rooms.items():
            self._by_free[room.unclaimed].append(name)
        self._refused: dict[object, set[str]] = defaultdict(set)
        self._hopeless: dict[object, tuple[int, Explanation]] = {}
        # The nodes of which something was claimed, in order: a refusal knows up to where it has read this.
        self._claimed: list[str] = []

    def place(self, want: Want) -> Placement | Explanation:
        """Find and claim the room for all shards of C{want}, or say why there is none now."""
        kind = want.kind
        if kind not in self._hopeless and (rooms := self._choose(want, kind)):
            return self._claim(want, rooms)
        return self._refuse(want, kind)

    def holds(self, claim: Claim, node: str) -> bool:
        """Whether exactly that claim could be made on that node now."""
        room = self._rooms.get(node)
        if room is None or claim.host_memory > room.host_free:
            return False
        return set(claim.devices) <= {fit.device.uuid for fit in room.fitting(claim.memory, claim.share)}

    def ports(self, node: str, count: int) -> tuple[int, ...] | None:
        """Claim C{count} fresh ports on a node, for a new attempt of what is placed there already."""
        room = self._rooms.get(node)
        ports = room.free_ports(count) if room else None
        if room and ports:
            room.ports_taken.update(ports)
            room.last_port = ports[-1]
            self._claimed.append(node)
        return ports

    def renewed(self, allocations: Sequence[Allocation], profile: Profile | None) -> tuple[Allocation, ...]:
        """Those of one replica, by rank, with the addresses that their nodes have now."""
        rooms = [self._rooms[one.node] for one in allocations if one.node in self._rooms]
        if len(rooms) < len(allocations) or profile is None:
            return tuple(allocations)
        fabric = profile.place.fabric or _common(rooms) if len(rooms) > 1 else None
        there = tuple(_address(room, fabric) for room in rooms)
        own = [room.candidate.facts.address if room.candidate.facts else "" for room in rooms]
        return tuple(
            evolve(one, address=address or one.address, head=there[0] or one.head, peers=there if all(there) else one.peers)
            for one, address in zip(allocations, own, strict=True)
        )

    def _choose(self, want: Want, kind: object) -> list[NodeRoom]:
        if want.count == 1:
            return next(([room] for room in self._fitting(want, kind)), [])
        # Ranks of different versions hang or fail in each other's collectives, so they never meet.
        found: dict[tuple[str, str | None], list[NodeRoom]] = defaultdict(list)
        for room in self._fitting(want, kind):
            for fabric in [want.profile.place.fabric] if want.profile.place.fabric else sorted(room.fabrics):
                alike = found[fabric, _version(room, want)]
                alike.append(room)
                if len(alike) == want.count:
                    return alike
        return []

    def _fitting(self, want: Want, kind: object) -> Iterator[NodeRoom]:
        """The rooms that fit, the best first."""
        refused = self._refused[kind]
        if want.profile.place.spread:
            yield from self._spread(want, refused)
            return
        least = 0 if want.share else want.needs.devices
        levels = [free for free in sorted(self._by_free) if free >= least]
        for free in levels:
            twins = []
            for name in list(self._by_free[free]):
                room = self._rooms[name]
                if name in refused:
                    continue
                if want.model in room.models:
                    twins.append(room)
                elif fits(room, want):
                    yield room
                else:
                    refused.add(name)
            yield from (room for room in twins if fits(room, want))

    def _spread(self, want: Want, refused: set[str]) -> Iterator[NodeRoom]:
        def key(room: NodeRoom) -> tuple[int, int, int, str]:
            copies = sum(claim.holder.rsplit("/", 2)[0] == want.model for claim in room.claims)
            return (copies, len(room.claims), -room.unclaimed, room.name)

        for room in sorted((r for name, r in self._rooms.items() if name not in refused), key=key):
            if fits(room, want):
                yield room
            else:
                refused.add(room.name)

    def _claim(self, want: Want, rooms: list[NodeRoom]) -> Placement:
        fabric = want.profile.place.fabric or _common(rooms) if want.count > 1 else None
        addresses = tuple(_address(room, fabric) for room in rooms)
        ports = [room.free_ports(want.needs.ports) or () for room in rooms]
        made = []
        for rank, room in enumerate(rooms):
            chosen = room.together(want.needs.devices, want.needs.memory, want.share)
            on = room.fabrics.get(fabric) if fabric else None
            made.append(
                Allocation(
                    node=room.name,
                    rank=rank,
                    nodes=want.count,
                    address=room.candidate.facts.address if room.candidate.facts else "",
                    devices=tuple(d.device.uuid for d in sorted(chosen, key=lambda d: d.device.index)),
                    memory=want.needs.memory,
                    host_memory=want.needs.host_memory,
                    ports=ports[rank],
                    head=addresses[0],
                    head_port=ports[0][1] if len(ports[0]) > 1 else 0,
                    peers=addresses,
                    interface=on.interface if on else None,
                )
            )
            self._take(room, claim_of(shard_id(want.replica, rank), made[-1], share=want.share))
        return Placement(want.replica, tuple(made))

    def _take(self, room: NodeRoom, claim: Claim) -> None:
        before = room.unclaimed
        room.claim(claim)
        room.last_port = claim.ports[-1] if claim.ports else room.last_port
        self._claimed.append(room.name)
        if room.unclaimed != before:
            self._by_free[before].remove(room.name)
            insort(self._by_free[room.unclaimed], room.name)

    def _refuse(self, want: Want, kind: object) -> Explanation:
        """Why there is no room, in short: only the first failed check of each node, since many plans find no room for much.

        A kind that was refused before stays refused, but maybe for other reasons: nodes of which something was claimed since
        are looked at again. Ranks look at each other's nodes, so for a replica of several all of them are.
        """
        read, known = self._hopeless.get(kind, (0, None))
        changed: Collection[str] = set(self._claimed[read:]) if known is not None else self._rooms
        if known is None or changed:
            kept = known.verdicts if known is not None and want.count == 1 else ()
            old = {verdict.node: verdict for verdict in kept if verdict.node not in changed}
            known = self._explanation(want, lambda room: tuple(islice(failed(room, want), 1)), old)
        known = evolve(known, model=want.model)
        self._hopeless[kind] = len(self._claimed), known
        return known

    def explain(self, want: Want) -> Explanation:
        """Everything that speaks against each node; for a want that has been refused."""
        return self._explanation(want, lambda room: in_full(room, want))

    def _explanation(
        self, want: Want, checks: Callable[[NodeRoom], tuple[Check, ...]], known: Mapping[str, Verdict] = MappingProxyType({})
    ) -> Explanation:
        fitting = [room for room in self._rooms.values() if fits(room, want)] if want.count > 1 else []
        verdicts = tuple(
            known.get(name) or Verdict(name, checks(room) or (_alone(room, want, fitting),)) for name, room in self._rooms.items()
        )
        return Explanation(want.model, len(verdicts), verdicts)

    def candidate(self, name: str) -> Candidate:
        """The node as it is now, with what this plan has claimed there."""
        return evolve(self.candidates[name], claims=tuple(self._rooms[name].claims), last_port=self._rooms[name].last_port)


def claim_of(shard: str, allocation: Allocation, share: bool, resident: bool = False) -> Claim:
    """What a shard with this allocation holds."""
    return Claim(
        shard, allocation.devices, allocation.memory, allocation.host_memory, allocation.ports, share=share, resident=resident
    )


def _alone(room: NodeRoom, want: Want, fitting: list[NodeRoom]) -> Check:
    """A node that could run a shard, but too few such nodes are on any fabric of its."""
    names = [want.profile.place.fabric] if want.profile.place.fabric else sorted(room.fabrics)
    best = max((sum(name in other.fabrics for other in fitting) for name in names), default=0)
    where = ", ".join(filter(None, names))
    if best < want.count:
        return Check("fabric_nodes", "with too few such nodes on one fabric", want.count, best, "nodes", where)
    mine = _version(room, want)
    alike = max(sum(name in other.fabrics and _version(other, want) == mine for other in fitting) for name in names)
    detail = f"it has {want.profile.engine} {mine or 'of unknown version'}; install one version on all nodes of {where}"
    return Check("versions", "with too few such nodes of its engine's version", want.count, alike, "nodes", detail)


def _version(room: NodeRoom, want: Want) -> str | None:
    installed = room.installations.get(want.profile.engine)
    return installed.version if installed is not None else None


def _common(rooms: list[NodeRoom]) -> str | None:
    return min(set.intersection(*(set(room.fabrics) for room in rooms)), default=None)


def _address(room: NodeRoom, fabric: str | None) -> str:
    on: Fabric | None = room.fabrics.get(fabric) if fabric else None
    own = room.candidate.facts.address if room.candidate.facts else ""
    return on.address or own if on else own
