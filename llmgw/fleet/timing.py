"""The control plane's clocks, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from llmgw.fleet.units import show_duration

REDIAL_CAP = 15.0


@frozen
class Timing:
    """The control plane's clocks, in seconds; L{timing_problems} holds them to each other.

    @ivar lease_renew: how often a leader renews its lease.
    @ivar lease_deadline: how long after its last renewal was sent a leader still acts.
    @ivar store_timeout: how long one renewal may take.
    @ivar make_room_after: how long nobody must have used a replica that is to make room for another model's.
    """

    heartbeat: float = 5.0
    lost_after: float = 300.0
    failover_grace: float = 60.0
    stop_grace: float = 20.0
    drain: float = 600.0
    node_drain: float = 3600.0
    lease: float = 15.0
    lease_renew: float = 3.0
    lease_deadline: float = 9.0
    store_timeout: float = 2.0
    backoff: float = 10.0
    backoff_max: float = 300.0
    crash_budget: int = 5
    crash_window: float = 1800.0
    make_room_after: float = 60.0

    def delay(self, failures: int) -> float:
        """How many seconds to wait after so many failures."""
        return min(self.backoff * 2.0 ** (failures - 1), self.backoff_max)

    @property
    def step_down(self) -> float:
        """How long stepping down may take: a leader must have stopped commanding before its lease can be taken."""
        return self.lease / 15

    @property
    def poll(self) -> float:
        """How often servers of one store look at each other: the most that a standby's routers are behind the leader's."""
        return self.lease / 15

    @property
    def peer_silence(self) -> float:
        """After how long a server that is not heard is no longer waited for."""
        return 2 * self.lease


def timing_problems(timing: Timing) -> Iterator[tuple[str, str]]:
    """What cannot work: the key that is best changed, and the numbers."""
    show = show_duration
    if timing.lost_after < 3 * timing.heartbeat:
        least = f"3 heartbeats ({show(3 * timing.heartbeat)})"
        yield "lost_after", f"{show(timing.lost_after)} is less than {least}, after which a node counts as unreachable"
    if timing.store_timeout >= timing.lease_renew:
        yield "store_timeout", f"{show(timing.store_timeout)} must be less than lease_renew, {show(timing.lease_renew)}"
    if 2 * timing.lease_renew > timing.lease_deadline:
        yield "lease_renew", f"twice {show(timing.lease_renew)} must be at most lease_deadline, {show(timing.lease_deadline)}"
    parts = (timing.lease_deadline, timing.store_timeout, timing.step_down, timing.lease / 100)
    if sum(parts) >= timing.lease:
        terms = " + ".join(f"{name} {seconds:.3g} s" for name, seconds in zip(_TERMS, parts, strict=True))
        yield "lease", f"{terms} = {sum(parts):.3g} s must be less than lease, {timing.lease:.3g} s"
    if timing.backoff > timing.backoff_max:
        yield "backoff", f"{show(timing.backoff)} must be at most backoff_max, {show(timing.backoff_max)}"


def timing_warnings(timing: Timing) -> Iterator[str]:
    """What works, but worse than meant."""
    least = 2 * REDIAL_CAP + timing.heartbeat
    if timing.failover_grace < least:
        short = f"timing.failover_grace is {show_duration(timing.failover_grace)}"
        yield f"{short}: after a failover agents take up to {show_duration(least)} to come back, and late ones may count as lost"


_TERMS = ("lease_deadline", "store_timeout", "stepping down", "1 % of drift")
