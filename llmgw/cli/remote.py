"""A server on another machine: mutual TLS 1.3 with an operator's certificate, with the standard library's C{ssl}.

Both sides are checked: the server shows a certificate of the fleet's authority, of the role server, for the address that was
dialed. In TLS 1.3 a server judges ours only after we have begun to talk, so its no comes as an alert to the first answer.
"""

from __future__ import annotations

import errno
import os
import ssl
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import click
from attrs import frozen

PORT = 7444


@frozen
class Credentials:
    """The files by which an operator is known."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def find(cls, certificate: str, key: str, authority: str) -> Credentials:
        """What was given, and beside the certificate what was not.

        @raise click.UsageError: no certificate was given, a file cannot be read, or others can read the key.
        """
        if not certificate:
            raise click.UsageError("--server needs --cert FILE or $LLMGW_CERT, made with: llmgw pki operator DIR NAME")
        path = Path(certificate)
        beside = path.with_suffix(".key"), path.with_name("ca.pem")
        found = cls(path, Path(key) if key else beside[0], Path(authority) if authority else beside[1])
        for option, file in (("--cert", found.certificate), ("--key", found.key), ("--ca", found.authority)):
            if not os.access(file, os.R_OK):
                raise click.UsageError(f"{option}: {file} is not there or cannot be read")
        if mode := found.key.stat().st_mode & 0o077:
            raise click.UsageError(f"--key: others can use {found.key} (mode ...{mode:02o}): run chmod 600 {found.key}")
        return found

    def context(self) -> ssl.SSLContext:
        """
        @raise click.UsageError: a file is not what it should be.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_verify_locations(self.authority)
        except ssl.SSLError:
            raise click.UsageError(f"--ca: {self.authority} holds no certificate") from None
        try:
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, ValueError):
            raise click.UsageError(f"--cert: {self.certificate} and {self.key} are no certificate and its key") from None
        return context


class _Connection(HTTPSConnection):
    """Checks the role, too."""

    def connect(self) -> None:
        """From C{http.client}."""
        super().connect()
        shown: Any = self.sock.getpeercert() or {}
        uris: list[str] = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
        if len(uris) != 1 or not uris[0].startswith("llmgw://") or uris[0].split("/")[3:4] != ["server"]:
            raise ssl.SSLCertVerificationError(f"its certificate names {', '.join(uris) or 'nobody'}, no server of a fleet")


class Remote:
    """See L{llmgw.cli.client.Dial}."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.place = address
        self._host, self._port = _split(address)
        self._credentials = credentials

    def open(self, timeout: float) -> HTTPConnection:
        """See L{llmgw.cli.client.Dial}."""
        return _Connection(self._host, self._port, timeout=timeout, context=self._credentials.context())

    def why(self, error: Exception) -> str:
        """See L{llmgw.cli.client.Dial}."""
        ours = self._credentials.certificate
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"{self.place} is not the server it should be: {getattr(error, 'verify_message', '') or error.args[0]}"
        if isinstance(error, ssl.SSLError):
            reason = error.reason or str(error)
            for part, text in _ALERTS.items():
                if part in reason:
                    return f"{self.place}: {text.format(ours=ours)}"
            return f"{self.place}: TLS failed: {reason}"
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return f"{self.place} closed the connection: it may not take {ours}, its log says why"
        if getattr(error, "errno", None) == errno.ECONNREFUSED:
            return f"nobody listens at {self.place}: is llmgw-server running there, and is this its admin.listen?"
        return f"no answer at {self.place}: {error or type(error).__name__}"


_ALERTS = {
    "CERTIFICATE_EXPIRED": "it says that {ours} has expired: renew it with llmgw pki renew",
    "UNKNOWN_CA": "it does not know the authority that issued {ours}: is it of the same fleet?",
    "UNSUPPORTED_CERTIFICATE": "it does not take {ours}: an operator's certificate is needed (llmgw pki operator)",
    "BAD_CERTIFICATE": "it does not take {ours}; its log says why",
    "WRONG_VERSION_NUMBER": "what listens there does not speak TLS: is this its admin.listen?",
    "INTERNAL_ERROR": "it failed with an internal error: is this its admin.listen, or its fleet.listen?",
}


def _split(address: str) -> tuple[str, int]:
    """
    @raise click.UsageError: it is no address.
    """
    from llmgw.config.address import address as reader
    from llmgw.config.shape import Reading, Wrong
    from llmgw.config.text import Item

    try:
        found = reader(PORT)(Item(address, "", "", address), Reading(Path()))
    except Wrong as wrong:
        raise click.UsageError(f"--server: found {address!r}, want {wrong.want}") from None
    return found.host, found.port
