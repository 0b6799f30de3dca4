"""A desired state in parts that each fit in a line, and whole again. Only a whole one counts: half a truth stops engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from attrs import define, evolve, field

from llmgw.fleet.shard import ShardOrder
from llmgw.wire.codec import to_plain
from llmgw.wire.messages import MAX_LINE, Desired

PART_SIZE = 2**18
MAX_PARTS = 256
# Half a line: the registration that tells of it has to hold the facts of its node, too.
MAX_ORDER = MAX_LINE // 2


def size_of(order: ShardOrder) -> int:
    """How many bytes of a line it takes, at most."""
    return len(json.dumps(to_plain(order)))


def split(
    epoch: int, leader: str, revision: int, orders: Sequence[ShardOrder], too_long: Callable[[ShardOrder, int], object]
) -> list[Desired]:
    """The parts of a desired state; at least one, since no orders at all is something to say, too.

    @param too_long: called with each order that fits in no line, and its size; it is left out, which stops nothing.
    """
    groups = list(_groups(orders, too_long)) or [()]
    return [Desired(epoch, leader, revision, part, len(groups), group) for part, group in enumerate(groups, 1)]


def _groups(orders: Sequence[ShardOrder], too_long: Callable[[ShardOrder, int], object]) -> Iterator[tuple[ShardOrder, ...]]:
    group: list[ShardOrder] = []
    size = 0
    for order in orders:
        length = size_of(order)
        if length > MAX_ORDER:
            too_long(order, length)
            continue
        if group and size + length > PART_SIZE:
            yield tuple(group)
            group, size = [], 0
        group.append(order)
        size += length
    if group:
        yield tuple(group)


@define
class Joiner:
    """Puts the parts of one desired state together; a part of another one throws away what was begun."""

    _begun: list[Desired] = field(factory=list)

    def add(self, part: Desired) -> Desired | None:
        """The whole, once C{part} completes it: part 1 of 1 with the orders of all."""
        if not 1 <= part.part <= part.parts <= MAX_PARTS:
            self._begun.clear()
            return None
        first = self._begun[0] if self._begun else part
        same = (first.epoch, first.leader, first.revision, first.parts) == (part.epoch, part.leader, part.revision, part.parts)
        if not same or part.part != len(self._begun) + 1:
            self._begun.clear()
            if part.part != 1:
                return None
        self._begun.append(part)
        if part.part < part.parts:
            return None
        orders = tuple(order for piece in self._begun for order in piece.orders)
        self._begun.clear()
        return evolve(part, part=1, parts=1, orders=orders)
