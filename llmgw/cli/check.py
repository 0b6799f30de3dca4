"""C{llmgw check}: everything that is wrong with a configuration, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from llmgw.cli.session import Session, json_option, pass_session
from llmgw.errors import Invalid, Problem
from llmgw.fleet.line import escape


@click.command(name="check")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@click.pass_context
@pass_session
def check_command(session: Session, context: click.Context, file: Path) -> None:
    """Check FILE, a server.yaml, an agent.yaml or a file of models.

    Prints every problem as FILE:LINE: text and exits 2 if there is one.
    """
    problems, notes, kind = _check(file)
    answer = {
        "file": str(file),
        "kind": kind,
        "problems": [{"where": each.where, "text": each.text, "code": each.code} for each in problems],
        "notes": notes,
    }
    session.show(answer, lambda: "\n".join(map(escape, _lines(file, kind, problems, notes))))
    context.exit(2 if problems else 0)


def _lines(file: Path, kind: str, problems: list[Problem], notes: list[str]) -> Iterator[str]:
    yield from map(str, problems)
    yield from (f"note: {note}" for note in notes)
    if not problems:
        yield f"{file}: good ({kind})"


def _check(file: Path) -> tuple[list[Problem], list[str], str]:
    from llmgw.config.check import check_file
    from llmgw.config.text import read_file

    try:
        checked = check_file(file.absolute(), read_file(file))
    except Invalid as invalid:
        return invalid.problems, [], ""
    problems, notes = _certificates(checked.kind, checked.settings, str(file))
    return problems, [*checked.warnings, *notes], checked.kind


def _certificates(kind: str, settings: Any, file: str) -> tuple[list[Problem], list[str]]:
    """What is wrong with the certificates that the file names. One that is not on this machine is only noted."""
    fleet = settings.tls if kind == "agent" else getattr(settings, "fleet", None) and settings.fleet.tls
    web = getattr(getattr(settings, "router", None), "tls", None)
    problems: list[Problem] = []
    notes: list[str] = []
    for files in filter(None, (fleet, web)):
        named = [path for path in (files.authority, files.certificate, files.key) if path]
        if absent := [str(path) for path in named if not path.exists()]:
            notes.append(f"not on this machine: {', '.join(absent)}")
        else:
            found, warning = _pair(kind, settings, files)
            problems += [Problem(text, file, "certificate") for text in found]
            notes += [warning] if warning else []
    return problems, notes


def _pair(kind: str, settings: Any, files: Any) -> tuple[list[str], str | None]:
    from llmgw import pki, pkifolder

    try:
        chain, _ = pkifolder.read_pair(files.certificate, files.key)
        if files.authority:
            pkifolder.read_certificates(files.authority)
            _identity(kind, settings, chain[0], files.certificate)
    except pki.PkiError as error:
        return [str(error)], None
    warning = pki.expiry_warning(chain[0], datetime.now(UTC))
    return [], f"{files.certificate}: {warning}" if warning else None


def _identity(kind: str, settings: Any, certificate: Any, path: Path) -> None:
    from llmgw import pki

    try:
        identity = pki.identity_of(certificate)
    except pki.PkiError as error:
        raise pki.PkiError(f"{path} cannot be used: {error}") from None
    role, name = (pki.NODE, settings.node) if kind == "agent" else (pki.SERVER, None)
    if identity.role != role:
        raise pki.PkiError(f"{path} is the certificate of {pki.with_article(identity.role)}, want one of a {role}")
    if name and identity.name != name:
        raise pki.PkiError(f"{path} is the certificate of {identity.name}, but node is {name}: set node: {identity.name}")
    if role == pki.SERVER:
        _dialed(settings, pki.addresses_of(certificate), path)


def _dialed(settings: Any, allowed: tuple[str, ...], path: Path) -> None:
    """Whoever dials checks that the certificate is for the address that was dialed."""
    from llmgw import pki

    for key, part in (("fleet.advertise", settings.fleet), ("admin.advertise", settings.admin)):
        if part is not None and part.advertise.host.lower() not in allowed:
            known = ", ".join(allowed) or "no address"
            raise pki.PkiError(f"{path} is for {known}, not for {part.advertise.host} ({key}): make one with --address")
