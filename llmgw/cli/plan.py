"""C{llmgw plan}: what a changed catalog, or the loss of nodes, would lead to. Asks the server; changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmgw.cli.catalog import REMOVALS, read_text
from llmgw.cli.session import Session, json_option, pass_session

# A large fleet is followed through for seconds, and nodes that are asked for weights may be slow.
PATIENCE = 120.0


@click.command(name="plan")
@click.argument("file", nargs=-1, type=click.Path())
@REMOVALS
@click.option("--allow-outage", is_flag=True, help="As if apply were told so: a model's only replica may stop first.")
@click.option("--without", is_flag=True, help="What if nodes were lost: all arguments but a FILE are their names.")
@json_option
@pass_session
def plan_command(session: Session, file: tuple[str, ...], allow_removals: bool, allow_outage: bool, without: bool) -> None:
    """Say what would start, change, move, stop or wait if FILE were applied, and why; and do nothing.

    With --without NODE... also, or only, what would become of the replicas on those nodes.
    """
    chosen, nodes = _sort(file, without)
    body: dict[str, Any] = {"allow_removals": allow_removals, "allow_outage": allow_outage, "without": list(nodes)}
    if chosen is not None:
        body |= {"text": read_text(chosen), "path": str(chosen.absolute())}
    session.show(session.client.post("/v1/plan", timeout=PATIENCE, **body))


def _sort(words: tuple[str, ...], without: bool) -> tuple[Path | None, list[str]]:
    """Which argument is the file and which are nodes.

    @raise click.UsageError: there is no file and no node, or more than one file.
    """
    files = [word for word in words if not without or "/" in word or word.endswith((".yaml", ".yml")) or Path(word).is_file()]
    nodes = [word for word in words if word not in files]
    if len(files) > 1:
        raise click.UsageError(f"one FILE can be planned at a time, found {' and '.join(files)}; nodes stand behind --without")
    if without and not nodes:
        raise click.UsageError("--without wants the names of nodes, e.g. llmgw plan --without n3 n4")
    if not files and not nodes:
        raise click.UsageError("Missing argument 'FILE', or --without NODE...")
    return (Path(files[0]) if files else None), nodes
