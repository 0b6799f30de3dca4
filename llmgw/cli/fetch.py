"""C{llmgw fetch}: have nodes download a model's weights; C{llmgw status} tells how it goes on."""

from __future__ import annotations

import click

from llmgw.cli.session import Session, json_option, pass_session


@click.command(name="fetch")
@click.argument("model")
@click.option("--node", metavar="NAME", help="Only on this node; default: all that could run MODEL.")
@click.option("--cancel", is_flag=True, help="End the download instead, and remove what is not whole.")
@json_option
@click.pass_context
@pass_session
def fetch_command(session: Session, context: click.Context, model: str, node: str | None, cancel: bool) -> None:
    """Have nodes download the weights of MODEL from the Hugging Face hub.

    What is there already is kept and checked; a download that was interrupted goes on from where it got to.
    """
    answer = session.client.post("/v1/fetch", model=model, node=node, cancel=cancel)
    session.show(answer)
    context.exit(1 if any(row.get("state") == "failed" for row in answer.get("nodes", ())) else 0)
