"""C{llmgw key}: who may use the models."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.client import Answer
from llmgw.cli.session import Session, duration, json_option, pass_session


@click.group(name="key")
def key_command() -> None:
    """API keys for the people and programs that use the models."""


@key_command.command(name="create")
@click.argument("name")
@click.option(
    "--team", metavar="T", help="Whose it is. The largest limits given to any of a team's keys hold for all of them together."
)
@click.option("--model", "models", multiple=True, metavar="MODEL", help="It may use only this model; repeat for several.")
@click.option("--rpm", type=click.IntRange(1), metavar="N", help="Requests per minute.")
@click.option("--tpm", type=click.IntRange(1), metavar="N", help="Tokens per minute.")
@click.option("--tpd", type=click.IntRange(1), metavar="N", help="Tokens per day.")
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="Requests at once.")
@click.option("--class", "class_", type=click.Choice(("high", "low")), help="high goes first where requests wait; default: low.")
@click.option("--expires", type=duration, help="How long it is good for, e.g. 90d; default: for ever.")
@json_option
@pass_session
def create_command(session: Session, /, name: str, models: tuple[str, ...], class_: str | None, **limits: Any) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    priority = 1 if class_ == "high" else None
    answer = session.client.post("/v1/keys", name=name, models=list(models) or None, priority=priority, **limits)
    session.show(answer, lambda: str(answer["key"]))
    if not session.as_json:
        click.echo(f"(id {answer['id']}; it is not shown again)", err=True)


@key_command.command(name="list")
@json_option
@pass_session
def list_command(session: Session) -> None:
    """Every key with its id and limits, never the key itself."""
    from llmgw.cli.render import table

    answer = session.client.get("/v1/keys")
    rows = [_row(key) for key in answer.get("keys", [])]
    headers = ("ID", "NAME", "TEAM", "CREATED", "EXPIRES", "MODELS", "LIMITS", "STATE")
    session.show(answer, lambda: table(headers, rows) if rows else "no keys")


def _row(key: Answer) -> list[str]:
    from llmgw.cli.render import day

    limits = [f"{key[name]} {name}" for name in ("rpm", "tpm", "tpd", "concurrency") if key.get(name)]
    limits += ["high class"] if key.get("priority") else []
    models = ", ".join(key.get("models") or ()) or "all"
    created, expires = day(key.get("created")), day(key.get("expires"))
    return [key["id"], key["name"], key.get("team") or "", created, expires, models, ", ".join(limits), key["state"]]


@key_command.command(name="rotate")
@click.argument("name")
@click.option("--overlap", type=duration, help="How long the secret before is good beside the new one; default: 24h.")
@json_option
@pass_session
def rotate_command(session: Session, name: str, overlap: float | None) -> None:
    """Give the key with this name or id a new secret and print it, this once. Its id, limits and usage stay."""
    from llmgw.cli.render import instant

    answer = session.client.post("/v1/keys/rotate", name=name, overlap=overlap)
    until = answer.get("old_until")
    before = f"the one before is good until {instant(until)}" if until else "the one before is refused now"
    session.show(answer, lambda: str(answer["key"]))
    if not session.as_json:
        click.echo(f"(id {answer['id']}; it is not shown again; {before})", err=True)


@key_command.command(name="revoke")
@click.argument("key", metavar="NAME")
@json_option
@pass_session
def revoke_command(session: Session, key: str) -> None:
    """Refuse the key with this name or id from now on; of several with the name, say which by its id."""
    session.show(session.client.post("/v1/keys/revoke", id=key))
