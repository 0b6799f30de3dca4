"""The admin API over mutual TLS: who gets in, who does not and why, and how llmgw finds the leader."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from pathlib import Path

import pytest
from attrs import evolve
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.tls import TLSMemoryBIOFactory

from llmgw import pki
from llmgw.admin.api import Api
from llmgw.admin.remote import CLOSING, HANDSHAKE, MOST_PER_HOST, REFUSAL, STOPPING, AdminPort, caller
from llmgw.admin.site import BODY_LIMIT, IDLE, QuietSite
from llmgw.cli.main import run
from llmgw.config.machine import Machine
from llmgw.config.server import read_server
from llmgw.config.settings import Address, AdminSettings, FleetSettings, RouterSettings, ServerSettings, TlsFiles
from llmgw.errors import Invalid, LlmgwError
from llmgw.testing.certificates import SERVER, Fleet
from llmgw.testing.links import MemoryNetwork
from llmgw.wire.identity import PeerCertificate
from llmgw.wire.tls import LinkTls, TlsIdentity

FLEET = "fleet: {{listen: {}, tls: {{authority: a, certificate: b, key: c}}}}\n"


def settings(text):
    return read_server(Path("/etc/llmgw/server.yaml"), text, Machine())


@pytest.mark.parametrize(
    "fleet, admin, dialed",
    [
        ("10.0.0.1:7443", "{listen: 10.0.0.1:7444}", "10.0.0.1:7444"),
        ("cp1.example:7443", "{listen: 0.0.0.0:7444}", "cp1.example:7444"),
        ("cp1.example:7443", "{listen: 0.0.0.0:7444, advertise: adm.example}", "adm.example:7444"),
    ],
)
def test_operators_dial_what_is_listened_on_or_what_agents_dial(fleet, admin, dialed):
    """A wildcard cannot be dialed: then the host of fleet.advertise counts, unless admin.advertise says another."""
    found = settings(FLEET.format(fleet) + f"admin: {admin}\n")
    assert str(found.admin.advertise) == dialed and found.admin.revoked == () and found.socket == Path("/run/llmgw/admin.sock")
    assert settings(FLEET.format(fleet)).admin is None


@pytest.mark.parametrize(
    "text, said",
    [
        ("admin: {listen: 10.0.0.1:7444}\n", "admin.listen: operators are known by certificates of fleet.tls"),
        (FLEET.format("10.0.0.1:1") + "admin: {advertise: cp1:7444}\n", "admin.advertise: there is no admin.listen"),
        (
            FLEET.format("10.0.0.1:1") + "admin: {listen: '[::]:7444', advertise: '0.0.0.0:1'}\n",
            "admin.listen: operators cannot dial 0.0.0.0:1",
        ),
        (
            FLEET.format("10.0.0.1:1") + "admin: {listen: '10.0.0.1:2', revoked: [12345678, alice]}\n",
            "admin.revoked.1: found 'alice', want a certificate's serial number",
        ),
    ],
)
def test_an_address_that_nobody_could_use_is_a_problem(text, said):
    """Found before anything is started, with the line."""
    with pytest.raises(Invalid) as found:
        settings(text)
    assert said in str(found.value) and "server.yaml:" in str(found.value)


# In memory, on a clock, over real TLS.


class Peer(Protocol):
    """Somebody who dials: says C{greeting} once TLS is there, keeps what comes."""

    def __init__(self, greeting):
        self.greeting, self.got, self.ended = greeting, b"", ""

    def connectionMade(self):
        if self.greeting:
            self.transport.write(self.greeting)

    def dataReceived(self, data):
        self.got += data

    def connectionLost(self, reason=connectionDone):
        self.ended = str(reason.value)

    @property
    def answer(self):
        """Status and body of the one answer that came."""
        head, _, text = self.got.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(text)


async def who(fields):
    return {"by": fields.by}


class Memory:
    """An admin port on a network in memory."""

    def __init__(self, folder):
        self.fleet, self.network, self.folder, self.faults = Fleet(), MemoryNetwork(), folder, []
        files = self.fleet.write(folder, "cp1", self.fleet.server("cp1"))
        tls = TlsFiles(files.certificate, files.key, files.authority)
        address = Address("127.0.0.1", 7444)
        self.settings = ServerSettings(
            folder / "server.yaml", "cp1", RouterSettings(), FleetSettings(address, address, tls), folder / "a", "", folder,
            admin=AdminSettings(address, address),
        )  # fmt: skip
        site = QuietSite("admin", Api(None, {("GET", "/who"): who, ("POST", "/who"): who}, caller), self.network)
        self.port = AdminPort(self.settings, site, self.network, self.faults.append)
        self.port.startService()
        self.alice = pki.issue(self.fleet.authority, pki.OPERATOR, "alice", self.fleet.now)

    def dial(self, pair=None, greeting=b"GET /who HTTP/1.1\r\nhost: x\r\n\r\n", tls=True):
        peer = Peer(greeting)
        factory = Factory.forProtocol(lambda: peer)
        if tls:
            pair, own = pair or self.alice, PeerCertificate("f", "x", "x", "1", 0, 0)
            identity = TlsIdentity(own, [pair.certificate], pair.key, [self.fleet.authority.certificate])
            factory = TLSMemoryBIOFactory(LinkTls(identity, b"http/1.1").towards("127.0.0.1"), True, factory, self.network)
        TCP4ClientEndpoint(self.network, "127.0.0.1", 7444).connect(factory)
        self.network.run()
        return peer

    def refusals(self):
        return [(refusal.reason, refusal.text) for refusal in self.port.refusals()]


@pytest.fixture
def memory(tmp_path):
    made = Memory(tmp_path)
    yield made
    made.port.stopService()
    made.network.run(2.0)
    for call in made.network.getDelayedCalls():
        raise AssertionError(f"left: {call}")


def test_an_operator_is_let_in_and_named(memory):
    """The name in the certificate is who asks; a connection takes several requests."""
    peer = memory.dial()
    assert peer.answer == (200, {"by": "operator alice"})
    peer.got = b""
    peer.transport.write(b"GET /who HTTP/1.1\r\nhost: x\r\n\r\n")
    memory.network.run()
    assert peer.answer == (200, {"by": "operator alice"}) and memory.refusals() == []


@pytest.mark.parametrize(
    "make, reason, said",
    [
        (lambda fleet: fleet.node("n1"), "wrong_role", "is a node's, not an operator's: make one with llmgw pki operator"),
        (lambda fleet: fleet.leaf(["llmgw://other/operator/eve"]), "wrong_fleet", "is of fleet other, this is f1ee7f1ee700"),
        (lambda fleet: fleet.nameless("eve"), "certificate", "is no identity: it carries no URI"),
    ],
)
def test_another_certificate_of_the_authority_is_told_why_not(memory, make, reason, said):
    """It did pass TLS, so it gets an answer; the log has the same, and it may not stay."""
    peer = memory.dial(make(memory.fleet))
    status, body = peer.answer
    assert status == 403 and body["error"]["code"] == "forbidden" and said in body["error"]["message"]
    assert memory.refusals() == [(reason, body["error"]["message"])]
    memory.network.run(REFUSAL + 0.1)
    assert peer.ended


def test_who_is_no_client_of_the_fleet_does_not_get_through_tls(memory, tmp_path):
    """A server's certificate, another authority's, none at all: each is a refusal with its reason."""
    stranger = pki.issue(Fleet(name="other").authority, pki.OPERATOR, "eve", memory.fleet.now)
    for pair in (memory.fleet.server("cp2"), stranger):
        assert memory.dial(pair).got == b""
    memory.dial(greeting=b"GET / HTTP/1.1\r\n\r\n", tls=False)
    (_, first), (_, second), (_, third) = memory.refusals()
    assert "is not for this side of a link" in first and "is not our authority" in second
    assert third == "it spoke plain HTTP; this port speaks TLS"


def test_a_peer_that_says_nothing_is_not_waited_for(memory):
    """Neither before TLS nor between requests."""
    silent = memory.dial(greeting=b"", tls=False)
    idle = memory.dial(greeting=b"")
    memory.network.run(HANDSHAKE - 0.1)
    assert not silent.ended
    memory.network.run(0.2)
    assert silent.ended and not idle.ended
    memory.network.run(IDLE)
    assert idle.ended


def test_only_so_many_may_be_there_at_once(memory):
    """From one address 16; who leaves makes room. It is counted before TLS, which costs."""
    peers = [memory.dial() for _ in range(MOST_PER_HOST)]
    late = memory.dial()
    assert late.got == b"" and late.ended and memory.refusals()[-1][0] == "crowded"
    peers[0].transport.loseConnection()
    memory.network.run()
    assert memory.dial().answer[0] == 200


def post(head, body=b""):
    return f"POST /who HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode() + body


def test_a_body_has_a_bound(memory):
    """Refused as it is declared, or as it comes; 8 MiB are taken."""
    peer = memory.dial(greeting=post(f"content-length: {BODY_LIMIT + 1}"))
    assert peer.answer[0] == 413 and peer.answer[1]["error"]["code"] == "too_large"
    piece = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
    peer = memory.dial(greeting=post("transfer-encoding: chunked", piece * 8 + b"1\r\n"))
    assert peer.got == b""
    peer.transport.write(b" \r\n0\r\n\r\n")
    memory.network.run()
    assert peer.answer[0] == 413
    memory.network.run(CLOSING + 0.1)
    assert peer.ended
    assert memory.dial(greeting=post("transfer-encoding: chunked", piece * 8 + b"0\r\n\r\n")).answer[0] == 200


def test_a_peer_that_does_not_close_is_cut_off(memory):
    """Its process is stopped: its side of the close never comes, and it is not waited for."""
    peer = memory.dial(greeting=b"")
    client, server = memory.network.connections[-1]
    peer.transport.write(b"GET /who HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    client.reading = False
    memory.network.run(CLOSING - 0.1)
    assert not server.disconnected
    memory.network.run(0.2)
    assert server.disconnected


def test_a_stop_waits_for_nobody_long(memory):
    """A second for what is being said."""
    memory.dial(greeting=b"")
    memory.network.connections[-1][0].reading = False
    done = []
    memory.port.stopService().addCallback(done.append)
    memory.network.run(STOPPING + 0.1)
    assert done and memory.network.listeners == {}


def test_a_reload_shows_the_new_certificate_and_keeps_the_old_for_a_bad_one(memory):
    """A connection that is up stays; new ones see what is in the files."""

    def shown():
        peer = memory.dial()
        return peer, peer.transport.getHandle().get_peer_certificate(as_cryptography=True).serial_number

    old, serial = shown()
    memory.fleet.write(memory.folder, "cp1", memory.fleet.server("cp1"))
    memory.port.reload(memory.settings)
    new, renewed = shown()
    assert renewed != serial and not old.ended and new.answer[0] == 200
    (memory.folder / "cp1.pem").write_text("nothing\n")
    with pytest.raises(LlmgwError, match="holds no PEM certificate"):
        memory.port.reload(memory.settings)
    assert shown()[1] == renewed


def test_a_revoked_certificate_is_out_at_once(memory):
    """At a reload: the connection that is up ends, a new one is told; another certificate of the same operator does."""
    peer = memory.dial()
    serial = f"{memory.alice.certificate.serial_number:x}"
    address = memory.settings.admin.listen
    memory.port.reload(evolve(memory.settings, admin=AdminSettings(address, address, (serial[:8],))))
    memory.network.run()
    assert peer.ended
    status, body = memory.dial().answer
    assert status == 403 and body["error"]["message"].endswith("is revoked (admin.revoked of server.yaml)")
    fresh = pki.issue(memory.fleet.authority, pki.OPERATOR, "alice", memory.fleet.now)
    assert memory.dial(fresh).answer == (200, {"by": "operator alice"})


def test_what_cannot_be_listened_on_ends_the_daemon_with_a_sentence(memory):
    """An address in use; the sentence names the key and the address."""
    AdminPort(memory.settings, QuietSite("x", Api(None, {}), memory.network), memory.network, memory.faults.append).startService()
    assert memory.faults == ["admin.listen 127.0.0.1:7444: Address already in use"]


# The command line.


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--server", "h", "status"], "--server needs --cert FILE or $LLMGW_CERT, made with: llmgw pki operator DIR NAME"),
        (["--server", "h", "--cert", "absent.pem", "status"], "--cert: absent.pem is not there or cannot be read"),
        (["--server", "h", "--socket", "s", "status"], "are two ways to a server: give one"),
        (["--server", "h:x", "--cert", "alice.pem", "status"], "--server: found 'h:x', want HOST:PORT"),
        (["--server", "h", "--cert", "alice.pem", "--ca", "alice.key", "status"], "--ca: alice.key holds no certificate"),
        (["--server", "h", "--cert", "alice.pem", "--key", "bob.key", "status"], "are no certificate and its key"),
        (["--server", "h", "--cert", "carol.pem", "status"], "run chmod 600 carol.key"),
    ],
)
def test_a_way_that_cannot_be_gone_is_misuse(arguments, said, tmp_path, monkeypatch, capsys):
    """Status 2, before anything is dialed; key and authority are looked for beside the certificate."""
    fleet = Fleet()
    for name in ("alice", "bob", "carol"):
        fleet.write(tmp_path, name, pki.issue(fleet.authority, pki.OPERATOR, name, fleet.now))
    (tmp_path / "carol.key").chmod(0o640)
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert said in capsys.readouterr().err


def test_what_is_typed_wins_over_the_environment(tmp_path, monkeypatch, capsys):
    """A socket that is asked for is asked, whatever LLMGW_SERVER says."""
    monkeypatch.setenv("LLMGW_SERVER", "127.0.0.1:1")
    assert run(["status"]) == 2
    assert run(["--socket", str(tmp_path / "absent.sock"), "status"]) == 3
    assert "absent.sock" in capsys.readouterr().err


def test_a_certificate_that_is_no_servers_is_not_talked_to(tmp_path, capsys):
    """Of the authority, for the address, and made for servers, but of another role: nothing is asked of it."""
    fleet = Fleet()
    files = fleet.write(tmp_path, "n1", fleet.leaf([fleet.uri("node", "n1")], [SERVER], ["127.0.0.1"]))
    fleet.write(tmp_path, "alice", pki.issue(fleet.authority, pki.OPERATOR, "alice", fleet.now))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    heard = []

    def serve(listening):
        with contextlib.suppress(OSError), context.wrap_socket(listening.accept()[0], server_side=True) as peer:
            heard.append(peer.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert run(["--server", address, "--cert", str(tmp_path / "alice.pem"), "status"]) == 3
        thread.join(10)
    uri = fleet.uri("node", "n1")
    assert f"is not the server it should be: its certificate names {uri}, no server of a fleet" in capsys.readouterr().err
    assert b"".join(heard) == b""
