"""What was used, on its way from the routers into the store: added up, written now and then, kept while the store is away."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import evolve
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from llmgw.interfaces import IStore
from llmgw.store.errors import StoreError
from llmgw.store.records import UsageRow
from llmgw.store.thread import StoreThread

DAY = 86400.0
_SUMS = ("requests", "failures", "prompt_tokens", "completion_tokens", "cached_tokens", "seconds")


class UsageSpool:
    """Usage that is not in the store yet.

    A batch that may or may not have been written is written again under its own id, which the store takes once.

    While the store takes nothing, and at a stop, what is not in it yet is also in a file, which the next process begins with.
    A thread of its own writes it: its disk may be the one for which the store is away.

    @param wall: the clock by which hours are told.
    @param file: where that is; None keeps it in memory only.
    @ivar on_today: called at the start with the tokens that each key has used since midnight (UTC), and the time.
    """

    log = Logger()
    EVERY = 5.0
    WITHIN = 4.0
    LIMIT = 20_000

    def __init__(self, store: IStore, reactor: Any, wall: Callable[[], float], file: Path | None = None) -> None:
        self._store = store
        self._wall = wall
        self._file = file
        self._kept = False
        self._thread = StoreThread(reactor, "usage file", 2)
        self._rows: dict[tuple[int, str, str], UsageRow] = {}
        self._batch: tuple[str, list[UsageRow]] | None = None
        self._writing: Deferred[None] | None = None
        self._complained = False
        self._loop = LoopingCall(self.flush)
        self._loop.clock = reactor
        self.dropped = 0
        self.on_today: Callable[[Mapping[str, int], float], object] = lambda tokens, now: None

    def start(self) -> Deferred[None]:
        """Begin to write; fires when L{on_today} has been told what the store knows of today."""
        self._bring_back()
        self._loop.start(self.EVERY, now=False).addErrback(lambda failure: self.log.failure("writing usage", failure))
        return Deferred.fromCoroutine(self._recall())

    async def _recall(self) -> None:
        """Limits per day hold over a stop of everything, and a reboot, which take the routers' own counts away."""
        now = self._wall()
        day = now // DAY * DAY
        try:
            rows = await self._store.usage(day, day + DAY, ("key",))
        except StoreError as error:
            self.log.error("tokens per day are counted from 0, the store does not say what was used: {error}", error=str(error))
            return
        unwritten = [row for row in (*self._rows.values(), *(self._batch[1] if self._batch else ())) if row.hour >= day]
        used: Counter[str] = Counter()
        for row in (*rows, *unwritten):
            if row.key:
                used[row.key] += row.prompt_tokens + row.completion_tokens
        self.on_today(used, now)

    def stop(self) -> Deferred[None]:
        """Write what there is, once."""
        kept: Deferred[None] = succeed(None)
        if self._loop.running:
            self._loop.stop()
            kept = Deferred.fromCoroutine(self._keep())
        return kept.addCallback(lambda _: self.flush())

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take a worker's rows; a row that makes no sense harms no other."""
        hour = int(self._wall() // 3600 * 3600)
        for row in rows:
            try:
                self._add(UsageRow(hour, row["key"], row["model"], **{name: row.get(name, 0) for name in _SUMS}))
            except (KeyError, TypeError) as error:
                self.log.error("a usage row cannot be read: {error}", error=repr(error))

    def _add(self, row: UsageRow) -> None:
        name = (row.hour, row.key, row.model)
        known = self._rows.get(name)
        if known is None and len(self._rows) >= self.LIMIT:
            self.dropped += 1
            return
        sums = {name: getattr(known, name) + getattr(row, name) for name in _SUMS} if known else {}
        self._rows[name] = evolve(row, **sums)

    def flush(self) -> Deferred[None]:
        """Write what has come together, unless a write is under way."""
        if self._writing is not None or not (self._rows or self._batch):
            return succeed(None)
        writing = self._writing = Deferred.fromCoroutine(self._write())
        return writing.addBoth(self._written)

    def _written(self, result: None) -> None:
        self._writing = None
        return result

    async def _write(self) -> None:
        if self._batch is None:
            self._batch = (os.urandom(12).hex(), list(self._rows.values()))
            self._rows = {}
            if self._kept:
                await self._keep()  # with the id that it is sent under, or it would be counted twice after a death on the way
        try:
            await self._store.add_usage(*self._batch)
        except StoreError as error:
            if not self._complained:
                self.log.error("usage is kept here, the store does not take it: {error}", error=str(error))
            self._complained = True
            await self._keep()
        else:
            self._batch = None
            self._complained = False
            if self._kept:
                await self._keep()

    # On disk.

    async def _keep(self) -> None:
        """Have the file say what is not in the store; none where all is."""
        file = self._file
        if file is None:
            return
        empty = self._batch is None and not self._rows
        self._kept = True  # where nobody knows whether it was written, it may be there
        kept = {"batch": self._batch, "rows": [*self._rows.values()]}
        try:
            await self._thread.run("write it", lambda: _put(file, None if empty else kept), self.WITHIN)
            self._kept = not empty
        except (OSError, StoreError) as error:
            self.log.error("usage is in memory only, {file} cannot be written: {error}", file=str(file), error=str(error))

    def _bring_back(self) -> None:
        """Begin with what the last process could not write."""
        if self._file is None or not self._file.exists():
            return
        try:
            kept = msgspec.json.decode(self._file.read_bytes())
            batch = kept["batch"] and (str(kept["batch"][0]), [UsageRow(**row) for row in kept["batch"][1]])
            rows = [UsageRow(**row) for row in kept["rows"]]
        except (OSError, ValueError, TypeError, LookupError) as error:
            self.log.error("usage in {file} cannot be read and is put aside: {error}", file=str(self._file), error=repr(error))
            self._file.replace(self._file.with_name(self._file.name + ".bad"))
            return
        self._batch, self._kept = batch, True
        for row in rows:
            self._add(row)


def _put(path: Path, kept: dict[str, Any] | None) -> None:
    if kept is None:
        path.unlink(missing_ok=True)
        return
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(msgspec.json.encode(kept))
    fresh.replace(path)
