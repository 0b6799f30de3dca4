"""How many replicas the load asks for, for models whose number may vary: a request wakes a sleeping model, idleness ends it.

After a restart nobody knows what was asked for before, so what runs counts as asked for: a new server lets no model sleep that
somebody may be using.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.records import ShardRecord
from llmgw.planning.replicas import Replica, group


class Demand:
    """The replicas asked for, by model.

    @param steady: seconds on a clock that nobody can set.
    @param in_flight: how many requests run on an endpoint.
    """

    def __init__(self, steady: Callable[[], float], in_flight: Callable[[str], int], news: Callable[[], None]) -> None:
        self._steady = steady
        self._in_flight = in_flight
        self._news = news
        self._used: dict[str, float] = {}
        self.wanted: dict[str, int] = {}

    def begin(self, shards: Iterable[ShardRecord]) -> None:
        """A leadership begins: what runs is wanted."""
        staying = {model: sum(not one.leaving for one in replicas) for model, replicas in group(shards).items()}
        self.wanted = {model: count for model, count in staying.items() if count}
        self._used = dict.fromkeys(self.wanted, self._steady())

    def asked(self, model: str) -> None:
        """A request waits for a model that has no endpoint."""
        self._used[model] = self._steady()
        if self.wanted.get(model, 0) < 1:
            self.wanted[model] = 1
            self._news()

    def look(self, catalog: Catalog, replicas: Callable[[], dict[str, list[Replica]]]) -> None:
        """Let models sleep on which nothing has run for long enough."""
        sleepy = [model for model in catalog.models if _may_sleep(model) and self.wanted.get(model.name, 0) > model.replicas.min]
        running = replicas() if sleepy else {}
        for model in sleepy:
            if any(self._in_flight(one.id) for one in running.get(model.name, [])):
                self._used[model.name] = self._steady()
            idle = self._steady() - self._used.setdefault(model.name, self._steady())
            if idle >= (model.replicas.idle_after or 0.0):
                self.wanted.pop(model.name, None)
                self._news()


def _may_sleep(model: Model) -> bool:
    return model.profile is not None and model.replicas.idle_after is not None and model.replicas.min < model.replicas.max
