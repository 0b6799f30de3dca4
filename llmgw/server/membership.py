"""What agents say: the leader's ear. Nothing here decides; it keeps the last word of each node and tells when it is news.

A session's messages come here already in order and never after its end. What is known of a node survives its link for
C{status}, but only nodes with a link speak for a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from attrs import evolve, frozen
from twisted.logger import Logger

from llmgw.fleet.fetch import Fetch
from llmgw.fleet.node import Inventory, NodeFacts
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardReport, Wanted
from llmgw.planning.world import Declined, Told
from llmgw.wire.messages import Done, Event, Register, Report

TAIL = 50
# Of how many shards a node's refusals and last outputs are kept: an agent may name shards that nobody knows.
MOST_NAMED = 256

_T = TypeVar("_T")
Named = dict[str, dict[str, _T]]


@frozen
class Present:
    """A node with a link: its session, its facts as last told, and its shards."""

    session: str
    register: Register
    facts: NodeFacts
    told: Told
    certificate_expires: float | None = None
    fetches: tuple[Fetch, ...] = ()


class Membership:
    """The nodes that have, or had, a link in this leadership.

    @param steady: seconds on a clock that nobody can set: how long a node has been away is not for the wall clock to say.
    @param news: called when something was said that may change a plan.
    @param room: called when a node only has more memory free than before: that matters to what waits for room, and it happens
        somewhere in a large fleet all the time.
    """

    log = Logger()

    def __init__(self, steady: Callable[[], float], news: Callable[[], None], room: Callable[[], None] | None = None) -> None:
        self._steady = steady
        self._news = news
        self._room = room or news
        self.present: dict[str, Present] = {}
        self.last: dict[str, Told] = {}
        self.left_at: dict[str, float] = {}
        self.left: dict[str, str] = {}
        self.reported: set[str] = set()
        self._declined: Named[Declined] = {}
        self._tails: Named[tuple[str, ...]] = {}
        self.history = False

    def begin(self) -> None:
        """A new leadership: everybody is away until they come."""
        self.present.clear()
        self.last.clear()
        self.left_at.clear()
        self.left.clear()
        self.reported.clear()
        self._declined.clear()
        self._tails.clear()
        self.history = False

    def joined(self, node: str, session: str, register: Register, expires: float | None) -> None:
        """A link is up. What the agent lists runs; what it does not list may still come with its first report."""
        told = Told({report.shard: report for report in register.shards}, register.epoch, 0)
        self.present[node] = Present(session, register, register.facts, told, expires)
        self.last[node] = told
        # Only a node's first word tells of an earlier leadership: when it comes again it has seen ours.
        self.history = self.history or (register.epoch > 0 and node not in self.reported)
        self.reported.add(node)
        self.left_at.pop(node, None)
        self.left.pop(node, None)
        self._news()

    def report(self, node: str, session: str, message: Report) -> bool:
        """The whole truth of a node. It is news when a shard changed in what plans or routes go by.

        @return: whether it came over the node's link of today.
        """
        here = self._of(node, session)
        if here is None:
            return False
        shards = {report.shard: _whole(report, here.told) for report in message.shards}
        told = Told(shards, message.epoch, message.revision, complete=True)
        facts = here.facts if message.inventory is None else evolve(here.facts, inventory=message.inventory)
        if message.installations is not None:
            facts = evolve(facts, installations=message.installations)
        changed = _gist(told) != _gist(here.told) or _devices_changed(here.facts.inventory, facts.inventory)
        changed = changed or facts.installations != here.facts.installations
        self.present[node] = evolve(here, facts=facts, told=told, fetches=message.fetches)
        self.last[node] = told
        for report in message.shards:
            known = self._declined.get(node, {}).get(report.shard)
            if known and report.attempt >= known.attempt and report.state.live:
                del self._declined[node][report.shard]
        if changed:
            self._news()
        elif _more_room(here.facts.inventory, facts.inventory):
            self._room()
        return True

    def event(self, node: str, session: str, message: Event) -> None:
        """A transition also comes by a report; what only the event has is the end of the output."""
        if message.tail and self._of(node, session) is not None:
            _remember(self._tails, node, message.shard, message.tail[-TAIL:])

    def done(self, node: str, session: str, message: Done) -> None:
        """An order was followed, or was declined: then why is kept until the next attempt."""
        if message.ok or self._of(node, session) is None:
            return
        kind, _, rest = message.operation.partition(":")
        shard, _, tail = rest.rpartition(":")
        shard, _, attempt = shard.rpartition(":")
        text = str(message.result.get("text") or message.error)
        self.log.debug("{node} could not do {operation}: {text}", node=node, operation=message.operation, text=text)
        if kind == Wanted.RUN and attempt.isdecimal() and tail:
            _remember(self._declined, node, shard, Declined(int(attempt), message.error, text))
            self._news()

    def gone(self, node: str, session: str, reason: str) -> bool:
        """A link has ended. Returns whether it was the node's link of today."""
        if self._of(node, session) is None:
            return False
        del self.present[node]
        self.left_at[node] = self._steady()
        self.left[node] = reason
        self._news()
        return True

    def _of(self, node: str, session: str) -> Present | None:
        here = self.present.get(node)
        return here if here is not None and here.session == session else None

    def declined(self, shards: Iterable[ShardRecord]) -> dict[str, Declined]:
        """What nodes declined of C{shards}, each only for those that are placed on it."""
        found = {}
        for record in shards:
            if record.allocation and (said := self._declined.get(record.allocation.node, {}).get(record.shard)):
                found[record.shard] = said
        return found

    def tail(self, node: str, shard: str) -> tuple[str, ...]:
        """The end of the output that C{node} sent last of an attempt of C{shard} that failed there."""
        return self._tails.get(node, {}).get(shard, ())

    def told_tail(self, node: str, shard: str) -> None:
        """It is kept with an event now."""
        self._tails.get(node, {}).pop(shard, None)

    def report_of(self, node: str, shard: str) -> ShardReport | None:
        """What a node said last of one of its shards, also when it is away now."""
        told = self.last.get(node)
        return told.shards.get(shard) if told else None


def _remember(named: Named[_T], node: str, shard: str, what: _T) -> None:
    """The newest are kept."""
    mine = named.setdefault(node, {})
    mine.pop(shard, None)
    mine[shard] = what
    if len(mine) > MOST_NAMED:
        del mine[next(iter(mine))]


def _whole(report: ShardReport, before: Told) -> ShardReport:
    """C{report} with the order that its agent has told on this link already, and so leaves out."""
    known = before.shards.get(report.shard) if report.order is None else None
    return report if known is None or known.attempt != report.attempt else evolve(report, order=known.order)


def _gist(told: Told) -> object:
    """What of a report can change a plan or a route; progress and load cannot."""
    shards = sorted(
        (r.shard, r.attempt, r.generation, r.state, r.url, r.key, r.healthy, r.reason, r.limit, r.loras, r.fixed)
        for r in told.shards.values()
    )
    return told.complete, told.epoch, told.revision, shards


def _devices_changed(old: Inventory, new: Inventory) -> bool:
    """Whether a device came or went, or became good or bad."""
    return old is not new and _states(old) != _states(new)


def _states(inventory: Inventory) -> list[tuple[object, ...]]:
    return sorted((device.uuid, device.problem, device.missing_since or 0.0) for device in inventory.devices)


def _more_room(old: Inventory, new: Inventory) -> bool:
    """Whether something may fit that did not, on the same devices."""
    if old is new:
        return False
    used = {device.uuid: device.memory_used or 0 for device in old.devices}
    if any((device.memory_used or 0) < used.get(device.uuid, 0) for device in new.devices):
        return True
    return (new.memory_available or 0) > (old.memory_available or 0) + 2**28
