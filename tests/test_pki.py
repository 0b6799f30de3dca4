"""Certificates: identities, purposes, dates, and files that are never half written or mixed up."""

from __future__ import annotations

import stat
import subprocess
import tarfile
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from llmgw import pki, pkifolder
from llmgw.testing.certificates import CLIENT, SERVER, Fleet

NOW = datetime(2026, 10, 1, 12, 0, tzinfo=UTC)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def verify(pair, authority, now=NOW):
    store = Store([authority.certificate])
    return PolicyBuilder().store(store).time(now).build_client_verifier().verify(pair.certificate, [])


def test_authority_carries_the_fleet_id():
    """The fleet's id is 12 hex digits, read back from the authority's certificate."""
    authority = pki.make_authority(NOW)
    fleet = pki.fleet_of(authority.certificate)
    assert len(fleet) == 12 and int(fleet, 16) >= 0
    with pytest.raises(pki.PkiError, match="carries no fleet id"):
        pki.fleet_of(pki.issue(authority, pki.NODE, "n1", NOW).certificate)


def test_node_certificate_is_a_client_with_one_name():
    """A node's certificate: one URI SAN, clientAuth only, P-256, begun five minutes ago, accepted as client by its authority."""
    fleet = Fleet(NOW)
    pair = fleet.node("n1")
    names = pair.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [f"llmgw://{fleet.name}/node/n1"]
    assert pki.usages_of(pair.certificate) == {CLIENT}
    assert isinstance(pair.key.curve, ec.SECP256R1)
    assert pair.certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
    assert pki.identity_of(pair.certificate) == pki.Identity(fleet.name, "node", "n1")
    assert verify(pair, fleet.authority).subjects


def test_server_certificate_names_its_addresses():
    """A server's certificate: its URI plus DNS names and addresses, serverAuth only; no client verifier takes it."""
    fleet = Fleet(NOW)
    pair = fleet.server("cp1", ["cp1.Example", "10.0.0.1", "::1", "[::1]", "10.0.0.1"])
    assert pki.addresses_of(pair.certificate) == ("cp1.example", "10.0.0.1", "::1")
    assert pki.usages_of(pair.certificate) == {SERVER}
    assert pki.identity_of(pair.certificate) == pki.Identity(fleet.name, "server", "cp1")
    with pytest.raises(VerificationError):
        verify(pair, fleet.authority)


@pytest.mark.parametrize("bad", ["", "N1", "-a", "a/b", "a_b", "a" * 64, "a\n", "é"])
def test_bad_names_are_refused(bad):
    """A name goes into paths and logs, so its syntax is checked before anything is made of it."""
    with pytest.raises(pki.PkiError, match="is not a name"):
        pki.issue(Fleet(NOW).authority, pki.NODE, bad, NOW)


@pytest.mark.parametrize("bad", ["cp1:7443", "*.example", "", "a b", "http://x"])
def test_bad_addresses_are_refused(bad):
    """An address is a host name or an IP address, without port or wildcard."""
    with pytest.raises(pki.PkiError, match="neither a host name"):
        Fleet(NOW).server("cp1", [bad])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda fleet: fleet.two_names("n1", "n2"), "carries 2 URIs"),
        (lambda fleet: fleet.nameless("n1"), "carries no URIs"),
        (lambda fleet: fleet.wrong_purpose("n1"), "not clientAuth alone"),
        (lambda fleet: fleet.leaf([fleet.uri("node", "n1")], [CLIENT, SERVER]), "not clientAuth alone"),
        (lambda fleet: fleet.leaf(["spiffe://x/node/n1"]), "not of the form"),
        (lambda fleet: fleet.leaf([fleet.uri("admin", "n1")]), "not of the form"),
        (lambda fleet: fleet.leaf([fleet.uri("node", "n1/x")]), "not of the form"),
    ],
)
def test_what_is_not_an_identity_is_refused(make, said):
    """Exactly one URI of ours with exactly its role's purpose, or a sentence saying what was found."""
    with pytest.raises(pki.PkiError, match=said):
        pki.identity_of(make(Fleet(NOW)).certificate)


def test_test_certificates_are_as_bad_as_they_say():
    """The verifier judges the makers for tests: expired, too early and of another authority."""
    fleet, other = Fleet(NOW), Fleet(NOW, "another")
    for pair in (fleet.expired("n1"), fleet.not_yet_valid("n1"), other.node("n1")):
        with pytest.raises(VerificationError):
            verify(pair, fleet.authority)
    assert verify(fleet.not_yet_valid("n1"), fleet.authority, NOW + timedelta(hours=1, seconds=1))


def test_no_certificate_outlives_its_authority():
    """A leaf ends with its authority at the latest, and an expired authority signs nothing."""
    authority = pki.make_authority(NOW, days=10)
    assert pki.issue(authority, pki.NODE, "n1", NOW).certificate.not_valid_after_utc == NOW + timedelta(days=10)
    with pytest.raises(pki.PkiError, match="expired on 2026-10-11"):
        pki.issue(authority, pki.NODE, "n1", NOW + timedelta(days=10))


@pytest.mark.parametrize(
    "left, stage, said",
    [
        (timedelta(days=100), 0, None),
        (timedelta(days=29), 1, "certificate expires: 29 d left"),
        (timedelta(days=14), 2, "expires soon: 14 d left"),
        (timedelta(days=3), 3, "expires very soon"),
        (timedelta(days=1), 4, "expires within a day: 1 d left"),
        (timedelta(minutes=1), 4, "within a day: 1 m left"),
        (timedelta(0), 5, "expired 0.0 s ago"),
        (-timedelta(hours=2), 5, "expired 2 h ago"),
    ],
)
def test_expiry_is_warned_about(left, stage, said):
    """Warnings begin in the last third and grow at 14, 3 and 1 days; each says what is left and what to do."""
    certificate = Fleet(NOW).node("n1", days=100).certificate
    now = certificate.not_valid_after_utc - left
    assert pki.expiry_stage(certificate, now) == stage
    text = pki.expiry_warning(certificate, now)
    assert text is None if said is None else said in text and "renew it" in text


def test_files_are_made_whole_and_private(tmp_path):
    """init, server and node write keys 0600, an authority folder 0700, and OpenSSL agrees with the result."""
    folder = tmp_path / "pki"
    pkifolder.init(folder, datetime.now(UTC))
    pkifolder.add(folder, pki.SERVER, "cp1", datetime.now(UTC), ["127.0.0.1"])
    pkifolder.add(folder, pki.NODE, "n1", datetime.now(UTC))
    assert sorted(path.name for path in folder.iterdir()) == ["ca.key", "ca.pem", "cp1.key", "cp1.pem", "n1.key", "n1.pem"]
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.glob("*.key")} == {0o600}
    checked = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-CAfile", folder / "ca.pem", folder / "n1.pem", folder / "cp1.pem"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr


def test_existing_files_are_refused(tmp_path):
    """Nothing is written over: neither an authority nor a certificate, nor a key that an interrupted run left."""
    pkifolder.init(tmp_path, NOW)
    pkifolder.add(tmp_path, pki.NODE, "n1", NOW)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(pki.PkiError, match=r"ca\.pem exists already"):
        pkifolder.init(tmp_path, NOW)
    with pytest.raises(pki.PkiError, match="llmgw pki renew"):
        pkifolder.add(tmp_path, pki.SERVER, "n1", NOW, ["10.0.0.1"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "n1.pem").unlink()
    with pytest.raises(pki.PkiError, match=r"n1\.key exists already"):
        pkifolder.add(tmp_path, pki.NODE, "n1", NOW)


def test_renewal_keeps_key_names_role_and_life(tmp_path):
    """A renewed certificate differs in serial and dates only, so every copy of the key stays right."""
    pkifolder.init(tmp_path, NOW)
    old = pkifolder.add(tmp_path, pki.SERVER, "cp1", NOW, ["cp1.example", "10.0.0.1"], days=90)
    key = (tmp_path / "cp1.key").read_bytes()
    later = NOW + timedelta(days=60)
    new = pkifolder.renew(tmp_path, "cp1", later)
    chain, private = pkifolder.read_pair(tmp_path / "cp1.pem", tmp_path / "cp1.key")
    assert chain == [new.certificate] and private.public_key() == old.key.public_key()
    assert (tmp_path / "cp1.key").read_bytes() == key
    assert pki.identity_of(new.certificate) == pki.identity_of(old.certificate)
    assert pki.addresses_of(new.certificate) == ("cp1.example", "10.0.0.1")
    assert new.certificate.not_valid_after_utc == later + timedelta(days=90)
    assert new.certificate.serial_number != old.certificate.serial_number


def test_renewed_authority_still_vouches_for_its_leaves(tmp_path):
    """The authority keeps key and fleet id, so certificates signed before and after are both good."""
    old = pkifolder.init(tmp_path, NOW, days=100)
    leaf = pkifolder.add(tmp_path, pki.NODE, "n1", NOW, days=100)
    new = pkifolder.renew(tmp_path, "ca", NOW + timedelta(days=90))
    assert pki.fleet_of(new.certificate) == pki.fleet_of(old.certificate)
    assert verify(leaf, new, NOW + timedelta(days=91)).subjects
    assert pkifolder.read_authority(tmp_path).certificate == new.certificate


def test_keys_that_others_can_read_are_refused(tmp_path):
    """The refusal names the file, its mode and the command that mends it."""
    files = Fleet(NOW).write(tmp_path, "n1", Fleet(NOW).node("n1"))
    files.key.chmod(0o640)
    with pytest.raises(pki.PkiError, match=r"others can read the key .*n1\.key \(mode 0640\): run chmod 600"):
        pkifolder.read_key(files.key)


def test_mismatched_and_broken_files_are_refused(tmp_path):
    """A key of another certificate, garbage, an empty file and a missing one each get their sentence."""
    fleet = Fleet(NOW)
    one = fleet.write(tmp_path, "n1", fleet.node("n1"))
    two = fleet.write(tmp_path, "n2", fleet.node("n2"))
    with pytest.raises(pki.PkiError, match="is not the one of the certificate"):
        pkifolder.read_pair(one.certificate, two.key)
    two.key.write_bytes(b"\x00garbage")
    with pytest.raises(pki.PkiError, match="no unencrypted PEM private key"):
        pkifolder.read_key(two.key)
    two.certificate.write_bytes(b"")
    with pytest.raises(pki.PkiError, match="holds no PEM certificate"):
        pkifolder.read_certificates(two.certificate)
    with pytest.raises(pki.PkiError, match="No such file"):
        pkifolder.read_key(tmp_path / "absent.key")


def test_bundle_holds_everything_a_node_needs(tmp_path):
    """The archive is 0600, its key too, and it is refused where a file is already."""
    pkifolder.init(tmp_path, NOW)
    pkifolder.add(tmp_path, pki.NODE, "n1", NOW)
    pkifolder.write_bundle(tmp_path / "n1.tar.gz", tmp_path, "n1", "node: n1\n")
    assert mode(tmp_path / "n1.tar.gz") == 0o600
    with tarfile.open(tmp_path / "n1.tar.gz") as archive:
        modes = {member.name: member.mode for member in archive}
        assert archive.extractfile("n1.key").read() == (tmp_path / "n1.key").read_bytes()
    assert modes == {"ca.pem": 0o644, "n1.pem": 0o644, "n1.key": 0o600, "agent.yaml": 0o644}
    with pytest.raises(pki.PkiError, match="exists already"):
        pkifolder.write_bundle(tmp_path / "n1.tar.gz", tmp_path, "n1", "node: n1\n")


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    """When writing fails, there is neither a part of the file nor its temporary, and the sentence says why."""
    pkifolder.init(tmp_path, NOW)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(pki.PkiError, match=r"cannot write .*n1\.key: No space left"):
        pkifolder.add(tmp_path, pki.NODE, "n1", NOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


def test_two_runs_at_once_leave_one_pair(tmp_path, monkeypatch):
    """A run that did not see the other's files when it looked still changes none of them."""
    pkifolder.init(tmp_path, NOW)
    first = pkifolder.add(tmp_path, pki.NODE, "n1", NOW)
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    with pytest.raises(pki.PkiError, match=r"n1\.key exists already"):
        pkifolder.add(tmp_path, pki.NODE, "n1", NOW)
    chain, key = pkifolder.read_pair(tmp_path / "n1.pem", tmp_path / "n1.key")
    assert chain == [first.certificate] and key.public_key() == first.key.public_key()
