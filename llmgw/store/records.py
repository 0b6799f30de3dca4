"""What a store keeps, as plain frozen values; L{llmgw.store.sql.SqlStore} reads and writes them.

Every instant here is wall time in seconds since 1970: it is shown to people and survives a restart, where no monotonic clock
does. Deadlines are instants, too. By which clock is told by L{ToldBy}, since a standby's may be another. A record is written
whole: the last one wins, so build it with C{attrs.evolve} from the one you have. C{commit} takes L{ToldBy}, L{CatalogRevision},
L{NodeRecord}, L{ShardRecord}, L{RolloutRecord}, L{KeyRecord}, L{Drop} and L{llmgw.fleet.events.FleetEvent}; L{UsageRow} goes by
C{add_usage} instead, since servers that do not lead have usage, too.
"""

from __future__ import annotations

from attrs import frozen

from llmgw.fleet.events import FleetEvent
from llmgw.fleet.records import NodeRecord, RolloutRecord, ShardRecord

__all__ = [
    "CatalogRevision", "Change", "Drop", "KeyRecord", "NodeRecord", "Opened", "RolloutRecord", "ShardRecord", "Snapshot",
    "ToldBy", "UsageRow",
]  # fmt: skip


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
class OldSecret:
    """A secret that was replaced and is good until an instant nevertheless."""

    digest: str
    until: float


@frozen
class KeyRecord:
    """An API key. Only the SHA-256 of its secret is kept, as hex in C{digest}.

    @ivar models: names it may use; empty means all.
    @ivar rpm: requests per minute, C{tpm} and C{tpd} tokens per minute and day, C{concurrency} requests at once;
        None is no limit.
    @ivar old: secrets that were replaced, for as long as they are still good.
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
    old: tuple[OldSecret, ...] = ()


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
    """Forget a record. C{kind} is C{node}, C{shard}, C{rollout} or C{key}; C{name} what it is kept under: a name or an id."""

    kind: str
    name: str


@frozen
class ToldBy:
    """The wall clock by which the records in the store are told from this commit on.

    @ivar ahead: how many seconds it is ahead of this machine's C{CLOCK_BOOTTIME}.
    """

    ahead: float


Change = ToldBy | CatalogRevision | NodeRecord | ShardRecord | RolloutRecord | KeyRecord | Drop | FleetEvent


@frozen
class Snapshot:
    """All that a new leader needs. C{catalog} is the revision in force, None before the first.

    @ivar epoch: the epoch in force when it was read.
    @ivar revision: the state revision: it grows by one with each commit, over all leaderships.
    @ivar ahead: of the last L{ToldBy}, as seen from this machine, whichever it was written on; None if that cannot be told.
    """

    fleet: str
    epoch: int
    revision: int
    catalog: CatalogRevision | None = None
    nodes: tuple[NodeRecord, ...] = ()
    shards: tuple[ShardRecord, ...] = ()
    keys: tuple[KeyRecord, ...] = ()
    rollouts: tuple[RolloutRecord, ...] = ()
    ahead: float | None = None
