"""server.yaml to L{ServerSettings}.

Every path in the settings is absolute (a relative one in the file is relative to the file), every duration in seconds.
Without a C{fleet} section llmgw-server is only a router over static endpoints; a profile in the catalog then is a problem.
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from attrs import evolve, fields

from llmgw.config.address import address, loopback, wildcard
from llmgw.config.machine import Machine, this_machine
from llmgw.config.models import models
from llmgw.config.settings import Address, AdminSettings, FleetSettings, RouterSettings, ServerSettings, Timeouts, TlsFiles
from llmgw.config.shape import Reading, Section, Wrong, duration, integer, list_of, matching, one_of, path, section, size, text
from llmgw.config.storeurl import DEFAULT_STORE, store
from llmgw.config.text import Item, parse
from llmgw.fleet.model import Catalog
from llmgw.fleet.node import NODE_NAME
from llmgw.fleet.timing import Timing, timing_problems, timing_warnings

__all__ = [
    "Address", "AdminSettings", "FleetSettings", "RouterSettings", "ServerSettings", "Timeouts", "Timing", "TlsFiles",
    "read_server",
]  # fmt: skip

ADMIN_SOCKET = Path("/run/llmgw/admin.sock")
STATE = Path("/var/lib/llmgw")
MAX_SOCKET_PATH = 107
ADMIN_PORT = 7444
_SERIAL = re.compile(r"[0-9a-f]{8,40}\Z", re.ASCII | re.IGNORECASE)


def read_server(file: Path, content: str, machine: Machine | None = None) -> ServerSettings:
    """The settings in a server.yaml.

    @param file: its absolute path: relative paths start at its folder.
    @raise Invalid: with every problem of the file.
    """
    item, problems = parse(file, content)
    reading = Reading(file.parent, problems)
    found = reading.read(_SHAPE, item) or {}
    if found.get("models", Catalog()).runs_engines and not item.has("fleet"):
        reading.add(_first_profile(item), "a profile needs a fleet section: without one no agent can link", "no_fleet")
    _check_admin(item, found, reading)
    reading.finish()
    return _make(file, item, found, machine or this_machine())


def _make(file: Path, item: Item, found: dict[str, Any], machine: Machine) -> ServerSettings:
    router = found.get("router", RouterSettings())
    if not item.get("router").has("workers"):
        router = evolve(router, workers=min(4, machine.cores))
    place = found.get("store", DEFAULT_STORE)
    timing, admin = found.get("timing", Timing()), found.get("admin", {})
    return ServerSettings(
        path=file,
        name=found.get("name", machine.name.lower()),
        router=router,
        fleet=found.get("fleet"),
        socket=admin.get("socket", ADMIN_SOCKET),
        store=place.url,
        state=found.get("state") or place.folder or STATE,
        timing=timing,
        catalog=found.get("models", Catalog()),
        admin=_make_admin(found.get("fleet"), **admin),
        warnings=tuple(timing_warnings(timing)),
    )


def _network(item: Item, reading: Reading) -> str:
    try:
        return str(ip_network(text(item, reading), strict=False))
    except ValueError:
        raise Wrong("an address or a network: 10.0.0.0/8", "address") from None


def _socket(item: Item, reading: Reading) -> Path:
    found = path(item, reading)
    if len(os.fsencode(found)) > MAX_SOCKET_PATH:
        raise Wrong(
            "", "path", f"{found} is too long for a socket: at most {MAX_SOCKET_PATH} bytes, it has {len(os.fsencode(found))}"
        )
    return found


def _serial(item: Item, reading: Reading) -> str:
    """Hexadecimal; one that happens to have no letter is no number."""
    if not _SERIAL.match(item.text):
        raise Wrong("a certificate's serial number, or its first 8 digits as llmgw pki list shows them", "syntax")
    return item.text.lower()


def _check_router(item: Item, router: RouterSettings, reading: Reading) -> None:
    if not item.has("keys") and not loopback(router.listen.host):
        reason = f"{router.listen} can be reached from other machines: say keys: required, or keys: none to serve anybody"
        reading.add(item.get("listen"), reason, "keys")


def _check_fleet(item: Item, fleet: FleetSettings, reading: Reading) -> None:
    if wildcard(fleet.advertise.host):
        reading.add(item.get("advertise"), f"agents cannot dial {fleet.advertise}: say advertise: NAME:PORT", "advertise")


def _check_admin(item: Item, found: dict[str, Any], reading: Reading) -> None:
    """Operators are known by the fleet's authority, and dial the server under a name in its certificate."""
    given, fleet = found.get("admin", {}), found.get("fleet")
    here = item.get("admin")
    if "listen" not in given:
        if "advertise" in given:
            reading.add(here.get("advertise"), "there is no admin.listen that it could be the address of", "advertise")
    elif fleet is None and not item.has("fleet"):
        reading.add(here.get("listen"), "operators are known by certificates of fleet.tls: it needs a fleet section", "no_fleet")
    elif (made := _make_admin(fleet, **given)) and wildcard(made.advertise.host):
        reading.add(here.get("listen"), f"operators cannot dial {made.advertise}: say advertise: NAME:PORT", "advertise")


def _make_admin(
    fleet: FleetSettings | None,
    listen: Address | None = None,
    advertise: Address | None = None,
    socket: Path | None = None,
    revoked: tuple[str, ...] = (),
) -> AdminSettings | None:
    """Where agents reach the server, operators do, too, unless it says otherwise."""
    if listen is None:
        return None
    known = fleet.advertise.host if fleet and wildcard(listen.host) else listen.host
    return AdminSettings(listen, advertise or Address(known, listen.port), revoked)


def _make_fleet(listen: Address, tls: TlsFiles, advertise: Address | None = None) -> FleetSettings:
    return FleetSettings(listen, advertise or listen, tls)


def _make_timing(**given: float) -> Timing:
    """The lease's own clocks follow the lease where they are not given."""
    share = given.get("lease", Timing().lease) / Timing().lease
    own = {name: getattr(Timing(), name) * share for name in ("lease_renew", "lease_deadline", "store_timeout")}
    return Timing(**{**own, **given})


def _check_timing(item: Item, timing: Timing, reading: Reading) -> None:
    for key, problem in timing_problems(timing):
        reading.add(item.get(key), problem, "timing")


_ROUTER = section(
    RouterSettings,
    (),
    _check_router,
    listen=address(),
    tls=section(TlsFiles, ("certificate", "key"), certificate=path, key=path),
    workers=integer(1, 256),
    keys=one_of("required", "none"),
    metrics=address(),
    access_log=path,
    timeouts=Section(Timeouts, {name.name: duration() for name in fields(Timeouts)}),
    body_limit=size,
    trusted_proxies=list_of(_network),
)
_FLEET = section(
    _make_fleet,
    ("listen", "tls"),
    _check_fleet,
    listen=address(),
    advertise=address(7443),
    tls=section(TlsFiles, ("authority", "certificate", "key"), authority=path, certificate=path, key=path),
)
_ADMIN = section(
    dict[str, Any],
    socket=_socket,
    listen=address(),
    advertise=address(ADMIN_PORT),
    revoked=list_of(_serial),
)
_TIMING = Section(
    _make_timing,
    {name.name: integer(1, 1000) if name.name == "crash_budget" else duration() for name in fields(Timing)},
    check=_check_timing,
    check_whole=True,
)
_SHAPE = section(
    dict[str, Any],
    name=matching(NODE_NAME, "a server's name: small letters, digits and . -"),
    router=_ROUTER,
    fleet=_FLEET,
    admin=_ADMIN,
    store=store,
    state=path,
    timing=_TIMING,
    models=models,
)


def _first_profile(item: Item) -> Item:
    """The first model with a profile: where to say that there is no fleet."""
    found = item.get("models").value
    elements = found if isinstance(found, list) else []
    return next((element.get("profile") for element in elements if element.has("profile")), item)
