"""One place for a router worker: the listening sockets it has, and the process that accepts from them now.

A worker that ends, or is silent on its channel for 3 seconds, is replaced at the same place, on the same sockets: what the
kernel has queued there waits for the next one. Its column of the scoreboard is zeroed, so that what it had in flight is not
counted for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, ProcessProtocol, connectionDone
from twisted.logger import Logger
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

from llmgw.config.server import TlsFiles
from llmgw.router.channel import MAX_LINE, SILENCE, Message, decode, encode
from llmgw.router.scoreboard import Scoreboard

START = 15.0
SOON = 5.0
LONGEST_PAUSE = 10.0
LAST_WORD = 0.5


class Channel(LineOnlyReceiver):
    """The server's end; see router/channel.py for what is said."""

    transport: Any = None
    delimiter = b"\n"
    MAX_LENGTH = MAX_LINE

    def __init__(self, place: Place) -> None:
        self._place = place
        self.closed: Deferred[None] = Deferred()

    def connectionLost(self, reason: Failure = connectionDone) -> None:  # noqa: D102
        self.closed.callback(None)

    def lineReceived(self, line: bytes) -> None:  # noqa: D102
        self._place.heard(decode(line))

    def send(self, type: str, /, **values: object) -> None:
        """Tell the worker."""
        if self.transport is not None:
            self.transport.write(encode(type, **values))


class _ChannelFactory(Factory):
    noisy = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def buildProtocol(self, addr: IAddress | None) -> Channel:
        return self._channel


@define(eq=False)
class Place(ProcessProtocol):
    """A worker's place.

    @ivar number: of this place, from 0.
    @ivar sockets: what its worker accepts from.
    @ivar told: called with this place and each message that is for the owner (not C{beat}, C{ready}, C{routing}).
    @ivar gone: called with this place, the process id and why, when its worker has ended that should have gone on.
    @ivar version: the table version that its worker routes by, -1 while there is none.
    @ivar beat: what its last beat said.
    """

    reactor: Any
    number: int
    generation: int
    folder: Path
    board: Scoreboard
    tls: TlsFiles | None
    told: Callable[[Place, Message], None]
    changed: Callable[[], None]
    sockets: list[socket.socket] = field(factory=list)
    gone: Callable[[Place, int | None, str], None] = lambda place, pid, why: None
    version: int = -1
    ready: bool = False
    beat: Message = field(factory=dict)
    ended: bool = True
    closing: bool = False
    replaced: int = 0
    _channel: Channel | None = None
    _process: Any = None
    _pid: int | None = None
    _silence: str = ""
    _column: int = 0
    _since: float = 0.0
    _last_heard: float = 0.0
    _short_lives: int = 0
    _again: Any = None

    log = Logger()

    @property
    def pid(self) -> int | None:
        """Its worker's, None while there is none."""
        return self._process.pid if self._process is not None else None

    def spawn(self) -> None:
        """Start a worker here."""
        self._again = None
        self._column = self.board.claim()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            self._channel = Channel(self)
            self.reactor.adoptStreamConnection(ours.fileno(), socket.AF_UNIX, _ChannelFactory(self._channel))
            first = 4
            listening = range(first, first + len(self.sockets))
            descriptors = {0: null, 1: 1, 2: 2, 3: theirs.fileno(), first + len(listening): self.board.descriptor}
            descriptors |= {number: one.fileno() for number, one in zip(listening, self.sockets, strict=True)}
            self._since = self._last_heard = self.reactor.seconds()
            self.ended = False
            self._process = self.reactor.spawnProcess(
                self, sys.executable, self._argv(list(listening)), env=dict(os.environ), childFDs=descriptors
            )
            self._pid, self._silence = self._process.pid, ""
        finally:
            ours.close()
            theirs.close()
            os.close(null)

    def _argv(self, listening: list[int]) -> list[str]:
        argv = [sys.executable, "-m", "llmgw.router.worker", "--folder", str(self.folder)]
        argv += ["--generation", str(self.generation), "--column", str(self._column), "--channel", "3"]
        argv += ["--board", str(3 + len(listening) + 1)]
        for number in listening:
            argv += ["--listen", str(number)]
        if self.tls is not None:
            argv += ["--certificate", str(self.tls.certificate), "--key", str(self.tls.key)]
        return argv

    def heard(self, message: Message) -> None:
        """Its worker has said something."""
        self._last_heard = self.reactor.seconds()
        match message["type"]:
            case "beat":
                self.beat = message
            case "ready":
                self.ready = True
                self.changed()
            case "routing":
                self.version = message["version"]
                self.changed()
            case _:
                self.told(self, message)

    def send(self, type: str, /, **values: object) -> None:
        """Tell its worker, if there is one."""
        if self._channel is not None and not self.ended:
            self._channel.send(type, **values)

    def check(self) -> None:
        """Replace a worker that has been silent for too long. Called once a second."""
        if self.ended or self.closing:
            return
        silent = self.reactor.seconds() - self._last_heard
        if silent > (SILENCE if self.ready else START):
            self.log.error(
                "Router worker {number} (pid {pid}) has been silent for {silent} s; it is replaced.",
                number=self.number, pid=self.pid, silent=round(silent, 1),
            )  # fmt: skip
            self._silence = f"it was silent for {silent:.1f} s"
            self.kill()

    def excuse(self, seconds: float) -> None:
        """We did not listen for so long, so its silence then says nothing."""
        self._last_heard = min(self.reactor.seconds(), self._last_heard + seconds)

    def kill(self) -> None:
        """End its worker at once."""
        if self._process is not None and not self.ended:
            with contextlib.suppress(ProcessExitedAlready):
                self._process.signalProcess(signal.SIGKILL)

    def processEnded(self, reason: Failure) -> None:  # noqa: D102
        self.ended, self.ready, self.version = True, False, -1
        if self._channel is not None and self._channel.transport is not None:
            self._channel.transport.abortConnection()
        self._channel = None
        self.board.clear(self._column)
        if not self.closing:
            self.replaced += 1
            self._respawn(reason)
        self.changed()

    def _respawn(self, reason: Failure) -> None:
        lived = self.reactor.seconds() - self._since
        why = self._silence or ("exit code 0" if reason.check(ProcessDone) else str(reason.value).rstrip("."))
        self._short_lives = self._short_lives + 1 if lived < SOON else 0
        pause = min(LONGEST_PAUSE, 0.5 * 2**self._short_lives) if self._short_lives > 1 else 0.0
        self.log.error(
            "Router worker {number} (pid {pid}) ended after {lived} s: {reason}. The next one starts in {pause} s.",
            number=self.number, pid=self._pid, lived=round(lived, 1), pause=pause, reason=why,
        )  # fmt: skip
        self.gone(self, self._pid, why)
        self._again = self.reactor.callLater(pause, self.spawn)

    def leave(self, at_once: bool) -> Deferred[None]:
        """Let its worker finish on its own; what becomes of it is no longer this server's business.

        @return: fires when it has been told. Who ends before that has told it nothing: it then goes on as after a C{kill -9}.
        """
        self.closing = True
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self.send("stop", at_once=at_once)
        for listening in self.sockets:
            listening.close()
        channel = self._channel
        if channel is None or channel.transport is None:
            return succeed(None)
        channel.transport.loseConnection()
        return channel.closed.addTimeout(LAST_WORD, self.reactor, onTimeoutCancel=lambda value, _: None)
