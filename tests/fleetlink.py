"""A server's fleet port and agents' uplinks in one process on a clock, over real TLS in memory."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred, succeed
from twisted.logger import formatEvent, globalLogPublisher
from zope.interface import implementer

from llmgw import pki
from llmgw.agent.inode import INode
from llmgw.agent.uplink import Uplink
from llmgw.config.agent import AgentSettings
from llmgw.config.settings import Address, FleetSettings, TlsFiles
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Fabric, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, ShardOrder, ShardReport, ShardState, Wanted
from llmgw.fleet.timing import Timing
from llmgw.interfaces import ILeadership
from llmgw.server.fleetport import FleetPort
from llmgw.server.imembers import IMembers
from llmgw.testing.certificates import Fleet
from llmgw.testing.links import MemoryNetwork
from llmgw.wire.identity import PeerCertificate
from llmgw.wire.messages import Done, Register, Report
from llmgw.wire.tls import LinkTls, TlsIdentity


def order(shard="m/1/0", operation="op1", wanted=Wanted.RUN, filler=""):
    profile = Profile("llamacpp", weights="m.gguf", environment={"FILLER": filler})
    return ShardOrder(shard, "m", "g1", 1, wanted, operation, profile, Allocation("n1", ports=(20000,)))


def shard(name="m/1/0", state=ShardState.READY):
    return ShardReport(name, "m", "g1", 1, state, serial=3, pid=812, url="http://10.0.0.5:20000", order=order(name))


@implementer(ILeadership)
class Leadership:
    def __init__(self, leader="cp1", epoch=7):
        self.leader = leader
        self.epoch = epoch
        self.acting = True
        self.outranked = []

    def may_act(self):
        return self.acting

    def start(self):
        return succeed(None)

    def outrank(self, epoch):
        self.outranked.append(epoch)
        self.epoch = max(self.epoch, epoch + 1)
        return succeed(self.epoch)

    def release(self):
        return succeed(None)


@implementer(IMembers)
class Members:
    def __init__(self):
        self.events = []
        self.refusal = None
        self.verdict = None
        self.revision = 11
        self.on_joined = lambda node: None
        self.registers = {}

    def readiness(self):
        return self.refusal

    def judge(self, register, certificate):
        return self.verdict

    def joined(self, node, session, register):
        self.events.append(("joined", node, session))
        self.registers[node] = register
        self.on_joined(node)
        return self.revision

    def report(self, node, session, message):
        self.events.append(("report", node, session, message))

    def event(self, node, session, message):
        self.events.append(("event", node, session, message))

    def done(self, node, session, message):
        self.events.append(("done", node, session, message))

    def left(self, node, session, reason):
        self.events.append(("left", node, session, reason))

    def of(self, kind):
        return [event[1:] for event in self.events if event[0] == kind]


@implementer(INode)
class Node:
    def __init__(self, name, instance="i-1", boot="b-1"):
        self.name = name
        self.instance = instance
        self.boot = boot
        self.shards = ()
        self.facts = NodeFacts(
            name,
            "10.0.0.5",
            Inventory(8, 2**36),
            labels={"pool": "a"},
            fabrics=(Fabric("rack3"),),
            installations=(Installation("vllm", "vllm", version="0.33.0"),),
        )
        self.events = []
        self.send = None
        self.answer = lambda message: succeed(Done(message.operation, True, result={"of": type(message).__name__}))

    def register(self, fleet, local_address):
        self.events.append(("register", fleet, local_address))
        return Register(0, self.name, self.instance, self.boot, 0, "", self.facts, tuple(self.shards), version="0.1.0")

    def accepted(self, epoch, leader, revision):
        self.events.append(("accepted", epoch, leader, revision))

    def connected(self, send):
        self.events.append(("connected",))
        self.send = send

    def disconnected(self, reason):
        self.events.append(("disconnected", reason))

    def desired(self, message):
        self.events.append(("desired", message))

    def inspect(self, message) -> Deferred[Done]:
        return self.answer(message)

    def fetch_log(self, message) -> Deferred[Done]:
        return self.answer(message)

    def report(self, beat=0):
        return Report(0, 0, tuple(self.shards))

    def of(self, kind):
        return [event[1:] for event in self.events if event[0] == kind]


class Log:
    """The lines logged, as people read them. Not a list: the publisher compares observers, and empty lists are equal."""

    def __init__(self):
        self.lines = []

    def __call__(self, event):
        if event.get("log_namespace", "").startswith("llmgw"):
            self.lines.append(f"{event['log_level'].name}: {formatEvent(event)}")

    def having(self, *parts):
        return [line for line in self.lines if all(part in line for part in parts)]


class World:
    """One fleet. Wall time is real, since certificates are; every timer is on the network's clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fleet = Fleet()
        self.net = MemoryNetwork()
        self.log = Log()
        self.random = lambda: 0.5
        self.stoppable = []
        globalLogPublisher.addObserver(self.log)

    def files(self, name, pair, fleet=None):
        written = (fleet or self.fleet).write(self.path / name, name, pair)
        return TlsFiles(written.certificate, written.key, written.authority)

    def server(self, name="cp1", host="10.0.0.1", pair=None, members=None, leadership=None, fleet=None, start=True, **more):
        tls = self.files(name, pair or (fleet or self.fleet).server(name, [host, f"{name}.example"]), fleet)
        settings = FleetSettings(Address(host, 7443), Address(host, 7443), tls)
        members, leadership = members or Members(), leadership or Leadership(name)
        port = FleetPort(self.net, settings, name, (fleet or self.fleet).name, leadership, Timing(heartbeat=5.0), members, **more)
        port.members, port.leadership, port.settings = members, leadership, settings
        if start:
            port.startService()
            self.stoppable.append(port)
        return port

    def agent(
        self, name="n1", pair=None, servers=("10.0.0.1",), claim=None, node=None, state=None, start=True, fleet=None, **more
    ):
        tls = self.files(f"{name}-agent", pair or self.fleet.node(name), fleet)
        state = self.path / (state or f"{name}-state")
        state.mkdir(exist_ok=True)
        addresses = tuple(Address(host, 7443) for host in servers)
        settings = AgentSettings(self.path / "agent.yaml", claim or name, addresses, tls, state)
        node = node or Node(claim or name)
        uplink = Uplink(self.net, settings, node, lambda: self.random(), **more)
        uplink.node, uplink.settings = node, settings
        if start:
            uplink.startService()
            self.stoppable.append(uplink)
        return uplink

    def linked(self, port, node="n1", seconds=60.0):
        return self.net.until(lambda: node in port.sessions(), seconds)

    def bad_agent(self, name, pair, **more):
        """An agent that shows this certificate, though its own check at the start would refuse it."""
        uplink = self.agent(name, start=False, **more)
        end = pair.certificate.not_valid_after_utc.timestamp()
        start = pair.certificate.not_valid_before_utc.timestamp()
        serial, issuer = pki.serial_of(pair.certificate), pair.certificate.issuer.rfc4514_string()
        own = PeerCertificate(self.fleet.name, "node", name, serial, start, end, issuer=issuer)
        uplink._tls = LinkTls(TlsIdentity(own, [pair.certificate], pair.key, [self.fleet.authority.certificate]))
        uplink.startService()
        self.stoppable.append(uplink)
        return uplink

    def stop(self, *services):
        """Stop these and return the seconds until all had stopped."""
        over = []
        for service in services:
            service.stopService().addCallback(over.append)
            if service in self.stoppable:
                self.stoppable.remove(service)
        return self.net.until(lambda: len(over) == len(services), 10)

    def close(self):
        for _, end in self.net.connections:
            end.reading = True
        self.net.dead.clear()
        if self.stoppable:
            self.stop(*self.stoppable)
        globalLogPublisher.removeObserver(self.log)
        self.net.run(5)
        left = self.net.getDelayedCalls()
        assert not left, f"timers left: {left}"


def a_world(path):
    """The body of each test file's C{world} fixture."""
    world = World(path)
    try:
        yield world
    finally:
        world.close()
