"""What an uplink may meet at an address: a server that says what the test makes it say, a peer without TLS, names to look up."""

from __future__ import annotations

from twisted.internet.protocol import Factory, Protocol
from twisted.protocols.tls import TLSMemoryBIOFactory

from llmgw.agent.lookup import Lookup
from llmgw.config.settings import Address, TlsFiles
from llmgw.wire.codec import decode_from_agent, encode
from llmgw.wire.framing import LineSplitter
from llmgw.wire.messages import PROTOCOL, Accepted, Beat, Refused, Register, Welcome
from llmgw.wire.tls import LinkTls, read_identity
from tests.fleetlink import World


class ScriptedLink(Protocol):
    """One connection of a L{ScriptedServer}. C{heard} is all that the agent said."""

    def __init__(self, server):
        self.server = server
        self.heard = []
        self.over = False
        self._splitter = LineSplitter("the agent")

    def connectionMade(self):
        if greeting := self.server.greeting:
            self.send(greeting)
            if isinstance(greeting, Refused):
                self.transport.loseConnection()

    def dataReceived(self, data):
        for line in self._splitter.feed(data):
            message = decode_from_agent(line, "the agent")
            self.heard.append(message)
            if isinstance(message, Register) and self.server.accepts:
                self.send(Accepted("s1", self.server.epoch, self.server.name, 11))

    def connectionLost(self, reason):
        self.over = True

    def send(self, *messages):
        self.write(b"".join(map(encode, messages)))

    def write(self, data):
        self.transport.write(data)

    def of(self, kind):
        return [message for message in self.heard if isinstance(message, kind)]


class ScriptedServer(Factory):
    """Real TLS and a real certificate, and no more sense than the test gives it.

    @ivar greeting: its first message on each connection; None says nothing at all.
    @ivar accepts: whether it answers a registration.
    """

    noisy = False

    def __init__(self, world: World, host: str = "10.0.0.1", name: str = "cp1", epoch: int = 7, addresses=()):
        self.name, self.epoch, self.accepts = name, epoch, True
        self.greeting = Welcome(PROTOCOL, PROTOCOL, name, world.fleet.name, epoch, heartbeat=5.0)
        self.links = []
        written = world.fleet.write(world.path / f"{name}-scripted", name, world.fleet.server(name, [host, *addresses]))
        tls = LinkTls(read_identity(TlsFiles(written.certificate, written.key, written.authority), "server"))
        self.port = world.net.listenTCP(7443, TLSMemoryBIOFactory(tls, False, self, world.net), interface=host)

    def buildProtocol(self, addr):
        self.links.append(ScriptedLink(self))
        return self.links[-1]

    @property
    def link(self):
        """The newest connection."""
        return self.links[-1]

    def refuses(self, reason="standby", leader="", addresses=(), retry_after=0.0):
        self.greeting = Refused(reason, f"{self.name} is {reason}", leader, tuple(addresses), retry_after)
        return self

    def beat(self, serial=1):
        self.link.send(Beat(serial, self.epoch))


def mute(world, host="10.0.0.1"):
    """TCP that is open and answers nothing, TLS included."""
    world.net.listenTCP(7443, Factory.forProtocol(Protocol), interface=host)


def link_to(world, server, uplink, seconds=60.0):
    """Wait for an accepted link; returns the seconds that took."""
    return world.net.until(lambda: server.links and "linked to" in uplink.status, seconds)


def rounds(world, node="n1"):
    """The lines of failed rounds."""
    return [line.removeprefix(f"warn: {node}: ") for line in world.log.having(f"warn: {node}: ", "Next ")]


class Names:
    """DNS for one world: C{records} are the addresses of each name; a name in C{mute} is not answered until it is taken out."""

    def __init__(self, world: World, **records):
        self.records = records
        self.mute = set()
        self.asked = []
        self._held = []
        self.lookup = Lookup(world.net, self._ask, begin=self._begin)

    def _ask(self, host, port, **more):
        if host not in self.records:
            raise OSError(-2, "Name or service not known")
        return [(0, 0, 0, "", (ip, 0)) for ip in self.records[host]]

    def _begin(self, name, call):
        host = name.removeprefix("lookup ")
        self.asked.append(host)
        if host in self.mute:
            self._held.append((host, call))
        else:
            call()

    def answer(self):
        """DNS answers what it was asked long ago."""
        held, self._held = self._held, []
        for _, call in held:
            call()


def dotted(*hosts):
    return tuple(Address(host, 7443) for host in hosts)
