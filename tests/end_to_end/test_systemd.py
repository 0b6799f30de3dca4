"""The units of etc/ under a real systemd: READY, restarts that no engine feels, the watchdog, stops that are quick."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.end_to_end.systemd_boot import boot, obstacle
from tests.end_to_end.systemd_drive import AGENT, SERVER, UNITS

# One life of both units takes a minute and a half, most of which is the watchdog's patience.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def seen():
    """What was seen of one life of both units. The folder is not pytest's own, since the server's user must read in it."""
    if why := obstacle():
        pytest.skip(f"no systemd in a namespace here: {why}")
    folder = Path(tempfile.mkdtemp(prefix="llmgw-systemd-"))
    folder.chmod(0o755)
    try:
        yield boot(folder, 300)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_up_when_its_daemon_says_so(seen, unit):
    """READY=1 ends systemctl start, and the status line is the daemon's own."""
    up = seen["up"][unit]
    assert (up["Type"], up["ActiveState"], up["SubState"], up["NRestarts"]) == ("notify", "active", "running", "0")
    assert {SERVER: "leader epoch 1", AGENT: "linked to 127.0.0.1:7443"}[unit] in up["StatusText"]


def test_f71_an_engine_survives_systemctl_restart_of_the_agent(seen):
    """F71: another agent, the same engine, the same attempt; the restart itself is quick."""
    assert len(set(seen["agents"])) == 2 and seen["after_restart"] == seen["engine"]
    assert seen["restart"] < 15


def test_f49_an_engine_survives_kill_9_of_the_agent(seen):
    """F49: systemd starts another agent, which adopts."""
    assert seen["after_crash"] == seen["engine"] and "signal" in seen["crash"]["results"]


def test_a_stream_survives_systemctl_restart_of_the_server(seen):
    """Router workers outlive their server's unit: the stream ends whole, and the engine is the same."""
    done, error, pieces = seen["stream"]
    assert done and pieces > 200, error
    assert seen["after_server_restart"] == seen["engine"]


@pytest.mark.parametrize("unit", UNITS)
def test_the_watchdog_replaces_a_daemon_that_hangs(seen, unit):
    """F17: SIGSTOP: systemd finds out within the unit's WatchdogSec and starts another; the engine is the same."""
    assert "watchdog" in seen["hung"][unit]["results"]
    assert seen["after_hung"] == seen["engine"]


@pytest.mark.parametrize("unit", UNITS)
def test_f70_a_unit_stops_at_once_and_leaves_its_engines(seen, unit):
    """F70: neither waits for TimeoutStopSec; what serves goes on."""
    assert seen["stop"][unit] < 10 and seen["after_stop"]


@pytest.mark.parametrize("unit", UNITS)
def test_systemctl_reload_is_taken(seen, unit):
    """SIGHUP by systemctl ends nothing."""
    assert seen["reload"][unit] < 5


@pytest.mark.parametrize("unit", UNITS)
def test_systemctl_reload_of_a_mistake_fails(seen, unit):
    """And the daemon goes on with what it has."""
    status, same, state = seen["mistaken"][unit]
    assert status != 0 and same and state == "active"
