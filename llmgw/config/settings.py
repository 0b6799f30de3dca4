"""What server.yaml says, as values. Apart from its reader, so that a router worker need not carry a YAML parser."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen

from llmgw.fleet.model import Catalog
from llmgw.fleet.timing import Timing


@frozen
class Address:
    """Where to listen or to connect; C{host} without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@frozen
class TlsFiles:
    """PEM files of one identity. C{authority} is None where no peer has to show a certificate (the router's HTTPS)."""

    certificate: Path
    key: Path
    authority: Path | None = None


@frozen
class Timeouts:
    """The router's deadlines, each on its own clock; there is none over a whole answer."""

    headers: float = 10.0
    body: float = 60.0
    connect: float = 5.0
    first_token: float = 600.0
    idle: float = 180.0
    queue: float = 60.0
    drain: float = 180.0
    keep_alive: float = 60.0
    engine_keep_alive: float = 4.0


@frozen
class RouterSettings:
    """The data plane. C{keys} is C{required} or C{none}."""

    listen: Address = Address("127.0.0.1", 8080)
    tls: TlsFiles | None = None
    workers: int = 1
    keys: str = "none"
    metrics: Address | None = None
    access_log: Path | None = None
    timeouts: Timeouts = Timeouts()
    body_limit: int = 64 * 2**20
    trusted_proxies: tuple[str, ...] = ()


@frozen
class FleetSettings:
    """The listener for agents. C{advertise} is how agents reach it; C{tls.authority} is never None here."""

    listen: Address
    advertise: Address
    tls: TlsFiles


@frozen
class AdminSettings:
    """Where operators on other machines are listened for. C{advertise} is how they, and those a standby sends on, dial it.

    @ivar revoked: serial numbers of certificates that are not taken any more: hexadecimal, at least their first 8 digits.
    """

    listen: Address
    advertise: Address
    revoked: tuple[str, ...] = ()


@frozen
class ServerSettings:
    """Everything in server.yaml. C{state} is the folder of the SQLite store and of the router's files.

    C{socket} is always there for operators on this machine; C{admin} is None where there is no other way.
    """

    path: Path
    name: str
    router: RouterSettings
    fleet: FleetSettings | None
    socket: Path
    store: str
    state: Path
    timing: Timing = Timing()
    catalog: Catalog = Catalog()
    admin: AdminSettings | None = None
    warnings: tuple[str, ...] = field(default=())
