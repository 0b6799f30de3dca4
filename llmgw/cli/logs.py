"""C{llmgw events} and C{llmgw logs}: what happened, and what an engine printed."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
from attrs import define

from llmgw.cli.client import Answer, Client, Refused, Unreachable
from llmgw.cli.session import Session, json_option, pass_session
from llmgw.fleet.line import escape

WAIT = 20.0
POLL = 0.5
PAUSE = 2.0
PIECE = 2**18
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@click.command(name="events")
@click.option("--follow", "-f", is_flag=True, help="Go on printing events as they happen.")
@click.option("--after", type=click.IntRange(0), metavar="N", help="Only events numbered above N.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many of the latest.")
@json_option
@pass_session
def events_command(session: Session, follow: bool, after: int | None, limit: int) -> None:
    """What happened in the fleet, oldest first. With --json one object a line."""
    answer = session.client.get("/v1/events", after=after, limit=limit)
    last = _print_events(session, answer, after or 0)
    patient = Patient(session.client)
    while follow:
        fresh = patient.get("/v1/events", after=last, wait=WAIT, limit=1000)
        if fresh and not fresh.get("events"):
            time.sleep(POLL)
        last = _print_events(session, fresh or {}, last)


def _print_events(session: Session, answer: Answer, last: int) -> int:
    for event in answer.get("events", ()):
        click.echo(json.dumps(event, ensure_ascii=False) if session.as_json else event_text(event))
        last = max(last, event.get("number", 0))
    sys.stdout.flush()
    return last


def event_text(event: Answer) -> str:
    """One line, and an engine's last words indented below it."""
    from llmgw.cli.render import instant

    tail = [f"    {escape(line)}" for line in event.get("tail") or ()]
    return "\n".join([f"{instant(event.get('at'))}  {escape(event.get('text') or '')}", *tail])


@define
class Patient:
    """Asks again and again while the server or a node is away, and says so once for each different reason."""

    client: Client
    _said: str = ""

    def get(self, route: str, **query: Any) -> Answer | None:
        """The answer, or, after a pause, None."""
        try:
            answer = self.client.get(route, timeout=WAIT + 10, **query)
        except (Refused, Unreachable) as error:
            if str(error) != self._said:
                click.echo(f"llmgw: {escape(str(error))}; trying again", err=True)
            self._said = str(error)
            time.sleep(PAUSE)
            return None
        self._said = ""
        return answer


@click.command(name="logs")
@click.argument("shard")
@click.option("--follow", "-f", is_flag=True, help="Go on printing, also into the next attempt.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="The output of this attempt; default: the latest.")
@click.option("--node", metavar="NAME", help="As it ran on this node; default: where it is, or was last.")
@click.option("--lines", "-n", type=click.IntRange(1), metavar="N", help="Only the last N lines.")
@json_option
@pass_session
def logs_command(session: Session, shard: str, follow: bool, attempt: int | None, lines: int | None, node: str | None) -> None:
    """What the engine of SHARD (MODEL/REPLICA/RANK, e.g. smol/1/0) printed.

    Also of one that is gone, as long as its node keeps the output and the events tell where it was.
    On a terminal control characters are shown escaped; into a pipe the output goes as it came.
    """
    for piece in _pieces(session.client, {"shard": shard, "node": node}, attempt, follow, lines):
        if session.as_json:
            click.echo(json.dumps(piece, ensure_ascii=False))
        else:
            # Not click.echo, which takes colours out of what goes into a file.
            sys.stdout.write(fit(piece["text"]) if sys.stdout.isatty() else piece["text"])
        sys.stdout.flush()


def _pieces(client: Client, shard: Answer, attempt: int | None, follow: bool, lines: int | None) -> Iterator[Answer]:
    asked, offset = attempt or 0, -PIECE if lines else 0
    piece = client.get("/v1/logs", **shard, attempt=asked, offset=offset, limit=PIECE)
    if lines:
        piece["text"] = "".join(piece["text"].splitlines(keepends=True)[-lines:])
    patient = Patient(client)
    while True:
        if piece["text"]:
            yield piece
        elif not follow:
            return
        elif not attempt and (newer := _newer(client, shard, piece["attempt"])):
            click.echo(f"-- attempt {newer} --", err=True)
            piece |= {"attempt": newer, "next": 0}
        else:
            time.sleep(POLL)
        where = {**shard, "attempt": piece["attempt"], "offset": piece["next"], "limit": PIECE}
        piece = (patient.get("/v1/logs", **where) if follow else client.get("/v1/logs", **where)) or piece | {"text": ""}


def _newer(client: Client, shard: Answer, attempt: int) -> int:
    try:
        latest: int = client.get("/v1/logs", **shard, attempt=0, offset=0, limit=1)["attempt"]
    except (Refused, Unreachable):
        return 0
    return latest if latest > attempt else 0


def fit(text: str) -> str:
    """An engine's output for a terminal: colours dropped, of a progress bar's states the last one, the rest escaped."""
    rows = (row.rstrip("\r").rpartition("\r")[2] for row in _COLOUR.sub("", text).expandtabs().split("\n"))
    return "\n".join(map(escape, rows))
