"""Faults of the link, seen on real machines, through real daemons."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import time

import pytest

from tests.end_to_end.fleet import fake_model, processes, until
from tests.ports import free_port


@contextlib.contextmanager
def silent_listener():
    """A peer that accepts and never says anything."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield server.getsockname()[1]


def test_a_claim_that_differs_from_the_certificate_is_told_on_both_sides(fleet):
    """Both logs name the reason, the certificate's name and the claimed one; the agent backs off, growing."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    path = fleet.write_agent("n2")
    path.write_text(path.read_text().replace("node: n2", "node: n3"))
    fleet.start_server()
    fleet.start_agent("n2")
    for log in ("server", "n2"):
        line = until(
            lambda log=log: next((line for line in fleet.log(log).splitlines() if "name_mismatch" in line), ""),
            f"the reason in the log of {log}",
        )
        assert "n2" in line and "n3" in line
    until(lambda: fleet.log("server").count("name_mismatch") >= 3, "three tries")
    waits = [float(text) for text in re.findall(r"[Nn]ext (?:try|round) in ([0-9.]+) s", fleet.log("n2"))]
    assert waits and max(waits) <= 15


def test_a_certificate_of_another_authority_is_told_on_both_sides(fleet):
    """The agent does not hammer: in three seconds no more than a handful of connections are made."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    fleet.pki("init", "other")
    fleet.pki("node", "other", "n1")
    shutil.copy(fleet.folder / "other" / "n1.pem", fleet.folder / "pki" / "n1.pem")
    shutil.copy(fleet.folder / "other" / "n1.key", fleet.folder / "pki" / "n1.key")
    fleet.start_server()
    fleet.start_agent("n1")
    until(lambda: "certificate" in fleet.log("server") and "127.0.0.1" in fleet.log("server"), "the server says why")
    until(lambda: re.search(r"unknown ca|authority", fleet.log("n1")), "the agent says why")
    before, begin = fleet.log("server").count("refused"), time.monotonic()
    until(lambda: time.monotonic() - begin > 3, "three seconds")
    assert fleet.log("server").count("refused") - before <= 6


def test_f23_an_agent_goes_on_to_its_next_address(fleet):
    """A dead address, one that never answers, then the leader: linked within one round."""
    fleet.write_server(fake_model())
    dead = free_port()
    with silent_listener() as silent:
        servers = f"servers: ['127.0.0.1:{dead}', '127.0.0.1:{silent}', '127.0.0.1:{fleet.fleet}']"
        fleet.write_agent("n1", servers=servers)
        fleet.start_server()
        fleet.start_agent("n1")
        fleet.ready()


def test_f28_a_second_agent_of_the_same_name_is_refused_and_the_first_undisturbed(fleet):
    """A copied certificate on another state folder: the newcomer is told who holds the name."""
    fleet.write_server(fake_model())
    path = fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    before = fleet.ready()[0]
    twin = fleet.folder / "twin.yaml"
    twin.write_text(path.read_text().replace("state: state/n1", "state: state/twin"))
    fleet.daemon("twin", "agent", twin)
    until(lambda: "name_in_use" in fleet.log("twin") and "name_in_use" in fleet.log("server"), "both logs name the reason")
    assert fleet.ready()[0]["pid"] == before["pid"]
    assert fleet.status()["nodes"][0]["state"] == "ready"


def test_an_agent_that_runs_nothing_says_so_and_the_server_lets_go(fleet):
    """State and engine gone while the agent was down: the empty list is news, and the model is started anew."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    before = fleet.ready()[0]
    fleet.end("n1", signal.SIGKILL)
    for pid, command in processes(str(fleet.folder)).items():
        if pid != fleet.running["server"].pid and "llmgw-server" not in command and "llmgw.router" not in command:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(fleet.folder / "state" / "n1")
    fleet.start_agent("n1")
    after = until(lambda: (s := fleet.shards()[0])["state"] == "ready" and s["pid"] != before["pid"] and s, "a new engine", 40)
    assert (after["id"], after["attempt"]) != (before["id"], before["attempt"])
    assert fleet.ask()[0] == 200


def test_a_reconnecting_agent_refreshes_what_the_server_knows(fleet):
    """Labels, fabrics and engines come with each registration."""
    fleet.write_server(fake_model())
    path = fleet.write_agent("n1", "labels: {pool: a}\nfabrics: [rack3]\n")
    fleet.start_server()
    fleet.start_agent("n1")
    node = until(lambda: fleet.status()["nodes"][0], "the node is known")
    assert node["labels"] == {"pool": "a"}
    assert "rack3" in str(node["fabrics"])
    assert "command" in str(node["installations"])
    fleet.end("n1")
    path.write_text(path.read_text().replace("pool: a", "pool: b").replace("[rack3]", "[rack4]"))
    fleet.start_agent("n1")
    until(lambda: fleet.status()["nodes"][0]["labels"] == {"pool": "b"}, "new labels")
    assert "rack4" in str(fleet.status()["nodes"][0]["fabrics"])


def test_sigterm_ends_an_agent_whose_server_never_answers(fleet):
    """Connected over TCP to a peer that says nothing: mid-handshake."""
    with silent_listener() as port:
        fleet.write_agent("n1", servers=f"server: 127.0.0.1:{port}")
        fleet.start_agent("n1")
        until(lambda: "127.0.0.1" in fleet.log("n1") or fleet.running["n1"].poll() is not None, "the agent has started")
        fleet.ends_in_time("n1")


def test_sigterm_ends_a_server_with_mute_connections(fleet):
    """TCP connections that never shake hands, and one that shook hands and never registered."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    fleet.start_server()
    mute = [until(lambda: socket.create_connection(("127.0.0.1", fleet.fleet)), "listening") for _ in range(5)]
    context = client_context(fleet)
    mute.append(context.wrap_socket(socket.create_connection(("127.0.0.1", fleet.fleet))))
    fleet.ends_in_time("server")
    for one in mute:
        one.close()


def client_context(fleet, name: str = "n1") -> ssl.SSLContext:
    """TLS as node C{name}; the server's host name is not checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(fleet.folder / "pki" / "ca.pem")
    context.load_cert_chain(fleet.folder / "pki" / f"{name}.pem", fleet.folder / "pki" / f"{name}.key")
    context.set_alpn_protocols(["llmgw/1"])
    return context


@pytest.mark.parametrize(
    "line",
    [b"garbage\n", b"x" * (2 * 2**20) + b"\n", b'{"type":"register"}\n', b"\xff\xfe{\x00}\x00\n", b"[" * 100000 + b"\n"],
    ids=["garbage", "2MiB", "half", "utf16", "deep"],
)
def test_bad_lines_are_refused_and_the_server_stands(fleet, line):
    """A clean refusal that names the trouble, no traceback, and real agents go on."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    fleet.write_agent("n2")
    fleet.start_server()
    fleet.start_agent("n2")
    fleet.ready()
    with client_context(fleet).wrap_socket(socket.create_connection(("127.0.0.1", fleet.fleet))) as peer:
        peer.settimeout(10)
        reader = peer.makefile("rb")
        assert b'"welcome"' in reader.readline()
        with contextlib.suppress(OSError):
            peer.sendall(line)
        with contextlib.suppress(OSError):
            assert b'"refused"' in reader.readline()
    assert fleet.ask()[0] == 200
    assert fleet.status()["nodes"]
    assert "Traceback" not in fleet.log("server")
