"""What a routing table means to a worker: names to models, ids to endpoints with their connections, digests to keys.

A new table makes new routes. An endpoint that is in both keeps its connections and its breaker; one that has left closes its
idle connections, while requests that already run there go on to their end. The line of a model goes on as well, with those who
wait in it; a model that is the same in both goes on as it is, since to make a thousand anew would hold up all streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from random import random

from attrs import field, frozen
from msgspec.structs import replace

from llmgw.router.admission import Line, WaitingRoom
from llmgw.router.choose import Group
from llmgw.router.limits import Allowance, is_limited, widest
from llmgw.router.prefixes import Hints, Prefixes
from llmgw.router.scoreboard import Scoreboard
from llmgw.router.table import AT_ONCE, KeyEntry, RoutedModel, Table
from llmgw.router.upstream import Upstream


@frozen
class Shared:
    """What all routes of a worker have in common, whatever the table says. C{folder} is where large bodies wait,
    C{connections} what L{Upstream.used} counts in."""

    loop: asyncio.AbstractEventLoop
    board: Scoreboard
    prefixes: Prefixes
    room: WaitingRoom
    folder: Path
    connections: list[int] = field(factory=lambda: [0, 0])


class Served:
    """One model: its entry in the table, the endpoints that answer for it now, who waits, and who likely holds which prompts."""

    __slots__ = ("_group", "config", "hints", "line", "name", "upstreams")

    def __init__(self, config: RoutedModel, upstreams: list[Upstream], shared: Shared, before: Served | None) -> None:
        self.config = config
        self.name = config.name
        self.upstreams = upstreams
        group = self._group = Group(shared.board, upstreams, config.policy, random)
        row = shared.board.row(f"model/{config.name}") or 0
        self.line: Line
        if before is not None and before.line.row == row:
            self.line = before.line
        else:
            self.line = Line(shared.room, shared.board, group, row, config.max_in_flight or 0, config.max_waiting)
        self.hints = Hints(shared.prefixes, config.name, group.rows) if config.policy == "least_cost" else None

    def begin(self) -> None:
        """Its table is in force."""
        if self.line.group is not self._group:
            self.line.update(self._group, self.config.max_in_flight or 0, self.config.max_waiting)

    def stays(self, config: RoutedModel, upstreams: list[Upstream], shared: Shared) -> bool:
        """Whether a new table changes nothing of it."""
        same = config == self.config and upstreams == self.upstreams
        return same and self.line.row == (shared.board.row(f"model/{config.name}") or 0)


class Caller:
    """A key in use, with its limits.

    @ivar ends: wall clock from which it is good no more, None never.
    @ivar replaced: it is an old secret, good for a while beside the new one.
    """

    __slots__ = ("allowance", "ends", "entry", "high", "id", "limited", "replaced")

    def __init__(self, entry: KeyEntry, limits: KeyEntry, board: Scoreboard, servers: int, until: float | None) -> None:
        self.entry = entry
        self.id = entry.id
        self.replaced = until is not None
        self.ends = min((end for end in (entry.expires, until) if end is not None), default=None)
        self.high = entry.priority > 0
        self.limited = is_limited(limits)
        self.allowance = Allowance(limits, board, servers)


class Routes:
    """One table, made ready for use; empty until L{steps} have been made."""

    def __init__(self, table: Table, board: Scoreboard) -> None:
        self.table = table
        self._board = board
        self._keys: dict[str, tuple[KeyEntry, float | None]] = {}
        self._callers: dict[str, Caller] = {}
        self._teams: dict[str, KeyEntry] = {}
        self.upstreams: dict[str, Upstream] = {}
        self.models: dict[str, Served] = {}
        self._gone: list[Upstream | Line] = []

    @classmethod
    def steps(cls, table: Table, shared: Shared, before: Routes) -> Generator[None, None, Routes]:
        """Make them, about a millisecond at a time; yields between. Nothing of C{before} is another until L{begin}."""
        made = cls(table, shared.board)
        for start in range(0, len(table.keys), AT_ONCE):
            for key in table.keys[start : start + AT_ONCE]:
                made._keys.setdefault(key.digest, (key, None))
                if key.team:
                    made._teams[key.team] = widest(made._teams.get(key.team), key)
                for digest, until in key.old:
                    made._keys[digest] = key, until
            yield
        yield from made._endpoints(shared, before)
        yield from made._models(shared, before)
        return made

    def begin(self) -> None:
        """They are in force: what has left takes nothing any more."""
        for served in self.models.values():
            served.begin()
        gone, self._gone = self._gone, []
        for one in gone:
            one.close()

    def _models(self, shared: Shared, before: Routes) -> Generator[None, None, None]:
        old = dict(before.models)
        for number, config in enumerate(self.table.models):
            if number % AT_ONCE == 0:
                yield
            found = [self.upstreams[id] for id in config.endpoints if id in self.upstreams]
            served = old.pop(config.name, None)
            if served is None or not served.stays(config, found, shared):
                served = Served(config, found, shared, served)
            for name in (*config.aliases, config.name):
                self.models[name] = served
        if old:
            self._gone += {served.line for served in old.values()} - {served.line for served in self.models.values()}

    def _endpoints(self, shared: Shared, before: Routes) -> Generator[None, None, None]:
        old, fresh, table = dict(before.upstreams), self.upstreams, self.table
        for number, config in enumerate(table.endpoints):
            if number % AT_ONCE == 0:
                yield
            known = old.get(config.id)
            if known is not None and known.config == config:
                fresh[config.id] = old.pop(config.id)
                fresh[config.id].keep = table.timeouts.engine_keep_alive
                continue
            upstream = Upstream(shared.loop, config, table.timeouts.engine_keep_alive, shared.connections)
            if known is not None and replace(known.config, limit=config.limit, share=config.share, row=config.row) == config:
                upstream.breaker = known.breaker
            fresh[config.id] = upstream
        self._gone += old.values()

    def caller(self, digest: str) -> Caller | None:
        """Who has the key with this digest."""
        found = self._callers.get(digest)
        if found is None:
            entry = self._keys.get(digest)
            if entry is None:
                return None
            limits = self._teams.get(entry[0].team, entry[0])
            found = self._callers[digest] = Caller(entry[0], limits, self._board, self.table.servers, entry[1])
        return found

    def names(self, caller: Caller | None) -> list[RoutedModel]:
        """The models that a caller may use."""
        allowed = caller.entry.models if caller is not None else ()
        return [model for model in self.table.models if not allowed or model.name in allowed]
