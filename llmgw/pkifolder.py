"""Certificates and keys in files: a folder holds ca.pem, ca.key and per name NAME.pem, NAME.key.

A file appears whole or not at all, and none is written over. A renewed certificate keeps its key: then one rename is the
whole change, and no crash can leave a key beside a certificate that is not its own.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
import tarfile
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from llmgw.pki import (
    AUTHORITY_DAYS,
    BACK_DATED,
    LEAF_DAYS,
    Pair,
    PkiError,
    addresses_of,
    certificate_text,
    fleet_of,
    identity_of,
    issue,
    key_text,
    make_authority,
)


def read_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates in a PEM file, at least one.

    @raise PkiError: it cannot be read or holds none.
    """
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise _unreadable("certificate", path, error) from None
    except ValueError:
        raise PkiError(f"{path} holds no PEM certificate") from None


def _unreadable(what: str, path: Path, error: OSError) -> PkiError:
    """It names the user where that is the trouble: files of root and a daemon of another user are what goes wrong most."""
    who = f" for the user with id {os.geteuid()}, who must own it" if isinstance(error, PermissionError) else ""
    return PkiError(f"cannot read the {what} {path}: {error.strerror}{who}")


def read_key(path: Path) -> PrivateKeyTypes:
    """The private key in a PEM file that nobody but its owner can read.

    @raise PkiError: it cannot be read, others can read it, or it is not an unencrypted PEM key.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(2**16)
    except OSError as error:
        raise _unreadable("key", path, error) from None
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


def certificates_in(folder: Path) -> list[tuple[str, x509.Certificate | PkiError]]:
    """Every NAME.pem in C{folder} by name, the authority first; for one that cannot be read, why."""
    if not (folder / "ca.pem").exists():
        raise PkiError(f"there is no {folder / 'ca.pem'}: make a fleet with llmgw pki init {folder}")
    paths = sorted(folder.glob("*.pem"), key=lambda path: (path.stem != "ca", path.stem))
    return [(path.stem, _first_certificate(path)) for path in paths]


def _first_certificate(path: Path) -> x509.Certificate | PkiError:
    try:
        return read_certificates(path)[0]
    except PkiError as error:
        return error


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
    member.size, member.mode, member.mtime = len(content), mode, int(time.time())
    archive.addfile(member, io.BytesIO(content))


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
