"""What a routing table means to a worker: names to models, ids to endpoints with their connections, digests to keys.

A new table makes new routes. An endpoint that is in both keeps its connections and its breaker; one that has left closes its idle
connections, while requests that already run there go on to their end.
"""

from __future__ import annotations

import asyncio
from random import random

from msgspec.structs import replace

from llmgw.router.choose import Group
from llmgw.router.scoreboard import Scoreboard
from llmgw.router.table import KeyEntry, RoutedModel, Table
from llmgw.router.upstream import Upstream


class Served:
    """One model: its entry in the table and the endpoints that answer for it now."""

    __slots__ = ("config", "group", "name", "name_bytes", "row", "upstreams")

    def __init__(self, config: RoutedModel, upstreams: list[Upstream], board: Scoreboard) -> None:
        self.config = config
        self.name = config.name
        self.upstreams = upstreams
        self.group = Group(board, upstreams, config.policy, random)
        self.row = board.row(f"model/{config.name}")


class Routes:
    """One table, made ready for use."""

    def __init__(self, table: Table, board: Scoreboard, loop: asyncio.AbstractEventLoop, before: Routes | None = None) -> None:
        self.table = table
        self.keys: dict[str, KeyEntry] = {key.digest: key for key in table.keys}
        self.upstreams = self._endpoints(table, loop, before)
        self.models: dict[str, Served] = {}
        for config in table.models:
            found = [self.upstreams[id] for id in config.endpoints if id in self.upstreams]
            served = Served(config, found, board)
            for name in (*config.aliases, config.name):
                self.models[name] = served

    @staticmethod
    def _endpoints(table: Table, loop: asyncio.AbstractEventLoop, before: Routes | None) -> dict[str, Upstream]:
        old = dict(before.upstreams) if before else {}
        fresh: dict[str, Upstream] = {}
        for config in table.endpoints:
            known = old.get(config.id)
            if known is not None and known.config == config:
                fresh[config.id] = old.pop(config.id)
                fresh[config.id].keep = table.timeouts.engine_keep_alive
                continue
            upstream = Upstream(loop, config, table.timeouts.engine_keep_alive)
            if known is not None and replace(known.config, limit=config.limit, share=config.share, row=config.row) == config:
                upstream.breaker = known.breaker
            fresh[config.id] = upstream
        for gone in old.values():
            gone.close()
        return fresh

    def names(self, key: KeyEntry | None) -> list[RoutedModel]:
        """The models that this key may use."""
        return [model for model in self.table.models if key is None or not key.models or model.name in key.models]
