"""C{llmgw store}: the store as a whole, copied to another database or into a file. Needs no server, and asks none.

Addresses are those of server.yaml's C{store}; a relative file starts at the folder one is in, not at the configuration's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmgw.cli.session import Session, json_option, pass_session
from llmgw.errors import Invalid, LlmgwError
from llmgw.fleet.units import show_size

URL = "sqlite:///FILE or postgresql://USER@HOST/DATABASE?passfile=FILE"
CONFIG = Path("/etc/llmgw/server.yaml")


@click.group(name="store")
def store_command() -> None:
    """Copy or back up what survives restarts: catalog, nodes, placements, keys, usage, events."""


@store_command.command(name="copy")
@click.option("--from", "source", required=True, metavar="URL", help=f"The store to copy; no server may use it. {URL}")
@click.option("--to", "target", required=True, metavar="URL", help="An empty database, or a file that is not there yet.")
@json_option
@pass_session
def copy_command(session: Session, source: str, target: str) -> None:
    """Copy a store to another place, e.g. from SQLite to PostgreSQL, or a backup back.

    Stop every llmgw-server first (engines and routers go on), and change store in each server.yaml before you start them
    again. The old store is left as it is.
    """
    from llmgw.store.copy import copy_store

    old, new = _address(source, "--from"), _address(target, "--to")
    if old == new:
        raise click.UsageError("--from and --to are the same store")
    rows = copy_store(old, new)
    answer = {"from": _shown(old), "to": _shown(new), "rows": rows, "store": new}
    session.show(answer, lambda: _copied(rows, old, new))


def _copied(rows: dict[str, int], old: str, new: str) -> str:
    kinds = ("catalog", "nodes", "shards", "keys", "events", "usage")
    counts = ", ".join(f"{rows[kind]} {kind}" for kind in kinds if kind in rows)
    return (
        f"copied and counted: {counts}\n"
        f"Now set in server.yaml of every server, then start it:\n  store: {new}\n"
        f"Start none on {_shown(old)} again: it would lead the same nodes beside the new one."
    )


@store_command.command(name="backup")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--from", "source", metavar="URL", help=f"The store to back up. {URL}. Default: the one in the configuration.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=CONFIG,
    show_default=True,
    metavar="PATH",
    help="The server.yaml that says where the store is.",
)
@json_option
@pass_session
def backup_command(session: Session, file: Path, source: str | None, config: Path) -> None:
    """Write a whole, consistent copy of the store into FILE (SQLite), while the server runs.

    Of PostgreSQL, too. It holds the hashes of keys, no key, and nobody else may read it. To restore: llmgw store copy
    --from sqlite:///FILE --to where the store was.
    """
    from llmgw.store.copy import backup_store

    url = _address(source, "--from") if source else _configured(config)
    size = backup_store(url, file.absolute())
    answer = {"store": _shown(url), "file": str(file), "bytes": size}
    session.show(answer, lambda: f"{file}: {show_size(size)}, a copy of {_shown(url)}")


def _configured(config: Path) -> str:
    """The address of the store in a server.yaml. Only that is read: a problem elsewhere must not stand in a backup's way."""
    from llmgw.config.storeurl import DEFAULT_STORE
    from llmgw.config.text import parse, read_file

    path = config.absolute()
    item, _ = parse(path, read_file(path))
    return _read(item.get("store"), path.parent) if item.has("store") else DEFAULT_STORE.url


def _address(text: str, option: str) -> str:
    from llmgw.config.text import Item

    try:
        return _read(Item(text, "", option, text), Path.cwd())
    except Invalid as invalid:
        raise click.UsageError(str(invalid)) from None


def _read(item: Any, folder: Path) -> str:
    from llmgw.config.shape import Reading
    from llmgw.config.storeurl import store

    reading = Reading(folder)
    found = reading.read(store, item)
    reading.finish()
    if found is None:
        raise LlmgwError(f"{item.path}: no store's address")
    return found.url


def _shown(url: str) -> str:
    """The address without its query."""
    return url.partition("?")[0]
