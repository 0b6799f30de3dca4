"""What one run of C{llmgw} was asked for: which server, and whether people or programs read the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click
from attrs import define

from llmgw.cli.client import Answer, Client, Local
from llmgw.fleet.units import parse_duration

Command = TypeVar("Command", bound=Callable[..., Any])


@define
class Session:
    """C{socket} is the admin socket's path; C{as_json} asks for the answer as the API gave it.

    @ivar server: HOST:PORT of a server elsewhere, which then counts instead of the socket.
    @ivar credentials: an operator's certificate, key and authority, empty where not given.
    """

    socket: str = "/run/llmgw/admin.sock"
    server: str = ""
    credentials: tuple[str, str, str] = ("", "", "")
    as_json: bool = False

    @property
    def client(self) -> Client:
        """The way to the server; opens nothing by itself.

        @raise click.UsageError: a server elsewhere is asked for without a certificate, or with one that cannot be used.
        """
        if not self.server and not self.credentials[0]:
            return Client(Local(self.socket))
        from llmgw.cli.remote import Credentials, Remote

        credentials = Credentials.find(*self.credentials)
        home = Remote(self.server, credentials) if self.server else Local(self.socket)
        return Client(home, lambda address: Remote(address, credentials))

    def show(self, answer: Any, text: Callable[[], str] | None = None) -> None:
        """Print C{answer} as JSON or as C{text} makes it (default: the server's own sentences)."""
        if self.as_json:
            click.echo(json.dumps(answer, ensure_ascii=False, indent=None if isinstance(answer, list) else 2))
        else:
            click.echo(text() if text else sentences(answer))


def sentences(answer: Answer) -> str:
    """What the server says in words: C{text}, C{lines} or both; a bare answer is shown as JSON."""
    from llmgw.cli.render import plain

    said = [answer["text"]] if answer.get("text") else []
    said += answer.get("lines") or ()
    return plain("\n".join(said)) if said else json.dumps(answer, ensure_ascii=False)


def _be_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Session).as_json = True


def json_option(command: Command) -> Command:
    """C{--json}, as every command has it."""
    return click.option(
        "--json", is_flag=True, expose_value=False, callback=_be_json, help="Print the answer as JSON, for programs."
    )(command)


def duration(text: str) -> float:
    """C{90s}, C{30m}, C{12h}, C{90d} to seconds; for C{type=}.

    @raise click.BadParameter: saying what is allowed.
    """
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


pass_session = click.make_pass_decorator(Session)
