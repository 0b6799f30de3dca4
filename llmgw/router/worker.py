"""A router worker: C{python -m llmgw.router.worker}, started by llmgw-server with its sockets as inherited descriptors.

It is a process on uvloop without a Twisted reactor: nothing here would use one, and importing it (with it OpenSSL's bindings)
was measured to cost 21 MB in every worker.

A worker outlives its server. When the channel closes it goes on by its last table, and looks once a second for the generation
file in the state folder: when a newer server's workers are there, it stops accepting, finishes what runs, and exits.

  - SIGTERM may be half of a restart: go on accepting until a newer generation is there, or 10 s have passed; then finish.
    C{/ready} is 503 from the beginning, so that a load balancer has those seconds to send new requests elsewhere.
  - SIGINT: stop accepting now, finish.
  - "Finish" is bounded by C{timeouts.drain}; what still streams then ends with an error event.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import socket
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop
from twisted.logger import Logger, globalLogBeginner

from llmgw.logs import text as text_observer
from llmgw.router.access import AccessLog
from llmgw.router.account import Accounts
from llmgw.router.admission import WaitingRoom
from llmgw.router.channel import BEAT, MAX_LINE, Message, decode, encode
from llmgw.router.door import Door
from llmgw.router.handover import Offer
from llmgw.router.http import ServerConnection
from llmgw.router.prefixes import Prefixes
from llmgw.router.probe import PERIOD, Prober
from llmgw.router.proxies import Proxies
from llmgw.router.reading import in_turns
from llmgw.router.routes import Routes, Served, Shared
from llmgw.router.scoreboard import LIVE, Scoreboard, shared_file
from llmgw.router.sharedfile import Absent
from llmgw.router.table import BadTable, Table, table_steps

SWEEP = 0.25
GRACE = 10.0
IDLE_WHEN_LEAVING = 6.0
LAST_WORDS = 2.0
QUEUE = 4096
TABLE = "table.json"
GENERATION = "generation"
USAGE = ".usage.json"
NO_PROBE = "does not answer the routers' probes"
_monotonic = time.monotonic


def read_generation(folder: Path) -> int:
    """The number of the newest server whose workers have started; 0 if there is none."""
    try:
        return int((folder / GENERATION).read_text())
    except (OSError, ValueError):
        return 0


class Channel(asyncio.Protocol):
    """The worker's end of the channel; see router/channel.py for what is said."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server is there."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Lines, whole or not."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._worker.told(decode(line))
        if len(self._rest) > MAX_LINE and self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server is gone."""
        self._transport = None
        self._worker.alone()

    def send(self, type: str, /, **values: object) -> bool:
        """Tell the server; false if there is none that listens."""
        if self._transport is None or self._transport.get_write_buffer_size() > MAX_LINE:
            return False
        self._transport.write(encode(type, **values))
        return True


class Worker:
    """One worker's life."""

    log = Logger()

    def __init__(self, loop: asyncio.AbstractEventLoop, options: argparse.Namespace) -> None:
        self.loop = loop
        self._folder: Path = options.folder
        self._generation: int = options.generation
        self._sockets = [socket.socket(fileno=number) for number in options.listen]
        self._servers: list[asyncio.AbstractServer] = []
        self._offer: Offer | None = None
        self._tls = server_context(options.certificate, options.key) if options.certificate else None
        self._files = (options.certificate, options.key)
        self.board = Scoreboard.attach(shared_file(self._folder, "scoreboard"), options.column, descriptor=options.board)
        self.access = AccessLog(None, ThreadPoolExecutor(1, "access"))
        self.accounts = Accounts(self.access)
        prefixes = Prefixes(shared_file(self._folder, "prefixes"))
        self.shared = Shared(loop, self.board, prefixes, WaitingRoom(loop.call_later, time.monotonic), self._folder)
        self.door = Door(self.shared, Routes(Table(), self.board), self.accounts)
        self.door.on_failure = self._failure
        self.door.on_recovered = self._recovered
        self.door.on_demand = self._demand
        self.channel = Channel(self)
        self._demanded: dict[str, float] = {}
        self._alone = self._news = False
        self._taking: asyncio.Task[None] | None = None
        self._leave_at: float | None = None
        self._end_at = 0.0
        self._due = 0.0
        self._next_beat = 0.0
        self._prober = Prober()
        self._next_probe = 0.0
        self._lag = 0.0

    async def start(self, channel: int | None) -> None:
        """Read the table, begin to accept, tell the server."""
        await self._read_table()
        self._offer = Offer(self.loop, self._folder / f"{self._generation}.{self.board.column}.sock", self._sockets)
        for listening in self._sockets:
            self._servers.append(await self.loop.create_server(self._protocol, sock=listening, ssl=self._tls))
        if channel is not None:
            await self.loop.create_connection(lambda: self.channel, sock=socket.socket(fileno=channel))
        else:
            self._alone = True
        self.channel.send("ready", pid=os.getpid(), column=self.board.column)
        self.channel.send("routing", version=self.door.routes.table.version)
        self._due = _monotonic()
        self._sweep()

    def _protocol(self) -> ServerConnection:
        return ServerConnection(self.door)

    # The table.

    async def _take_tables(self) -> None:
        """Take up the newest table, and the one that has come meanwhile."""
        while self._news:
            self._news = False
            try:
                await self._read_table()
            except Exception:
                self.log.failure("The routing table could not be taken up")
            self.channel.send("routing", version=self.door.routes.table.version)
        self._taking = None

    async def _read_table(self) -> None:
        try:
            table = await in_turns(table_steps(self._folder / TABLE))
        except BadTable as error:
            self.log.error("{error}", error=error)
            self.channel.send("refused", version=0, text=str(error))
            return
        if table is not None and table.version >= self.door.routes.table.version:
            try:
                routes = await in_turns(Routes.steps(table, self.shared, self.door.routes))
                proxies = Proxies(table.trusted_proxies)
            except Exception:
                self.log.failure("Routing table {version} cannot be used, the one before stays", version=table.version)
                self.channel.send(
                    "refused", version=table.version, text=f"table {table.version} cannot be used; its log says why"
                )
                return
            self.door.use(routes)
            self.accounts.forget({one.id for one in table.endpoints}, {one.id for one in table.keys})
            self.board.acknowledge(table.version)
            self.access.path = Path(table.access_log) if table.access_log else None
            self.access.proxies = proxies

    # The channel.

    def told(self, message: Message) -> None:
        """The server has said something. A message that cannot be used must not cost the channel."""
        try:
            self._obey(message)
        except Exception:
            self.log.failure("A {type} message of the server could not be used", type=message["type"])

    def _obey(self, message: Message) -> None:
        match message["type"]:
            case "table":
                self._news = True
                self._taking = self._taking or self.loop.create_task(self._take_tables())
            case "stop":
                self.stop(at_once=bool(message.get("at_once")))
            case "metrics":
                self.channel.send(
                    "metrics", request=message["request"], text=self.accounts.text(self.door.routes, self.shared, self._lag)
                )
            case "certificates":
                self._read_certificate()

    def _read_certificate(self) -> None:
        if self._tls is None:
            return
        try:
            server_context(*self._files)  # a bad pair must not be loaded halfway into the one in use
            self._tls.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            self.log.error("{file} cannot be used, the certificate before stays: {error}", file=self._files[0], error=error)

    def alone(self) -> None:
        """The channel has closed: go on."""
        self._alone = True
        if self.door.leaving:
            self.door.turn_out()

    def _failure(self, endpoint: str, kind: str, text: str) -> None:
        upstream = self.door.routes.upstreams.get(endpoint)
        left_alone = upstream is not None and bool(upstream.breaker.blocked_until)
        self.channel.send("failure", endpoint=endpoint, kind=kind, text=text, open=left_alone)

    def _recovered(self, endpoint: str) -> None:
        self.channel.send("recovered", endpoint=endpoint)

    def _demand(self, served: Served) -> None:
        """A model is asked for and has no endpoint."""
        now = _monotonic()
        if now - self._demanded.get(served.name, -1.0) >= 1.0:
            self._demanded[served.name] = now
            self.channel.send("demand", model=served.name, waiting=served.line.waiting)

    # Time.

    def _sweep(self) -> None:
        now = _monotonic()
        self.door.sweep(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self._beat(now - self._due)
        if now >= self._next_probe and not self.door.leaving:
            self._next_probe = now + PERIOD
            self._probe(now)
        self._due = now + SWEEP
        self.loop.call_later(SWEEP, self._sweep)

    def _beat(self, lag: float) -> None:
        self._lag = lag
        self.access.flush()
        served = [served for name, served in self.door.routes.models.items() if name == served.name]
        for one in served:
            if one.line.waiting and not one.upstreams:
                self._demand(one)
        with open("/proc/self/statm", "rb") as file:
            rss = int(file.read().split()[1]) * resource.getpagesize()
        self.channel.send(
            "beat", in_flight=self.board.mine[LIVE], waiting=sum(one.line.waiting for one in served),
            connections=len(self.door.connections), lag=round(lag, 4), rss=rss,
        )  # fmt: skip
        self._send_usage()
        self._consider_leaving()

    def _probe(self, now: float) -> None:
        routes = self.door.routes
        for upstream, to in self._prober.round(routes.upstreams.values(), now):
            served = next((served for served in routes.models.values() if upstream in served.upstreams), None)
            self.log.warn("Endpoint {id}: breaker is {to} after its probes.", id=upstream.id, to=to)
            if served is not None:
                self.accounts.breaker(served, upstream, to)
            self._failure(upstream.id, "probe", NO_PROBE) if to == "open" else self._recovered(upstream.id)
        for upstream in routes.upstreams.values():
            if upstream.config.static and upstream.breaker.blocked_until:
                self._failure(upstream.id, "still", NO_PROBE)

    def _send_usage(self) -> None:
        rows = self.accounts.tally.take()
        if rows and not self.channel.send("usage", rows=rows):
            self.accounts.tally.put_back(rows)

    def leave_usage(self) -> None:
        """What could not be told goes into a file for the next server."""
        rows = self.accounts.tally.take()
        if rows:
            fresh = self._folder / f".usage.{os.getpid()}"
            fresh.write_text(json.dumps(rows))
            os.replace(fresh, self._folder / f"{self._generation}.{self.board.column}{USAGE}")

    # Leaving.

    def stop(self, at_once: bool) -> None:
        """Leave: now, or when newer workers are there, or in C{GRACE} seconds."""
        wanted = _monotonic() + (0.0 if at_once else GRACE)
        self._leave_at = min(wanted, self._leave_at or wanted)
        self.door.stopping = True
        if at_once:
            self._consider_leaving()

    def _consider_leaving(self) -> None:
        now = _monotonic()
        if self.door.leaving:
            if now >= self._end_at:
                self.cut()
            if not self.door.connections or now >= self._end_at + LAST_WORDS:
                self.loop.stop()
            return
        waiting = self._alone or self._leave_at is not None
        if waiting and (read_generation(self._folder) > self._generation or now >= (self._leave_at or now + 1)):
            self._leave()

    def _leave(self) -> None:
        self.log.info("Generation {number} takes no new connections, {open} are open.", number=self._generation,
                      open=len(self.door.connections))  # fmt: skip
        self.door.leaving = True
        self._end_at = _monotonic() + self.door.timeouts.drain
        for server in self._servers:
            server.close()
        if self._offer is not None:
            for listening in self._offer.close():
                self.loop.create_task(self._empty(listening))
        if self._alone:
            self.door.turn_out()
        for connection in list(self.door.connections):
            connection.leave(IDLE_WHEN_LEAVING)

    async def _empty(self, listening: socket.socket) -> None:
        """Take what waits in a queue that nobody else may be going to look into, then let go of it."""
        listening.setblocking(False)
        with listening:
            for _ in range(QUEUE):
                try:
                    taken, _ = listening.accept()
                except OSError:
                    return
                _, connection = await self.loop.connect_accepted_socket(self._protocol, taken, ssl=self._tls)
                connection.leave(IDLE_WHEN_LEAVING)

    def cut(self) -> None:
        """End what still runs, each stream with an error event."""
        for connection in list(self.door.connections):
            connection.cut()


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """HTTPS as this router speaks it.

    @raise OSError: a file cannot be read, or the two do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context


def options(arguments: list[str]) -> argparse.Namespace:
    """The worker's command line; only llmgw-server writes it."""
    parser = argparse.ArgumentParser(prog="llmgw-router-worker")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--column", type=int, required=True)
    parser.add_argument("--channel", type=int)
    parser.add_argument("--board", type=int)
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--listen", type=int, action="append", required=True)
    return parser.parse_args(arguments)


def main() -> None:
    """Run until told to stop."""
    globalLogBeginner.beginLoggingTo([text_observer()], redirectStandardIO=False)
    chosen = options(sys.argv[1:])
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        worker = Worker(loop, chosen)
    except Absent as error:
        # The server that started us has ended meanwhile and taken its shared files along.
        sys.exit(f"llmgw router worker: {error}")
    loop.add_signal_handler(signal.SIGTERM, worker.stop, False)
    loop.add_signal_handler(signal.SIGINT, worker.stop, True)
    loop.run_until_complete(worker.start(chosen.channel))
    # Nothing of a request is in a cycle when it has ended, so the collector finds nothing, and it was 6 % of the work.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    loop.run_forever()
    worker.access.flush()
    worker.leave_usage()
    worker.board.depart(shared_file(chosen.folder, "prefixes"))


if __name__ == "__main__":
    main()
