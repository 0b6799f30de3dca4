"""Events: one line each of what happened to what, when and why. They are the fleet's memory for people."""

from __future__ import annotations

from attrs import frozen


@frozen
class FleetEvent:
    """One thing that happened. C{at} is wall time, for people only; C{epoch} tells which leadership wrote it.

    @ivar kind: a stable word for programs: C{node_state}, C{shard_state}, C{placed}, C{refused}, C{catalog}, C{brake}, ...
    @ivar subject: what it is about: a node, a shard, a replica, a model.
    @ivar text: the sentence.
    """

    at: float
    kind: str
    subject: str
    text: str
    node: str = ""
    epoch: int = 0
    before: str = ""
    after: str = ""
    tail: tuple[str, ...] = ()
    number: int = 0
