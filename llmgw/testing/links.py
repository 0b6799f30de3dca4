"""A network in memory, on a clock that tests advance: the real protocols, the real TLS, no socket and no waiting.

L{MemoryNetwork} is a reactor as far as C{Uplink}, C{FleetPort} and Twisted's endpoints can tell. Addresses can refuse or never
answer, a connection can be cut, go dead in silence, or have a side that no longer reads, as a stopped process does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import (
    CannotListenError,
    ConnectionAborted,
    ConnectionDone,
    ConnectionLost,
    ConnectionRefusedError,
    TimeoutError,
    UserError,
)
from twisted.internet.interfaces import IAddress, IProtocol, IReactorTCP, ITCPTransport
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

BUFFER = 2**16


def _address(host: str, port: int) -> IPv4Address | IPv6Address:
    return (IPv6Address if ":" in host else IPv4Address)("TCP", host, port)


@implementer(ITCPTransport)
@define(eq=False)
class End:
    """One side of a connection in memory.

    @ivar reading: false for a side whose process is stopped: nothing is delivered to it, and its peer's buffer fills.
    @ivar silent: true when what this side writes is lost on the way, though it cannot tell.
    """

    _clock: Clock
    _local: IPv4Address | IPv6Address
    _remote: IPv4Address | IPv6Address
    protocol: IProtocol = field(init=False)
    other: End = field(init=False)
    reading: bool = True
    silent: bool = False
    disconnecting: bool = False
    disconnected: bool = False
    written: int = 0
    _buffer: bytearray = field(factory=bytearray)
    _producer: Any = None
    _paused: bool = False

    def write(self, data: bytes) -> None:
        """Never blocks, like a real one."""
        if self.disconnected or self.disconnecting:
            return
        self.written += len(data)
        self._buffer += data
        if len(self._buffer) > BUFFER and self._producer is not None and not self._paused:
            self._paused = True
            self._producer.pauseProducing()
        self._clock.callLater(0, self.flush)

    def writeSequence(self, data: Any) -> None:
        """From Twisted."""
        self.write(b"".join(data))

    def flush(self) -> None:
        """Deliver what the other side can take."""
        if self.disconnected:
            return
        if self.silent:
            self._buffer.clear()
        elif self._buffer and self.other.reading and not self.other.disconnected:
            data = bytes(self._buffer)
            self._buffer.clear()
            self.other.protocol.dataReceived(data)
        if self._buffer:
            return
        if self._paused and self._producer is not None:
            self._paused = False
            self._producer.resumeProducing()
        elif self.disconnecting:
            self._lose(ConnectionDone())
            if not self.silent:
                self.other.hung_up()

    def hung_up(self) -> None:
        """The other side closed; a stopped process does not notice."""
        if self.reading:
            self._lose(ConnectionDone())

    def resume(self) -> None:
        """The stopped process goes on: it reads what has come meanwhile."""
        self.reading = True
        self._clock.callLater(0, self.other.flush)

    def loseConnection(self) -> None:
        """Close when all has been written."""
        self.disconnecting = True
        self._clock.callLater(0, self.flush)

    def abortConnection(self) -> None:
        """Close now."""
        self.disconnecting = True
        self._clock.callLater(0, self._lose, ConnectionAborted())
        if not self.silent and self.other.reading:
            self._clock.callLater(0, self.other._lose, ConnectionLost())

    def cut(self) -> None:
        """The network breaks the connection; this side notices."""
        self._clock.callLater(0, self._lose, ConnectionLost())

    def _lose(self, why: Exception) -> None:
        if self.disconnected:
            return
        self.disconnected = True
        if self._producer is not None:
            self._producer.stopProducing()
        self.protocol.connectionLost(Failure(why))

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """From Twisted."""
        self._producer = producer

    def unregisterProducer(self) -> None:
        """From Twisted."""
        self._producer = None
        if self.disconnecting:
            self._clock.callLater(0, self.flush)

    def getPeer(self) -> IPv4Address | IPv6Address:
        """From Twisted."""
        return self._remote

    def getHost(self) -> IPv4Address | IPv6Address:
        """From Twisted."""
        return self._local

    def loseWriteConnection(self) -> None:
        """Not used."""

    def getTcpNoDelay(self) -> bool:
        """Not used."""
        return True

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Nothing to do in memory."""

    def getTcpKeepAlive(self) -> bool:
        """Not used."""
        return True

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Nothing to do in memory."""


@define(eq=False)
class _Listening:
    _network: MemoryNetwork
    host: str
    port: int
    factory: Any

    def getHost(self) -> IPv4Address | IPv6Address:
        return _address(self.host, self.port)

    def startListening(self) -> None:
        pass

    def stopListening(self) -> Deferred[None]:
        self._network.listeners.pop((self.host, self.port), None)
        return succeed(None)


@define(eq=False)
class _Dialing:
    """Twisted's connector for one attempt."""

    _network: MemoryNetwork
    host: str
    port: int
    factory: Any
    timeout: float
    over: bool = False

    def begin(self) -> None:
        self.factory.doStart()
        self.factory.startedConnecting(self)
        if (self.host, self.port) in self._network.dead:
            self._network.callLater(self.timeout, self.fail, TimeoutError())
        else:
            self._network.callLater(0, self._knock)

    def _knock(self) -> None:
        listener = self._network.listeners.get((self.host, self.port))
        if self.over:
            return
        if listener is None:
            self.fail(ConnectionRefusedError())
            return
        self.over = True
        self._network.connect(self, listener)

    def fail(self, why: Exception) -> None:
        if not self.over:
            self.over = True
            self.factory.clientConnectionFailed(self, Failure(why))

    def stopConnecting(self) -> None:
        self.fail(UserError())

    disconnect = stopConnecting

    def getDestination(self) -> IAddress:
        return _address(self.host, self.port)


@implementer(IReactorTCP)
class MemoryNetwork(Clock):
    """A reactor with TCP in memory.

    @ivar dead: addresses where nobody ever answers, not even with a refusal.
    @ivar dialed: every attempt: when, and where to.
    @ivar connections: every connection made, as (client's end, server's end).
    """

    def __init__(self) -> None:
        super().__init__()
        self.listeners: dict[tuple[str, int], _Listening] = {}
        self.dead: set[tuple[str, int]] = set()
        self.dialed: list[tuple[float, str, int]] = []
        self.connections: list[tuple[End, End]] = []
        self.client_host = "10.0.0.5"
        self._ports = 40000

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:
        """From Twisted. Port 0 takes the next free one."""
        port = port or self._next_port()
        if (interface, port) in self.listeners:
            raise CannotListenError(interface, port, OSError(98, "Address already in use"))
        listening = self.listeners[interface, port] = _Listening(self, interface, port, factory)
        return listening

    def connectTCP(self, host: str, port: int, factory: Any, timeout: float = 30, bindAddress: Any = None) -> Any:  # noqa: N803
        """From Twisted."""
        self.dialed.append((self.seconds(), host, port))
        dialing = _Dialing(self, host, port, factory, timeout)
        dialing.begin()
        return dialing

    def callFromThread(self, call: Callable[..., Any], *args: Any) -> None:
        """From Twisted; there are no threads here."""
        self.callLater(0, call, *args)

    def connect(self, dialing: _Dialing, listener: _Listening) -> None:
        """Join a client to a listener, which may not want it."""
        here, there = _address(self.client_host, self._next_port()), _address(listener.host, listener.port)
        client, server = End(self, here, there), End(self, there, here)
        client.other, server.other = server, client
        server_protocol = listener.factory.buildProtocol(here)
        client.protocol = dialing.factory.buildProtocol(there)
        self.connections.append((client, server))
        if server_protocol is None:
            server.disconnected = True
            client.protocol.makeConnection(client)
            client.hung_up()
            return
        server.protocol = server_protocol
        server_protocol.makeConnection(server)
        client.protocol.makeConnection(client)

    def run(self, seconds: float = 0.0, step: float = 0.05) -> None:
        """Let C{seconds} pass in small steps, and all that is to happen at once happen."""
        until = self.seconds() + seconds
        self._settle()
        while self.seconds() < until:
            self.advance(min(step, until - self.seconds()))
            self._settle()

    def until(self, done: Callable[[], object], seconds: float = 60.0, step: float = 0.05) -> float:
        """Let time pass until C{done} is true; returns how much did.

        @raise AssertionError: C{seconds} were not enough.
        """
        begun = self.seconds()
        self._settle()
        while not done():
            assert self.seconds() - begun < seconds, f"not within {seconds} s"
            self.run(step, step)
        return self.seconds() - begun

    def _settle(self) -> None:
        for _ in range(1000):
            if not any(call.getTime() <= self.seconds() for call in self.getDelayedCalls()):
                return
            self.advance(0)
        raise AssertionError("something calls itself without end")

    def _next_port(self) -> int:
        self._ports += 1
        return self._ports
