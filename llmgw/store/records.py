"""What a store keeps, as plain frozen values; L{llmgw.store.sql.SqlStore} reads and writes them.

Every instant here is wall time in seconds since 1970: it is shown to people and survives a restart, where no monotonic clock
does. Deadlines are instants, too. A record is written whole: the last one wins, so build it with C{attrs.evolve} from the one
you have. C{commit} takes L{CatalogRevision}, L{NodeRecord}, L{ShardRecord}, L{KeyRecord}, L{Drop} and
L{llmgw.fleet.events.FleetEvent}; L{UsageRow} goes by C{add_usage} instead, since servers that do not lead have usage, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Profile
from llmgw.fleet.node import NodeFacts, NodeState
from llmgw.fleet.shard import Allocation, ShardState, Wanted


@frozen
class Opened:
    """What opening found. C{fresh} is true when this very opening made the store: a fleet may run that it knows nothing of.

    @ivar fleet: the fleet id it belongs to, empty for a router only.
    @ivar path: the file, or the database's address without its password.
    """

    fleet: str
    fresh: bool
    path: str


@frozen
class CatalogRevision:
    """One numbered catalog. The one with the highest number is in force.

    @ivar text: canonical JSON as made by C{config.catalog.dump_catalog}; read it with C{load_catalog}.
    @ivar origin: what made it, for people: C{apply models.yaml by ann}, C{start}, C{SIGHUP}.
    """

    number: int
    text: str
    at: float
    origin: str = ""


@frozen
class NodeRecord:
    """The leader's knowledge of a node. C{facts} is None for a node that has never been accepted.

    @ivar instance: the agent's random instance id; C{boot} the kernel's boot id.
    @ivar since: when C{state} was entered; C{reason} why.
    @ivar drain_deadline: when what is left on a draining node is stopped, None without a drain.
    @ivar quarantined_until: nothing is placed there before; None when not quarantined.
    @ivar certificate_expires: not_after of the certificate last shown.
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
    quarantined_until: float | None = None
    certificate_expires: float | None = None
    last_report: float | None = None


@frozen
class ShardRecord:
    """What is wanted of one shard and what the leader concludes of it. The agent's report itself is not kept.

    @ivar shard: its id, C{MODEL/NUMBER/RANK}; C{number} is the replica's.
    @ivar nodes: the names of all nodes of its replica, the head's first; C{allocation.node} is this shard's own.
    @ivar operation: the id of the order in force: the same effect is asked for under the same id for ever.
    @ivar served: the names its engine was started to answer to.
    @ivar crashes: when it crashed, the newest last, no older than the crash window.
    @ivar first_reason: why the first of these crashes happened, C{last_reason} the last.
    @ivar next_at: when a shard in backoff is tried again.
    @ivar placed_revision: the state revision of its placement; an older report says nothing about it.
    @ivar excluded: nodes it must not be placed on, each with the instant until which.
    @ivar url: where its engine serves and C{key} with what secret, so that routers can be fed before any agent reports.
    @ivar adopted: it was found running and taken over, not started by an order.
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
    first_reason: str = ""
    last_reason: str = ""
    next_at: float | None = None
    placed_revision: int = 0
    excluded: Mapping[str, float] = field(factory=dict)
    url: str = ""
    key: str = field(default="", repr=False)
    adopted: bool = False


@frozen
class KeyRecord:
    """An API key. Only the SHA-256 of its secret is kept, as hex in C{digest}.

    @ivar models: names it may use; empty means all.
    @ivar rpm: requests per minute, C{tpm} and C{tpd} tokens per minute and day, C{concurrency} requests at once;
        None is no limit.
    """

    id: str
    name: str
    digest: str
    created: float
    expires: float | None = None
    revoked: float | None = None
    team: str = ""
    models: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None
    tpd: int | None = None
    concurrency: int | None = None
    priority: int = 0


@frozen
class UsageRow:
    """What one key used of one model within one hour; rows of the same hour, key and model add up.

    @ivar hour: the hour's first second.
    @ivar key: the key's id, empty where no key was asked for.
    @ivar seconds: time spent on the answers, from the request's last byte to the answer's last.
    """

    hour: int
    key: str
    model: str
    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


@frozen
class Drop:
    """Forget a record. C{kind} is C{node}, C{shard} or C{key}; C{name} the node's name, shard's id or key's id."""

    kind: str
    name: str


Change = CatalogRevision | NodeRecord | ShardRecord | KeyRecord | Drop | FleetEvent


@frozen
class Snapshot:
    """All that a new leader needs. C{catalog} is the revision in force, None before the first.

    @ivar epoch: the epoch in force when it was read.
    @ivar revision: the state revision: it grows by one with each commit, over all leaderships.
    """

    fleet: str
    epoch: int
    revision: int
    catalog: CatalogRevision | None = None
    nodes: tuple[NodeRecord, ...] = ()
    shards: tuple[ShardRecord, ...] = ()
    keys: tuple[KeyRecord, ...] = ()
