"""Making room: a wanted replica that fits nowhere has idle replicas of models with C{min: 0} go, least recently used first.

Only as many as are needed, which is found out by placing. Nothing goes on which a request runs or for which one waits, and
nothing that was used within C{timing.make_room_after} or has served for less: it would be wanted back at once, and two models
would push each other out for ever. Where room is on its way already, it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmgw.fleet.model import Model
from llmgw.fleet.shard import ShardState, Wanted
from llmgw.fleet.units import show_duration
from llmgw.planning.checks import Want
from llmgw.planning.fleetroom import leaving, ledger
from llmgw.planning.placement import Placement
from llmgw.planning.replicas import Replica, given_up, group, wanted
from llmgw.planning.rollout import Work, leave
from llmgw.planning.sleep import asleep
from llmgw.planning.world import Draft

_IDLE = (ShardState.READY, ShardState.BACKOFF)


def give_way(work: Work, name: str) -> None:
    """Make room for the replica of model C{name} that could not be placed in this plan, if that is possible.

    What has to go is ordered away and noted in C{work.gave}: its model wants so many fewer from now on.
    """
    draft, pending, model = work.draft, work.pending[name], work.draft.catalog.get(name)
    if model is None or not _lacks(draft, model):
        return
    if pending.searching:
        return
    soon = _soon_free(draft)
    if soon and _fits(draft, pending.want, soon):
        gone = ", ".join(sorted({shard.rpartition("/")[0] for shard in soon})[:4])
        work.notes[name] = f"waiting for the room of {gone}"
        del work.pending[name]
        return
    going = _fewest(draft, pending.want, soon, list(_idle(draft, name)))
    for replica in going:
        unused = show_duration(draft.world.unused[replica.model])
        leave(draft, replica, f"gives its room to {name}: it is the least recently used, unused for {unused}", remember=True)
        draft.say("gave_way", replica.id, f"{replica.id}: gives its room to {pending.want.replica}; unused for {unused}")
        if not asleep(replica):  # one that sleeps is not wanted already
            work.gave[replica.model] = work.gave.get(replica.model, 0) + 1
    if going:
        work.notes[name] = f"{', '.join(replica.id for replica in going)}, idle and of min 0, makes room for it"
        del work.pending[name]
        work.forget_room()
    else:
        quiet = draft.world.timing.make_room_after
        work.again.extend(quiet - unused for unused in draft.world.unused.values() if unused < quiet)


def _lacks(draft: Draft, model: Model) -> bool:
    """Whether it has fewer replicas than it should; one more for a moment, as while it changes, is no reason to push others."""
    here = group(record for record in draft.shards.values() if record.model == model.name).get(model.name, [])
    staying = [replica for replica in here if not replica.leaving and not given_up(replica, draft.nodes)]
    return len(staying) < wanted(model, draft.world.demand)


def _soon_free(draft: Draft) -> frozenset[str]:
    """Shards whose room is on its way back."""
    resting = (
        record.shard
        for record in draft.shards.values()
        if record.state is ShardState.BACKOFF and record.wanted is not Wanted.RUN and record.next_at is None
    )
    return leaving(draft) | frozenset(resting)


def _idle(draft: Draft, besides: str) -> Iterator[Replica]:
    """The replicas that may go, the least recently used first."""
    world, quiet = draft.world, draft.world.timing.make_room_after
    replicas = group(draft.shards.values())
    rested = [(seconds, name) for name, seconds in world.unused.items() if seconds >= quiet and name != besides]
    for _, name in sorted(rested, key=lambda found: (-found[0], found[1])):
        model = draft.catalog.get(name)
        if model is None or model.replicas.min or any(one.load(world.load) for one in replicas.get(name, [])):
            continue
        for replica in reversed(replicas.get(name, [])):
            calm = world.now - replica.shards[0].since >= quiet
            if asleep(replica) or (replica.state in _IDLE and not replica.leaving and calm):
                yield replica


def _fewest(draft: Draft, want: Want, soon: frozenset[str], idle: list[Replica]) -> list[Replica]:
    """The fewest that have to go, none if all together would not help."""
    chosen: list[Replica] = []
    for replica in idle:
        chosen.append(replica)
        if _fits(draft, want, soon | _shards(chosen)):
            break
    else:
        return []
    # What was taken before the one that made it fit may lie elsewhere; the more recently used is kept rather.
    for replica in list(reversed(chosen[:-1])):
        rest = [other for other in chosen if other is not replica]
        if _fits(draft, want, soon | _shards(rest)):
            chosen = rest
    return chosen


def _shards(replicas: Iterable[Replica]) -> frozenset[str]:
    return frozenset(shard.shard for replica in replicas for shard in replica.shards)


def _fits(draft: Draft, want: Want, without: frozenset[str]) -> bool:
    return isinstance(ledger(draft, without).place(want), Placement)
