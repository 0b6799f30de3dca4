"""The control plane's part of C{/metrics}: the same facts as C{llmgw status}, as gauges for alerts.

Made anew at each scrape from the status object; the routers' counters come from their workers (router/histogram.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from llmgw.fleet.node import NodeState
from llmgw.router.histogram import Family

Data = dict[str, Any]


def fleet_metrics(status: Data) -> str:
    """Prometheus text of what L{llmgw.server.status.Status.all} says."""
    return "".join(f"{line}\n" for family in _families(status) for line in family.lines())


def _gauge(name: str, help: str, *labels: str) -> Family:
    return Family(f"llmgw_{name}", "gauge", help, labels)


def _families(status: Data) -> Iterator[Family]:
    server, nodes, models = status["server"], status["nodes"], status["models"]
    leader = _gauge("leader", "1 where this server commands the fleet.")
    leader.cell()[0] = float(server["role"] == "leader")
    epoch = _gauge("epoch", "Number of the leadership held or last seen.")
    epoch.cell()[0] = server["epoch"]
    catalog = _gauge("catalog_revision", "The catalog in force.")
    catalog.cell()[0] = server["catalog"]
    orphans = _gauge("orphans", "Engines that run although nothing wants them.")
    orphans.cell()[0] = len(status["orphans"])
    notes = _gauge("notes", "Remarks of the server that somebody should read, see llmgw status.")
    notes.cell()[0] = len(server["notes"])
    yield from (leader, epoch, catalog, orphans, notes, _nodes(nodes), *_replicas(models), *_devices(nodes))
    yield _certificates(server, nodes)


def _nodes(nodes: list[Data]) -> Family:
    family, found = _gauge("nodes", "Nodes by state.", "state"), Counter(node["state"] for node in nodes)
    for state in NodeState:
        family.cell(state)[0] = found[state]
    return family


def _replicas(models: list[Data]) -> Iterator[Family]:
    for key in ("wanted", "ready"):
        family = _gauge(f"replicas_{key}", f"Replicas {key}, by model.", "model")
        for model in models:
            family.cell(model["name"])[0] = model[key]
        yield family


def _devices(nodes: list[Data]) -> Iterator[Family]:
    total, used, sick = (
        _gauge(f"devices{suffix}", f"Devices {text}, by node.", "node")
        for suffix, text in (("", "there"), ("_used", "with a shard"), ("_sick", "with a problem"))
    )
    for node in nodes:
        devices = node["devices"]
        total.cell(node["name"])[0] = len(devices)
        used.cell(node["name"])[0] = sum(bool(device["shards"]) for device in devices)
        sick.cell(node["name"])[0] = sum(bool(device["problem"]) for device in devices)
    yield from (total, used, sick)


def _certificates(server: Data, nodes: list[Data]) -> Family:
    family = _gauge("certificate_expires", "When a certificate ends, in seconds since 1970.", "role", "name")
    for role, owner in [("server", server), *(("node", node) for node in nodes)]:
        if owner["certificate_expires"] is not None:
            family.cell(role, owner["name"])[0] = owner["certificate_expires"]
    if server["https_expires"] is not None:
        family.cell("router", server["name"])[0] = server["https_expires"]
    return family
