"""One node for people: its hardware, each device with what is claimed of it and really used, its engines, its downloads."""

from __future__ import annotations

import time

from llmgw.cli.client import Answer
from llmgw.cli.render import instant, table
from llmgw.cli.session import Session
from llmgw.errors import LlmgwError
from llmgw.fleet.line import escape
from llmgw.fleet.units import show_size


class NoSuchNode(LlmgwError):
    """Nothing has this name."""

    code = "not_found"


def show_node(session: Session, name: str) -> None:
    """Print it.

    @raise NoSuchNode: the server knows none of this name.
    """
    nodes = session.client.get("/v1/nodes").get("nodes", [])
    found = next((node for node in nodes if node["name"] == name), None)
    if found is None:
        raise NoSuchNode(f"no node is called {name}; known: {', '.join(node['name'] for node in nodes) or 'none'}")
    session.show(found, lambda: node_view(found, time.time()))


def node_view(node: Answer, now: float) -> str:
    """The whole of it."""
    from llmgw.cli.status import node_table

    parts = [node_table([node], now), escape(" · ".join(_system(node)))]
    if devices := node.get("devices"):
        parts.append(device_table(devices))
    if fetches := node.get("fetches"):
        parts.append(table(("DOWNLOAD", "STATE"), [(one["weights"], one["text"]) for one in fetches]))
    return "\n\n".join(parts)


def _system(node: Answer) -> list[str]:
    said = {
        "driver {}": node.get("driver"),
        "CUDA {}": node.get("cuda"),
        "kernel {}": node.get("kernel"),
        "{} cpus": node.get("cpus"),
        "memory {}": _size(node.get("memory")),
        "{} available": _size(node.get("memory_available")),
        "disk {} free": _size(node.get("disk_free")),
        "/dev/shm {} free": _size(node.get("shm_free")),
        "{} open files": node.get("nofile"),
        "{} lockable": _size(node.get("memlock")),
    }
    return [text.format(value) for text, value in said.items() if value not in (None, "")]


def _size(value: int | None) -> str:
    return "" if value is None else show_size(value)


def device_table(devices: list[Answer]) -> str:
    """One row per device; a MIG instance stands below its parent."""
    headers = ("GPU", "UUID", "NAME", "CC", "TOTAL", "RESERVED", "CLAIMED", "OBSERVED", "HELD BY", "STATE")
    return table(headers, [_row(device) for device in devices])


def _row(device: Answer) -> list[str]:
    sizes = [_size(device.get(f"memory_{name}")) for name in ("total", "reserved", "claimed", "used")]
    index = f"{device.get('index')} mig" if device.get("parent") else str(device.get("index"))
    capability = device.get("capability") or device.get("architecture") or ""
    return [index, device["uuid"], device.get("name", ""), capability, *sizes, ", ".join(_holders(device)), _state(device)]


def _holders(device: Answer) -> list[str]:
    foreign = [
        f"pid {one['pid']} {one['name']} ({_size(one.get('memory')) or 'unknown'}, not ours)"
        for one in device.get("foreign") or ()
    ]
    return [*(device.get("shards") or ()), *foreign]


def _state(device: Answer) -> str:
    if not device.get("problem"):
        return "ok"
    cordon = device.get("cordon") or {}
    return f"{device['problem']}, cordoned since {instant(cordon['since'])}" if cordon else str(device["problem"])
