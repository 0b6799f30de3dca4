"""C{llmgw pki}: the fleet's certificates, in a folder on the operator's machine. Needs no server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from llmgw.cli.session import Command, Session, json_option, pass_session

FOLDER = click.Path(path_type=Path, file_okay=False)
AGENT_YAML = """\
# Unpack beside the certificates and start: twistd -n --pidfile= llmgw-agent --config agent.yaml
node: "{name}"
server: "{server}"
tls: {{authority: ca.pem, certificate: "{name}.pem", key: "{name}.key"}}
state: "{state}"
# See llmgw.yaml(5) for address, ports, labels, fabrics, devices, models, environment, engines.
"""


@click.group(name="pki")
def pki_command() -> None:
    """Make and renew the fleet's certificates.

    DIR holds ca.pem and ca.key and, for each server, node and operator, NAME.pem and NAME.key. Whoever has ca.key can
    make themselves any of them: keep DIR off the fleet's machines and copy out only what each needs.
    """


def days_option(default: int | None, text: str) -> Callable[[Command], Command]:
    """C{--days}."""
    return click.option("--days", type=click.IntRange(1, 36500), default=default, show_default=default is not None, help=text)


@pki_command.command(name="init")
@click.argument("folder", type=FOLDER, metavar="DIR")
@days_option(3650, "How long the authority is valid.")
@json_option
@pass_session
def init_command(session: Session, folder: Path, days: int) -> None:
    """Make a fleet: its authority and its id."""
    from llmgw import pkifolder

    _show(session, "ca", pkifolder.init(folder, datetime.now(UTC), days).certificate, folder)


@pki_command.command(name="server")
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.argument("name")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    required=True,
    metavar="HOST",
    help="A host name or IP address under which agents reach this server; repeat for several.",
)
@days_option(730, "How long the certificate is valid, at most as long as the authority.")
@json_option
@pass_session
def server_command(session: Session, folder: Path, name: str, addresses: tuple[str, ...], days: int) -> None:
    """Make NAME.pem and NAME.key for a server."""
    from llmgw import pki, pkifolder

    _show(session, name, pkifolder.add(folder, pki.SERVER, name, datetime.now(UTC), addresses, days).certificate, folder)


@pki_command.command(name="node")
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.argument("name")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write one .tar.gz with ca.pem, NAME.pem, NAME.key and an agent.yaml. It holds a private key: "
    "move it safely, then delete it.",
)
@click.option("--server", metavar="HOST:PORT", help="The fleet address for the bundle's agent.yaml.")
@click.option(
    "--state",
    default="state/agent",
    show_default=True,
    metavar="PATH",
    help="The state folder for the bundle's agent.yaml.",
)
@days_option(730, "How long the certificate is valid, at most as long as the authority.")
@json_option
@pass_session
def node_command(
    session: Session, folder: Path, name: str, bundle: Path | None, server: str | None, state: str, days: int
) -> None:
    """Make NAME.pem and NAME.key for a node."""
    from llmgw import pki, pkifolder

    if (bundle is None) != (server is None):
        raise click.UsageError("--bundle and --server belong together")
    if server is not None:
        _check_address(server)
    if '"' in state or "\\" in state:
        raise click.BadParameter("quotes and backslashes are not allowed", param_hint="--state")
    if bundle is not None and bundle.exists():
        raise pki.PkiError(f"{bundle} exists already and is left as it is")
    made = pkifolder.add(folder, pki.NODE, name, datetime.now(UTC), days=days)
    if bundle is not None:
        pkifolder.write_bundle(bundle, folder, name, AGENT_YAML.format(name=name, server=server, state=state))
    _show(session, name, made.certificate, folder, bundle)


def _check_address(text: str) -> None:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or any(c in host for c in ' "\\'):
        raise click.BadParameter(f"{text!r} is not HOST:PORT, e.g. cp1.example:7443 or [fd00::1]:7443", param_hint="--server")


@pki_command.command(name="operator")
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.argument("name")
@days_option(365, "How long the certificate is valid, at most as long as the authority.")
@json_option
@pass_session
def operator_command(session: Session, folder: Path, name: str, days: int) -> None:
    """Make NAME.pem and NAME.key for a person who operates the fleet.

    With them and ca.pem, llmgw --server HOST:PORT --cert NAME.pem does everything from another machine; what it changes
    is noted under NAME.
    """
    from llmgw import pki, pkifolder

    _show(session, name, pkifolder.add(folder, pki.OPERATOR, name, datetime.now(UTC), days=days).certificate, folder)


@pki_command.command(name="list")
@click.argument("folder", type=FOLDER, metavar="DIR")
@json_option
@pass_session
def list_command(session: Session, folder: Path) -> None:
    """Show every certificate in DIR with its end."""
    from llmgw import pkifolder
    from llmgw.cli.render import table

    rows = [_row(name, found) for name, found in pkifolder.certificates_in(folder)]
    cells = [
        (row["name"], row["role"], row["serial"][:8], row["expires"], ", ".join(row["addresses"]), row["note"]) for row in rows
    ]
    session.show(rows, lambda: table(("NAME", "ROLE", "SERIAL", "EXPIRES", "ADDRESSES", "NOTE"), cells))


@pki_command.command(name="renew")
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.argument("name")
@days_option(None, "How long the new one is valid; default: as long as the old one was.")
@json_option
@pass_session
def renew_command(session: Session, folder: Path, name: str, days: int | None) -> None:
    """Write a new NAME.pem for the same key, role and names.

    Copy only NAME.pem to where the old one is used and send the daemon SIGHUP. "renew DIR ca" renews the authority:
    then ca.pem goes to every server and node.
    """
    from llmgw import pkifolder

    _show(session, name, pkifolder.renew(folder, name, datetime.now(UTC), days).certificate, folder)


def _row(name: str, certificate: Any) -> dict[str, Any]:
    from llmgw import pki

    row: dict[str, Any] = {"name": name, "role": "", "fleet": "", "serial": "", "expires": "", "addresses": [], "note": ""}
    if isinstance(certificate, pki.PkiError):
        return row | {"note": str(certificate)}
    row |= {"serial": pki.serial_of(certificate), "expires": f"{certificate.not_valid_after_utc:%Y-%m-%d}"}
    row |= {"addresses": list(pki.addresses_of(certificate)), "note": pki.expiry_warning(certificate, datetime.now(UTC)) or ""}
    try:
        if name == "ca":
            return row | {"role": "authority", "fleet": pki.fleet_of(certificate)}
        identity = pki.identity_of(certificate)
        return row | {"role": identity.role, "fleet": identity.fleet}
    except pki.PkiError as error:
        return row | {"note": str(error)}


def _show(session: Session, name: str, certificate: Any, folder: Path, bundle: Path | None = None) -> None:
    row = _row(name, certificate)
    files = [str(bundle)] if bundle else []
    row["files"] = [str(folder / f"{name}.pem"), str(folder / f"{name}.key"), *files]
    text = f"{row['role']} {name if name != 'ca' else row['fleet']}, valid until {row['expires']}: {', '.join(row['files'])}"
    session.show(row, lambda: text)
