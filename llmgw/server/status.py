"""The fleet as one object for C{llmgw status --json}: what is wanted, what is there, and why they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llmgw.fleet.model import Model
from llmgw.fleet.node import Installation, NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ShardReport, ShardState, Wanted
from llmgw.planning.adopt import Orphan
from llmgw.planning.lifecycle import failed_there, in_quarantine
from llmgw.planning.observe import addresses
from llmgw.planning.replicas import Replica, group, wanted
from llmgw.planning.versions import outdated
from llmgw.server.controller import Controller
from llmgw.server.devices import Claims, claims, devices_data, equipment_data
from llmgw.server.fetches import fetch_data
from llmgw.server.https import HttpsCertificate
from llmgw.server.rollouts import in_force, rollout_data
from llmgw.server.routing import reasons

Data = dict[str, Any]


class Status:
    """Everything people ask to see.

    @param role: C{leader}, C{standby} or C{router}.
    @param in_flight: requests under way on an endpoint.
    @param https: the certificate that clients are shown.
    @param expires: when the server's own certificate ends, None without one.
    @param warnings: what the configuration's reader had to remark, and whose file is not the catalog in force.
    @param servers: all servers of the store, this one first; empty where there can be only one.
    """

    def __init__(
        self,
        controller: Controller,
        role: Callable[[], str],
        in_flight: Callable[[str], int],
        https: HttpsCertificate,
        expires: Callable[[], float | None] = lambda: None,
        warnings: Sequence[str] = (),
        servers: Callable[[], list[Data]] = list,
    ) -> None:
        self._controller = controller
        self._role = role
        self._in_flight = in_flight
        self._https = https
        self._expires = expires
        self._warnings = warnings
        self._servers = servers

    def all(self) -> Data:
        """The whole object."""
        return {
            "server": self.server(),
            "nodes": self.nodes(),
            "models": self.models(),
            "orphans": [orphan_data(orphan) for orphan in self._orphans()],
        }

    def server(self) -> Data:
        """This server: C{notes} say that something is wrong now, C{warnings} that the configuration could be better."""
        controller = self._controller
        return {
            "name": controller.name,
            "role": self._role(),
            "epoch": controller.leadership.epoch,
            "catalog": controller.truth.catalog_revision,
            "revision": controller.truth.revision,
            "certificate_expires": self._expires(),
            "https_expires": self._https.expires,
            "notes": self._notes(),
            "warnings": list(self._warnings),
            "servers": self._servers(),
        }

    def _notes(self) -> list[str]:
        controller = self._controller
        failing, problem = controller.commits.failing, controller.leadership.problem
        found = [f"the store does not work, nothing is changed: {failing}"] if failing else []
        if problem:
            found.append(f"who leads cannot be seen, the routers go on: {problem}")
        held = controller.outcome.holding if controller.outcome else None
        if held is not None and held.brake:
            found.append(held.text)
        return [*found, *self._https.notes(), *controller.notes.recent(), *controller.remarks]

    def _orphans(self) -> Iterable[Orphan]:
        return self._controller.outcome.orphans if self._controller.outcome else ()

    def nodes(self) -> list[Data]:
        """All nodes by name."""
        held = claims(self._controller.truth.shards.values())
        return [self._node(record, held) for _, record in sorted(self._controller.truth.nodes.items())]

    def _node(self, record: NodeRecord, held: Claims) -> Data:
        here = self._controller.members.present.get(record.name)
        facts = here.facts if here else record.facts
        now = self._controller.clocks.wall()
        flags = [name for name in ("cordoned", "draining") if getattr(record, name)]
        flags += ["quarantined"] if in_quarantine(record, now) else []
        return {
            "name": record.name,
            "state": record.state,
            "flags": flags,
            "version": facts.version if facts else "",
            "address": facts.address if facts else "",
            "devices": devices_data(record, facts.inventory, held) if facts else [],
            **(equipment_data(facts.inventory) if facts else {}),
            "memory": facts.inventory.memory_total if facts else None,
            "memory_available": facts.inventory.memory_available if facts else None,
            "cpus": facts.inventory.cpus if facts else None,
            "installations": [
                {"name": i.name, "adapter": i.adapter, "version": i.version, "problem": i.problem} for i in facts.installations
            ]
            if facts
            else [],
            "labels": dict(facts.labels) if facts else {},
            "fabrics": [fabric.name for fabric in facts.fabrics] if facts else [],
            "since": record.since,
            "reason": record.reason,
            "quarantine": _quarantine(record) if in_quarantine(record, now) else None,
            "certificate_expires": record.certificate_expires,
            "fetches": [fetch_data(fetch) for fetch in here.fetches] if here else [],
            "notes": ([facts.inventory.problem] if facts and facts.inventory.problem else [])
            + (_outdated(record.name, facts.installations, here.told.shards.values()) if facts and here else [])
            + (self._elsewhere(record.name, here.told.shards) if here else []),
        }

    def _elsewhere(self, node: str, shards: Iterable[str]) -> list[str]:
        """A remark for each engine that still serves at an address which its node had before."""
        truth, found = self._controller.truth, []
        for record in (truth.shards[shard] for shard in sorted(shards) if shard in truth.shards):
            if record.allocation is None or record.wanted is not Wanted.RUN or not record.state.live:
                continue
            old, new = addresses(record, truth.nodes)
            if old != new:
                again = f"it goes on while that answers: llmgw restart {record.model} --node {node}"
                found.append(f"{record.shard} listens at {old}, {node} is at {new} now; {again}")
        return found

    def models(self) -> list[Data]:
        """All models of the catalog in its order, then those that only run."""
        controller = self._controller
        replicas = group(controller.truth.shards.values())
        models = list(controller.truth.catalog.models)
        left = [Model(name) for name in sorted(replicas) if controller.truth.catalog.get(name) is None]
        said = reasons(controller.outcome)
        return [self._model(model, replicas.get(model.name, []), said.get(model.name, "")) for model in [*models, *left]]

    def _model(self, model: Model, replicas: list[Replica], reason: str) -> Data:
        controller = self._controller
        doubts = controller.routing.doubts.all()
        shown = [self._replica(replica, doubts) for replica in replicas]
        ready = sum(replica.ready for replica in replicas)
        want = wanted(model, self._controller.demand.wanted) if model.profile else 0
        endpoints = [
            {"url": one.url, "model": one.model or model.name, "failing": doubts.get(f"static:{model.name}/{number}", "")}
            for number, one in enumerate(model.endpoints)
        ]
        return {
            "name": model.name,
            "aliases": list(model.aliases),
            "wanted": want,
            "ready": ready,
            "scaling": controller.demand.data(model),
            "reason": reason or self._worst(shown, ready, want),
            "generation": in_force(controller, model).generation,
            "rollout": rollout_data(controller, model, replicas) if model.profile else None,
            "replicas": shown,
            "endpoints": endpoints,
            "in_flight": sum(self._in_flight(one.id) for one in replicas)
            + sum(self._in_flight(f"static:{model.name}/{number}") for number in range(len(endpoints))),
        }

    @staticmethod
    def _worst(replicas: list[Data], ready: int, want: int) -> str:
        """Each replica shows its own reason; the model's is only for what no replica says."""
        return "" if ready >= want or replicas else "not placed yet"

    def _replica(self, replica: Replica, doubts: Mapping[str, str]) -> Data:
        head = replica.shards[0]
        shards = [self._shard(shard) for shard in replica.shards]
        return {
            "id": replica.id,
            "generation": replica.generation,
            "state": replica.state,
            "endpoint": head.url or None,
            "replace": head.replace,
            "in_flight": self._in_flight(replica.id),
            "failing": _failing(replica, shards, doubts) if replica.state is ShardState.READY else "",
            "shards": shards,
        }

    def _shard(self, record: ShardRecord) -> Data:
        assert record.allocation is not None
        node = record.allocation.node
        report = self._controller.members.report_of(node, record.shard)
        report = report if report and report.attempt == record.attempt else None
        running = report is not None and report.state.live and record.state.live
        return {
            "id": record.shard,
            "node": node,
            "rank": record.rank,
            "attempt": record.attempt,
            "state": record.state,
            "pid": report.pid if report and running else None,
            "port": record.allocation.ports[0] if record.allocation.ports else None,
            "since": record.since,
            "reason": record.reason or (record.last_reason if record.state is not ShardState.READY else ""),
            "first_reason": record.first_reason,
            "last_reason": record.last_reason,
            "crashes": len(record.crashes) + len(record.node_failures),
            "cause": record.cause,
            "next_at": record.next_at,
            "devices": list(record.allocation.devices),
            "gpus": self._indexes(record),
            "adopted": record.adopted,
            "loras": [{"name": one.name, "weights": one.weights, "problem": one.problem} for one in record.loras or ()],
            **(_said(report) if report else {}),
        }

    def _indexes(self, record: ShardRecord) -> list[int]:
        assert record.allocation is not None
        node = self._controller.truth.nodes.get(record.allocation.node)
        devices = node.facts.inventory.devices if node and node.facts else ()
        return [device.index for device in devices if device.uuid in record.allocation.devices]

    def line(self) -> str:
        """The one line of C{systemctl status}."""
        controller = self._controller
        nodes = controller.truth.nodes.values()
        ready = sum(node.state is NodeState.READY for node in nodes)
        replicas = [replica for found in group(controller.truth.shards.values()).values() for replica in found]
        serving = sum(replica.ready for replica in replicas)
        role = self._role()
        if role == "router":
            return f"router for {len(controller.truth.catalog.models)} models"
        lead = f"{role} epoch {controller.leadership.epoch}"
        return f"{lead}, {ready}/{len(nodes)} nodes ready, {serving}/{len(replicas)} replicas ready"


def _failing(replica: Replica, shards: list[Data], doubts: Mapping[str, str]) -> str:
    """Why a replica that is there does not serve well, empty if it does: by its agent, else by what routers tell."""
    found = [text for shard in shards for text in shard.get("conditions", ()) if text.startswith("unhealthy")]
    return next((text for text in [*found, *(doubts.get(id) for id in (replica.id, *(s["id"] for s in shards)))] if text), "")


def _quarantine(record: NodeRecord) -> Data:
    """Until when nothing goes to a node, and what failed there."""
    failures = [{"model": one.model, "at": one.at, "reason": one.reason} for one in record.failures]
    return {"until": record.quarantined_until, "text": failed_there(record), "failures": failures}


def _outdated(node: str, installations: Iterable[Installation], reports: Iterable[ShardReport]) -> list[str]:
    """A remark for each installation that was replaced on a node while engines of its former version run on."""
    now = {installation.name: installation.version for installation in installations}
    return [
        f"{', '.join(shards)} still on {name} {version}, {now[name]} is installed: llmgw restart --outdated --node {node}"
        for (name, version), shards in outdated(installations, reports).items()
    ]


def _said(report: ShardReport) -> Data:
    return {
        "version": report.version,
        "installation": report.installation,
        "progress": report.progress,
        "phase": report.phase,
        "healthy": report.healthy,
        "conditions": list(report.conditions),
    }


def orphan_data(orphan: Orphan) -> Data:
    """One orphan for people and programs."""
    report = orphan.report
    return {
        "shard": report.shard,
        "node": orphan.node,
        "model": report.model,
        "generation": report.generation,
        "attempt": report.attempt,
        "state": report.state,
        "pid": report.pid,
        "port": report.ports[0] if report.ports else None,
        "devices": list(report.devices),
        "since": report.since,
        "reason": orphan.why,
    }
