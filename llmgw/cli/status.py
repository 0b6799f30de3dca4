"""C{llmgw status}: one screen that says what runs, what does not, and why.

What is as wanted takes few words: many ready replicas are counted, each one that is not ready is shown with its reason.
"""

from __future__ import annotations

import time

import click

from llmgw.cli.client import Answer
from llmgw.cli.render import ago, count, day, instant, ranges, table
from llmgw.cli.session import Session, json_option, pass_session
from llmgw.fleet.line import escape
from llmgw.fleet.units import show_duration

SHOWN_READY = 4
SOON = 14 * 86400
DOT = " · "


@click.command(name="status")
@click.argument("node", required=False)
@click.option("--check", is_flag=True, help="Say only what is not as wanted, and exit 1 if anything is not.")
@json_option
@click.pass_context
@pass_session
def status_command(session: Session, context: click.Context, node: str | None, check: bool) -> None:
    """What runs, what does not, and why; of NODE, its hardware, devices and downloads."""
    if node is not None:
        from llmgw.cli.nodeview import show_node

        show_node(session, node)
        return
    answer = session.client.get("/v1/status")
    now = time.time()
    wrong = complaints(answer, now)
    if check:
        session.show(answer, lambda: "\n".join(map(escape, wrong)) or "all is as wanted")
        context.exit(1 if wrong else 0)
    session.show(answer, lambda: screen(answer, now))


def screen(status: Answer, now: float) -> str:
    """The whole of it: a header, the models, the nodes, the orphans, then remarks."""
    parts = [header(status)]
    if status.get("models"):
        parts.append(model_table(status["models"], now))
    if status.get("nodes"):
        parts.append(node_table(status["nodes"], now))
    if orphans := status.get("orphans"):
        parts.append(f"{count(len(orphans), 'orphan')} left running, see: llmgw orphans")
    warnings = [f"note: {warning}" for warning in status["server"].get("warnings") or ()]
    if notes := [*_server_notes(status["server"], now), *warnings]:
        parts.append("\n".join(map(escape, notes)))
    return "\n\n".join(parts)


def _server_notes(server: Answer, now: float) -> list[str]:
    expiry = _expiry(server, now)
    return [*map(str, server.get("notes") or ()), *([f"{server.get('name')}: {expiry}"] if expiry else [])]


def header(status: Answer) -> str:
    """C{cp1 leader epoch 7 · catalog 41 · 3 nodes, 24 devices (17 used)}."""
    server, nodes = status["server"], status.get("nodes") or []
    leading = f"{server.get('name')} {server.get('role')}"
    if server.get("epoch"):
        leading += f" epoch {server['epoch']}"
    others = [f"{one['name']} {one.get('role')}" for one in server.get("servers") or () if one["name"] != server.get("name")]
    catalog = [f"catalog {server['catalog']}"] if server.get("catalog") else []
    fleet = []
    if server.get("role") != "router":
        devices = [device for node in nodes for device in node.get("devices") or ()]
        used = f", {count(len(devices), 'device')} ({sum(map(_used, devices))} used)" if devices else ""
        fleet = [count(len(nodes), "node") + used]
    return escape(DOT.join([leading, *others, *catalog, *fleet]))


def model_table(models: list[Answer], now: float) -> str:
    """One row per model."""
    load = [name for name in ("in_flight", "waiting") if any(model.get(name) is not None for model in models)]
    headers = ["MODEL", "READY", "REPLICAS", *(name.replace("_", " ").upper() for name in load)]
    return table(headers, [[*_model_row(model, now), *(_dash(model.get(name)) for name in load)] for model in models])


def _model_row(model: Answer, now: float) -> list[str]:
    replicas = model.get("replicas") or []
    ready = [replica for replica in replicas if replica.get("state") == "ready" and not replica.get("failing")]
    rest = [replica for replica in replicas if replica.get("state") != "ready" or replica.get("failing")]
    shown = [replica_text(replica, now) for replica in ready[:SHOWN_READY]]
    if len(ready) > SHOWN_READY:
        nodes = {shard.get("node") for replica in ready for shard in replica.get("shards") or ()}
        shown = [f"{len(ready)} ready on {count(len(nodes), 'node')}"]
    shown += [replica_text(replica, now) for replica in rest]
    if not replicas and model.get("endpoints"):
        shown = [f"{count(len(model['endpoints']), 'endpoint')} elsewhere"]
    shown += [f"{one['url']} failing: {one['failing']}" for one in model.get("endpoints") or () if one.get("failing")]
    if reason := model.get("reason"):
        see = f", see: llmgw explain {model['name']}" if model.get("ready", 0) < model.get("wanted", 0) else ""
        shown.append(f"{reason}{see}")
    return [model["name"], f"{model.get('ready', 0)}/{model.get('wanted', 0)}", DOT.join(shown)]


def _dash(value: object) -> str:
    return "-" if value is None else str(value)


def replica_text(replica: Answer, now: float) -> str:
    """C{n1 gpus 0-3 ready 6 d}, or C{n2+n3 loading 62 % (weights, 4 m 10 s)}, or C{pending: why}."""
    shards = replica.get("shards") or []
    state = replica.get("state", "unknown")
    where = "+".join(dict.fromkeys(shard["node"] for shard in shards if shard.get("node")))
    devices = ranges(index for shard in shards[:1] for index in shard.get("gpus") or ())
    gpus = f" gpu{'s' * (not devices.isdigit())} {devices}" if devices else ""
    worst = next((shard for shard in shards if shard.get("state") == state), shards[0] if shards else {})
    lasting = ago(worst.get("since") or replica.get("since"), now)
    on_its_way = state in ("placed", "starting", "loading")
    said = " ".join(filter(None, (where + gpus, state, _progress(worst, lasting) if on_its_way else lasting)))
    if on_its_way or state == "ready":
        return said + (f", failing: {replica['failing']}" if replica.get("failing") else "") + _crashes(worst)
    reason = worst.get("reason") or replica.get("reason") or ""
    return f"{said}: {reason}" if reason else said


def _crashes(shard: Answer) -> str:
    """What has happened to a replica that is well, or on its way to be, since it may happen again."""
    if not shard.get("crashes"):
        return ""
    first, last = shard.get("first_reason"), shard.get("last_reason") or "unknown"
    before = f"first: {first}; " if first and first != last else ""
    return f", {count(shard['crashes'], 'crash', 'es')}, {before}last: {last}"


def _progress(shard: Answer, lasting: str) -> str:
    percent = f"{shard['progress'] * 100:.0f} %" if shard.get("progress") is not None else ""
    phase = shard.get("phase") if shard.get("phase") != shard.get("state") else ""
    inner = ", ".join(filter(None, (phase, lasting)))
    return " ".join(filter(None, (percent, f"({inner})" if inner else "")))


def node_table(nodes: list[Answer], now: float | None = None) -> str:
    """One row per node."""
    now = time.time() if now is None else now
    if not nodes:
        return "no node has registered yet"
    headers = ("NODE", "STATE", "DEVICES", "ENGINES", "NOTES")
    notes = [DOT.join([*_downloads(node), *_notes(node, now)]) for node in nodes]
    rows = [(node["name"], _state(node), _devices(node), _engines(node), note) for node, note in zip(nodes, notes, strict=True)]
    return table(headers, rows)


def _state(node: Answer) -> str:
    return ", ".join([node.get("state", "unknown"), *(node.get("flags") or ())])


def _used(device: Answer) -> bool:
    return bool(device.get("shards"))


def _devices(node: Answer) -> str:
    devices = node.get("devices") or []
    return f"{sum(map(_used, devices))}/{len(devices)} used" if devices else "cpu only"


def _engines(node: Answer) -> str:
    found = node.get("installations") or []
    return ", ".join(" ".join(filter(None, (each["name"], each.get("version")))) for each in found)


def _notes(node: Answer, now: float) -> list[str]:
    notes = [_away(node, now)] if node.get("state") != "ready" or node.get("reason") else []
    notes += [f"gpu {device.get('index')}: {device['problem']}" for device in node.get("devices") or () if device.get("problem")]
    notes += [f"{each['name']}: {each['problem']}" for each in node.get("installations") or () if each.get("problem")]
    notes += [f"{each['weights']} {each['text']}" for each in node.get("fetches") or () if each.get("state") == "failed"]
    notes += [_quarantine(node, now)]
    notes += [str(note) for note in node.get("notes") or ()]
    return [note for note in (*notes, _expiry(node, now)) if note]


def _quarantine(node: Answer, now: float) -> str:
    """Until when nothing goes to it, what for, and how that ends sooner."""
    found = node.get("quarantine")
    if not found:
        return ""
    left = show_duration(max(0.0, found["until"] - now))
    return f"nothing new for {left}, until {instant(found['until'])}: {found['text']}; end it: llmgw node reset {node['name']}"


def _closed_by_somebody(device: Answer) -> bool:
    """Whether its cordon is all that is the matter with it."""
    by = (device.get("cordon") or {}).get("by")
    return bool(by) and str(device.get("problem", "")).startswith("cordoned by ")


def _downloads(node: Answer) -> list[str]:
    """What is under way; that is wanted, so it is no complaint."""
    over = ("done", "failed", "cancelled")
    return [f"{each['weights']} {each['text']}" for each in node.get("fetches") or () if each.get("state") not in over]


def _away(node: Answer, now: float) -> str:
    return "; ".join(filter(None, (ago(node.get("since"), now) if node.get("state") != "ready" else "", node.get("reason"))))


def _expiry(node: Answer, now: float) -> str:
    ends = node.get("certificate_expires")
    if not ends or ends - now > SOON:
        return ""
    if ends <= now:
        return f"certificate expired {day(ends)}"
    return f"certificate expires in {show_duration(ends - now)}"


def complaints(status: Answer, now: float) -> list[str]:
    """A line for everything that is not as wanted; a cordon, a drain or a removal is wanted."""
    found = []
    if status["server"].get("role") == "standby":
        found.append(f"{status['server'].get('name')} is standby: ask the leader")
    for model in status.get("models") or ():
        if model.get("ready", 0) < model.get("wanted", 0):
            why = model.get("reason") or "; ".join(
                replica_text(replica, now) for replica in model.get("replicas") or () if replica.get("state") != "ready"
            )
            found.append(f"model {model['name']}: {model.get('ready', 0)}/{model['wanted']} ready: {why}".rstrip(": "))
        elif (rollout := model.get("rollout") or {}).get("state") == "rolled_back":
            found.append(f"model {model['name']}: {rollout.get('reason')}")
        elif failed := [replica for replica in model.get("replicas") or () if replica.get("state") == "failed"]:
            found.append(f"model {model['name']}: {'; '.join(replica_text(replica, now) for replica in failed)}")
        found += [
            f"model {model['name']}: {one.get('id') or one.get('url')} is failing: {one['failing']}"
            for one in (*(model.get("replicas") or ()), *(model.get("endpoints") or ()))
            if one.get("failing")
        ]
        shards = (shard for replica in model.get("replicas") or () for shard in replica.get("shards") or ())
        missing = ((shard, one) for shard in shards for one in shard.get("loras") or () if one.get("problem"))
        found += [f"model {model['name']}: {shard.get('id')}: {one['problem']}" for shard, one in missing]
    for node in status.get("nodes") or ():
        if node.get("state") == "removed":
            continue
        wrong = [node["state"]] if node.get("state") != "ready" else []
        wrong += [flag for flag in node.get("flags") or () if flag == "quarantined"]
        node = node | {"devices": [device for device in node.get("devices") or () if not _closed_by_somebody(device)]}
        if notes := [*wrong, *_notes(node, now)] if wrong else _notes(node | {"reason": ""}, now):
            found.append(f"node {node['name']}: {', '.join(notes)}")
    found += [f"orphan {orphan.get('shard')} on {orphan.get('node')}" for orphan in status.get("orphans") or ()]
    return found + _server_notes(status["server"], now)
