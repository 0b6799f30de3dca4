"""The C{llmgw} command: finds the subcommand, runs it, and turns what went wrong into one sentence and an exit status.

0 is well, 1 failed or refused, 2 a wrong command line or configuration, 3 no server answers. Subcommands are imported only
when they are called, so that C{llmgw status} starts in a fifth of a second.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from llmgw.cli.client import Refused, Unreachable
from llmgw.cli.session import Session, json_option
from llmgw.errors import Invalid, LlmgwError
from llmgw.fleet.line import escape

OK, FAILED, MISUSED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

# Where each command lives, in the order of the help: looking first, then changing, then the rest.
COMMANDS = {
    "status": "status",
    "explain": "catalog",
    "events": "logs",
    "logs": "logs",
    "orphans": "operate",
    "refusals": "nodes",
    "check": "check",
    "plan": "plan",
    "apply": "catalog",
    "wait": "catalog",
    "rollout": "rollout",
    "drain": "operate",
    "cordon": "operate",
    "uncordon": "operate",
    "restart": "operate",
    "adopt": "operate",
    "stop": "operate",
    "node": "nodes",
    "key": "keys",
    "pki": "pki",
    "store": "store",
    "estimate": "estimate",
    "fetch": "fetch",
    "usage": "live",
    "top": "live",
}


class Commands(click.Group):
    """The subcommands by name, imported when needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; its module holds it as C{NAME_command}."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"llmgw.cli.{COMMANDS[cmd_name]}"), f"{cmd_name}_command")
        return found


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--socket",
    envvar="LLMGW_SOCKET",
    default="/run/llmgw/admin.sock",
    show_default=True,
    metavar="PATH",
    help="The server's admin socket; also taken from $LLMGW_SOCKET.",
)
@click.option(
    "--server",
    envvar="LLMGW_SERVER",
    metavar="HOST:PORT",
    help="A server on another machine (its admin.listen) instead of the socket; needs --cert. Also $LLMGW_SERVER.",
)
@click.option("--cert", envvar="LLMGW_CERT", metavar="FILE", help="Your operator's certificate. Also $LLMGW_CERT.")
@click.option(
    "--key", envvar="LLMGW_CERT_KEY", metavar="FILE", help="Its key; default: NAME.key beside it. Also $LLMGW_CERT_KEY."
)
@click.option("--ca", envvar="LLMGW_CA", metavar="FILE", help="The fleet's authority; default: ca.pem beside it. Also $LLMGW_CA.")
@click.version_option(package_name="llmgw", prog_name="llmgw", message="%(prog)s %(version)s")
@json_option
@click.pass_context
def llmgw(context: click.Context, socket: str, server: str | None, cert: str | None, key: str | None, ca: str | None) -> None:
    """Operate llmgw: language models on machines that somebody owns."""
    session = context.ensure_object(Session)
    session.socket = socket
    session.server = _server(context, server)
    session.credentials = (cert or "", key or "", ca or "")


def _server(context: click.Context, server: str | None) -> str:
    """What is typed wins over the environment, and of two in the environment the server over the socket."""
    typed = {name for name in ("socket", "server") if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if len(typed) == 2:
        raise click.UsageError("--socket and --server are two ways to a server: give one")
    return "" if typed == {"socket"} else server or ""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    session = Session()
    try:
        done: Any = llmgw.main(list(arguments), prog_name="llmgw", standalone_mode=False, obj=session)
    except click.ClickException as error:
        error.show()
        return MISUSED
    except click.Abort:
        return INTERRUPTED
    except LlmgwError as error:
        return _tell(error, session)
    return done if isinstance(done, int) else OK


def _tell(error: LlmgwError, session: Session) -> int:
    problems = [str(problem) for problem in getattr(error, "problems", ())]
    message = "" if isinstance(error, Invalid) else str(error)
    code = getattr(error, "code", "") or type(error).__name__.lower()
    if session.as_json:
        click.echo(json.dumps({"error": {"code": code, "message": str(error), "problems": problems}}, ensure_ascii=False))
    for problem in problems:
        click.echo(escape(problem), err=True)
    if message:
        prefix = "not yet: " if code == "not_yet" and not message.startswith("not yet") else ""
        click.echo(f"llmgw: {prefix}{escape(message)}", err=True)
    if isinstance(error, Unreachable):
        return UNREACHABLE
    return MISUSED if isinstance(error, Invalid) or (isinstance(error, Refused) and problems) else FAILED


def main() -> None:
    """The console script. Text that the terminal's encoding lacks is shown escaped instead of ending in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))
