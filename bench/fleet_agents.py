"""Many agents in one process: the real uplink, link and TLS of each, over a node whose engines are only numbers.

    python -m bench.fleet_agents FOLDER PORT NAME ...

Run by L{bench.fleet}. Each agent's certificate is C{FOLDER/pki/NAME.pem}, its state C{FOLDER/state/NAME}. What happens is
appended to C{FOLDER/log/agents-NAME.tsv} (of the first name) as lines of time and word: C{dialed} when TCP is there and the
handshake begins, C{accepted} when the link is the node's, C{ready} when a shard is.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve
from twisted.application.service import MultiService
from twisted.internet.defer import Deferred, succeed
from zope.interface import implementer

from llmgw.agent.inode import INode
from llmgw.agent.rounds import Target
from llmgw.agent.talk import Talk
from llmgw.agent.uplink import Uplink
from llmgw.config.agent import AgentSettings
from llmgw.config.settings import Address, TlsFiles
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import EngineLoad, ShardOrder, ShardReport, ShardState, Wanted
from llmgw.wire.messages import AgentMessage, Desired, Done, Event, FetchLog, Inspect, Register, Report

GIB = 2**30
LOAD_SECONDS = 2.0
Tell = Callable[[str], None]


@implementer(INode)
class NumberNode:
    """A node with eight devices. What it is ordered to run is ready two seconds later and then works: its load moves."""

    def __init__(self, reactor: Any, name: str, tell: Tell) -> None:
        self._reactor = reactor
        self._name = name
        self._tell = tell
        self._send: Callable[[AgentMessage], None] = lambda message: None
        self._shards: dict[str, ShardReport] = {}
        self._serial = 0
        devices = tuple(Device(f"GPU-{name}-{i}", i, "NVIDIA H100 80GB HBM3", 80 * GIB, memory_used=GIB) for i in range(8))
        self._facts = NodeFacts(
            name, "127.0.0.1", Inventory(64, 1024 * GIB, 900 * GIB, devices), installations=(Installation("command", "command"),)
        )

    def register(self, fleet: str, local_address: str) -> Register:
        """See L{INode}."""
        return Register(1, self._name, f"i-{self._name}", "boot", 0, "", self._facts, self._reports(), fleet)

    def accepted(self, epoch: int, leader: str, revision: int) -> None:
        """See L{INode}."""
        self._tell("accepted")

    def connected(self, send: Callable[[AgentMessage], None]) -> None:
        """See L{INode}."""
        self._send = send

    def disconnected(self, reason: str) -> None:
        """See L{INode}."""
        self._send = lambda message: None

    def desired(self, message: Desired) -> None:
        """See L{INode}."""
        for order in message.orders:
            known = self._shards.get(order.shard)
            if order.wanted is not Wanted.RUN:
                self._shards.pop(order.shard, None)
                self._send(Done(order.operation, True))
            elif known is None or known.attempt < order.attempt:
                self._begin(order)

    def _begin(self, order: ShardOrder) -> None:
        url = f"http://127.0.0.1:{order.allocation.ports[0]}/v1"
        self._serial += 1
        self._shards[order.shard] = ShardReport(
            order.shard, order.model, order.generation, order.attempt, ShardState.LOADING, self._serial,
            pid=1000 + self._serial, since=time.time(), url=url, key=f"key-{self._serial:028}", devices=order.allocation.devices,
            ports=order.allocation.ports, installation="command", phase="weights", order=order,
        )  # fmt: skip
        self._reactor.callLater(LOAD_SECONDS, self._ready, order.shard)

    def _ready(self, shard: str) -> None:
        if (report := self._shards.get(shard)) is None:
            return
        self._serial += 1
        self._shards[shard] = evolve(report, state=ShardState.READY, serial=self._serial, phase="", since=time.time())
        self._send(Event(shard, report.attempt, "loading", "ready", "", at=time.time()))
        self._send(self.report())
        self._tell("ready")

    def inspect(self, message: Inspect) -> Deferred[Done]:
        """See L{INode}."""
        return succeed(Done(message.operation, True))

    def fetch_log(self, message: FetchLog) -> Deferred[Done]:
        """See L{INode}."""
        return succeed(Done(message.operation, True))

    def report(self, beat: int = 0) -> Report:
        """See L{INode}; every second inventory differs, as memory does on real nodes."""
        inventory = evolve(self._facts.inventory, memory_available=(900 + random.randrange(8)) * GIB) if beat % 2 else None
        return Report(0, 0, self._reports(), inventory, beat)

    def _reports(self) -> tuple[ShardReport, ...]:
        for shard, report in self._shards.items():
            self._serial += 1
            load = EngineLoad(random.randrange(32), 0, random.random(), (report.load.tokens or 0) + random.randrange(5000))
            self._shards[shard] = evolve(report, serial=self._serial, load=load)
        return tuple(self._shards[shard] for shard in sorted(self._shards))


class CountedUplink(Uplink):
    """Tells each time a handshake begins, whatever comes of it."""

    tell: Tell

    def _connect(self, target: Target, talk: Talk) -> Any:
        def begun(protocol: Any) -> Any:
            self.tell("dialed")
            return protocol

        return super()._connect(target, talk).addCallback(begun)


def agent(reactor: Any, folder: Path, port: int, name: str, tell: Tell) -> Uplink:
    state = folder / "state" / name
    state.mkdir(parents=True, exist_ok=True)
    tls = TlsFiles(folder / "pki" / f"{name}.pem", folder / "pki" / f"{name}.key", folder / "pki" / "ca.pem")
    settings = AgentSettings(folder / f"{name}.yaml", name, (Address("127.0.0.1", port),), tls, state)
    uplink = CountedUplink(reactor, settings, NumberNode(reactor, name, tell), random.random)
    uplink.tell = tell
    uplink.setName(name)
    return uplink


def main() -> None:
    from twisted.internet import reactor

    folder, port, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    told = (folder / "log" / f"agents-{names[0]}.tsv").open("a", buffering=1)
    agents = MultiService()

    def tell(word: str) -> None:
        told.write(f"{time.time():.3f}\t{word}\n")

    for number, name in enumerate(names):
        # A fleet does not begin in one instant: twenty a second from each process.
        reactor.callLater(number / 20, agent(reactor, folder, port, name, tell).setServiceParent, agents)  # type: ignore[attr-defined]
    agents.startService()
    signal.signal(signal.SIGTERM, lambda *_: reactor.callFromThread(reactor.stop))  # type: ignore[attr-defined]
    reactor.run()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
