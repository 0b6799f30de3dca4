"""C{llmgw node} and C{llmgw refusals}: the machines, and who was turned away."""

from __future__ import annotations

import click

from llmgw.cli.session import Session, json_option, pass_session


@click.group(name="node")
def node_command() -> None:
    """The machines of the fleet."""


@node_command.command(name="ls")
@json_option
@pass_session
def ls_command(session: Session) -> None:
    """Every node the server knows."""
    from llmgw.cli.status import node_table

    answer = session.client.get("/v1/nodes")
    session.show(answer, lambda: node_table(answer.get("nodes", [])))


@node_command.command(name="show")
@click.argument("name")
@json_option
@pass_session
def show_command(session: Session, name: str) -> None:
    """What node NAME has: hardware, limits, each device with what is claimed of it and really used, downloads."""
    from llmgw.cli.nodeview import show_node

    show_node(session, name)


@node_command.command(name="reset")
@click.argument("name")
@json_option
@pass_session
def reset_command(session: Session, name: str) -> None:
    """Let node NAME start anew: ends a quarantine, and lets a removed node join again."""
    session.show(session.client.post("/v1/node/reset", name=name))


@node_command.command(name="remove")
@click.argument("name")
@click.option("--force", is_flag=True, help="Even while replicas may run there: they are forgotten, not stopped.")
@json_option
@pass_session
def remove_command(session: Session, name: str, force: bool) -> None:
    """Forget node NAME and refuse it from now on, whatever certificate it shows.

    Its engines are not stopped: drain it first.
    """
    session.show(session.client.post("/v1/node/remove", name=name, force=force))


@click.command(name="refusals")
@json_option
@pass_session
def refusals_command(session: Session) -> None:
    """The last agents and operators that were turned away, and why."""
    from llmgw.cli.render import instant, table

    answer = session.client.get("/v1/refusals")
    found = answer.get("refusals", [])
    rows = [(instant(row.get("at")), row.get("peer", ""), row.get("reason", ""), row.get("text", "")) for row in found]
    session.show(answer, lambda: table(("WHEN", "FROM", "REASON", "WHY"), rows) if rows else "nobody was refused")
