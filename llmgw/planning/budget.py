"""What the failures of a replica that is gone count for: a model that is scaled in while it fails has not become any better.

A replica that leaves since fewer are wanted leaves a husk with its failures, which the next one of the same generation takes over
with the rest of the crash budget and of the wait. One that has used its budget up stays, as nothing of it runs, and says why.
"""

from __future__ import annotations

from llmgw.fleet.model import Model
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardState
from llmgw.planning.replicas import Replica
from llmgw.planning.world import Draft


def remembered(draft: Draft, model: Model) -> Replica | None:
    """Of the replicas that leave or have left since fewer were wanted the one that failed most; old failures are forgotten."""
    known = [draft.shards[shard] for shard in draft.remembered.get(model.name, ()) if shard in draft.shards]
    for record in known:
        if record.allocation is None and record.number != draft.number(model.name) and not counts(draft, model, record):
            del draft.shards[record.shard]
    worst = max((record for record in known if counts(draft, model, record)), key=_failures, default=None)
    return Replica(model.name, worst.number, (worst,)) if worst else None


def counts(draft: Draft, model: Model, record: ShardRecord) -> bool:
    """Whether the failures of this one are to be taken over by the next of the model."""
    recent = draft.world.now - record.failed_at <= draft.world.timing.crash_window
    return record.remembered and recent and record.generation == model.generation


def rest(draft: Draft, before: Replica) -> float:
    """For how many seconds the one after C{before} has to wait, as that would have had to; 0 or less for none."""
    (husk,) = before.shards
    delay = draft.world.timing.delay(_failures(husk))
    wait = husk.failed_at + delay - draft.world.now
    return wait if wait <= delay else 0.0


def told(before: Replica) -> str:
    """How it went, in words that do not change with time."""
    (husk,) = before.shards
    count = _failures(husk)
    return f"{before.id} failed {count} time{'s' * (count > 1)}, last: {husk.last_reason}"


def may_leave(model: Model, target: int, replicas: list[Replica]) -> list[Replica]:
    """Those of C{replicas} that leave when fewer are wanted. Where none is wanted now, one that has used its budget up does not:
    each request would find a fresh one."""
    if target or not model.replicas.max:
        return replicas
    return [replica for replica in replicas if replica.state is not ShardState.FAILED]


def _failures(record: ShardRecord) -> int:
    return len(record.crashes) + len(record.node_failures)
