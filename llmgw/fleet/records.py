"""What a leader remembers of a node and of a shard: its verdicts, apart from what it was told and what it wants.

They live here and not in the store because planning reads and makes them, and planning knows no store.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import evolve, field, frozen

from llmgw.fleet.model import Model, Profile
from llmgw.fleet.node import NodeFacts, NodeState
from llmgw.fleet.shard import Allocation, ShardLora, ShardState, Wanted


@frozen
class DeviceCordon:
    """Why a device takes nothing new and since when; C{by} names the operator, empty where it was closed by itself."""

    reason: str
    since: float
    by: str = ""

    @property
    def by_itself(self) -> bool:
        """Whether it opens again as soon as the device is well."""
        return not self.by

    @property
    def text(self) -> str:
        """Why, for people."""
        return self.reason if self.by_itself else f"cordoned by {self.by}" + f": {self.reason}" * bool(self.reason)


@frozen
class NodeFailure:
    """A failure on a node that may be its own: of which model, when and why."""

    model: str
    at: float
    reason: str


@frozen
class NodeRecord:
    """The leader's knowledge of a node. C{facts} is None for a node that has never been accepted.

    @ivar instance: the agent's random instance id; C{boot} the kernel's boot id.
    @ivar since: when C{state} was entered; C{reason} why.
    @ivar drain_deadline: when what is left on a draining node is stopped, None without a drain.
    @ivar outage: the drain may leave a model without any replica.
    @ivar force: the drain waits for no successor.
    @ivar quarantined_until: nothing is placed there before; None when not quarantined.
    @ivar failures: what failed there lately of what has not served there since, the newest last: what a quarantine is for.
    @ivar certificate_expires: not_after of the certificate last shown.
    @ivar device_cordons: the devices that take nothing new, by UUID.
    @ivar last_report: when the node was last heard; written now and then only.
    """

    name: str
    instance: str = ""
    boot: str = ""
    facts: NodeFacts | None = None
    state: NodeState = NodeState.JOINING
    since: float = 0.0
    reason: str = ""
    cordoned: bool = False
    draining: bool = False
    drain_deadline: float | None = None
    outage: bool = False
    force: bool = False
    quarantined_until: float | None = None
    failures: tuple[NodeFailure, ...] = ()
    certificate_expires: float | None = None
    last_report: float | None = None
    device_cordons: Mapping[str, DeviceCordon] = field(factory=dict)


@frozen
class ShardRecord:
    """What is wanted of one shard and what the leader concludes of it. The agent's report itself is not kept.

    @ivar shard: its id, C{MODEL/NUMBER/RANK}; C{number} is the replica's.
    @ivar nodes: the names of all nodes of its replica, the head's first; C{allocation.node} is this shard's own.
    @ivar operation: the id of the order in force: the same effect is asked for under the same id for ever.
    @ivar served: the names its engine was started to answer to.
    @ivar crashes: when it crashed, the newest last, no older than the crash window.
    @ivar node_failures: the same of failures that are its node's and so count for no budget.
    @ivar first_reason: why the first of these happened, C{last_reason} the last; C{cause} the last one's class (L{causes}).
    @ivar next_at: when a shard in backoff is tried again.
    @ivar placed_revision: the state revision of its placement; an older report says nothing about it.
    @ivar excluded: nodes it must not be placed on, each with the instant until which.
    @ivar url: where its engine serves and C{key} with what secret, so that routers can be fed before any agent reports.
    @ivar replace: why another replica shall take its place although its generation is current; empty mostly.
    @ivar outage: it may be replaced even while nobody else serves its model.
    @ivar served_since: since when this attempt has been ready, as far as we know; 0 before.
    @ivar given_up: its node was lost, so another replica may have taken its place.
    @ivar adopted: it was found running and taken over, not started by an order.
    @ivar to_sleep: once it is drained its engine is put to sleep instead of stopped.
    @ivar fault: what took its last attempt down where that was not its own failure; empty where it was, or nothing has.
    @ivar drain: how many seconds its requests may take when it leaves, as its model said last; None for C{timing.drain}.
    @ivar loras: the adapters of its engine as its agent said last; None before. C{profile} has those that are wanted of it.
    @ivar remembered: it leaves since fewer are wanted, so its failures count for the next one (L{llmgw.planning.budget}).
    @ivar peak: the most bytes of one device that its engine was seen to use while it served; None if it was never seen.
    """

    shard: str
    model: str
    number: int
    rank: int = 0
    nodes: tuple[str, ...] = ()
    generation: str = ""
    attempt: int = 0
    wanted: Wanted = Wanted.RUN
    state: ShardState = ShardState.PENDING
    since: float = 0.0
    reason: str = ""
    operation: str = ""
    profile: Profile | None = None
    allocation: Allocation | None = None
    served: tuple[str, ...] = ()
    crashes: tuple[float, ...] = ()
    node_failures: tuple[float, ...] = ()
    cause: str = ""
    first_reason: str = ""
    last_reason: str = ""
    next_at: float | None = None
    placed_revision: int = 0
    excluded: Mapping[str, float] = field(factory=dict)
    url: str = ""
    key: str = field(default="", repr=False)
    replace: str = ""
    outage: bool = False
    served_since: float = 0.0
    given_up: bool = False
    adopted: bool = False
    peak: int | None = None
    to_sleep: bool = False
    drain: float | None = None
    fault: str = ""
    remembered: bool = False
    loras: tuple[ShardLora, ...] | None = None

    def with_failures_of(self, other: ShardRecord) -> ShardRecord:
        """As it is, but with the history of C{other}."""
        return evolve(
            self,
            crashes=other.crashes,
            node_failures=other.node_failures,
            cause=other.cause,
            first_reason=other.first_reason,
            last_reason=other.last_reason,
            excluded=other.excluded,
        )

    @property
    def failed_at(self) -> float:
        """When it failed last; 0 if it has not lately."""
        return max((*self.crashes, *self.node_failures), default=0.0)


class RolloutState(StrEnum):
    """How far the change of a model to the catalog's profile is."""

    RUNNING = "running"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    UNDONE = "undone"


@frozen
class RolloutRecord:
    """The change of one model from the profile that was good to the catalog's, kept for as long as the model is in the catalog.

    @ivar target: the catalog's profile that this is about; another one in the catalog begins another rollout.
    @ivar back: the last good profile, which a rollback returns to; None if there is none. Of a rollout that is done: the one
        that was good before.
    @ivar since: when C{state} was entered; C{reason} why.
    @ivar paused: no further replica is changed before an operator resumes.
    @ivar failures: the attempts with C{target} that failed, C{MODEL/NUMBER:ATTEMPT}.
    @ivar outage: an old replica may make room even if nobody else serves the model.
    """

    model: str
    state: RolloutState
    target: Profile
    back: Profile | None = None
    since: float = 0.0
    reason: str = ""
    paused: bool = False
    failures: tuple[str, ...] = ()
    outage: bool = False

    @property
    def pinned(self) -> bool:
        """Whether the model stays at C{back} although its catalog says C{target}."""
        return self.back is not None and self.state in (RolloutState.ROLLED_BACK, RolloutState.UNDONE)

    @property
    def held(self) -> bool:
        """Whether nothing may change for now, so that what there is of either profile is well."""
        return self.paused and self.state is RolloutState.RUNNING

    def in_force(self, model: Model) -> Model:
        """C{model} as its replicas shall be run now: with the profile that it is pinned to, if it is."""
        if self.target == model.profile and self.back is not None and (self.pinned or self.held):
            return evolve(model, profile=self.back)
        return model
