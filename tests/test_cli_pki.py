"""llmgw pki and llmgw check as typed."""

from __future__ import annotations

import json
import os
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llmgw import pki, pkifolder
from llmgw.cli.main import run
from llmgw.testing.certificates import Fleet

NOW = datetime.now(UTC)


def made(folder, *arguments):
    assert run(["pki", arguments[0], str(folder), *arguments[1:]]) == 0


@pytest.fixture
def folder(tmp_path):
    """A fleet with one server and one node."""
    made(tmp_path / "pki", "init")
    made(tmp_path / "pki", "server", "cp1", "--address", "cp1.example", "--address", "10.0.0.1")
    made(tmp_path / "pki", "node", "n1")
    return tmp_path / "pki"


def test_list_shows_roles_addresses_and_ends(folder, capsys):
    """One row per certificate, the authority first; a broken file is a note, not the end of the list."""
    (folder / "old.pem").write_text("no certificate\n")
    capsys.readouterr()
    made(folder, "list")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [
        ["NAME", "ROLE"],
        ["ca", "authority"],
        ["cp1", "server"],
        ["n1", "node"],
        ["old", str(folder / "old.pem")],
    ]
    assert rows[2][4:6] == ["cp1.example,", "10.0.0.1"]
    made(folder, "list", "--json")
    listed = json.loads(capsys.readouterr().out)
    assert listed[1]["addresses"] == ["cp1.example", "10.0.0.1"] and listed[1]["fleet"] == listed[0]["fleet"]


def test_list_warns_of_the_end(tmp_path, capsys):
    """A certificate near its end carries the warning."""
    fleet = Fleet()
    fleet.write(tmp_path, "n1", fleet.leaf([fleet.uri("node", "n1")], start=timedelta(days=-29), end=timedelta(days=2, hours=1)))
    made(tmp_path, "list")
    assert "expires very soon: 2 d left" in capsys.readouterr().out


def test_refusals_are_sentences(folder, tmp_path, capsys):
    """Existing files, bad names and addresses, no authority: status 1 with a sentence; nothing is written over."""
    before = (folder / "n1.key").read_bytes()
    capsys.readouterr()
    for arguments, said in [
        (["node", folder, "n1"], "n1.pem exists already"),
        (["init", folder], "ca.pem exists already"),
        (["node", folder, "N_1"], "is not a name"),
        (["server", folder, "cp2", "--address", "cp2:7443"], "leave out the port"),
        (["node", tmp_path, "n2"], "cannot read the key"),
        (["list", tmp_path], "llmgw pki init"),
        (["renew", folder, "n9"], "cannot read the certificate"),
    ]:
        assert run(["pki", *map(str, arguments)]) == 1
        assert said in capsys.readouterr().err
    assert (folder / "n1.key").read_bytes() == before
    assert run(["pki", "server", str(folder), "cp2"]) == 2


def test_renew_changes_the_certificate_only(folder, capsys):
    """New serial, same key, and --days is obeyed."""
    old = pkifolder.read_certificates(folder / "n1.pem")[0]
    key = (folder / "n1.key").read_bytes()
    made(folder, "renew", "n1", "--days", "5")
    new = pkifolder.read_certificates(folder / "n1.pem")[0]
    assert new.serial_number != old.serial_number and (folder / "n1.key").read_bytes() == key
    assert timedelta(days=4) < new.not_valid_after_utc - NOW < timedelta(days=6)


def test_a_bundle_is_ready_to_use(folder, tmp_path, capsys):
    """Unpacked anywhere, its agent.yaml passes llmgw check, with the address and state that were asked for."""
    bundle = tmp_path / "1e5.tar.gz"
    made(folder, "node", "1e5", "--bundle", str(bundle), "--server", "[fd00::1]:7443", "--state", "/var/lib/llmgw-agent")
    assert bundle.stat().st_mode & 0o777 == 0o600
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path / "node", filter="data")
    capsys.readouterr()
    assert run(["check", str(tmp_path / "node" / "agent.yaml")]) == 0
    assert "good (agent)" in capsys.readouterr().out
    from llmgw.config.agent import read_agent

    settings = read_agent(tmp_path / "node" / "agent.yaml", (tmp_path / "node" / "agent.yaml").read_text())
    assert (settings.node, str(settings.servers[0]), str(settings.state)) == ("1e5", "[fd00::1]:7443", "/var/lib/llmgw-agent")


def test_a_bundle_needs_an_address(folder, tmp_path, capsys):
    """--bundle and --server belong together, and the address has a port; nothing is made otherwise."""
    for arguments in (
        ["--bundle", "x"],
        ["--server", "cp1:1"],
        ["--bundle", "x", "--server", "cp1"],
        ["--bundle", "x", "--server", ":1"],
    ):
        assert run(["pki", "node", str(folder), "n2", *arguments]) == 2
    existing = tmp_path / "there.tar.gz"
    existing.touch()
    assert run(["pki", "node", str(folder), "n2", "--bundle", str(existing), "--server", "cp1:7443"]) == 1
    assert not (folder / "n2.pem").exists()


AGENT = """\
node: n1
server: cp1.example:7443
tls: {authority: pki/ca.pem, certificate: pki/n1.pem, key: pki/n1.key}
"""


def test_check_prints_every_problem(tmp_path, capsys):
    """FILE:LINE: text for each, status 2; --json has them as data."""
    file = tmp_path / "agent.yaml"
    file.write_text(AGENT + "prots: 20000-20999\nports: 1-2\n")
    assert run(["check", str(file)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{file}:4", f"{file}:5"]
    assert "did you mean ports" in lines[0]
    assert run(["check", str(file), "--json"]) == 2
    assert [each["code"] for each in json.loads(capsys.readouterr().out)["problems"]] == ["unknown_key", "ports"]
    assert run(["check", str(tmp_path / "absent.yaml")]) == 2


def test_check_looks_at_certificates_that_are_there(folder, tmp_path, capsys):
    """Absent ones are noted; a key others can read, a foreign pair, another role or name are problems."""
    file = tmp_path / "agent.yaml"
    file.write_text(AGENT)
    assert run(["check", str(file)]) == 0
    os.chmod(folder / "n1.key", 0o644)
    assert run(["check", str(file)]) == 2
    os.chmod(folder / "n1.key", 0o600)
    file.write_text(AGENT.replace("node: n1", "node: n2"))
    assert run(["check", str(file)]) == 2
    file.write_text(AGENT.replace("pki/n1", "pki/cp1"))
    assert run(["check", str(file)]) == 2
    file.write_text(AGENT.replace("pki/n1.key", "pki/cp1.key"))
    assert run(["check", str(file)]) == 2
    file.write_text(AGENT.replace("pki/", "absent/"))
    assert run(["check", str(file)]) == 0
    out = capsys.readouterr().out
    for said in (
        "chmod 600",
        "set node: n1",
        "certificate of a server",
        "not the one of the certificate",
        "note: not on this machine",
    ):
        assert said in out


def test_no_key_is_ever_printed(folder, capsys):
    """Neither the output nor the JSON of any pki command has a private key in it."""
    for arguments in (
        ["list", folder],
        ["list", folder, "--json"],
        ["renew", folder, "n1", "--json"],
        ["node", folder, "n3", "--json"],
    ):
        run(["pki", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "PRIVATE" not in captured.out + captured.err
    assert pki.serial_of(pkifolder.read_certificates(Path(folder) / "n3.pem")[0]) in captured.out


def test_an_operators_certificate_is_a_clients_and_kept_private(folder, capsys):
    """Role operator, clientAuth alone, key 0600, a year; renewing keeps the role, and no daemon takes it for its own."""
    made(folder, "operator", "alice")
    assert "operator alice, valid until" in capsys.readouterr().out
    certificate = pkifolder.read_certificates(folder / "alice.pem")[0]
    assert pki.identity_of(certificate).role == "operator"
    assert pki.usages_of(certificate) == pki.usages_of(pkifolder.read_certificates(folder / "n1.pem")[0])
    assert timedelta(days=364) < certificate.not_valid_after_utc - NOW < timedelta(days=366)
    assert (folder / "alice.key").stat().st_mode & 0o777 == 0o600
    made(folder, "renew", "alice")
    assert pki.identity_of(pkifolder.read_certificates(folder / "alice.pem")[0]).role == "operator"
    file = folder.parent / "agent.yaml"
    file.write_text(AGENT.replace("pki/n1", "pki/alice"))
    assert run(["check", str(file)]) == 2
    assert "is the certificate of an operator, want one of a node" in capsys.readouterr().out


def test_check_finds_an_address_that_no_peer_would_believe(folder, tmp_path, capsys):
    """Agents and operators refuse a certificate that is not for what they dialed: said before anything is started."""
    file = tmp_path / "server.yaml"
    tls = "tls: {authority: pki/ca.pem, certificate: pki/cp1.pem, key: pki/cp1.key}"
    for fleet, admin, said in (
        ("CP1.example:7443", "10.0.0.1:7444", ""),
        ("cp2.example:7443", "10.0.0.1:7444", "cp1.pem is for cp1.example, 10.0.0.1, not for cp2.example (fleet.advertise)"),
        ("cp1.example:7443", "10.0.0.2:7444", "not for 10.0.0.2 (admin.advertise): make one with --address"),
    ):
        file.write_text(f"fleet: {{listen: '{fleet}', {tls}}}\nadmin: {{listen: '{admin}'}}\n")
        assert run(["check", str(file)]) == (2 if said else 0)
        assert said in capsys.readouterr().out
