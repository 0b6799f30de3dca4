"""The routing table: which endpoints serve which model, and why there are none where there are none.

An endpoint stays while it may serve. It leaves when its replica is ordered away, when its agent says that it ended or is not
healthy, or when its node is lost and its successor is ready; not because a node, a leader or a database is away. A leader that
knows less than the table on disk (a lost store) goes on routing to what that table had until a node speaks against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from attrs import frozen
from twisted.logger import Logger

from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.node import NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardReport, ShardState, Wanted, replica_of
from llmgw.planning import loras
from llmgw.planning.replicas import Replica, group
from llmgw.planning.world import Told
from llmgw.router.table import KeyEntry, RoutedEndpoint, RoutedModel, Table, endpoint
from llmgw.store.records import KeyRecord

log = Logger()
_BEGUN = (ShardState.PLACED, ShardState.STARTING, ShardState.LOADING)


@frozen
class Known:
    """What a table is made from. C{reasons} says by model why it has fewer endpoints than it should.

    @ivar denied: L{address_of} endpoints where somebody else answers.
    """

    catalog: Catalog
    nodes: Mapping[str, NodeRecord]
    shards: Mapping[str, ShardRecord]
    keys: Mapping[str, KeyRecord]
    reports: Callable[[str, str], ShardReport | None]
    told: Mapping[str, Told]
    reasons: Mapping[str, str]
    epoch: int
    secrets: Callable[[str], str]
    denied: frozenset[tuple[object, ...]] = frozenset()


def build(known: Known, before: Table | None) -> Table:
    """The table now. C{before} is the table in force, from which what this leader cannot judge is kept."""
    replicas = group(known.shards.values())
    models, endpoints = [], []
    for model in known.catalog.models:
        found, mine = _static(known, model), replicas.get(model.name, [])
        if model.profile is not None:
            serving = [replica for replica in mine if _routable(known, replica)]
            enough = _enough(known, model, serving)
            found += _ours(known, serving, enough) + _inherited(known, model.name, mine, before, enough)
        endpoints += found
        models.append(_model(known, model, mine, found))
        models += _adapters(known, models[-1], model, mine, found)
    models += _leftover(known, before, endpoints)
    keys = tuple(_key(record) for record in known.keys.values() if record.revoked is None)
    return Table(epoch=known.epoch, models=tuple(models), endpoints=tuple(endpoints), keys=keys, stopping=_stopping(known))


def _stopping(known: Known) -> tuple[str, ...]:
    """Endpoints of replicas whose engines are ordered to end."""
    ending = (r for r in known.shards.values() if r.wanted is Wanted.STOP and r.state is ShardState.STOPPING)
    return tuple(sorted(id for ids in parts_of(ending).values() for id in ids))


def _model(known: Known, model: Model, replicas: list[Replica], found: list[RoutedEndpoint]) -> RoutedModel:
    routing = model.routing
    return RoutedModel(
        model.name,
        model.aliases,
        tuple(one.id for one in found),
        routing.policy,
        "" if found else _reason(known, model.name, replicas),
        routing.fallbacks,
        routing.max_in_flight,
        routing.max_waiting,
        on_demand=model.profile is not None and model.replicas.min == 0 < model.replicas.max and not _hopeless(replicas),
    )


def _hopeless(replicas: list[Replica]) -> bool:
    """Whether no request wakes the model, since all that there is of it has failed for good: then nobody waits for it."""
    return bool(replicas) and all(replica.state is ShardState.FAILED and not replica.leaving for replica in replicas)


def _adapters(
    known: Known, base: RoutedModel, model: Model, replicas: list[Replica], routed: list[RoutedEndpoint]
) -> list[RoutedModel]:
    """The model's LoRA adapters, each on those replicas whose engines have it, and by one name, as engines of one kind do.

    A request for one wakes the model.
    """
    made = []
    for adapter in model.profile.loras if model.profile else ():
        found = {one.id: there for one in replicas if (there := loras.routed(one.shards[0], adapter.name)) is not None}
        served = next((found[id].served for one in routed for id in (one.id, replica_of(one.id)) if id in found), adapter.name)
        having = {id for id, there in found.items() if there.served == served}
        ids = [one.id for one in routed if {one.id, replica_of(one.id)} & having]
        without = f"none of its replicas has the adapter {adapter.name} loaded: llmgw status tells why"
        reason = "" if ids else without if routed else base.reason
        sleeps = base.on_demand and not routed
        made.append(
            RoutedModel(
                adapter.name, (), tuple(ids), base.policy, reason, max_waiting=base.max_waiting, on_demand=sleeps, served=served
            )
        )
    return made


def _reason(known: Known, model: str, replicas: list[Replica]) -> str:
    """Why a model has no endpoint."""
    if any(str(address[0]).rpartition("/")[0] == model for address in known.denied):
        return "what answers at its replica's address refuses the replica's key: another program may have its port"
    if model in known.reasons:
        return known.reasons[model]
    return next(filter(None, map(_failure, replicas)), "") or f"{model} has no ready replica"


def _failure(replica: Replica) -> str:
    """In short why a replica has failed, for whoever asks for its model; what is to be done is the operator's to read."""
    why = replica.last_failed[0].last_reason.partition(". ")[0]
    if replica.leaving or not why or replica.failures_here == 0:
        return ""
    how = "has failed" if replica.state is ShardState.FAILED else "failed and is started again"
    return f"{replica.id} {how}: {why}"


def _static(known: Known, model: Model) -> list[RoutedEndpoint]:
    found = []
    for number, static in enumerate(model.endpoints):
        try:
            key = known.secrets(static.key_file) if static.key_file else ""
            name = f"static:{model.name}/{number}"
            found.append(endpoint(name, static.url, model=static.model or model.name, key=key, share=static.share, static=True))
        except (OSError, ValueError) as error:
            log.error("endpoint {url} of {model} is left out: {error}", url=static.url, model=model.name, error=str(error))
    return found


def _enough(known: Known, model: Model, serving: list[Replica]) -> bool:
    """Whether so many are ready for sure that what may have been lost is not needed."""
    ready = sum(replica.ready and not _on_lost_node(known, replica) for replica in serving)
    return ready >= max(1, model.replicas.min)


def _ours(known: Known, serving: list[Replica], enough: bool) -> list[RoutedEndpoint]:
    staying = [replica for replica in serving if not (enough and _on_lost_node(known, replica))]
    return [one for replica in staying for one in _endpoints_of(known, replica)]


def _endpoints_of(known: Known, replica: Replica) -> list[RoutedEndpoint]:
    """The head's, and those of other ranks that serve for themselves."""
    others = [shard for shard in replica.shards[1:] if shard.url]
    return [_endpoint(known, replica), *(_of_shard(known, shard, shard.shard) for shard in others)]


def parts_of(shards: Iterable[ShardRecord]) -> dict[str, list[str]]:
    """By replica, the ids of its endpoints."""
    found: dict[str, list[str]] = {}
    for shard in shards:
        replica = replica_of(shard.shard)
        found.setdefault(replica, [replica])
        if shard.rank and shard.url:
            found[replica].append(shard.shard)
    return found


def _routable(known: Known, replica: Replica) -> bool:
    head = replica.shards[0]
    if not head.url or not all(map(_may_serve, replica.shards)):
        return False
    if known.denied and address_of(_endpoint(known, replica)) in known.denied:
        return False
    return not any(_unhealthy(known, shard) for shard in replica.shards)


def _unhealthy(known: Known, shard: ShardRecord) -> bool:
    """Only a node with a link can say so now; what one said before it went away is old."""
    if shard.allocation is None or shard.allocation.node not in known.told:
        return False
    report = known.reports(shard.allocation.node, shard.shard)
    return report is not None and report.attempt == shard.attempt and not report.healthy


def _on_lost_node(known: Known, replica: Replica) -> bool:
    return any(name not in known.nodes or known.nodes[name].state is NodeState.LOST for name in replica.nodes)


def _endpoint(known: Known, replica: Replica) -> RoutedEndpoint:
    return _of_shard(known, replica.shards[0], replica.id)


def _of_shard(known: Known, shard: ShardRecord, id: str) -> RoutedEndpoint:
    report = known.reports(shard.allocation.node, shard.shard) if shard.allocation else None
    name = shard.served[0] if shard.served else shard.model
    return _made(id, shard.url, name, shard.key, report.limit if report else None)


@lru_cache(maxsize=20_000)
def _made(id: str, url: str, model: str, key: str, limit: int | None) -> RoutedEndpoint:
    """The same endpoint again is the same object: a table of thousands is made with every plan."""
    return endpoint(id, url, model=model, key=key, limit=limit)


def _inherited(
    known: Known, model: str, replicas: list[Replica], before: Table | None, enough: bool = False
) -> list[RoutedEndpoint]:
    """Endpoints of replicas that this leader has not heard of, or has no record of: routed while nothing speaks against them.

    With C{enough} others, those without a record go, and those on a node that is lost.
    """
    unheard = {one.id for one in replicas if _unheard(known, one) and not (enough and _on_lost_node(known, one))}
    if before is None or (enough and not unheard):
        return []
    recorded = {replica_of(record.shard) for record in known.shards.values() if record.model == model}
    listed = next((routed.endpoints for routed in before.models if routed.name == model), ())
    there = [(one, {one.id, replica_of(one.id)}) for one in before.endpoints if one.id in listed and not one.static]
    kept = [one for one, names in there if names & unheard or not (enough or names & recorded)]
    return [one for one in kept if address_of(one) not in known.denied and not _denied(known, one)]


def _unheard(known: Known, replica: Replica) -> bool:
    """Whether our records of some rank only say that it was to run, on a node that is away, and no other speaks against that:
    after an older store is in place it may serve."""
    silent = [one for one in replica.shards if _silent(known, one)]
    if not silent or _routable(known, replica):
        return False
    return all(one in silent or (_may_serve(one) and not _unhealthy(known, one)) for one in replica.shards)


def _silent(known: Known, shard: ShardRecord) -> bool:
    """Whether it was to run when its node was last heard of, which says nothing now."""
    linked = shard.allocation is not None and shard.allocation.node in known.told
    begun = shard.state is ShardState.UNKNOWN or (shard.state in _BEGUN and not linked)
    return shard.wanted is Wanted.RUN and not shard.url and begun


def _may_serve(shard: ShardRecord) -> bool:
    return shard.wanted is Wanted.RUN and shard.state in (ShardState.READY, ShardState.UNKNOWN)


def _denied(known: Known, one: RoutedEndpoint) -> bool:
    """Whether the node at that address has reported and does not list it as ready any more."""
    for name, told in known.told.items():
        record = known.nodes.get(name)
        if record is None or record.facts is None or record.facts.address != one.host or not told.complete:
            continue
        if not any(r.state is ShardState.READY and one.port in r.ports[:1] for r in told.shards.values()):
            return True
    return False


def _leftover(known: Known, before: Table | None, endpoints: list[RoutedEndpoint]) -> list[RoutedModel]:
    """Models that the catalog does not name (any more) but that still run: as long as nobody orders them away.

    C{endpoints} is extended by theirs.
    """
    replicas = group(known.shards.values())
    names = [*replicas, *(routed.name for routed in (before.models if before else ()))]
    models = []
    adapters = {adapter.name for model in known.catalog.models if model.profile for adapter in model.profile.loras}
    adapters |= {routed.name for routed in (before.models if before else ()) if routed.served}
    for name in dict.fromkeys(names):
        if known.catalog.get(name) is not None or name in adapters:
            continue
        found = [one for r in replicas.get(name, []) if _routable(known, r) for one in _endpoints_of(known, r)]
        found += _inherited(known, name, replicas.get(name, []), before)
        if found:
            endpoints += found
            models.append(RoutedModel(name, endpoints=tuple(one.id for one in found)))
    return models


def address_of(one: RoutedEndpoint) -> tuple[object, ...]:
    """What makes an endpoint the one that was asked: the same replica elsewhere, or with another key, is another."""
    return one.id, one.host, one.port, one.key


def _key(record: KeyRecord) -> KeyEntry:
    return KeyEntry(
        record.id,
        record.digest,
        record.name,
        record.team,
        tuple(record.models),
        record.rpm,
        record.tpm,
        record.tpd,
        record.concurrency,
        record.priority,
        record.expires,
        tuple((secret.digest, secret.until) for secret in record.old),
    )
