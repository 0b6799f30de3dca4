"""Addresses: where to listen and whom to dial, with or without a port, IPv6 in brackets."""

from __future__ import annotations

import re
from ipaddress import ip_address

from llmgw.config.settings import Address
from llmgw.config.shape import Reader, Reading, Wrong
from llmgw.config.text import Item


def address(port: int | None = None) -> Reader[Address]:
    """C{HOST:PORT}, C{[IPV6]:PORT}; the port may be left out where C{port} says which it is then."""

    def read(item: Item, reading: Reading) -> Address:
        found = _ADDRESS.match(item.text) if isinstance(item.value, str) else None
        host = (found["six"] or found["host"]) if found else ""
        digits = (found["port"] if found else None) or (str(port) if port else "")
        if not found or not _host(host, six=bool(found["six"])) or not digits or not 0 < int(digits) < 65536:
            raise Wrong("HOST:PORT, e.g. 127.0.0.1:8080 or [::1]:8080", "address")
        return Address(host, int(digits))

    return read


_ADDRESS = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?\Z", re.ASCII)
_LABELS = re.compile(r"(?!.*\.\.)[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?\Z", re.ASCII)


def _host(host: str, six: bool) -> bool:
    try:
        return (ip_address(host).version == 6) is six
    except ValueError:
        return not six and bool(_LABELS.match(host)) and not host.replace(".", "").isdigit()


def host(item: Item, reading: Reading) -> str:
    """A host name or an address without a port; C{[::1]} and C{::1} both do."""
    name = item.text.removeprefix("[").removesuffix("]")
    if not isinstance(item.value, str) or not (_host(name, six=False) or _host(name, six=True)):
        raise Wrong("a host name or an address without port", "address")
    return name


def loopback(name: str) -> bool:
    """Whether a host is this machine's loopback."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.rstrip(".") == "localhost" or name.rstrip(".").endswith(".localhost")


def wildcard(name: str) -> bool:
    """Whether a host means every address of the machine, so that nobody could dial it."""
    try:
        return ip_address(name).is_unspecified
    except ValueError:
        return False
