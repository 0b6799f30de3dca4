"""Host names to addresses, in threads that nobody waits for.

The reactor's own resolver runs C{getaddrinfo} in its thread pool, which is joined at the end: with a dead DNS server that would
hold up the stop of the agent for half a minute. These threads are daemons, and there is at most one per name. Surprising: an
answer that comes too late is kept for whoever asks next. With a first name server that is dead the system takes 5 s for every
answer, longer than anybody here waits, and an agent that asked anew each time would never have one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import Logger

from llmgw.errors import LlmgwError

KEPT = 60.0


class LookupFailed(LlmgwError):
    """A host name has no address, or nobody could say in time."""


Answer = list[str] | LookupFailed


def in_thread(name: str, call: Callable[[], None]) -> None:
    """Have C{call} run in a thread that does not keep the process alive.

    @raise RuntimeError: there can be no more threads.
    """
    threading.Thread(target=call, name=name, daemon=True).start()


class Lookup:
    """Asks the system's resolver.

    @param ask: C{socket.getaddrinfo} or something like it; it may block.
    @param begin: runs what it is given under a name, apart from the reactor's thread.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        ask: Callable[..., Any] = socket.getaddrinfo,
        within: float = 3.0,
        begin: Callable[[str, Callable[[], None]], None] = in_thread,
    ) -> None:
        self._reactor = reactor
        self._ask = ask
        self._within = within
        self._begin = begin
        self._waiting: dict[str, list[Deferred[list[str]]]] = {}
        self._late: dict[str, tuple[float, Answer]] = {}

    def addresses(self, host: str) -> Deferred[list[str]]:
        """Every address of C{host}, in the system's order; at least one.

        The Deferred fails with L{LookupFailed}, whose text completes a sentence that began with the name.
        """
        if isIPAddress(host) or isIPv6Address(host):
            return succeed([host])
        if (late := self._late.pop(host, None)) and self._reactor.seconds() - late[0] < KEPT:
            return _fired(late[1])
        found: Deferred[list[str]] = Deferred()
        if (waiting := self._waiting.get(host)) is None:
            waiting = self._waiting[host] = []
            try:
                self._begin(f"lookup {host}", lambda: self._look(host))
            except RuntimeError as error:
                del self._waiting[host]
                return fail(LookupFailed(f"was not looked up: {error}"))
        waiting.append(found)
        return found.addTimeout(self._within, self._reactor, self._gave_up)

    def _gave_up(self, _: object, seconds: float) -> Any:
        raise LookupFailed(f"was not found in {seconds:.0f} s (DNS does not answer)")

    def _look(self, host: str) -> None:
        """In the thread. Whatever happens is an answer: without one the name could never be asked for again."""
        try:
            found = self._ask(host, None, type=socket.SOCK_STREAM)
            answer: Answer = list(dict.fromkeys(each[4][0] for each in found)) or LookupFailed("has no address")
        except (OSError, UnicodeError) as error:
            answer = LookupFailed(f"was not found: {getattr(error, 'strerror', None) or error}")
        except Exception as error:
            self.log.failure("while looking up {host}", host=host)
            answer = LookupFailed(f"was not found: {error!r}")
        self._reactor.callFromThread(self._answered, host, answer)

    def _answered(self, host: str, answer: Answer) -> None:
        waiting = [found for found in self._waiting.pop(host) if not found.called]
        if not waiting:
            self._late[host] = (self._reactor.seconds(), answer)
        for found in waiting:
            _fired(answer).chainDeferred(found)


def _fired(answer: Answer) -> Deferred[list[str]]:
    return fail(answer) if isinstance(answer, LookupFailed) else succeed(answer)
