"""What the leader concludes of each shard from what its node says, or from its silence.

A report is judged by its attempt: an older one is of an engine that has ended, a newer one means that our store is older than
the fleet, and then the fleet is right. The crash budget counts over attempts and restarts of both daemons, and a short time
of being ready does not reset it: only time does.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from llmgw.fleet.causes import CONFIGURATION, NODE, SUSPECT, UNKNOWN, cause_of
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import (
    ADDRESS_GONE,
    DISK_FULL,
    NODE_RESTARTED,
    ShardReport,
    ShardState,
    Wanted,
    may_become,
    replica_of,
    shard_id,
)
from llmgw.fleet.timing import Timing
from llmgw.fleet.units import show_duration
from llmgw.planning.lifecycle import blame
from llmgw.planning.loras import heard
from llmgw.planning.orders import attempt_id
from llmgw.planning.world import Draft, Told, World

_ENDED = (ShardState.STOPPED, ShardState.FAILED, ShardState.BACKOFF)
_RESTING = (ShardState.BACKOFF, ShardState.FAILED)
_PORT_PAUSE = 1.0
FULL_AGAIN = 6  # waits after a first crash: how soon what met a full disk is tried again


def observe(draft: Draft, record: ShardRecord) -> None:
    """Bring one shard's record in line with what is known of it now."""
    if record.allocation is None:
        return
    node = record.allocation.node
    told = draft.world.told.get(node)
    if told is None:
        _cover(draft, record, node)
        return
    report = told.shards.get(record.shard)
    if report is None:
        _missing(draft, record, told)
    elif report.attempt < record.attempt:
        _older(draft, record, report, told)
    else:
        if report.attempt > record.attempt:
            record = draft.put(_caught_up(draft, record, report))
        declined = draft.world.declined.get(record.shard)
        known = declined is not None and declined.attempt == record.attempt and record.wanted is Wanted.RUN
        if report.state is ShardState.FAILED and known and declined and record.state not in _RESTING:
            code = _fault(draft, record, report) or declined.code
            _decline(draft, record, code, _reason(report) or declined.text, _cause(report))
        elif report.state in _ENDED:
            _ended(draft, record, report.state, _reason(report), _fault(draft, record, report), _cause(report))
        else:
            _alive(draft, record, report)


def _caught_up(draft: Draft, record: ShardRecord, report: ShardReport) -> ShardRecord:
    """The record of a store that was restored from an older copy, with what the fleet knows better."""
    operation = attempt_id(record.shard, report.attempt, draft.world.epoch, draft.world.revision)
    return evolve(record, attempt=report.attempt, generation=report.generation, operation=operation)


def _cover(draft: Draft, record: ShardRecord, node: str) -> None:
    """The node is away: whatever may run there is unknown. What was known to have ended has."""
    found = draft.nodes.get(node)
    away = found is None or found.state in (NodeState.UNREACHABLE, NodeState.LOST, NodeState.REMOVED)
    if found is not None and found.state is NodeState.LOST and not record.given_up:
        record = draft.put(evolve(record, given_up=True))
    if away and (record.state.live or record.state is ShardState.PLACED) and record.state is not ShardState.UNKNOWN:
        draft.move(record, ShardState.UNKNOWN, f"{node} is {found.state if found else 'not known'}")


def _missing(draft: Draft, record: ShardRecord, told: Told) -> None:
    if not (_seen(record) or draft.world.fresh(told, record.placed_revision)):
        return
    if record.wanted is not Wanted.RUN or record.state not in _RESTING:
        node = record.allocation.node if record.allocation else ""
        declined = draft.world.declined.get(record.shard)
        if declined and declined.attempt == record.attempt and record.wanted is Wanted.RUN:
            _decline(draft, record, declined.code, declined.text)
        else:
            _ended(draft, record, ShardState.FAILED, f"{node} no longer has it; exit status unknown")


def _seen(record: ShardRecord) -> bool:
    """Whether its node has said before that this attempt runs: then whatever it says without it is news.

    Of one that stops nobody knows: it may have been ordered away while the order to start it was under way.
    """
    return record.url != "" or (record.state.live and record.state not in (ShardState.UNKNOWN, ShardState.STOPPING))


def _older(draft: Draft, record: ShardRecord, report: ShardReport, told: Told) -> None:
    """The node shows an attempt before ours. It may not have seen the order yet, or it declined it."""
    declined = draft.world.declined.get(record.shard)
    if record.wanted is not Wanted.RUN:
        if report.state in _ENDED and draft.world.fresh(told, record.placed_revision):
            _ended(draft, record, report.state, _reason(report))
    elif declined and declined.attempt == record.attempt and record.state not in _RESTING:
        _decline(draft, record, declined.code, declined.text)


def _decline(draft: Draft, record: ShardRecord, code: str, text: str, cause: str = "") -> None:
    """A port that somebody else has and a full disk are nobody's crash: the next attempt gets another one, or waits for room."""
    if code == "port_in_use":
        record = evolve(record, next_at=draft.world.now + _PORT_PAUSE)
        draft.move(record, ShardState.BACKOFF, f"{text}; trying other ports{_before(record, text)}")
    elif code in (DISK_FULL, NODE_RESTARTED):
        _taken_down(draft, record, text, code)
    else:
        _crashed(draft, record, text or code, cause or cause_of(code))


def addresses(record: ShardRecord, nodes: Mapping[str, NodeRecord]) -> tuple[str, str]:
    """Where a shard was told to listen, and the address that its node has now; the same twice where that is not known."""
    assert record.allocation is not None
    node, old = nodes.get(record.allocation.node), record.allocation.address
    new = (node.facts.address if node and node.facts else "") or old
    return old or new, new


def _cause(report: ShardReport) -> str:
    return report.diagnosis.cause if report.diagnosis else ""


def _reason(report: ShardReport) -> str:
    if report.diagnosis:
        return str(report.diagnosis).replace("`llmgw logs SHARD`", f"`llmgw logs {report.shard}`")
    return report.reason or (str(report.exit) if report.exit else "")


def _alive(draft: Draft, record: ShardRecord, report: ShardReport) -> None:
    state, said = report.state, report.reason
    if record.wanted is Wanted.RUN and ADDRESS_GONE in report.conditions and not report.healthy:
        old, new = addresses(record, draft.nodes)
        if old != new:
            reason = f"{old} is no address of its node any more: it is started anew at {new}"
            _found(draft, evolve(record, wanted=Wanted.STOP, next_at=draft.world.now), ShardState.STOPPING, reason)
            return
    if record.wanted is Wanted.RUN:
        if state in (ShardState.PLACED, ShardState.PENDING, ShardState.UNKNOWN):
            return
    elif state is not ShardState.STOPPING:
        # The order is under way; until the agent says that it stops, ours is the better word.
        asleep = record.wanted is Wanted.SLEEP and ShardState.SLEEPING in (state, record.state)
        winding = ShardState.STOPPING if record.wanted is Wanted.STOP else ShardState.DRAINING
        state, said = (ShardState.SLEEPING, record.reason) if asleep else (winding, "as ordered")
        if asleep and record.url:
            record = evolve(record, url="", key="")
    if state is ShardState.SLEEPING and record.wanted is Wanted.RUN:
        state, said = ShardState.LOADING, "it wakes up"
    if state is ShardState.STARTING and record.state in (ShardState.LOADING, ShardState.READY):
        state = ShardState.LOADING
    ready = state is ShardState.READY
    url, key = (report.url, report.key) if ready else ("", "")
    # Why it was ordered says more than that it was.
    keeps = state is record.state and (record.wanted is not Wanted.RUN or not said)
    reason = record.reason if keeps else said
    if record.wanted is Wanted.RUN and (url, key) != (record.url, record.key):
        record = evolve(record, url=url, key=key)
    if ready and record.next_at is not None:
        record = evolve(record, next_at=None)
    record = heard(draft, record, report) if ready else record
    if record.state is state and record.reason == reason:
        draft.put(record)
    else:
        _found(draft, record, state, reason)


def _found(draft: Draft, record: ShardRecord, state: ShardState, reason: str) -> None:
    """Go by what its node says, also where the table has no way there from our record: that is of an older store, or an order to
    start it was under way when it was found to have ended. Then nothing was known.
    """
    if not may_become(record.state, state):
        record = draft.move(record, ShardState.UNKNOWN, "its engine is there after all")
    draft.move(record, state, reason)


def _fault(draft: Draft, record: ShardRecord, report: ShardReport) -> str:
    """What took an engine down that was not its own failure, empty where it was.

    A rank that ends while another one's node is away, or has just been restarted, has lost its peer.
    """
    if report.diagnosis and report.diagnosis.cause == DISK_FULL:
        return DISK_FULL
    ranks = [shard_id(replica_of(record.shard), rank) for rank in range(len(record.nodes))]
    told = [draft.world.told.get(node) for node in record.nodes]
    reports = [there.shards.get(rank) for rank, there in zip(ranks, told, strict=True) if there]
    restarted = any(one and one.attempt == record.attempt and NODE_RESTARTED in one.conditions for one in [report, *reports])
    return NODE_RESTARTED if restarted or None in told else ""


def _ended(draft: Draft, record: ShardRecord, state: ShardState, reason: str, fault: str = "", cause: str = "") -> None:
    if record.wanted is Wanted.RUN:
        if record.state in _RESTING:
            return
        if state is ShardState.STOPPED:
            record = evolve(record, url="", key="", next_at=draft.world.now + draft.world.timing.backoff)
            draft.move(record, ShardState.BACKOFF, reason or "it was stopped on its node")
        elif fault:
            _taken_down(draft, record, reason, fault)
        else:
            _crashed(draft, record, reason or "it ended; exit status unknown", cause or UNKNOWN)
    elif record.next_at is not None:
        draft.move(evolve(record, wanted=Wanted.RUN, url="", key=""), ShardState.BACKOFF, record.reason)
    else:
        draft.drop(draft.move(record, ShardState.STOPPED, record.reason))


def _taken_down(draft: Draft, record: ShardRecord, reason: str, fault: str) -> None:
    """It ended by no failure of its own, so none is counted and it is tried for ever: at once, or now and then where it waits."""
    wait = FULL_AGAIN * draft.world.timing.backoff if fault == DISK_FULL else 0.0
    again = f"tried again every {show_duration(wait)} until there is room" if wait else "it is started again"
    record = evolve(record, url="", key="", fault=fault, last_reason=reason, next_at=draft.world.now + wait)
    draft.move(record, ShardState.BACKOFF, f"{reason.rstrip('. ')}. This is no failure of its own; {again}.")


def _crashed(draft: Draft, record: ShardRecord, reason: str, cause: str) -> None:
    """An attempt has failed by itself: count it where it counts, and say when it is tried again, or that it is not.

    What is the profile's is tried once more, and no more: a profile stays as wrong as it is. What has served was right, though.
    """
    world, timing, reason = draft.world, draft.world.timing, reason.rstrip(". ")
    crashes, node_failures = _recent(world, record.crashes), _recent(world, record.node_failures)
    first = record.first_reason if crashes or node_failures else reason
    hopeless = cause == CONFIGURATION == record.cause and bool(crashes) and not record.served_since
    if cause == NODE:
        node_failures = (*node_failures, world.now)
    else:
        crashes = (*crashes, world.now)
    record = evolve(
        record,
        crashes=crashes,
        node_failures=node_failures,
        cause=cause,
        first_reason=first,
        last_reason=reason,
        url="",
        key="",
        fault="",
    )
    if cause in SUSPECT and record.allocation:
        blame(draft, record.allocation.node, record.model, reason)
    told = reason + _before(record, reason)
    again = f"not tried again before the profile changes or `llmgw restart {record.model}`"
    if hopeless or len(crashes) >= timing.crash_budget:
        said = (
            "Twice it was the profile's fault" if hopeless else f"{len(crashes)} failures in {show_duration(timing.crash_window)}"
        )
        draft.move(evolve(record, next_at=None), ShardState.FAILED, f"{told}. {said}: {again}")
    else:
        delay = timing.delay(len(crashes) + len(node_failures)) * world.jitter()
        draft.move(evolve(record, next_at=world.now + delay), ShardState.BACKOFF, f"{told}. {_next(record, timing, delay)}")


def _before(record: ShardRecord, reason: str) -> str:
    """Why it failed first, where that is another reason: what comes later is often only a consequence."""
    failed = record.crashes or record.node_failures
    return f". At first it was: {record.first_reason}" if failed and record.first_reason not in ("", reason) else ""


def _recent(world: World, failures: tuple[float, ...]) -> tuple[float, ...]:
    """Those that count. A clock that was set back must not make old ones new for ever."""
    window = world.timing.crash_window
    return tuple(at for at in failures if -window < world.now - at <= window)


def _next(record: ShardRecord, timing: Timing, delay: float) -> str:
    if record.cause == NODE:
        return f"That is its node's: it goes to another one where it fits, else the next attempt is in {show_duration(delay)}."
    budget = 2 if record.cause == CONFIGURATION and not record.served_since else timing.crash_budget
    return f"Attempt {len(record.crashes) + 1} of {max(budget, len(record.crashes) + 1)}, next in {show_duration(delay)}."
