"""Commands whose server side may be missing: they ask, and a server that cannot yet says so."""

from __future__ import annotations

import click

from llmgw.cli.session import Session, json_option, pass_session


@click.command(name="fetch")
@click.argument("model")
@click.option("--node", metavar="NAME", help="Only on this node.")
@json_option
@pass_session
def fetch_command(session: Session, model: str, node: str | None) -> None:
    """Have nodes download the weights of MODEL."""
    session.show(session.client.post("/v1/fetch", model=model, node=node))
