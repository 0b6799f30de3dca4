"""agent.yaml to L{AgentSettings}; paths absolute, durations in seconds.

C{server} and C{servers} may both be there: C{server} is tried first, doubles are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import field, frozen

from llmgw.config.address import address, host, loopback, wildcard
from llmgw.config.machine import Machine, this_machine
from llmgw.config.models import INSTALLATION, LABEL, argument_word, environment, labels
from llmgw.config.settings import Address, TlsFiles
from llmgw.config.shape import Reader, Reading, Wrong, list_of, map_of, matching, path, section, text
from llmgw.config.text import Item, parse
from llmgw.fleet.node import NODE_NAME, Fabric

STATE = Path("/var/lib/llmgw-agent")


@frozen
class EngineSettings:
    """One C{engines:} entry: an installation. C{adapter} defaults to the entry's name."""

    name: str
    adapter: str
    command: tuple[str, ...] = ()
    user: str | None = None
    environment: Mapping[str, str] = field(factory=dict)


@frozen
class AgentSettings:
    """Everything in agent.yaml. C{address} None means the link's local address. C{devices} is auto, none or UUIDs."""

    path: Path
    node: str
    servers: tuple[Address, ...]
    tls: TlsFiles
    state: Path
    address: str | None = None
    ports: tuple[int, int] = (20000, 20999)
    labels: Mapping[str, str] = field(factory=dict)
    fabrics: tuple[Fabric, ...] = ()
    devices: str | tuple[str, ...] = "auto"
    models: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)
    engines: tuple[EngineSettings, ...] = ()


def read_agent(file: Path, content: str, machine: Machine | None = None) -> AgentSettings:
    """The settings in an agent.yaml.

    @param file: its absolute path: relative paths start at its folder.
    @raise Invalid: with every problem of the file.
    """
    item, problems = parse(file, content)
    reading = Reading(file.parent, problems)
    shape = section(partial(_make, file), ("node", "tls"), _check, **_KEYS, ports=_ports((machine or this_machine()).ephemeral))
    settings = reading.read(shape, item)
    reading.finish()
    assert settings is not None, "a reading without a problem has a value"
    return settings


def _make(file: Path, server: Address | None = None, servers: tuple[Address, ...] = (), **rest: Any) -> AgentSettings:
    order = dict.fromkeys([*([server] if server else []), *servers])
    return AgentSettings(path=file, servers=tuple(order), **{"state": STATE, **rest})


def _check(item: Item, settings: AgentSettings, reading: Reading) -> None:
    if not settings.servers and not (item.has("server") or item.has("servers")):
        reading.add(item, "server is missing: say server: HOST:PORT, or servers: [...]", "missing_key")
    if settings.address is not None and loopback(settings.address):
        away = [str(server) for server in settings.servers if not loopback(server.host)]
        if away:
            reason = f"{settings.address} is loopback, but {away[0]} is not: its routers could not reach this node's engines"
            reading.add(item.get("address"), reason, "loopback")


def _address(item: Item, reading: Reading) -> str:
    found = host(item, reading)
    if wildcard(found):
        raise Wrong("an address that routers can dial", "address")
    return found


def _ports(ephemeral: tuple[int, int]) -> Reader[tuple[int, int]]:
    def read(item: Item, reading: Reading) -> tuple[int, int]:
        found = re.match(r"([0-9]{1,5})-([0-9]{1,5})\Z", item.text, re.ASCII)
        low, high = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1024 <= low <= high <= 65535:
            raise Wrong("a range of ports FIRST-LAST between 1024 and 65535", "ports")
        if low <= ephemeral[1] and high >= ephemeral[0]:
            kernel = f"{ephemeral[0]}-{ephemeral[1]}, from which the kernel takes ports for outgoing connections"
            raise Wrong("", "ports", f"{low}-{high} overlaps {kernel} (net.ipv4.ip_local_port_range): choose another range")
        return low, high

    return read


def _fabrics(item: Item, reading: Reading) -> tuple[Fabric, ...]:
    if isinstance(item.value, list):
        return tuple(Fabric(name) for name in list_of(matching(LABEL, _FABRIC))(item, reading))
    found = map_of(_ONE_FABRIC, LABEL, _FABRIC)(item, reading)
    return tuple(Fabric(name, **where) for name, where in found.items())


def _devices(item: Item, reading: Reading) -> str | tuple[str, ...]:
    if isinstance(item.value, list):
        return list_of(matching(re.compile(r"[A-Za-z0-9][A-Za-z0-9:./-]{7,127}\Z", re.ASCII), "a GPU's UUID: GPU-..."))(
            item, reading
        )
    if item.text not in ("auto", "none"):
        raise Wrong("auto, none or a list of GPU UUIDs", "value")
    return item.text


def _command(item: Item, reading: Reading) -> tuple[str, ...]:
    if isinstance(item.value, list):
        words = list_of(argument_word, 1)(item, reading)
    elif " " in (found := text(item, reading)):
        raise Wrong("a program's name or path, or a list of words: [apptainer, exec, image.sif, vllm]", "command")
    else:
        words = (found,)
    program = words[0] if words else ""
    return (str(reading.folder / program) if "/" in program else program, *words[1:])


def _engines(item: Item, reading: Reading) -> tuple[EngineSettings, ...]:
    found = map_of(_ONE_ENGINE, INSTALLATION, "an installation's name")(item, reading)
    return tuple(EngineSettings(name, **{"adapter": name, **rest}) for name, rest in found.items())


_FABRIC = "a fabric's name"
_ONE_FABRIC = section(dict[str, Any], address=host, interface=text)
_ONE_ENGINE = section(
    dict[str, Any],
    adapter=matching(INSTALLATION, "an adapter's name: vllm, sglang, trtllm, llamacpp, command"),
    command=_command,
    user=text,
    environment=environment,
)
_KEYS: dict[str, Reader[Any]] = {
    "node": matching(NODE_NAME, "the name in the node's certificate: small letters, digits and . -"),
    "server": address(7443),
    "servers": list_of(address(7443), 1),
    "tls": section(TlsFiles, ("authority", "certificate", "key"), authority=path, certificate=path, key=path),
    "state": path,
    "address": _address,
    "labels": labels,
    "fabrics": _fabrics,
    "devices": _devices,
    "models": list_of(path),
    "environment": environment,
    "engines": _engines,
}
