"""The router's workers, as their server sees them: sockets, processes, the routing table and who routes by which version.

The server binds the listening sockets (one for each worker, with SO_REUSEPORT) and keeps every descriptor. Workers outlive it:
L{RouterWorkers.stop} asks them to finish and waits for nothing, a C{kill -9} asks nothing; the next server gets the sockets of
those that still run (router/handover.py), starts its own workers on them, and when all of these route, the generation file tells
the old ones to finish. So there is no moment at which nobody accepts.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import define
from msgspec.structs import replace
from twisted.internet.defer import CancelledError, Deferred, DeferredList, succeed
from twisted.internet.task import LoopingCall
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from llmgw.config.server import RouterSettings
from llmgw.errors import LlmgwError
from llmgw.holders import why_not
from llmgw.router import windows
from llmgw.router.channel import Message
from llmgw.router.corrections import Corrections
from llmgw.router.handover import collect, offers
from llmgw.router.limits import is_limited, row_name
from llmgw.router.prefixes import Prefixes
from llmgw.router.scoreboard import ELSEWHERE, WAITING, Scoreboard, shared_file
from llmgw.router.table import BadTable, Table, read_table, write_table
from llmgw.router.worker import GENERATION, TABLE, USAGE, read_generation
from llmgw.server.totals import Totals
from llmgw.server.workerprocess import Place

BACKLOG = 4096


class CannotListen(LlmgwError):
    """The router's address cannot be used; the text says why and what to do."""


class NotRouting(LlmgwError):
    """Not all workers route by a table version in time."""

    def __init__(self, version: int, versions: dict[int, int], timeout: float) -> None:
        super().__init__(
            f"not all router workers route by table {version} after {timeout:g} s: "
            + ", ".join(f"worker {number} by {'none' if has < 0 else has}" for number, has in versions.items())
        )
        self.version = version
        self.versions = versions


@define
class _Waiting:
    version: int
    done: Deferred[None]


class RouterWorkers:
    """All workers of this server.

    @ivar table: the table last published, or found on disk; None before L{listen} and where there has never been one.
    @ivar taken_over: how many sockets are from workers that still ran.
    @ivar on_demand: called with the name of a model that is asked for and has no endpoint.
    @ivar on_failure: called with C{(endpoint id, kind, sentence, open)} when an endpoint fails a request, C{on_recovered}
        with the id of one that was left alone and has answered (see router/channel.py).
    @ivar on_ended: called with C{(number, pid, why)} of a worker that has ended, or was ended for its silence.
    @ivar on_usage: called with the rows of a worker's usage message.
    """

    log = Logger()

    def __init__(self, reactor: Any, settings: RouterSettings, state: Path) -> None:
        self._reactor = reactor
        self._settings = settings
        self.folder = state / "router"
        self.table: Table | None = None
        self.places: list[Place] = []
        self.generation = 0
        self.taken_over = 0
        self.on_demand: Callable[[str], None] = lambda model: None
        self.on_failure: Callable[[str, str, str, bool], None] = lambda endpoint, kind, text, open: None
        self.on_recovered: Callable[[str], None] = lambda endpoint: None
        self.on_ended: Callable[[int, int | None, str], None] = lambda number, pid, why: None
        self.on_usage: Callable[[list[dict[str, Any]]], None] = lambda rows: None
        self._servers = 1
        self._checked = 0.0
        self._sockets: list[socket.socket] = []
        self._waiting: list[_Waiting] = []
        self.totals = Totals(reactor)
        self._writing: Deferred[None] | None = None
        self._written = 0
        self._announced = False
        self._checks = LoopingCall(self._check)
        self._checks.clock = reactor

    # Starting.

    def listen(self) -> None:
        """Take over the sockets of workers that still run, bind what is missing, and read the table on disk.

        @raise CannotListen: the address is in use by another program, or not ours.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.table = self._table_on_disk()
        old = offers(self.folder)
        self.generation = max(read_generation(self.folder), *(number for number, _ in old), 0) + 1
        self._board = Scoreboard.create(shared_file(self.folder, "scoreboard"))
        self._corrections = Corrections(self._board)
        # Made here, since of two workers that made it at once each would have its own.
        Prefixes(shared_file(self.folder, "prefixes")).close()
        self._sockets = collect(self.folder, (self._settings.listen.host, self._settings.listen.port))
        self.taken_over = len(self._sockets)
        while len(self._sockets) < self._settings.workers:
            self._sockets.append(self._bind(shared=bool(old) or bool(self._sockets)))
        self.log.info(
            "Router listens on {address} with {count} sockets, {taken} of them taken over from generation {before}.",
            address=str(self.address), count=len(self._sockets), taken=self.taken_over, before=old[0][0] if old else 0,
        )  # fmt: skip

    def _table_on_disk(self) -> Table | None:
        """The last table; one that is damaged, or of a release that wrote others, is put aside: the leader makes a new one."""
        path = self.folder / TABLE
        try:
            return read_table(path)
        except BadTable as error:
            aside = path.with_name(path.name + ".bad")
            path.replace(aside)
            self.log.error("{error} It is put aside as {aside}.", error=str(error), aside=aside.name)
            return None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: the settings' address, with the port that the kernel gave where it says 0."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    def _bind(self, shared: bool) -> socket.socket:
        """One more listening socket.

        @param shared: whether others may be there already: workers of ours. Otherwise nobody may, or two servers by mistake
            on one port would each get a part of the requests.
        """
        wanted = self._settings.listen
        port = self.address[1] if self._sockets else wanted.port
        try:
            family, kind, _, _, address = socket.getaddrinfo(wanted.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
                0
            ]
            if not shared:
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            listening = socket.socket(family, kind)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError as error:
            advice = "Stop the program that has it, or set another." if error.errno == errno.EADDRINUSE else "Set another."
            raise CannotListen(f"router.listen {wanted}: {why_not(error, port)}. {advice}") from error
        listening.setblocking(False)
        return listening

    def start(self) -> None:
        """Start the workers; they route by the table on disk until the first L{publish}."""
        self.prepare()
        count = self._settings.workers
        for number in range(count):
            place = Place(
                self._reactor, number, self.generation, self.folder, self._board, self._settings.tls, self._told, self._changed,
                self._sockets[number::count], self._ended,
            )  # fmt: skip
            self.places.append(place)
            place.spawn()
        self._left_usage()
        self._checked = self._reactor.seconds()
        self._checks.start(1.0, now=False).addErrback(lambda failure: self.log.failure("The check of workers stopped", failure))

    def prepare(self) -> None:
        """Make the table on disk fit the settings and the scoreboard of today: keys may be required by now.

        Blocks for one write at most; no worker may begin with what was true yesterday.
        """
        if self.table is not None and self._settled(self.table) != self.table:
            self.table = replace(self._settled(self.table), version=self.table.version + 1)
            write_table(self.folder / TABLE, self.table)
        self._written = self.table.version if self.table is not None else 0

    def _settled(self, table: Table) -> Table:
        """The table with what is not the controller's to say: rows, and the router's settings."""
        names = [f"endpoint/{one.id}" for one in table.endpoints] + [f"model/{model.name}" for model in table.models]
        names += [row_name(key) for key in table.keys if is_limited(key)]
        rows = self._board.assign(names, (self.table.version if self.table is not None else 0) + 1)
        self._corrections.route([rows[f"endpoint/{one.id}"] for one in table.endpoints])
        settings = self._settings
        return replace(
            table,
            endpoints=tuple(replace(one, row=rows[f"endpoint/{one.id}"]) for one in table.endpoints),
            keys_required=settings.keys == "required",
            timeouts=settings.timeouts,
            body_limit=settings.body_limit,
            trusted_proxies=settings.trusted_proxies,
            access_log=str(settings.access_log) if settings.access_log else "",
            servers=self._servers,
        )

    # The table.

    def publish(self, table: Table) -> int:
        """Put this table in force and return the version that it gets, or that is in force if it says nothing new.

        C{table.version}, the endpoints' rows and what follows from the router's settings are filled in here. The file is
        written by a thread; of several tables published meanwhile the last is written.
        """
        before = self.table.version if self.table is not None else 0
        fresh = replace(self._settled(table), version=before)
        if fresh == self.table:
            return before
        self.table = replace(fresh, version=before + 1)
        if self._writing is None:
            self._write()
        return before + 1

    def share_limits(self, servers: int) -> None:
        """From now on so many servers divide the keys' limits among them."""
        if servers != self._servers:
            self._servers = servers
            if self.table is not None:
                self.publish(self.table)

    def _write(self) -> None:
        table = self.table
        assert table is not None

        def written(result: object) -> None:
            self._writing = None
            self._written = table.version
            for place in self.places:
                place.send("table", version=table.version)
            if self.table is not None and self.table.version > self._written:
                self._write()

        def failed(failure: Any) -> None:
            self._writing = None
            failure.trap(OSError)
            self.log.error(
                "Routing table {version} cannot be written to {folder}: {error}. The one before stays in force; next try in 1 s.",
                version=table.version, folder=str(self.folder), error=str(failure.value),
            )  # fmt: skip

        pool = self._reactor.getThreadPool()
        self._writing = deferToThreadPool(self._reactor, pool, write_table, self.folder / TABLE, table)
        self._writing.addCallbacks(written, failed)
        self._writing.addErrback(lambda failure: self.log.failure("Writing the routing table failed", failure))

    def certificates(self) -> None:
        """Have the workers read the HTTPS certificate again; new connections get it."""
        for place in self.places:
            place.send("certificates")

    def versions(self) -> dict[int, int]:
        """By worker, the table version that it routes by; -1 for one that is just being started."""
        return {place.number: place.version for place in self.places}

    def when_routing(self, version: int, timeout: float) -> Deferred[None]:
        """Fires when all workers route by this version or a later one.

        @raise NotRouting: not within C{timeout} seconds.
        """
        if self._all_route(version):
            return succeed(None)
        waiting = _Waiting(version, Deferred())
        self._waiting.append(waiting)

        def over(result: Any) -> Any:
            self._waiting.remove(waiting)
            if hasattr(result, "check") and result.check(CancelledError):
                raise NotRouting(version, self.versions(), timeout)
            return result

        waiting.done.addTimeout(timeout, self._reactor, onTimeoutCancel=lambda value, _: value)
        return waiting.done.addBoth(over)

    def _all_route(self, version: int) -> bool:
        return bool(self.places) and all(place.ready and place.version >= version for place in self.places)

    # What workers say.

    def _ended(self, place: Place, pid: int | None, why: str) -> None:
        """A worker has ended that should have gone on."""
        self.totals.ended(place.number, {one.id for one in self.table.endpoints} if self.table is not None else ())
        self.on_ended(place.number, pid, why)

    def _changed(self) -> None:
        if not self._announced and all(place.ready and place.version >= 0 for place in self.places):
            self._announced = True
            fresh = self.folder / (GENERATION + ".new")
            fresh.write_text(f"{self.generation}\n")
            os.replace(fresh, self.folder / GENERATION)
        for waiting in [waiting for waiting in self._waiting if self._all_route(waiting.version)]:
            if not waiting.done.called:
                waiting.done.callback(None)

    def _told(self, place: Place, message: Message) -> None:
        try:
            match message["type"]:
                case "demand":
                    self.on_demand(message["model"])
                case "failure":
                    self.on_failure(message["endpoint"], message["kind"], message["text"], bool(message.get("open")))
                case "recovered":
                    self.on_recovered(message["endpoint"])
                case "usage":
                    self.on_usage(message["rows"])
                case "metrics":
                    self.totals.said(place, message)
                case "refused":
                    self.log.error("Router worker {number}: {text}", number=place.number, text=message.get("text"))
        except Exception:
            self.log.failure(
                "A message of router worker {number} could not be used: {type}", number=place.number, type=message["type"]
            )

    def _check(self) -> None:
        # A server that was stopped, or busy, has not heard what its workers said meanwhile: it must not kill them for that.
        now, before = self._reactor.seconds(), self._checked
        self._checked = now
        for place in self.places:
            place.excuse(max(0.0, now - before - 2.0))
            place.check()
            if place.ready and place.version < self._written:
                place.send("table", version=self._written)
        self._board.sweep()
        self._corrections.look()
        self._left_usage()
        if self.table is not None and self.table.version > self._written and self._writing is None:
            self._write()

    def _left_usage(self) -> None:
        """Take what workers without a server could not tell any more."""
        for path in self.folder.glob(f"*{USAGE}"):
            try:
                rows = json.loads(path.read_bytes())
                path.unlink()
            except (OSError, ValueError) as error:
                self.log.error("Usage in {path} cannot be read: {error}", path=str(path), error=str(error))
                path.rename(path.with_name(path.name + ".bad"))
                continue
            self.on_usage(rows)

    # Figures.

    def in_flight(self, endpoint: str) -> int:
        """How many requests are under way at this endpoint, through all workers, old ones included."""
        row = self._board.row(f"endpoint/{endpoint}")
        return self._board.total(row) if row is not None else 0

    def load(self, endpoint: str) -> int:
        """The same with what its engine says to have from others."""
        row = self._board.row(f"endpoint/{endpoint}")
        return self._board.total(row) + self._board.own[row + ELSEWHERE] if row is not None else 0

    def waiting(self, model: str) -> int | None:
        """How many requests wait for this model, in all workers; None while not every worker is there, or none routes it yet."""
        row = self._board.row(f"model/{model}")
        known = row is not None and bool(self.places) and all(place.ready for place in self.places)
        return self._board.total(row + WAITING) if known and row is not None else None

    def reported(self, endpoint: str, requests: int | None) -> None:
        """An engine says how many requests it has, ours and others', running and waiting; None: it says nothing any more."""
        row = self._board.row(f"endpoint/{endpoint}")
        if row is None:
            return
        if requests is None:
            self._corrections.forget(row)
        else:
            self._corrections.report(row, requests, self._reactor.seconds())

    def used_today(self, tokens: Mapping[str, int], now: float) -> None:
        """What keys have used since midnight, by their ids: counted from now on, where no worker has counted it already.

        @param now: wall clock.
        """
        rows: Counter[int] = Counter()
        for key in self.table.keys if self.table is not None else ():
            row = self._board.row(row_name(key))
            if row is not None and key.id in tokens:
                rows[row] += tokens[key.id]
        for row, used in rows.items():
            columns = self._board.every_column()
            windows.recall(columns, self._board.own, row, int(now // 60), used // self._servers)

    def metrics(self) -> Deferred[str]:
        """The Prometheus text of this server's workers, summed."""
        return self.totals.ask(self.places)

    # Stopping.

    def stop(self, at_once: bool) -> Deferred[None]:
        """Let go of the workers. They finish on their own (see router/worker.py), also after this process has gone.

        @param at_once: they stop accepting now instead of waiting for the next server's workers for some seconds.
        """
        if self._checks.running:
            self._checks.stop()
        self.totals.stop()
        told = [place.leave(at_once) for place in self.places]
        for waiting in list(self._waiting):
            waiting.done.cancel()
        if self._writing is not None:
            told.append(self._writing)
        return DeferredList(told).addCallback(lambda _: None)
