"""The fleet's certificates: one authority, a certificate per server and per node, and the files they live in.

An identity is one URI in the certificate, C{llmgw://FLEET/ROLE/NAME}; the common name is for people only. The authority
carries C{llmgw://FLEET}, so that the fleet's id can be read back from C{ca.pem}. Two things surprise. A renewed certificate
keeps its key: then one rename is the whole change, and no crash can leave a key beside a certificate that is not its own.
And certificates begin five minutes ago, since the clocks of a fleet never agree.
"""

from __future__ import annotations

import io
import ipaddress
import os
import re
import secrets
import stat
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import LlmgwError
from llmgw.fleet.node import NODE_NAME
from llmgw.fleet.units import show_duration

NODE, SERVER = "node", "server"
AUTHORITY_DAYS, LEAF_DAYS = 3650, 730
BACK_DATED = timedelta(minutes=5)
FLEET_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z", re.ASCII)
_USAGE = {NODE: ExtendedKeyUsageOID.CLIENT_AUTH, SERVER: ExtendedKeyUsageOID.SERVER_AUTH}
_HOST = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*\Z", re.ASCII | re.IGNORECASE
)


class PkiError(LlmgwError):
    """A certificate, a key or a file of theirs is not as it has to be."""


@frozen
class Identity:
    """Who a certificate says its holder is. C{role} is C{node} or C{server}."""

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

    @param addresses: DNS names and IP addresses under which a server is reached; none for a node.
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
        raise PkiError(f"its URI {uris[0]!r} is not of the form llmgw://FLEET/node/NAME or llmgw://FLEET/server/NAME")
    if usages_of(certificate) != {_USAGE[role]}:
        raise PkiError(
            f"it names a {role}, but its extended key usage is not {'clientAuth' if role == NODE else 'serverAuth'} alone"
        )
    return Identity(fleet, role, name)


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


# Files. A folder holds ca.pem, ca.key and per name NAME.pem, NAME.key.


def read_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates in a PEM file, at least one.

    @raise PkiError: it cannot be read or holds none.
    """
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise PkiError(f"cannot read the certificate {path}: {error.strerror}") from None
    except ValueError:
        raise PkiError(f"{path} holds no PEM certificate") from None


def read_key(path: Path) -> PrivateKeyTypes:
    """The private key in a PEM file that nobody but its owner can read.

    @raise PkiError: it cannot be read, others can read it, or it is not an unencrypted PEM key.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(2**16)
    except OSError as error:
        raise PkiError(f"cannot read the key {path}: {error.strerror}") from None
    if mode & 0o077:
        raise PkiError(f"others can read the key {path} (mode {mode:04o}): run chmod 600 {path}")
    try:
        return serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError):
        raise PkiError(f"{path} holds no unencrypted PEM private key") from None


def read_pair(certificate: Path, key: Path) -> tuple[list[x509.Certificate], PrivateKeyTypes]:
    """The chain (own certificate first) and its key.

    @raise PkiError: either cannot be used, or they do not belong together.
    """
    chain, private = read_certificates(certificate), read_key(key)
    if chain[0].public_key() != private.public_key():
        raise PkiError(f"the key {key} is not the one of the certificate {certificate}")
    return chain, private


def init(folder: Path, now: datetime, days: int = AUTHORITY_DAYS) -> Pair:
    """Make the fleet's authority in C{folder}, which is made 0700 if it is not there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PkiError(f"cannot make the folder {folder}: {error.strerror}") from None
    return _write_new(folder, "ca", make_authority(now, days=days))


def add(folder: Path, role: str, name: str, now: datetime, addresses: Sequence[str] = (), days: int = LEAF_DAYS) -> Pair:
    """Make NAME.pem and NAME.key in C{folder}; files that are there are left alone and refused."""
    pair = issue(read_authority(folder), role, name, now, addresses, days)
    return _write_new(folder, name, pair)


def renew(folder: Path, name: str, now: datetime, days: int | None = None) -> Pair:
    """A new certificate for the same key, names, role and (unless C{days} says) length of life; C{ca} renews the authority.

    Whoever holds a copy needs only the new NAME.pem.
    """
    chain, key = read_pair(folder / f"{name}.pem", folder / f"{name}.key")
    old = chain[0]
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PkiError(f"{folder / f'{name}.key'} is not one of ours (not an elliptic curve key)")
    life = days or round((old.not_valid_after_utc - old.not_valid_before_utc - BACK_DATED) / timedelta(days=1)) or 1
    if name == "ca":
        pair = make_authority(now, fleet_of(old), life, key)
    else:
        identity = identity_of(old)
        pair = issue(read_authority(folder), identity.role, identity.name, now, addresses_of(old), life, key)
    _write(folder / f"{name}.pem", certificate_text(pair.certificate), 0o644, replace=True)
    return pair


def read_authority(folder: Path) -> Pair:
    """The authority in C{folder}: of the certificates in ca.pem the one that ca.key belongs to."""
    key = read_key(folder / "ca.key")
    for certificate in read_certificates(folder / "ca.pem"):
        if isinstance(key, ec.EllipticCurvePrivateKey) and certificate.public_key() == key.public_key():
            return Pair(certificate, key)
    raise PkiError(f"the key {folder / 'ca.key'} is not the one of the authority {folder / 'ca.pem'}")


def certificates_in(folder: Path) -> list[tuple[str, x509.Certificate]]:
    """Every NAME.pem in C{folder} by name, the authority first."""
    paths = sorted(folder.glob("*.pem"), key=lambda path: (path.stem != "ca", path.stem))
    return [(path.stem, read_certificates(path)[0]) for path in paths]


def write_bundle(path: Path, folder: Path, name: str, configuration: str) -> None:
    """One 0600 archive with all that a new node needs: ca.pem, NAME.pem, NAME.key and agent.yaml."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file, mode in (("ca.pem", 0o644), (f"{name}.pem", 0o644), (f"{name}.key", 0o600)):
            _add_member(archive, file, (folder / file).read_bytes(), mode)
        _add_member(archive, "agent.yaml", configuration.encode(), 0o644)
    _write(path, buffer.getvalue(), 0o600, replace=False)


def _add_member(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


def certificate_text(certificate: x509.Certificate) -> bytes:
    """PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Unencrypted PKCS 8 PEM."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write_new(folder: Path, name: str, pair: Pair) -> Pair:
    for path in (folder / f"{name}.pem", folder / f"{name}.key"):
        if path.exists():
            raise PkiError(
                f"{path} exists already and is left as it is; for a new certificate run: llmgw pki renew {folder} {name}"
            )
    # The key first and exclusively: of two runs at once, the one that placed its key also places the certificate.
    _write(folder / f"{name}.key", key_text(pair.key), 0o600, replace=False)
    _write(folder / f"{name}.pem", certificate_text(pair.certificate), 0o644, replace=False)
    return pair


def _write(path: Path, content: bytes, mode: int, replace: bool) -> None:
    """Write whole or not at all, whatever the umask; without C{replace} an existing file is an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
            file.flush()
            os.fsync(descriptor)
        if replace:
            os.rename(temporary, path)
        else:
            os.link(temporary, path)
        _sync_folder(path.parent)
    except FileExistsError:
        raise PkiError(f"{path} exists already and is left as it is") from None
    except OSError as error:
        raise PkiError(f"cannot write {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
