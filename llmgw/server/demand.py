"""How many replicas the load asks for, for models whose number may vary: requests wake a model that sleeps, many of them have
it get more, few of them fewer, and none for long enough puts it to sleep.

After a restart nobody knows what was asked for before, so what runs counts as asked for: a new server lets no model sleep that
somebody may be using, and takes no replica away before it has looked at the load for long enough itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from attrs import define, evolve, field

from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardReport, ShardState
from llmgw.fleet.units import show_duration
from llmgw.planning.autoscale import Load, advise, kept, target_of
from llmgw.planning.replicas import Replica, group, wanted

UNSERVED = 300.0
_COMING = (ShardState.PLACED, ShardState.STARTING, ShardState.LOADING)


class Counts(Protocol):
    """What routers know of the load: the part of L{llmgw.server.routing.Routers} that is used."""

    def load(self, endpoint_id: str) -> int:
        """How many requests an endpoint has, whoever sent them."""

    def waiting(self, model: str) -> int | None:
        """How many requests wait for a model, None while that is not known."""


@define
class _Watch:
    """One model's recent load. C{used}: when a request last ran or waited; C{why}: of the last change, at C{changed}."""

    used: float
    samples: deque[Load] = field(factory=deque)
    why: str = ""
    changed: float | None = None


class Demand:
    """The replicas asked for, by model.

    @param steady: seconds on a clock that nobody can set.
    @param counts: the routers'.
    @param find: the model of that name, or the one that has an adapter of that name.
    @param reports: what a node says of a shard, None if it says nothing now.
    @param news: called when the number of a model has changed.
    @ivar wanted: by model; the catalog's bounds hold.
    @ivar scaled: why it has changed, by model, until somebody has written that down (L{said}).
    """

    def __init__(
        self,
        steady: Callable[[], float],
        counts: Counts,
        find: Callable[[str], Model | None],
        reports: Callable[[ShardRecord], ShardReport | None],
        news: Callable[[], None],
    ) -> None:
        self._steady = steady
        self._counts = counts
        self._find = find
        self._reports = reports
        self._news = news
        self._watched: dict[str, _Watch] = {}
        self.wanted: dict[str, int] = {}
        self.scaled: dict[str, str] = {}

    def begin(self, shards: Iterable[ShardRecord]) -> None:
        """A leadership begins: what runs is wanted."""
        staying = {model: sum(not one.leaving for one in replicas) for model, replicas in group(shards).items()}
        self.wanted = {model: count for model, count in staying.items() if count}
        self._watched = {model: _Watch(self._steady()) for model in self.wanted}

    def asked(self, name: str) -> None:
        """A request waits for a model that has no endpoint, or for an adapter of it."""
        model = self._find(name)
        name = model.name if model is not None else name
        self._watch(name).used = self._steady()
        if self.wanted.get(name, 0) < 1:
            if model is not None and wanted(model, {name: 1}) > wanted(model, {}):
                self._set(model, 1, "a request waits for it")
            else:
                self.wanted[name] = 1
                self._news()

    def gave_way(self, gave: Mapping[str, int]) -> None:
        """So many replicas of these models make room for others."""
        for name, count in gave.items():
            self.wanted[name] = max(0, self.wanted.get(name, 0) - count)
            self._watch(name).samples.clear()

    def said(self, scaled: Mapping[str, str]) -> None:
        """These changes are written down."""
        self.scaled = {name: text for name, text in self.scaled.items() if scaled.get(name) != text}

    def look(self, catalog: Catalog, replicas: Callable[[], dict[str, list[Replica]]]) -> None:
        """Take a sample of every model whose number may vary, and change the number where that is due. About once a second."""
        elastic = [model for model in catalog.models if model.profile and model.replicas.min < model.replicas.max]
        running = replicas() if elastic else {}
        for model in elastic:
            self._follow(model, running.get(model.name, []))

    def unused(self) -> dict[str, float]:
        """Seconds since a request ran on or waited for a model, for those that are watched."""
        now = self._steady()
        return {name: now - watch.used for name, watch in self._watched.items() if watch.samples}

    def data(self, model: Model) -> dict[str, Any] | None:
        """What C{status} shows of a model whose number may vary: its bounds and load, and why it has as many as it has."""
        watch = self._watched.get(model.name)
        if model.profile is None or model.replicas.min >= model.replicas.max:
            return None
        load = watch.samples[-1] if watch is not None and watch.samples else None
        return {
            "min": model.replicas.min,
            "max": model.replicas.max,
            "target": target_of(model.replicas, load or Load(0.0)),
            "in_flight": load.in_flight if load else None,
            "waiting": load.waiting if load else None,
            "unused": self._steady() - watch.used if watch is not None and watch.samples else None,
            "why": watch.why if watch is not None else "",
            "changed": self._steady() - watch.changed if watch is not None and watch.changed is not None else None,
        }

    def _watch(self, name: str) -> _Watch:
        return self._watched.setdefault(name, _Watch(self._steady()))

    def _follow(self, model: Model, here: list[Replica]) -> None:
        now, scale, watch = self._steady(), model.replicas, self._watch(model.name)
        load = self._load(model, here, now)
        # What starts was asked for: it is not given up before anybody could use it.
        if not load.known or load.requests or any(one.state in _COMING for one in here):
            watch.used = now
        # As long as nothing serves, all that is asked for waits, which says nothing of how many could hold it.
        watch.samples.append(load if any(one.serving for one in here) else evolve(load, in_flight=None))
        while watch.samples[0].at < now - kept(scale):
            watch.samples.popleft()
        current = wanted(model, self.wanted)
        idle, limit = now - watch.used, _sleeps_after(model, here)
        if limit is not None and idle >= limit and current > scale.min:
            self._set(model, scale.min, f"no request for {show_duration(idle)}")
        elif (advice := advise(scale, watch.samples, now, current)).count != current:
            self._set(model, advice.count, advice.why)

    def _set(self, model: Model, count: int, why: str) -> None:
        before = wanted(model, self.wanted)
        self.wanted[model.name] = count
        watch = self._watch(model.name)
        watch.why, watch.changed = f"{before} -> {count}: {why}", self._steady()
        self.scaled[model.name] = f"{model.name}: wants {count} replica{'s' * (count != 1)} instead of {before}: {why}"
        self._news()

    def _load(self, model: Model, here: list[Replica], now: float) -> Load:
        limits = [report.limit for one in here if (report := self._reports(one.shards[0])) is not None and report.limit]
        waiting = self._counts.waiting(model.name)
        return Load(now, sum(one.load(self._counts.load) for one in here), waiting, min(limits, default=None))


def _sleeps_after(model: Model, here: list[Replica]) -> float | None:
    """After how many seconds without a request it is to have its least number; None: never for that.

    What was asked for once, cannot be placed, and is not asked for any more is not wanted for ever.
    """
    if model.replicas.idle_after is not None:
        return model.replicas.idle_after
    return UNSERVED if not here else None
