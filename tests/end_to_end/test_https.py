"""The router's HTTPS certificate through a real server: what clients are shown, and what operators are told of it."""

from __future__ import annotations

import signal
import socket
import ssl
import urllib.request
from datetime import timedelta

from cryptography import x509

from llmgw.testing.certificates import SERVER, Fleet
from tests.end_to_end.fleet import fake_model, until
from tests.ports import free_ports


def write(fleet, days):
    """A certificate of 90 days that ends in so many; its serial number."""
    authority = Fleet()
    pair = authority.leaf([], [SERVER], ["127.0.0.1"], start=timedelta(days=days - 90), end=timedelta(days=days))
    authority.write(fleet.folder / "web", "web", pair)
    return pair.certificate.serial_number


def shown(fleet):
    """The serial number of the certificate that a new client is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", fleet.router), timeout=5) as raw, context.wrap_socket(raw) as wrapped:
        return x509.load_der_x509_certificate(wrapped.getpeercert(True)).serial_number


def test_a_certificate_that_ends_or_is_broken_is_told(fleet):
    """SIGHUP takes an expired one, and log, status and metrics say so; a broken one is refused, and log and status say that."""
    (port,) = free_ports(1)
    first = write(fleet, 80)
    fleet.write_server(
        fake_model("m", 0), router=f", metrics: 127.0.0.1:{port}, tls: {{certificate: web/web.pem, key: web/web.key}}"
    )
    server = fleet.start_server()
    until(lambda: shown(fleet) == first, "HTTPS")
    assert "router.tls" not in fleet.llmgw("status")

    expired = write(fleet, -1)
    server.send_signal(signal.SIGHUP)
    until(lambda: shown(fleet) == expired, "the new one")
    assert "router.tls: certificate expired" in fleet.llmgw("status")
    assert "the router's certificate" in fleet.log("server") and "certificate expired" in fleet.log("server")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'llmgw_certificate_expires{role="router",name="cp1"}' in answer.read().decode()

    (fleet.folder / "web" / "web.pem").write_text("nonsense")
    server.send_signal(signal.SIGHUP)
    until(lambda: "reload refused: router.tls: " in fleet.log("server"), "refused")
    said = fleet.llmgw("status")
    assert "web.pem" in said and "cannot be used" in said
    assert shown(fleet) == expired
