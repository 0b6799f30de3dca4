"""Runs a short-lived child process for its output, with a deadline and a bound, since libraries and commands on a sick node
hang, and reading them in this process would hang us with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from llmgw.errors import LlmgwError

OUTPUT_LIMIT = 4 * 2**20
# A grandchild may hold the pipes open for ever; this long they are read on after the child has ended.
LINGER = 0.5


class ChildFailed(LlmgwError):
    """A child gave no usable output: it could not be started, took too long, or said too much."""


@frozen
class Output:
    """What a child printed on both streams together, and its exit status (negative for a signal)."""

    text: str
    status: int


class _Child(ProcessProtocol):
    def __init__(self, reactor: Any, name: str, limit: int) -> None:
        self._reactor = reactor
        self._linger: Any = None
        self._name = name
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._why = ""
        self.ended: Deferred[Output] = Deferred(lambda _: self.kill("cancelled"))

    def outReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            self.kill(f"printed more than {self._limit} bytes")
        else:
            self._parts.append(data)

    errReceived = outReceived

    def kill(self, why: str) -> None:
        self._why = self._why or why
        try:
            if self.transport:
                self.transport.signalProcess("KILL")
        except ProcessExitedAlready:
            pass

    def processExited(self, reason: Failure) -> None:
        # What it printed last may still be in the pipes: closed at once, that would be lost.
        if self.transport:
            self._linger = self._reactor.callLater(0 if self._why else LINGER, self.transport.loseConnection)

    def processEnded(self, reason: Failure) -> None:
        if self._linger and self._linger.active():
            self._linger.cancel()
        ended, self.ended = self.ended, Deferred()
        if ended.called:  # It was cancelled.
            return
        if self._why:
            ended.errback(ChildFailed(f"{self._name} {self._why}"))
            return
        status = 0 if reason.check(ProcessDone) else getattr(reason.value, "exitCode", None)
        number = -(getattr(reason.value, "signal", None) or 1) if status is None else status
        ended.callback(Output(b"".join(self._parts).decode(errors="replace"), number))


def run_child(
    reactor: Any, argv: Sequence[str], environment: Mapping[str, str], deadline: float, limit: int = OUTPUT_LIMIT
) -> Deferred[Output]:
    """Run C{argv} and collect what it prints.

    @param deadline: seconds until it is killed.
    @return: errbacks with L{ChildFailed}.
    """
    name = argv[0]
    child = _Child(reactor, name, limit)
    ended = child.ended
    try:
        reactor.spawnProcess(child, argv[0], list(argv), env=dict(environment))
    except OSError as error:
        raise ChildFailed(f"{name} cannot be started: {error.strerror}") from None
    timer = reactor.callLater(deadline, child.kill, f"gave no answer in {deadline:g} s")

    def over(result: Any) -> Any:
        if timer.active():
            timer.cancel()
        return result

    return ended.addBoth(over)
