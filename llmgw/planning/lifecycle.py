"""When a node is unreachable, when it is lost, and when nobody is because it is more likely us.

A link that ends makes its node unreachable at once: nothing new goes there, what runs there stays and stays routed. Only
C{lost_after} later is the node lost and are its replicas made anew elsewhere, and even then not

 - in the grace after a leadership began, unless all known nodes have reported; and
 - while the brake is on: half of the nodes, and at least three, are away together.
"""

from __future__ import annotations

from attrs import evolve, frozen

from llmgw.fleet.node import NodeEvent, NodeState, next_node_state
from llmgw.fleet.records import NodeFailure, NodeRecord
from llmgw.fleet.shard import ShardState
from llmgw.fleet.units import show_duration
from llmgw.planning.world import Draft, World

BRAKE_LEAST = 3
MISSED_BEATS = 3
HELD_AGAIN = 2.0
QUARANTINE_MODELS = 3
QUARANTINE_FIRST, QUARANTINE_MOST = 10.0, 3600.0
QUARANTINE_LOOKS_BACK = 600.0
BLAMES, BLAME_LENGTH = 32, 120
_KNOWN = (NodeState.READY, NodeState.UNREACHABLE)


@frozen
class Holding:
    """Whether nodes may be given up now. C{text} says why not."""

    grace: bool = False
    brake: bool = False
    text: str = ""


def holding(world: World) -> Holding:
    """Whether the grace or the brake is on."""
    known = [node for node in world.nodes.values() if node.state in _KNOWN]
    away = [node for node in known if node.name not in world.told]
    if len(away) >= BRAKE_LEAST and 2 * len(away) >= len(known):
        text = f"{len(away)} of {len(known)} nodes are away at once, so it is probably not they: none is given up"
        return Holding(brake=True, text=text)
    if world.leading_for < world.timing.failover_grace:
        missing = sum(node.name not in world.reported for node in known)
        if missing:
            return Holding(grace=True, text=f"{missing} of {len(known)} known nodes have not reported to this leader yet")
    return Holding()


def follow_nodes(draft: Draft) -> Holding:
    """Bring every node into the state that its link and the clocks say."""
    world = draft.world
    held = holding(world)
    for node in world.nodes.values():
        _follow(draft, node, held)
    return held


def _follow(draft: Draft, node: NodeRecord, held: Holding) -> None:
    world = draft.world
    if node.state is NodeState.REMOVED:
        return
    if node.name in world.told:
        if node.state is not NodeState.READY:
            draft.node(node, next_node_state(node.state, NodeEvent.REGISTERED), "")
        return
    away = world.away.get(node.name, 0.0)
    if node.state is NodeState.READY:
        if node.name in world.reported:
            draft.node(node, next_node_state(node.state, NodeEvent.LINK_LOST), world.left.get(node.name) or "its link ended")
        elif away >= MISSED_BEATS * world.timing.heartbeat:
            draft.node(node, NodeState.UNREACHABLE, "it has not come back since this server began to lead")
    elif node.state is NodeState.UNREACHABLE and away >= world.timing.lost_after and not (held.grace or held.brake):
        draft.node(node, next_node_state(node.state, NodeEvent.LOST_TIMER), f"away for {show_duration(away)}")


def next_step(draft: Draft) -> float | None:
    """In how many seconds a clock may move a node, None if none runs. What the grace or the brake holds is looked at again."""
    world = draft.world
    limits = {NodeState.READY: MISSED_BEATS * world.timing.heartbeat, NodeState.UNREACHABLE: world.timing.lost_after}
    waits = [
        limits[node.state] - world.away.get(node.name, 0.0)
        for node in draft.nodes.values()
        if node.state in limits and node.name not in world.told
    ]
    drains = [node.drain_deadline - world.now for node in draft.nodes.values() if node.draining and node.drain_deadline]
    waits = [wait if wait > 0 else HELD_AGAIN for wait in waits] + [wait for wait in drains if wait > 0]
    return min(waits, default=None)


def blame(draft: Draft, node: str, model: str, reason: str) -> None:
    """Note that an attempt of C{model} failed on a node for what may be the node's own."""
    record = draft.nodes.get(node)
    if record is not None:
        failure = NodeFailure(model, draft.world.now, reason[:BLAME_LENGTH])
        draft.nodes[node] = evolve(record, failures=(*record.failures, failure)[-BLAMES:])


def follow_quarantine(draft: Draft) -> None:
    """A node on which several different models fail, and none serves, is sick itself: nothing goes there for a while.

    The while doubles with each failure. What failed is in the node's record, so a restart of the server forgets nothing, nor does
    it go with a replica that has moved on. Who serves there clears the node of its failures. Whoever served there may still do so
    while the node is away, as all are when a server has just begun to lead.
    """
    placed = [(r, r.allocation.node) for r in draft.shards.values() if r.allocation]
    serving = {(node, r.model) for r, node in placed if r.state is ShardState.READY}
    busy = {node for r, node in placed if r.state is ShardState.READY or (r.state is ShardState.UNKNOWN and r.served_since)}
    for node in [node for node in draft.nodes.values() if node.failures]:
        now = draft.world.now
        kept = [one for one in node.failures if (node.name, one.model) not in serving]
        recent = [one for one in kept if now - one.at <= QUARANTINE_LOOKS_BACK]
        kept = kept if in_quarantine(node, now) else recent
        if len(kept) != len(node.failures):
            node = draft.nodes[node.name] = evolve(node, failures=tuple(kept))
        if node.name not in busy and len({one.model for one in recent}) >= QUARANTINE_MODELS:
            _quarantine(draft, node, recent)


def _quarantine(draft: Draft, node: NodeRecord, recent: list[NodeFailure]) -> None:
    now = draft.world.now
    lasts = min(QUARANTINE_MOST, QUARANTINE_FIRST * 2.0 ** max(0, len(recent) - QUARANTINE_MODELS))
    until = min(recent[-1].at, now) + lasts
    if until <= now or until <= (node.quarantined_until or 0.0):
        return
    node = draft.nodes[node.name] = evolve(node, quarantined_until=until)
    draft.say("quarantined", node.name, f"{node.name}: quarantined for {show_duration(lasts)}: {failed_there(node)}", node.name)


def failed_there(node: NodeRecord) -> str:
    """What a node is in quarantine for: the models by name, each with why it failed there last."""
    last = {one.model: one.reason for one in node.failures}
    reasons = "; ".join(f"{model}: {reason}" for model, reason in sorted(last.items()))
    return f"{', '.join(sorted(last))} failed there and nothing serves ({reasons})" if last else ""


def in_quarantine(node: NodeRecord, now: float) -> bool:
    """Whether nothing may go there now."""
    return node.quarantined_until is not None and node.quarantined_until > now
