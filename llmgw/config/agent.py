"""agent.yaml to L{AgentSettings}; paths absolute, durations in seconds.

C{server} and C{servers} may both be there: C{server} is tried first, doubles are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from llmgw.config.server import Address, TlsFiles
from llmgw.fleet.node import Fabric


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
