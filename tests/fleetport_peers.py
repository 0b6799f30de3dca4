"""Clients of a fleet port that say and do what a test tells them, over real TLS or none, on the network in memory."""

from __future__ import annotations

from attrs import evolve
from OpenSSL import SSL
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.protocol import Factory, Protocol
from twisted.protocols.tls import TLSMemoryBIOFactory
from zope.interface import implementer

from llmgw.fleet.node import Inventory, NodeFacts
from llmgw.wire.codec import decode_from_server, encode
from llmgw.wire.framing import LineSplitter
from llmgw.wire.messages import PROTOCOL, Beat, Goaway, Refused, Register, Report

SERVER = "10.0.0.1"


@implementer(IOpenSSLClientConnectionCreator)
class Tls:
    """Client TLS as a test wants it: any certificate or none, any version, any ALPN, a session to resume."""

    def __init__(self, pair=None, version=SSL.TLS1_3_VERSION, alpn=(b"llmgw/1",), session=None):
        self.context = SSL.Context(SSL.TLS_CLIENT_METHOD)
        self.context.set_max_proto_version(version)
        self.context.set_verify(SSL.VERIFY_NONE, lambda *_: True)
        if pair is not None:
            self.context.use_privatekey(pair.key)
            self.context.use_certificate(pair.certificate)
        self.alpn = [*alpn]
        self.session = session

    def clientConnectionForTLS(self, protocol):
        connection = SSL.Connection(self.context, None)
        if self.alpn:
            connection.set_alpn_protos(self.alpn)
        if self.session is not None:
            connection.set_session(self.session)
        return connection


class Peer(Protocol):
    """One connection. C{heard} is all that the server said, C{lost} why it ended, None while it is up.

    @ivar mute: it answers no beat, though it reads; C{stop} and C{resume} are the process's.
    """

    def __init__(self, clock, host):
        self.clock = clock
        self.host = host
        self.heard = []
        self.raw = b""
        self.lost = None
        self.mute = False
        self.shards = ()
        self.lines = LineSplitter("server")

    def connectionMade(self):
        self.begun = self.clock.seconds()

    def dataReceived(self, data):
        self.raw += data
        for line in self.lines.feed(data):
            message = decode_from_server(line, "server")
            self.heard.append(message)
            if isinstance(message, Beat) and not self.mute:
                self.say(Report(0, 0, tuple(self.shards), beat=message.serial))

    def connectionLost(self, reason):
        self.lost = reason.value
        self.lived = self.clock.seconds() - self.begun

    def say(self, *messages):
        for message in messages:
            self.transport.write(message if isinstance(message, bytes) else encode(message))

    def stop(self):
        """Like SIGSTOP: it reads no more."""
        self.end.reading = False

    def of(self, kind):
        return [message for message in self.heard if isinstance(message, kind)]

    @property
    def word(self):
        """What the server said at the end: the refusal or the goaway, None if it said neither."""
        found = [message for message in self.heard if isinstance(message, Refused | Goaway)]
        return found[-1] if found else None


def dial(world, tls=None, host="10.0.0.9"):
    """A peer with C{tls} (none: plain TCP) from address C{host}, TCP just made."""
    peer = Peer(world.net, host)
    factory = Factory.forProtocol(lambda: peer)
    factory.noisy = False
    if tls is not None:
        factory = TLSMemoryBIOFactory(tls, True, factory, world.net)
        factory.noisy = False
    for name in ("startedConnecting", "clientConnectionLost"):
        setattr(factory, name, lambda *_: None)
    before, world.net.client_host = world.net.client_host, host
    made = len(world.net.connections)
    world.net.connectTCP(SERVER, 7443, factory)
    world.net.advance(0)
    world.net.client_host = before
    peer.end = world.net.connections[made][0]
    return peer


def registration(name="n1", instance="i-1", boot="b-1", claim="", **more):
    facts = NodeFacts(name, "10.0.0.9", Inventory(8, 2**36))
    return evolve(Register(PROTOCOL, claim or name, instance, boot, 0, "", evolve(facts, name=claim or name), ()), **more)


def joining(world, name="n1", instance="i-1", boot="b-1", host="10.0.0.9", pair=None, **more):
    """A peer that has been welcomed and has sent its registration."""
    peer = dial(world, Tls(pair or world.fleet.node(name)), host)
    world.net.until(lambda: peer.heard or peer.lost, 1)
    peer.say(registration(name, instance, boot, **more))
    return peer


def joined(world, name="n1", instance="i-1", boot="b-1", host="10.0.0.9", **more):
    """A peer that has been accepted."""
    peer = joining(world, name, instance, boot, host, **more)
    world.net.until(lambda: len(peer.heard) > 1 or peer.lost, 1)
    assert peer.word is None and peer.lost is None, (peer.word, peer.lost)
    return peer
