"""What kind of file is this, and what is wrong with it: the one answer of C{llmgw check}, C{llmgw apply} and the daemons."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from llmgw.config.agent import AgentSettings, read_agent
from llmgw.config.catalog import only_models, read_catalog
from llmgw.config.machine import Machine
from llmgw.config.server import ServerSettings, read_server
from llmgw.config.text import Item, parse
from llmgw.fleet.model import Catalog

_AGENT = {"node", "server", "servers", "address", "ports", "labels", "fabrics", "devices", "environment", "engines"}
_SERVER = {"router", "fleet", "admin", "store", "timing"}


@frozen
class Checked:
    """A file without problems. C{kind} is C{server}, C{agent} or C{models}; C{warnings} are sentences."""

    kind: str
    settings: ServerSettings | AgentSettings | Catalog
    warnings: tuple[str, ...] = ()


def check_file(file: Path, content: str, machine: Machine | None = None) -> Checked:
    """Read a file of any kind.

    @raise Invalid: with every problem of the file, as a file of the kind that its keys say it is.
    """
    item, _ = parse(file, content)
    kind = kind_of(item)
    if kind == "agent":
        return Checked(kind, read_agent(file, content, machine))
    if kind == "models":
        return Checked(kind, read_catalog(file, content))
    settings = read_server(file, content, machine)
    return Checked(kind, settings, settings.warnings)


def kind_of(item: Item) -> str:
    """C{server}, C{agent} or C{models}, by which kind's keys it has more of."""
    if only_models(item):
        return "models"
    keys = set(item.value) if isinstance(item.value, dict) else set()
    return "agent" if len(keys & _AGENT) > len(keys & _SERVER) else "server"
