"""The admin API over mutual TLS: who gets in, who does not and why, and how llmgw finds the leader."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.config.machine import Machine
from llmgw.config.server import read_server
from llmgw.errors import Invalid

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
    assert str(found.admin.advertise) == dialed and found.socket == Path("/run/llmgw/admin.sock")
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
    ],
)
def test_an_address_that_nobody_could_use_is_a_problem(text, said):
    """Found before anything is started, with the line."""
    with pytest.raises(Invalid) as found:
        settings(text)
    assert said in str(found.value) and "server.yaml:" in str(found.value)
