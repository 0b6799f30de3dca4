"""Identities out of certificates, and the files they come from: each fault is one sentence that names the file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from attrs import evolve
from OpenSSL import SSL

from llmgw import pki
from llmgw.config.settings import TlsFiles
from llmgw.errors import LlmgwError
from llmgw.testing.certificates import CLIENT, SERVER, Fleet
from llmgw.wire.identity import IdentityError, PeerCertificate, Verdict, explain_tls
from llmgw.wire.tls import LinkTls, check_server, read_identity


@pytest.fixture(scope="module")
def fleet():
    return Fleet()


def written(fleet, path, name, pair):
    files = fleet.write(path, name, pair)
    return TlsFiles(files.certificate, files.key, files.authority)


def test_a_good_certificate_says_who_it_is(fleet):
    """Fleet, role, name, serial, dates and addresses come from the certificate."""
    pair = fleet.server("cp1", ["10.0.0.1", "cp1.example"])
    peer = PeerCertificate.read(pair.certificate)
    assert (peer.fleet, peer.role, peer.name) == (fleet.name, "server", "cp1")
    assert peer.addresses == ("cp1.example", "10.0.0.1")
    assert peer.serial == f"{pair.certificate.serial_number:x}"
    assert str(peer) == f"cp1 (serial {peer.serial[:8]})"
    assert peer.not_after == pair.certificate.not_valid_after_utc.timestamp()


@pytest.mark.parametrize(
    ("uris", "usages", "text"),
    [
        ([], [CLIENT], "no URI"),
        (["llmgw://f1ee7f1ee700/node/a", "llmgw://f1ee7f1ee700/node/b"], [CLIENT], "2 URIs"),
        (["spiffe://f1ee7f1ee700/node/a"], [CLIENT], "not of the form"),
        (["llmgw://f1ee7f1ee700/admin/a"], [CLIENT], "not of the form"),
        (["llmgw://f1ee7f1ee700/node/A"], [CLIENT], "not of the form"),
        (["llmgw://f1ee7f1ee700/node/a/b"], [CLIENT], "not of the form"),
        (["llmgw://f1ee7f1ee700/node/a"], [SERVER], "not clientAuth alone"),
        (["llmgw://f1ee7f1ee700/node/a"], [CLIENT, SERVER], "not clientAuth alone"),
        (["llmgw://f1ee7f1ee700/server/a"], [CLIENT], "not serverAuth alone"),
    ],
)
def test_anything_but_one_identity_is_refused(fleet, uris, usages, text):
    """No URI, several, another form, or another purpose than the role's."""
    with pytest.raises(IdentityError, match=text):
        PeerCertificate.read(fleet.leaf(uris, usages).certificate)


def test_good_files_make_an_identity(fleet, tmp_path):
    """And it can be used at once."""
    tls = LinkTls(read_identity(written(fleet, tmp_path, "n1", fleet.node("n1")), "node"))
    assert tls.own.name == "n1"


def test_a_key_that_others_can_read_is_refused_with_one_sentence(fleet, tmp_path):
    """It says which file, which mode and what to type."""
    files = written(fleet, tmp_path, "n1", fleet.node("n1"))
    files.key.chmod(0o644)
    with pytest.raises(LlmgwError) as error:
        read_identity(files, "node")
    assert str(error.value) == f"others can read the key {files.key} (mode 0644): run chmod 600 {files.key}"


def test_a_key_of_another_certificate_is_refused(fleet, tmp_path):
    """Both files are named."""
    files = written(fleet, tmp_path, "n1", fleet.node("n1"))
    other = written(fleet, tmp_path / "other", "n1", fleet.node("n1"))
    with pytest.raises(LlmgwError, match="is not the one of the certificate"):
        read_identity(TlsFiles(files.certificate, other.key, files.authority), "node")


@pytest.mark.parametrize("missing", ["certificate", "key", "authority"])
def test_a_missing_file_is_named(fleet, tmp_path, missing):
    """Whichever it is."""
    files = written(fleet, tmp_path, "n1", fleet.node("n1"))
    getattr(files, missing).unlink()
    with pytest.raises(LlmgwError, match=str(getattr(files, missing))):
        read_identity(files, "node")


@pytest.mark.parametrize("missing", ["certificate", "key", "authority"])
def test_half_a_file_is_refused(fleet, tmp_path, missing):
    """A file that is being written, or was cut off."""
    files = written(fleet, tmp_path, "n1", fleet.node("n1"))
    path = getattr(files, missing)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LlmgwError, match=str(path)):
        read_identity(files, "node")


def test_the_other_role_is_refused(fleet, tmp_path):
    """A server's certificate in agent.yaml is noticed at the start."""
    files = written(fleet, tmp_path, "cp1", fleet.server("cp1"))
    with pytest.raises(LlmgwError, match=r"cp1.pem is a server's certificate \(cp1\); here a node's is needed"):
        read_identity(files, "node")


def test_a_certificate_of_another_authority_is_refused(fleet, tmp_path):
    """The authority in the configuration has to be the one that signed."""
    files = written(fleet, tmp_path, "n1", Fleet(name="07e207e207e2").node("n1"))
    with pytest.raises(LlmgwError, match=r"n1.pem was not issued by the authority in .*ca.pem .*llmgw fleet 07e207e207e2"):
        read_identity(files, "node")


@pytest.mark.parametrize("kind", ["expired", "not_yet_valid"])
def test_a_certificate_out_of_its_time_is_not_refused_here(fleet, tmp_path, kind):
    """Engines need their agent; the server will say what is wrong, and the clock may be."""
    files = written(fleet, tmp_path, "n1", getattr(fleet, kind)("n1"))
    assert read_identity(files, "node").own.name == "n1"


def test_a_bundle_of_authorities_is_taken(fleet, tmp_path):
    """The first step of replacing an authority is a file with both."""
    files, new = written(fleet, tmp_path, "n1", fleet.node("n1")), Fleet(name=fleet.name)
    assert files.authority is not None
    files.authority.write_bytes(pki.certificate_text(new.authority.certificate) + files.authority.read_bytes())
    assert len(read_identity(files, "node").authorities) == 2


def test_a_server_is_checked_by_role_fleet_and_address(fleet):
    """All three, with sentences that complete the server's address."""
    good = fleet.server("cp1", ["10.0.0.1", "cp1.example", "fd00::1"]).certificate
    for host in ("10.0.0.1", "cp1.example", "fd00::1", "CP1.example"):
        assert check_server(good, host, fleet.name).name == "cp1"
    for host in ("10.0.0.2", "cp2.example", "1.example", "example"):
        with pytest.raises(IdentityError, match=r"is not for .* but for cp1.example, 10.0.0.1, fd00::1"):
            check_server(good, host, fleet.name)
    with pytest.raises(IdentityError, match="is of fleet f1ee7f1ee700, ours is of fleet aaa"):
        check_server(good, "10.0.0.1", "aaa")
    with pytest.raises(IdentityError, match="is a node's, not a server's"):
        check_server(fleet.node("n1").certificate, "10.0.0.1", fleet.name)


def test_a_verdict_gives_both_clocks_and_the_names():
    """What the server's log says of a certificate that it did not take."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    pair = Fleet(now=start).node("n1", days=10)
    serial = PeerCertificate.read(pair.certificate).serial[:8]
    now = (start + timedelta(days=11)).timestamp()
    assert Verdict(10, pair.certificate).explain(now) == (
        f"its certificate n1 (serial {serial}) expired on 2026-01-11 00:00 UTC; our clock says 2026-01-12 00:00 UTC:"
        " renew it, or set the clock that is wrong"
    )
    assert "valid only from 2025-12-31 23:55 UTC" in Verdict(9, pair.certificate).explain(now)
    assert "issued by CN=llmgw fleet f1ee7f1ee700, which is not our authority" in Verdict(20, pair.certificate).explain(now)
    assert "not for this side of a link" in Verdict(26, pair.certificate).explain(now)
    assert "OpenSSL error 99" in Verdict(99, pair.certificate).explain(now)


def test_an_alert_is_explained_with_our_own_facts():
    """A bad certificate before its time is our clock's fault, whatever the alert says."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    ours = PeerCertificate.read(Fleet(now=start).node("n1", days=10).certificate)

    def alert(reason):
        return SSL.Error([("SSL routines", "", reason)])

    early, late = (start - timedelta(hours=1)).timestamp(), (start + timedelta(days=11)).timestamp()
    assert "valid only from 2025-12-31 23:55 UTC; our clock says 2025-12-31 23:00" in explain_tls(
        alert("ssl/tls alert bad certificate"), ours, early
    )
    assert "without saying why" in explain_tls(alert("ssl/tls alert bad certificate"), ours, late)
    assert "n1 (serial" in explain_tls(alert("ssl/tls alert certificate expired"), ours, late)
    assert "CN=llmgw fleet f1ee7f1ee700" in explain_tls(alert("tlsv1 alert unknown ca"), ours, late)
    assert explain_tls(alert("something new"), ours, late) == "TLS failed: something new"
    assert explain_tls(SSL.Error(), ours, late) == "TLS failed: Error"


def test_the_pair_is_checked_before_it_is_swapped(fleet, tmp_path):
    """An identity whose key does not fit leaves the old one in force."""
    tls = LinkTls(read_identity(written(fleet, tmp_path, "n1", fleet.node("n1")), "node"))
    before = tls.identity
    broken = read_identity(written(fleet, tmp_path / "b", "n1", fleet.node("n1")), "node")
    with pytest.raises(SSL.Error):
        tls.use(evolve(broken, key=pki.make_key()))
    assert tls.identity is before
