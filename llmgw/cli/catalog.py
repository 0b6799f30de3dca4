"""C{llmgw apply, explain, wait}: the models that are wanted, and whether they are there yet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from llmgw.cli.client import Answer, Client, Unreachable
from llmgw.cli.session import Session, duration, json_option, pass_session
from llmgw.errors import LlmgwError
from llmgw.fleet.line import escape
from llmgw.fleet.units import show_duration

FILE = click.argument("file", type=click.Path(path_type=Path))
REMOVALS = click.option("--allow-removals", is_flag=True, help="Also remove models that are missing from FILE.")
TIMEOUT = click.option("--timeout", type=duration, default="30m", show_default=True, help="How long to wait.")
POLL = 0.5


class NotReady(LlmgwError):
    """A model did not become ready in time, or cannot."""


def read_text(file: Path) -> str:
    """A file's text.

    @raise llmgw.errors.Invalid: it cannot be read.
    """
    from llmgw.config.text import read_file

    return read_file(file)


@click.command(name="apply")
@FILE
@REMOVALS
@click.option("--check-revision", type=click.IntRange(0), metavar="N", help="Refuse if the catalog in force is not N any more.")
@click.option("--allow-outage", is_flag=True, help="Even if a model's only replica has to stop before its successor starts.")
@click.option("--wait", is_flag=True, help="Return only when what was added or changed is ready.")
@TIMEOUT
@json_option
@pass_session
def apply_command(
    session: Session, file: Path, allow_removals: bool, check_revision: int | None, allow_outage: bool, wait: bool, timeout: float
) -> None:
    """Make the models in FILE the catalog in force.

    A changed profile replaces a model's replicas one at a time; how is said at once. Follow it with: llmgw rollout MODEL.

    FILE is a server.yaml, of which only models is looked at, or a file of models alone. A model that is missing from
    it is kept; to stop one write "replicas: 0", to remove it use --allow-removals.
    """
    body: dict[str, Any] = {"text": read_text(file), "path": str(file.absolute()), "allow_removals": allow_removals}
    body |= {"allow_outage": True} if allow_outage else {}
    answer = session.client.post("/v1/apply", **body, check_revision=check_revision)
    session.show(answer)
    until = time.monotonic() + timeout
    for model in [*answer.get("added", ()), *answer.get("changed", ())] if wait else ():
        found = _wait(session.client, model, until, timeout)
        click.echo(_done(model, found), err=session.as_json)


@click.command(name="explain")
@click.argument("model")
@json_option
@pass_session
def explain_command(session: Session, model: str) -> None:
    """Why MODEL has the replicas it has, and what would make the missing ones fit."""
    session.show(session.client.get("/v1/explain", model=model))


@click.command(name="wait")
@click.argument("model")
@TIMEOUT
@json_option
@pass_session
def wait_command(session: Session, model: str, timeout: float) -> None:
    """Wait until every wanted replica of MODEL is ready.

    Fails when the time is over, when there is no such model, and when a replica has failed for good.
    """
    found = _wait(session.client, model, time.monotonic() + timeout, timeout)
    session.show(found, lambda: _done(model, found))


def _done(model: str, found: Answer) -> str:
    return f"{model} is ready: {found.get('ready', 0)}/{found.get('wanted', 0)}"


def _wait(client: Client, model: str, until: float, timeout: float) -> Answer:
    said = ""
    while True:
        found, state = _look(client, model)
        if found and _settled(found):
            return found
        if state != said:
            click.echo(escape(f"{model}: {state}"), err=True)
            said = state
        if time.monotonic() >= until:
            what, see = ("changed", "rollout") if found and _before(found) else ("ready", "explain")
            raise NotReady(f"{model} is not {what} after {show_duration(timeout)}: {state}; see: llmgw {see} {model}")
        time.sleep(min(POLL, max(0.0, until - time.monotonic())))


def _settled(found: Answer) -> bool:
    """Whether as many replicas as wanted are ready and none of them is about to be replaced."""
    changing = _state(found) in ("running", "paused") and found.get("wanted", 0) > 0
    return not changing and _current(found) >= found.get("wanted", 0)


def _current(found: Answer) -> int:
    """How many ready replicas are as they shall be."""
    if "generation" not in found:
        return int(found.get("ready", 0))
    ready = [replica for replica in found.get("replicas") or () if replica.get("state") == "ready" and not replica.get("replace")]
    return sum(replica.get("generation") == found["generation"] for replica in ready)


def _before(found: Answer) -> int:
    """How many ready replicas serve until another takes their place."""
    return max(0, int(found.get("ready", 0)) - _current(found))


def _stands(found: Answer, why: str) -> str:
    """Where it stands, in words."""
    wanted, before = found.get("wanted", 0), _before(found)
    if not before:
        return f"{_current(found)}/{wanted} ready: {why}".rstrip(": ")
    return f"{found.get('ready', 0)}/{wanted} serve, {before} as before the change, which waits: {why}".rstrip(": ")


def _state(found: Answer) -> str:
    return str((found.get("rollout") or {}).get("state", ""))


def _look(client: Client, model: str) -> tuple[Answer | None, str]:
    """The model's part of status, None while the server is away; and where it stands, in words."""
    from llmgw.cli.status import replica_text

    try:
        status = client.get("/v1/status")
    except Unreachable as error:
        return None, str(error)
    found: Answer | None = next((each for each in status.get("models") or () if each["name"] == model), None)
    if found is None:
        raise NotReady(f"there is no model {model!r} in the catalog (an alias is not enough)")
    if _state(found) == "rolled_back":
        raise NotReady(f"{model}: {found['rollout']['reason']}; see: llmgw rollout {model}")
    waiting = [replica for replica in found.get("replicas") or () if replica.get("state") != "ready"]
    # No duration in these words: they are printed whenever they change.
    words = " · ".join(replica_text(_timeless(replica), 0) for replica in waiting)
    state = _stands(found, words or found.get("reason") or "")
    if waiting and all(replica.get("state") == "failed" for replica in waiting) and _state(found) != "running":
        raise NotReady(f"{model} will not become ready by itself: {state}; then: llmgw restart {model}")
    return found, state


def _timeless(replica: Answer) -> Answer:
    shards = [shard | {"since": None} for shard in replica.get("shards") or ()]
    return replica | {"since": None, "shards": shards}
