"""The fleet's certificates: one authority, and a certificate per server, node and operator. No I/O: see L{llmgw.pkifolder}.

An identity is one URI in the certificate, C{llmgw://FLEET/ROLE/NAME}; the common name is for people only. The authority
carries C{llmgw://FLEET}, so that the fleet's id can be read back from C{ca.pem}. Certificates begin five minutes ago, since
the clocks of a fleet never agree.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import LlmgwError
from llmgw.fleet.node import NODE_NAME
from llmgw.fleet.units import show_duration

NODE, SERVER, OPERATOR = "node", "server", "operator"
AUTHORITY_DAYS, LEAF_DAYS = 3650, 730
BACK_DATED = timedelta(minutes=5)
FLEET_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z", re.ASCII)
_USAGE = {
    NODE: ExtendedKeyUsageOID.CLIENT_AUTH,
    SERVER: ExtendedKeyUsageOID.SERVER_AUTH,
    OPERATOR: ExtendedKeyUsageOID.CLIENT_AUTH,
}
_HOST = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*\Z", re.ASCII | re.IGNORECASE
)


class PkiError(LlmgwError):
    """A certificate, a key or a file of theirs is not as it has to be."""


@frozen
class Identity:
    """Who a certificate says its holder is. C{role} is C{node}, C{server} or C{operator}."""

    fleet: str
    role: str
    name: str

    @property
    def uri(self) -> str:
        """The one URI that the certificate carries."""
        return f"llmgw://{self.fleet}/{self.role}/{self.name}"


@frozen
class Pair:
    """A certificate and the private key that belongs to it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_key() -> ec.EllipticCurvePrivateKey:
    """A fresh P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def make_authority(
    now: datetime, fleet: str = "", days: int = AUTHORITY_DAYS, key: ec.EllipticCurvePrivateKey | None = None
) -> Pair:
    """A self-signed authority for C{fleet} (12 random hex digits when empty); it signs leaves and no further authority."""
    fleet, key = fleet or secrets.token_hex(6), key or make_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"llmgw fleet {fleet}")])
    builder = _dated(now, now + timedelta(days=days)).subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(authority=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(_names([f"llmgw://{fleet}"], []), critical=False)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Pair,
    role: str,
    name: str,
    now: datetime,
    addresses: Iterable[str] = (),
    days: float = LEAF_DAYS,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> Pair:
    """A certificate of C{role} for C{name}, never valid longer than its authority.

    @param addresses: DNS names and IP addresses under which a server is reached; none for a node or an operator.
    @raise PkiError: a bad name or address, or an authority that has expired.
    """
    if not NODE_NAME.match(name):
        raise PkiError(f"{name!r} is not a name: use 1 to 63 of a-z 0-9 . - with a letter or digit at both ends")
    end = authority.certificate.not_valid_after_utc
    if end <= now:
        raise PkiError(f"the authority expired on {end:%Y-%m-%d}; renew it with: llmgw pki renew DIR ca")
    identity = Identity(fleet_of(authority.certificate), role, name)
    return sign_leaf(authority, [identity.uri], addresses, [_USAGE[role]], (now, min(end, now + timedelta(days=days))), name, key)


def sign_leaf(
    authority: Pair,
    uris: Sequence[str],
    addresses: Iterable[str],
    usages: Sequence[x509.ObjectIdentifier],
    valid: tuple[datetime, datetime],
    display: str,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> Pair:
    """A leaf with exactly these names and purposes, asking no questions: L{issue} asks them."""
    key = key or make_key()
    builder = _dated(*valid).subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, display)]))
    builder = builder.issuer_name(authority.certificate.subject).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(authority=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    builder = builder.add_extension(_names(uris, addresses), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _dated(start: datetime, end: datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    return builder.not_valid_before(start - BACK_DATED).not_valid_after(end)


def _key_usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(uris: Iterable[str], addresses: Iterable[str]) -> x509.SubjectAlternativeName:
    uri_names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    return x509.SubjectAlternativeName([*uri_names, *dict.fromkeys(map(_address, addresses))])


def _address(text: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    if not _HOST.match(text):
        raise PkiError(f"{text!r} is neither a host name nor an IP address (leave out the port; wildcards are not allowed)")
    return x509.DNSName(text.lower())


def _subject_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return x509.SubjectAlternativeName([])


def fleet_of(authority: x509.Certificate) -> str:
    """The fleet id in an authority's certificate.

    @raise PkiError: it was not made by C{llmgw pki init}.
    """
    uris = _subject_names(authority).get_values_for_type(x509.UniformResourceIdentifier)
    fleet = uris[0].removeprefix("llmgw://") if len(uris) == 1 and uris[0].startswith("llmgw://") else ""
    if not FLEET_ID.match(fleet):
        raise PkiError(
            f"the authority {authority.subject.rfc4514_string()} carries no fleet id: make one with llmgw pki init DIR"
        )
    return fleet


def identity_of(certificate: x509.Certificate) -> Identity:
    """Whose certificate this is: its one URI, with the one purpose that goes with the role.

    @raise PkiError: no URI or several, not one of ours, or a purpose that is not its role's.
    """
    uris = _subject_names(certificate).get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise PkiError(f"it carries {len(uris) or 'no'} URI{'s' * (len(uris) != 1)} ({', '.join(uris)}), exactly one is allowed")
    scheme, _, rest = uris[0].partition("://")
    fleet, role, name = rest.split("/") if rest.count("/") == 2 else ("", "", "")
    if scheme != "llmgw" or not FLEET_ID.match(fleet) or role not in _USAGE or not NODE_NAME.match(name):
        raise PkiError(f"its URI {uris[0]!r} is not of the form llmgw://FLEET/ROLE/NAME with the role {', '.join(_USAGE)}")
    if usages_of(certificate) != {_USAGE[role]}:
        purpose = "serverAuth" if role == SERVER else "clientAuth"
        raise PkiError(f"it names {with_article(role)}, but its extended key usage is not {purpose} alone")
    return Identity(fleet, role, name)


def with_article(role: str) -> str:
    """C{a node}, C{a server}, C{an operator}."""
    return f"{'an' if role == OPERATOR else 'a'} {role}"


def usages_of(certificate: x509.Certificate) -> set[x509.ObjectIdentifier]:
    """The purposes in the extended key usage; empty where there is none."""
    with suppress(x509.ExtensionNotFound, ValueError):
        return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    return set()


def addresses_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The DNS names and IP addresses in a certificate."""
    names = _subject_names(certificate)
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def serial_of(certificate: x509.Certificate) -> str:
    """The serial number as logs and C{llmgw pki list} show it: hex, without leading zeros."""
    return f"{certificate.serial_number:x}"


def expiry_warning(certificate: x509.Certificate, now: datetime) -> str | None:
    """What to say about this certificate's end, None while more than a third of its life is left.

    The text changes its lead words at a third, 14, 3 and 1 days and at the end: log it when L{expiry_stage} does.
    """
    stage = expiry_stage(certificate, now)
    end = certificate.not_valid_after_utc
    if stage == 0:
        return None
    if stage == 5:
        return f"certificate expired {show_duration((now - end).total_seconds())} ago ({end:%Y-%m-%d %H:%M} UTC): renew it now"
    urgency = ("", "expires", "expires soon", "expires very soon", "expires within a day")[stage]
    return f"certificate {urgency}: {show_duration((end - now).total_seconds())} left (until {end:%Y-%m-%d %H:%M} UTC): renew it"


def expiry_stage(certificate: x509.Certificate, now: datetime) -> int:
    """0 fine, 1 in its last third, 2 at most 14 days, 3 at most 3 days, 4 at most 1 day, 5 expired."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    left = end - now
    if left > (end - start) / 3:
        return 0
    return 1 + sum(left <= timedelta(days=days) for days in (14, 3, 1, 0))


def certificate_text(certificate: x509.Certificate) -> bytes:
    """PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Unencrypted PKCS 8 PEM."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
