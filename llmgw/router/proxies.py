"""Who the client is, behind proxies that are trusted to say so (C{trusted_proxies}: addresses or networks).

C{X-Forwarded-For} is read from its end: each proxy adds the one it got the request from, so the last entry that is not one of the
trusted proxies is the client. What stands before it anybody may have written.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address, ip_network

MOST = 64  # of the addresses that a client chooses freely


class Proxies:
    """The trusted ones."""

    def __init__(self, networks: Iterable[str]) -> None:
        """@raise ValueError: one is neither an address nor a network."""
        self._networks = [ip_network(text, strict=False) for text in networks]

    def _trusted(self, address: str) -> bool:
        try:
            found = ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self._networks)

    def client(self, peer: str, forwarded: bytes) -> str:
        """The client's address.

        @param peer: who is connected.
        @param forwarded: C{X-Forwarded-For} as it was sent.
        """
        if not forwarded or not self._networks or not self._trusted(peer):
            return peer
        client = peer
        for entry in reversed(forwarded.decode("latin-1").rsplit(",", MOST)[-MOST:]):
            client = entry.strip()[:64]
            if not self._trusted(client):
                break
        return client
