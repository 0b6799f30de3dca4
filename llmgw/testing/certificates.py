"""Certificates for tests, good and bad, made in memory and written where a test wants them.

All of one L{Fleet} hang under one authority; L{Fleet.leaf} makes what L{llmgw.pki.issue} would refuse to.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from attrs import define, field, frozen
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from llmgw import pki

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@frozen
class Files:
    """Where one identity was written, as a configuration's C{tls:} names it."""

    authority: Path
    certificate: Path
    key: Path


@define
class Fleet:
    """An authority and what it signs, all as of C{now}. C{name} is the fleet's id."""

    now: datetime = field(factory=lambda: datetime.now(UTC))
    name: str = "f1ee7f1ee700"
    authority: pki.Pair = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.authority = pki.make_authority(self.now, self.name)

    def node(self, name: str, days: float = 30) -> pki.Pair:
        """A good node certificate."""
        return pki.issue(self.authority, pki.NODE, name, self.now, days=days)

    def server(self, name: str, addresses: Sequence[str] = ("127.0.0.1", "localhost"), days: float = 30) -> pki.Pair:
        """A good server certificate for these addresses."""
        return pki.issue(self.authority, pki.SERVER, name, self.now, addresses, days=days)

    def leaf(
        self,
        uris: Sequence[str],
        usages: Sequence[x509.ObjectIdentifier] = (CLIENT,),
        addresses: Sequence[str] = (),
        start: timedelta = timedelta(0),
        end: timedelta = timedelta(days=30),
        display: str = "leaf",
    ) -> pki.Pair:
        """A leaf with exactly these names, purposes and dates, however wrong."""
        return pki.sign_leaf(self.authority, uris, addresses, usages, (self.now + start, self.now + end), display)

    def uri(self, role: str, name: str) -> str:
        """The URI of an identity in this fleet."""
        return pki.Identity(self.name, role, name).uri

    def expired(self, name: str) -> pki.Pair:
        """A node's certificate that ended an hour ago."""
        return self.leaf([self.uri("node", name)], start=timedelta(days=-30), end=timedelta(hours=-1), display=name)

    def not_yet_valid(self, name: str) -> pki.Pair:
        """A node's certificate that begins in an hour (to a node whose clock is behind, every certificate is like this)."""
        return self.leaf([self.uri("node", name)], start=timedelta(hours=1) + pki.BACK_DATED, display=name)

    def wrong_purpose(self, name: str) -> pki.Pair:
        """It names a node but may only be used by a server."""
        return self.leaf([self.uri("node", name)], [SERVER], ["127.0.0.1"], display=name)

    def two_names(self, one: str, other: str) -> pki.Pair:
        """A node's certificate with two identities."""
        return self.leaf([self.uri("node", one), self.uri("node", other)], display=one)

    def nameless(self, name: str) -> pki.Pair:
        """A client certificate with nothing but a common name."""
        return self.leaf([], display=name)

    def write(self, folder: Path, name: str, pair: pki.Pair) -> Files:
        """Write ca.pem, NAME.pem and NAME.key (0600) into C{folder}, over what is there."""
        folder.mkdir(parents=True, exist_ok=True)
        files = Files(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
        files.authority.write_bytes(pki.certificate_text(self.authority.certificate))
        files.certificate.write_bytes(pki.certificate_text(pair.certificate))
        files.key.touch(0o600)
        files.key.chmod(0o600)
        files.key.write_bytes(pki.key_text(pair.key))
        return files
