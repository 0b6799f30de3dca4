"""What the admin API does, one coroutine per route: fields in, an object out; errors are raised as values.

An answer meant for people has C{text} or C{lines}; everything else in it is for programs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict
from twisted.internet.defer import CancelledError, Deferred

from llmgw.admin.errors import BadRequest
from llmgw.admin.fields import Fields
from llmgw.admin.questions import Questions
from llmgw.config.catalog import read_catalog
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.units import show_duration
from llmgw.planning.explanation import heading
from llmgw.planning.reconcile import explain
from llmgw.server.fetches import Fetches
from llmgw.server.imembers import Refusal
from llmgw.server.keys import state_of
from llmgw.server.operations import Conflict, Unknown
from llmgw.server.rollouts import ACTIONS, Rollouts
from llmgw.server.service import Server
from llmgw.server.status import orphan_data
from llmgw.store.records import KeyRecord

Data = dict[str, Any]
Handler = Callable[[Fields], Awaitable[Data]]
MAX_WAIT = 60.0
MAX_EVENTS = 1000
DAY = 86400.0
_LATE = "It gets it when it can, nothing has to be applied again; which server is silent says: llmgw status"
_SUMS = ("requests", "failures", "prompt_tokens", "completion_tokens", "cached_tokens", "seconds")


class Handlers:
    """All routes.

    @param refused: operators that were turned away, as the admin port remembers them.
    """

    def __init__(self, server: Server, reactor: Any, refused: Callable[[], Sequence[Refusal]] = tuple) -> None:
        self._server = server
        self._reactor = reactor
        self._refused = refused

    def routes(self) -> dict[tuple[str, str], Handler]:
        """By method and path."""
        return {
            ("GET", "/v1/status"): self.status,
            ("GET", "/v1/explain"): self.explain,
            ("POST", "/v1/apply"): self.apply,
            ("GET", "/v1/events"): self.events,
            ("POST", "/v1/drain"): self.drain,
            ("POST", "/v1/cordon"): self.cordon,
            ("POST", "/v1/uncordon"): self.uncordon,
            ("POST", "/v1/restart"): self.restart,
            ("GET", "/v1/orphans"): self.orphans,
            ("POST", "/v1/adopt"): self.adopt,
            ("POST", "/v1/stop"): self.stop,
            ("GET", "/v1/logs"): self.logs,
            ("GET", "/v1/nodes"): self.nodes,
            ("POST", "/v1/node/reset"): self.node_reset,
            ("POST", "/v1/node/remove"): self.node_remove,
            ("GET", "/v1/keys"): self.keys,
            ("POST", "/v1/keys"): self.create_key,
            ("POST", "/v1/keys/rotate"): self.rotate_key,
            ("POST", "/v1/keys/revoke"): self.revoke_key,
            ("GET", "/v1/refusals"): self.refusals,
            ("GET", "/v1/top"): self.top,
            ("GET", "/v1/usage"): self.usage,
            ("GET", "/v1/rollout"): self.rollout,
            ("POST", "/v1/rollout"): self.steer_rollout,
            ("POST", "/v1/fetch"): self.fetch,
            **Questions(self._server, self._reactor).routes(),
        }

    async def status(self, fields: Fields) -> Data:
        """Everything."""
        return self._server.view.all()

    async def nodes(self, fields: Fields) -> Data:
        """The nodes."""
        return {"nodes": self._server.view.nodes()}

    async def explain(self, fields: Fields) -> Data:
        """Why a model has the replicas it has."""
        name = fields.text("model")
        controller = self._server.controller
        model = next((one for one in self._server.view.models() if one["name"] == name or name in one["aliases"]), None)
        if model is None:
            known = ", ".join(one.name for one in controller.truth.catalog.models) or "none"
            raise Unknown(f"the catalog has no model {name}; it has: {known}")
        answer: Data = {"model": model["name"], "wanted": model["wanted"], "ready": model["ready"]}
        why = explain(controller.world(), controller.outcome, model["name"]) if controller.outcome else None
        note = controller.outcome.notes.get(model["name"], "") if controller.outcome else ""
        lines = _each(model) + ([f"  {note}"] if note else [])
        if why is None:
            return answer | {"text": _has(model), "lines": lines}
        head = heading(why, model["wanted"], len(model["replicas"]))
        return answer | {"text": head, "lines": lines + why.lines(), "explanation": why.data()}

    async def apply(self, fields: Fields) -> Data:
        """A new catalog."""
        path = fields.text("path", "catalog")
        new = read_catalog(Path(path), fields.text("text"))
        removals = fields.flag("allow_removals")
        revision = fields.integer("check_revision", None, low=0)
        done = await self._server.catalogs.apply(
            new,
            f"apply {path} by {fields.by}",
            allow_removals=removals,
            check_revision=revision,
            allow_outage=fields.flag("allow_outage"),
        )
        late = await self._server.controller.when_routed()
        lines = [*done.lines, *([f"not every router has it yet: {late}. {_LATE}"] if late else [])]
        return {
            "text": f"catalog {done.revision}",
            "lines": [f"  {line}" for line in lines],
            "routed": not late,
            "revision": done.revision,
            "added": [model.name for model in done.diff.added],
            "changed": [change.name for change in done.diff.changed],
            "removed": [model.name for model in done.diff.removed],
            "kept": [model.name for model in done.diff.kept],
        }

    async def events(self, fields: Fields) -> Data:
        """What happened; with C{wait} seconds of patience for something new."""
        after = fields.integer("after", None, low=0)
        limit = min(MAX_EVENTS, fields.integer("limit", 100, low=1))
        wait = min(MAX_WAIT, fields.number("wait", 0.0))
        found = await self._server.store.events(after, limit)
        if not found and wait:
            await self._something_new(wait)
            found = await self._server.store.events(after, limit)
        return {"events": [_event(event) for event in found]}

    async def _something_new(self, seconds: float) -> None:
        waiting: Deferred[None] = Deferred()
        watchers = self._server.controller.commits.watchers

        def news() -> None:
            if not waiting.called:
                waiting.callback(None)

        watchers.append(news)
        waiting.addTimeout(seconds, self._reactor, onTimeoutCancel=lambda result, _: None)
        try:
            await waiting
        except CancelledError:
            return
        finally:
            watchers.remove(news)

    async def drain(self, fields: Fields) -> Data:
        """Empty nodes."""
        nodes = fields.texts("nodes")
        deadline = fields.number("deadline", None)
        force, outage = fields.flag("force"), fields.flag("allow_outage")
        lines = await self._server.operations.drain(nodes, deadline, force, outage, fields.by)
        limit = self._server.settings.timing.node_drain if deadline is None else deadline
        text = f"draining; what still runs in {show_duration(limit)} is stopped"
        return {"text": text, "lines": lines, "nodes": nodes, "deadline": limit}

    async def cordon(self, fields: Fields) -> Data:
        """Close nodes, or one device of a node."""
        nodes = fields.texts("nodes")
        if device := fields.text("device", None):
            return await self._cordon_device(fields, nodes, device, True)
        await self._server.operations.cordon(nodes, True, fields.by)
        return {"text": f"{', '.join(nodes)}: cordoned; what runs there goes on", "nodes": nodes}

    async def uncordon(self, fields: Fields) -> Data:
        """Open nodes, or one device of a node."""
        nodes = fields.texts("nodes")
        if device := fields.text("device", None):
            return await self._cordon_device(fields, nodes, device, False)
        await self._server.operations.cordon(nodes, False, fields.by)
        return {"text": f"{', '.join(nodes)}: open for new replicas", "nodes": nodes}

    async def _cordon_device(self, fields: Fields, nodes: list[str], device: str, on: bool) -> Data:
        if len(nodes) != 1:
            raise BadRequest("a device is of one node: name that one")
        await self._server.operations.cordon_device(nodes[0], device, on, fields.text("reason", ""), fields.by)
        said = "cordoned; what runs on it goes on" if on else "open for new replicas"
        return {"text": f"{nodes[0]} device {device}: {said}", "nodes": nodes, "device": device}

    async def restart(self, fields: Fields) -> Data:
        """Replace replicas."""
        model, node = fields.text("model", None), fields.text("node", None)
        number, outdated = fields.integer("replica", None, low=0), fields.flag("outdated")
        if model is None and ((node is None and not outdated) or number is not None):
            raise BadRequest("say which model, or which node for all replicas there, or outdated for those of replaced engines")
        outage = fields.flag("allow_outage")
        chosen = await self._server.operations.restart(model, node, number, outage, fields.by, outdated)
        if not chosen:
            return {
                "text": "nothing to restart: no engine there is known to be of another version than is installed",
                "replicas": [],
            }
        follow = f"llmgw wait {model}" if model else "llmgw status"
        return {"text": f"{', '.join(chosen)}: replaced one at a time; follow it with: {follow}", "replicas": chosen}

    async def rollout(self, fields: Fields) -> Data:
        """How far the change of a model is."""
        return Rollouts(self._server.controller).show(fields.text("model"))

    async def steer_rollout(self, fields: Fields) -> Data:
        """Pause, resume or undo it."""
        model, action, outage = fields.text("model"), fields.text("action"), fields.flag("allow_outage")
        if action not in ACTIONS:
            raise BadRequest(f"action must be one of {', '.join(ACTIONS)}, not {action!r}")
        rollouts = Rollouts(self._server.controller)
        return {"text": await rollouts.order(model, action, outage, fields.by), "model": model, "action": action}

    async def fetch(self, fields: Fields) -> Data:
        """Have nodes download a model's weights, or end that."""
        model, node, cancel = fields.text("model"), fields.text("node", None), fields.flag("cancel")
        rows = await Fetches(self._server.controller).order(model, node, cancel, fields.by)
        follow = [] if cancel else ["Follow it with: llmgw status"]
        return {"lines": [f"{row['node']}: {row['text']}" for row in rows] + follow, "model": model, "nodes": rows}

    async def orphans(self, fields: Fields) -> Data:
        """What runs without being wanted."""
        return {"orphans": [orphan_data(orphan) for orphan in self._server.operations.orphans()]}

    async def adopt(self, fields: Fields) -> Data:
        """Take an orphan over."""
        return {"text": await self._server.operations.adopt(fields.text("shard"), fields.text("node", None), fields.by)}

    async def stop(self, fields: Fields) -> Data:
        """Stop an orphan."""
        return {"text": await self._server.operations.stop(fields.text("shard"), fields.text("node", None), fields.by)}

    async def logs(self, fields: Fields) -> Data:
        """A piece of an engine's output."""
        shard, attempt = fields.text("shard"), fields.integer("attempt", 0, low=0)
        offset, limit = fields.integer("offset", 0), fields.integer("limit", 2**16, low=1)
        node = fields.text("node", None) or await self._last_on(shard)
        done = await self._server.operations.logs(shard, attempt, offset, limit, node)
        if not done.ok:
            text = str(done.result.get("text") or done.error)
            raise Unknown(text) if done.error == "not_found" else Conflict(text)
        return {name: done.result.get(name) for name in ("attempt", "offset", "next", "size", "text")}

    async def _last_on(self, shard: str) -> str | None:
        """The node of a shard that is gone, by the events; its agent keeps what it printed for a while."""
        if self._server.operations.whose(shard) is not None:
            return None
        found = await self._server.store.events(None, MAX_EVENTS)
        return next((event.node for event in reversed(found) if event.subject == shard and event.node), None)

    async def node_reset(self, fields: Fields) -> Data:
        """Let a node start anew."""
        name = fields.text("name")
        await self._server.operations.reset(name, fields.by)
        return {"text": f"{name} starts anew: it may join, and what failed there is forgotten"}

    async def node_remove(self, fields: Fields) -> Data:
        """Refuse a node."""
        name = fields.text("name")
        await self._server.operations.remove(name, fields.flag("force"), fields.by)
        return {"text": f"{name} is removed and will be refused; engines on it, if any, go on"}

    async def keys(self, fields: Fields) -> Data:
        """All keys, without their secrets."""
        now = self._server.controller.clocks.wall()
        return {"keys": [_key(record) | {"state": state_of(record, now)} for record in self._server.keys.list()]}

    async def create_key(self, fields: Fields) -> Data:
        """A new key."""
        lasts = fields.number("expires", None)
        limits = {name: fields.integer(name, None, low=1) for name in ("rpm", "tpm", "tpd", "concurrency")}
        record, key = await self._server.keys.create(
            fields.text("name"),
            fields.by,
            team=fields.text("team", ""),
            models=tuple(fields.texts("models", [])),
            priority=fields.integer("priority", 0),
            expires=None if lasts is None else self._server.controller.clocks.wall() + lasts,
            **limits,
        )
        return _key(record) | {"key": key}

    async def rotate_key(self, fields: Fields) -> Data:
        """A new secret for a key."""
        record, key = await self._server.keys.rotate(fields.text("name"), fields.number("overlap", DAY), fields.by)
        return _key(record) | {"key": key}

    async def revoke_key(self, fields: Fields) -> Data:
        """Refuse a key."""
        record = await self._server.keys.revoke(fields.text("id"), fields.by)
        return {"text": f"{record.id} of {record.name} is revoked"}

    async def top(self, fields: Fields) -> Data:
        """What the routers and engines are doing."""
        return await self._server.top()

    async def usage(self, fields: Fields) -> Data:
        """What was used, in whole hours, by those of C{hour}, C{key} and C{model} that C{by} names."""
        by = [word for word in fields.text("by", "key,model").split(",") if word]
        if not by or not set(by) <= {"hour", "key", "model"}:
            raise BadRequest(f"by must name some of hour, key, model, not {','.join(by)!r}")
        since, until = fields.number("since", 0.0), fields.number("until", self._server.controller.clocks.wall())
        rows = await self._server.store.usage(since, until, by)
        return {"usage": [{name: value for name, value in asdict(row).items() if name in by or name in _SUMS} for row in rows]}

    async def refusals(self, fields: Fields) -> Data:
        """Agents and operators that were turned away."""
        port = self._server.port
        found = [*(port.refusals() if port else ()), *self._refused()]
        return {"refusals": [asdict(refusal) for refusal in sorted(found, key=lambda refusal: refusal.at)]}


def _has(model: Data) -> str:
    """How much of a model there is."""
    well, all = sum(not one["failing"] for one in model["endpoints"]), len(model["endpoints"])
    elsewhere = f"{well} of {all} endpoints elsewhere do not fail" if all else ""
    ours = f"wants {model['wanted']} and has {model['ready']} ready" if model["wanted"] or not all else ""
    return f"{model['name']} {'; '.join(filter(None, (ours, elsewhere)))}." if ours else f"{model['name']}: {elsewhere}."


def _each(model: Data) -> list[str]:
    """A line per replica that is not ready or fails, and one on a number of replicas that may vary."""
    shards = [shard for replica in model["replicas"] if replica["state"] != "ready" for shard in replica["shards"]]
    lines = [f"  {shard['id']}  {shard['node']}  {shard['state']}  {shard['reason']}".rstrip() for shard in shards]
    lines += [f"  {one['id']}  is failing: {one['failing']}" for one in model["replicas"] if one["failing"]]
    lines += [f"  {one['url']}  is failing: {one['failing']}" for one in model["endpoints"] if one["failing"]]
    if model.get("scaling"):
        lines.append(_scaling(model["scaling"], bool(model["replicas"])))
    return lines


def _scaling(data: Data, runs: bool) -> str:
    """Between which numbers a model may vary, its load, and why it has as many replicas as it has."""
    known = data["in_flight"] is not None and data["waiting"] is not None
    load = f"{data['in_flight']} in flight, {data['waiting']} waiting" if known else "load not known" if runs else "none runs"
    idle = f", unused for {show_duration(data['unused'])}" if known and data["unused"] and data["unused"] >= 1 else ""
    line = f"  {data['min']} to {data['max']} replicas, {data['target']} requests each: {load}{idle}"
    return line + (f"; {show_duration(data['changed'])} ago {data['why']}" if data["why"] else "")


def _event(event: FleetEvent) -> Data:
    return asdict(event) | {"tail": list(event.tail)}


def _key(record: KeyRecord) -> Data:
    shown = {name: value for name, value in asdict(record).items() if name not in ("digest", "old")}
    return shown | {"models": list(record.models), "old_until": max((secret.until for secret in record.old), default=None)}
