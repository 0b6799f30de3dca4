"""The control plane's clocks."""

from __future__ import annotations

from attrs import frozen


@frozen
class Timing:
    """The control plane's clocks, in seconds; C{config.server} holds them to each other."""

    heartbeat: float = 5.0
    lost_after: float = 300.0
    failover_grace: float = 60.0
    stop_grace: float = 20.0
    drain: float = 600.0
    node_drain: float = 3600.0
    lease: float = 15.0
    backoff: float = 10.0
    backoff_max: float = 300.0
    crash_budget: int = 5
    crash_window: float = 1800.0
