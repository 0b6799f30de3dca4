"""Host names to addresses, in threads that nobody waits for.

The reactor's own resolver runs C{getaddrinfo} in its thread pool, which is joined at the end: with a dead DNS server that would
hold up the stop of the agent for half a minute. These threads are daemons, and there is at most one per name.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred, fail, succeed

from llmgw.errors import LlmgwError


class LookupFailed(LlmgwError):
    """A host name has no address, or nobody could say in time."""


class Lookup:
    """Asks the system's resolver.

    @param ask: C{socket.getaddrinfo} or something like it; it may block.
    """

    def __init__(self, reactor: Any, ask: Callable[..., Any] = socket.getaddrinfo, within: float = 3.0) -> None:
        self._reactor = reactor
        self._ask = ask
        self._within = within
        self._running: set[str] = set()

    def addresses(self, host: str) -> Deferred[list[str]]:
        """Every address of C{host}, in the system's order.

        The Deferred fails with L{LookupFailed}, whose text completes a sentence that began with the name.
        """
        if isIPAddress(host) or isIPv6Address(host):
            return succeed([host])
        if host in self._running:
            return fail(LookupFailed("is still being looked up (DNS does not answer)"))
        self._running.add(host)
        found: Deferred[list[str]] = Deferred()
        threading.Thread(target=self._look, args=(host, found), name=f"lookup {host}", daemon=True).start()
        return found.addTimeout(self._within, self._reactor, self._late)

    def _late(self, _: object, seconds: float) -> Any:
        raise LookupFailed(f"was not found in {seconds:.0f} s (DNS does not answer)")

    def _look(self, host: str, found: Deferred[list[str]]) -> None:
        try:
            answers = self._ask(host, None, type=socket.SOCK_STREAM)
            result: list[str] | LookupFailed = list(dict.fromkeys(answer[4][0] for answer in answers))
        except (OSError, UnicodeError) as error:
            result = LookupFailed(f"was not found: {getattr(error, 'strerror', None) or error}")
        self._reactor.callFromThread(self._found, host, found, result)

    def _found(self, host: str, found: Deferred[list[str]], result: list[str] | LookupFailed) -> None:
        self._running.discard(host)
        if isinstance(result, LookupFailed):
            found.errback(result)
        else:
            found.callback(result)
