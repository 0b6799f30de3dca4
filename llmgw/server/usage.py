"""What was used, on its way from the routers into the store: added up, written now and then, kept while the store is away."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, evolve
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from llmgw.interfaces import IStore
from llmgw.store.errors import StoreError
from llmgw.store.records import UsageRow

DAY = 86400.0
_SUMS = ("requests", "failures", "prompt_tokens", "completion_tokens", "cached_tokens", "seconds")


class UsageSpool:
    """Usage that is not in the store yet.

    A batch that may or may not have been written is written again under its own id, which the store takes once.

    While the store takes nothing, and at a stop, what is not in it yet is also in a file, which the next process begins with.

    @param wall: the clock by which hours are told.
    @param file: where that is; None keeps it in memory only.
    @ivar on_today: called at the start with the tokens that each key has used since midnight (UTC), and the time.
    """

    log = Logger()
    EVERY = 5.0
    LIMIT = 20_000

    def __init__(self, store: IStore, reactor: Any, wall: Callable[[], float], file: Path | None = None) -> None:
        self._store = store
        self._wall = wall
        self._file = file
        self._kept = False
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
        if self._loop.running:
            self._loop.stop()
            self._keep()
        return self.flush()

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
                self._keep()  # with the id that it is sent under, or it would be counted twice after a death on the way
        try:
            await self._store.add_usage(*self._batch)
        except StoreError as error:
            if not self._complained:
                self.log.error("usage is kept here, the store does not take it: {error}", error=str(error))
            self._complained = True
            self._keep()
        else:
            self._batch = None
            self._complained = False
            if self._kept:
                self._keep()

    # On disk.

    def _keep(self) -> None:
        """Have the file say what is not in the store; none where all is."""
        if self._file is None:
            return
        try:
            if self._batch is None and not self._rows:
                self._file.unlink(missing_ok=True)
                self._kept = False
                return
            kept = {"batch": self._batch and [self._batch[0], _plain(self._batch[1])], "rows": _plain(self._rows.values())}
            fresh = self._file.with_name(self._file.name + ".new")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump(kept, file)
            fresh.replace(self._file)
            self._kept = True
        except OSError as error:
            self.log.error("usage is in memory only, {file} cannot be written: {error}", file=str(self._file), error=str(error))

    def _bring_back(self) -> None:
        """Begin with what the last process could not write."""
        if self._file is None or not self._file.exists():
            return
        try:
            kept = json.loads(self._file.read_bytes())
            batch = kept["batch"] and (str(kept["batch"][0]), [UsageRow(**row) for row in kept["batch"][1]])
            rows = [UsageRow(**row) for row in kept["rows"]]
        except (OSError, ValueError, TypeError, LookupError) as error:
            self.log.error("usage in {file} cannot be read and is put aside: {error}", file=str(self._file), error=repr(error))
            self._file.replace(self._file.with_name(self._file.name + ".bad"))
            return
        self._batch, self._kept = batch, True
        for row in rows:
            self._add(row)


def _plain(rows: Iterable[UsageRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
