"""C{llmgw rollout}: how far the change of a model to its new profile is, and steering it."""

from __future__ import annotations

import click

from llmgw.cli.session import Session, json_option, pass_session


@click.command(name="rollout")
@click.argument("model")
@click.option("--pause", "action", flag_value="pause", help="Change no further replica for now.")
@click.option("--resume", "action", flag_value="resume", help="Go on, or try again what was rolled back or undone.")
@click.option("--undo", "action", flag_value="undo", help="Go back to the profile before, and stay there.")
@click.option("--allow-outage", is_flag=True, help="With --resume or --undo: the only serving replica may stop first.")
@json_option
@pass_session
def rollout_command(session: Session, model: str, action: str | None, allow_outage: bool) -> None:
    """Show or steer the change of MODEL to its new profile."""
    if allow_outage and action not in ("resume", "undo"):
        raise click.UsageError("--allow-outage goes with --resume or --undo")
    if action:
        session.show(session.client.post("/v1/rollout", model=model, action=action, allow_outage=allow_outage or None))
    else:
        session.show(session.client.get("/v1/rollout", model=model))
