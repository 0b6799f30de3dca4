"""Operators on other machines, through real daemons: who is let in, what events say, and the way to the leader."""

from __future__ import annotations

import json
import signal
import socket
import ssl

import pytest

from tests.admin_stub import AdminStub
from tests.end_to_end.fleet import fake_model, free_ports, until
from tests.end_to_end.servers import Servers
from tests.store_fixtures import needs_postgres, postgres  # noqa: F401


def listening(fleet):
    """C{fleet.admin} becomes the port for operators in every server.yaml that it writes."""
    (fleet.admin,) = free_ports(1)
    write = fleet.write_server

    def write_server(*arguments):
        path = write(*arguments)
        path.write_text(path.read_text().replace("admin: {", f"admin: {{listen: 127.0.0.1:{fleet.admin}, "))
        return path

    fleet.write_server = write_server


@pytest.fixture
def remote(fleet):
    """A server that listens for operators, too, and alice's certificate."""
    listening(fleet)
    fleet.write_server(fake_model("m", 0))
    fleet.pki("operator", "pki", "alice")
    fleet.start_server()
    return fleet


@pytest.fixture
def noded(remote):
    """With a node."""
    remote.write_agent("n1")
    remote.start_agent("n1")
    until(lambda: [node for node in remote.status()["nodes"] if node["state"] == "ready"], "n1 is there")
    return remote


def ask(fleet, *arguments, who="alice", code=0, port=None):
    """C{llmgw --server} with a certificate: what it said."""
    done = fleet.command("--server", f"127.0.0.1:{port or fleet.admin}", "--cert", f"pki/{who}.pem", *arguments)
    if done.returncode != code:
        raise RuntimeError(f"{arguments}: {done.returncode} {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def texts(fleet):
    return [json.loads(line)["text"] for line in fleet.llmgw("events", "--json").splitlines()]


def test_an_operator_elsewhere_orders_and_events_name_her(noded):
    """Everything that the socket does; what was ordered over the socket is an operator's without a name."""
    assert json.loads(ask(noded, "status", "--json"))["server"]["name"] == "cp1"
    ask(noded, "cordon", "n1")
    noded.llmgw("uncordon", "n1")
    ask(noded, "key", "create", "bob")
    path = noded.folder / "models.yaml"
    path.write_text(f"models:{fake_model('two', 0)}")
    ask(noded, "apply", str(path))
    ask(noded, "node", "reset", "n1")
    said = texts(noded)
    for text in ("n1: cordoned by operator alice", "n1: uncordoned by an operator", "n1: reset by operator alice"):
        assert text in said
    assert [text for text in said if text.endswith("of bob was made by operator alice")]
    assert [text for text in said if f"(apply {path} by operator alice): add two" in text]


def test_others_are_turned_away_with_the_reason_on_both_sides(remote, tmp_path):
    """A node's certificate, a server's, a stranger's; a server that is not the fleet's; a port that is another one."""
    assert "is a node's, not an operator's: make one with llmgw pki operator" in ask(remote, "status", who="n1", code=1)
    said = ask(remote, "status", who="cp1", code=3)
    assert "it does not take pki/cp1.pem: an operator's certificate is needed (llmgw pki operator)" in said
    for words in (["init", "other"], ["operator", "other", "eve"]):
        assert remote.command("pki", *words).returncode == 0
    elsewhere = remote.command("--server", f"localhost:{remote.admin}", "--cert", "pki/alice.pem", "status").stderr
    assert "is not the server it should be: Hostname mismatch, certificate is not valid for 'localhost'" in elsewhere
    server = ("--server", f"127.0.0.1:{remote.admin}", "--cert", "other/eve.pem")
    assert "is not the server it should be: " in remote.command(*server, "status").stderr
    done = remote.command(*server, "--ca", "pki/ca.pem", "status")
    assert done.returncode == 3 and "it does not know the authority that issued other/eve.pem" in done.stderr
    assert "it failed with an internal error: is this its admin.listen, or its fleet.listen?" in ask(
        remote, "status", port=remote.fleet, code=3
    )
    listed = json.loads(remote.llmgw("refusals", "--json"))["refusals"]
    assert [row["reason"] for row in listed][:2] == ["wrong_role", "tls"] and "certificate n1 (serial" in listed[0]["text"]
    log = until(lambda: (text := remote.log("server")).count("admin: refused 127.0.0.1:") == 5 and text, "five refusals")
    for part in ("wrong_role: certificate n1 (serial", "is not for this side of a link", "which is not our authority"):
        assert part in log


def test_a_renewed_certificate_is_shown_after_sighup(remote):
    """Without a restart; a connection made before is not needed for that."""

    def serial():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(remote.folder / "pki" / "ca.pem")
        plain = socket.create_connection(("127.0.0.1", remote.admin), 5)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            return sock.getpeercert()["serialNumber"]

    before = serial()
    remote.pki("renew", "pki", "cp1")
    remote.running["server"].send_signal(signal.SIGHUP)
    until(lambda: serial() != before, "the new certificate")
    ask(remote, "status")


def test_a_revoked_certificate_is_refused_after_sighup(remote):
    """By its serial number as C{llmgw pki list} shows it; nothing has to be restarted for it."""
    (serial,) = (line.split()[2] for line in remote.command("pki", "list", "pki").stdout.splitlines() if line.startswith("alice"))
    ask(remote, "status")
    path = remote.folder / "server.yaml"
    path.write_text(path.read_text().replace("admin: {", f"admin: {{revoked: ['{serial}'], "))
    remote.running["server"].send_signal(signal.SIGHUP)
    until(lambda: "is revoked (admin.revoked of server.yaml)" in ask(remote, "status", code=1), "the refusal")
    assert "Reload refused" not in remote.log("server")


def test_a_standby_sends_on_to_the_leader(noded, tmp_path):
    """With a certificate the order follows once, and says so; without one it is told where to ask, with status 1."""
    standby = AdminStub(tmp_path / "standby.sock")
    try:
        told = {"code": "not_leader", "message": "not leader, ask cp1", "leader": "cp1", "address": f"127.0.0.1:{noded.admin}"}
        standby.answers["POST /v1/cordon"] = 503, {"error": told}
        plain = noded.command("--socket", standby.path, "cordon", "n1")
        assert (plain.returncode, plain.stderr) == (1, "llmgw: not leader, ask cp1\n")
        done = noded.command("--socket", standby.path, "--cert", "pki/alice.pem", "cordon", "n1")
        assert (done.returncode, done.stderr) == (0, f"llmgw: {standby.path}: not leader, ask cp1\n")
        assert "n1: cordoned by operator alice" in texts(noded)
        standby.answers["POST /v1/cordon"][1]["error"]["address"] = f"127.0.0.1:{free_ports(1)[0]}"
        gone = noded.command("--socket", standby.path, "--cert", "pki/alice.pem", "cordon", "n1")
        assert gone.returncode == 3 and "nobody listens at 127.0.0.1:" in gone.stderr
    finally:
        standby.close()


@needs_postgres
def test_an_order_to_a_standby_is_carried_out_by_the_leader(tmp_path, postgres):  # noqa: F811
    """Two servers over PostgreSQL: over TLS the order follows, over the socket it is told where; after a failover neither.

    Takes some seconds, since two servers start and one takes over.
    """
    servers = Servers(tmp_path, postgres, "cp1", "cp2")
    cp1, cp2 = servers.fleets.values()
    try:
        for fleet in (cp1, cp2):
            listening(fleet)
        cp1.pki("operator", "pki", "alice")
        servers.start("cp1", fake_model("m", 0))
        until(lambda: servers.server("cp1")["role"] == "leader", "cp1 leads")
        servers.start("cp2", fake_model("m", 0))
        told = f"not leader, ask cp1 (127.0.0.1:{cp1.admin})"
        until(lambda: told in cp2.llmgw("key", "create", "x", code=1), "the standby knows whom to name")
        alice = ("--server", f"127.0.0.1:{cp2.admin}", "--cert", "pki/alice.pem", "--json", "key", "create", "bob")
        done = cp1.command(*alice)
        assert (done.returncode, done.stderr) == (0, f"llmgw: 127.0.0.1:{cp2.admin}: {told}\n")
        number = json.loads(done.stdout)["id"]
        assert f"key {number} of bob was made by operator alice" in texts(cp2)
        cp1.end("server")
        servers.leader("cp1", above=1)
        again = cp1.command(*alice)
        assert (again.returncode, again.stderr) == (0, "")
    finally:
        servers.close()
