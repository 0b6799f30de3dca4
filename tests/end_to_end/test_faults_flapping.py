"""F21 with real daemons: the lead changes fifty times in a row, and it shows nowhere but in the epoch."""

from __future__ import annotations

import time

import psycopg
import pytest

from tests.end_to_end.fleet import until
from tests.end_to_end.scene import Scene, lease, names, servers  # noqa: F401
from tests.store_fixtures import needs_postgres, postgres  # noqa: F401

pytestmark = [needs_postgres, pytest.mark.slow]
TIMES = 50


def resident(pid: int) -> int:
    """KiB of memory."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lease", [1.5])
def test_f21_fifty_failovers_show_only_in_the_epoch(servers):  # noqa: F811
    """Of three agents each is linked again within two seconds of a leader being there; engines, streams and memory are as before.

    Takes some minutes: each time the next leader has to be there, and all agents linked to it.
    """
    scene = Scene(servers, nodes=3)
    epoch, gaps, sizes = scene.epoch, [], []
    for _ in range(TIMES):
        with psycopg.connect(servers.url, autocommit=True) as connection:
            connection.execute("UPDATE lease SET released = 1")
        leader, epoch = servers.leader(above=epoch)
        began = time.monotonic()
        until(lambda: len(obeying(scene, epoch)) == 3, f"all agents obey epoch {epoch}")
        gaps.append(time.monotonic() - began)
        sizes.append([resident(fleet.running["server"].pid) for fleet in servers.fleets.values()])
    print(f"agents linked after {sorted(gaps)[TIMES // 2]:.2f} s, at most {max(gaps):.2f} s; KiB {sizes[9]} to {sizes[-1]}")
    assert epoch >= scene.epoch + TIMES
    assert max(gaps) < 2.0
    for before, after in zip(sizes[9], sizes[-1], strict=True):
        assert after < before * 1.1 + 2048
    scene.nothing_happened(leader)


def obeying(scene: Scene, epoch: int) -> list[str]:
    """The nodes that a leader of that epoch, or a later one, has taken."""
    return [node for node in scene.nodes if any(found >= epoch for found, _ in scene.obeyed(node))]
