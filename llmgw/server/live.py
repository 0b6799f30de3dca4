"""What the router is doing now: the workers' metrics as one object for C{llmgw top}, and a list of engines for Prometheus.

Counters and histograms go out as they are, counted since the workers' start; whoever watches takes two and looks at the
difference. What an engine says of itself (its cache, its own queue) stands beside what the routers have in flight there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from llmgw.fleet.shard import EngineLoad
from llmgw.router.table import Table

Data = dict[str, Any]
_TOKENS = {"prompt": "prompt_tokens", "cached": "cached_tokens", "completion": "completion_tokens"}


def top(text: str, table: Table | None, loads: Mapping[str, EngineLoad], now: float) -> Data:
    """All models of the table with their replicas.

    @param text: the workers' metrics, summed.
    @param loads: by replica, what its engine last said of itself.
    """
    models: dict[str, Data] = {}
    replicas: dict[tuple[str, str], Data] = {}
    for model in table.models if table is not None else ():
        rows = [_replica(id, loads.get(id, EngineLoad())) for id in model.endpoints]
        replicas |= {(model.name, row["id"]): row for row in rows}
        models[model.name] = {
            "name": model.name, "reason": model.reason, "waiting": 0, "waiting_high": 0, "prompt_tokens": 0, "cached_tokens": 0,
            "completion_tokens": 0, "prefix_blocks": 0, "prefix_held": 0, "replicas": rows,
        }  # fmt: skip
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _add(sample.name.removeprefix("llmgw_"), sample.labels, sample.value, models, replicas)
    return {"at": now, "models": list(models.values())}


def _replica(id: str, load: EngineLoad) -> Data:
    return {
        "id": id, "in_flight": 0, "requests": 0, "failed": 0, "ttft": {}, "breaker_open": False,
        "engine_running": load.running, "engine_waiting": load.waiting, "kv_used": load.kv_used,
    }  # fmt: skip


def _add(
    name: str, labels: Mapping[str, str], value: float, models: dict[str, Data], replicas: dict[tuple[str, str], Data]
) -> None:
    model = models.get(labels.get("model", ""))
    replica = replicas.get((labels.get("model", ""), labels.get("replica", "")))
    if replica is not None:
        match name:
            case "in_flight":
                replica["in_flight"] = int(value)
            case "breaker_open":
                replica["breaker_open"] = bool(value)
            case "requests_total":
                replica["requests"] += int(value)
                replica["failed"] += int(value) if labels["status"] >= "500" else 0
            case "ttft_seconds_bucket":
                replica["ttft"][labels["le"]] = int(value)
    elif model is not None:
        match name:
            case "waiting":
                model["waiting"] += int(value)
                model["waiting_high"] += int(value) if labels["class"] == "high" else 0
            case "tokens_total":
                model[_TOKENS[labels["kind"]]] = int(value)
            case "prefix_blocks_total":
                model["prefix_blocks"] = int(value)
            case "prefix_blocks_held_total":
                model["prefix_held"] = int(value)


def targets(table: Table | None) -> list[Data]:
    """The engines that llmgw runs, as Prometheus' C{http_sd} wants them: their own metrics, labelled with model and replica."""
    if table is None:
        return []
    models = {id: model.name for model in table.models if not model.served for id in model.endpoints}
    return [
        {
            "targets": [f"[{one.host}]:{one.port}" if ":" in one.host else f"{one.host}:{one.port}"],
            "labels": {"__metrics_path__": f"{one.base}/metrics", "model": models.get(one.id, ""), "replica": one.id},
        }
        for one in table.endpoints
        if not one.static
    ]
