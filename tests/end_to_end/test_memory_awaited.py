"""Device memory that outlives its process, through real daemons: NVML is a stub in the agents' real child processes."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.end_to_end.fleet import until
from tests.end_to_end.test_engines_nodes import RANKED, on, ranks
from tests.test_agent_inventory import GPU, STUB

# The driver of one node: what it shows as holding memory is in a file, which a test writes.
DRIVER = (
    STUB
    + """
def nvmlDeviceGetComputeRunningProcesses_v3(d):
    return [P(pid, 2**30) for pid in json.load(open(os.environ["HOLDERS"]))]
"""
)


@pytest.mark.slow
def test_d1_d7_a_lost_rank_is_replaced_only_when_its_memory_is_back(fleet):
    """D1, D7 with two nodes: the driver goes on showing the killed rank's pid. Its shard is stopping and the other rank is gone;
    nothing starts, and the device is not free. When the driver lets go both ranks come back, as they were placed."""
    (fleet.folder / "stub").mkdir()
    (fleet.folder / "stub" / "pynvml.py").write_text(DRIVER)
    fleet.write_server(RANKED.replace("devices: 0,", "devices: 1, device_memory: 1GiB,"))
    fleet.start_server()
    for name in ("n1", "n2"):
        fleet.write_agent(name, on("rack"))
        (fleet.folder / f"{name}.holders").write_text("[]")
        plan = {"devices": [GPU | {"uuid": f"GPU-{name}"}]}
        environment = {"PYTHONPATH": str(fleet.folder / "stub"), "STUB": json.dumps(plan)}
        fleet.daemon(
            name, "agent", fleet.folder / f"{name}.yaml", environment | {"HOLDERS": str(fleet.folder / f"{name}.holders")}
        )
    by_rank = {shard["rank"]: shard for shard in fleet.ready("wide", 2)}
    before = ranks(fleet)
    lost = by_rank[1]["node"]
    held = fleet.folder / f"{lost}.holders"
    held.write_text(json.dumps([before[1][0]]))
    os.kill(before[1][0], signal.SIGKILL)

    def states():
        return {shard["rank"]: (shard["state"], shard["attempt"]) for shard in fleet.shards("wide")}

    until(lambda: states() == {0: ("backoff", 1), 1: ("stopping", 1)}, "rank 0 has ended, rank 1 waits for its memory")
    since = next(shard["since"] for shard in fleet.shards("wide") if shard["rank"] == 1)
    until(lambda: time.time() - since > 3, "longer than the first wait after a crash")
    assert states() == {0: ("backoff", 1), 1: ("stopping", 1)}
    held.write_text("[]")
    after = {shard["rank"]: shard for shard in fleet.ready("wide", 2)}
    assert {shard["attempt"] for shard in after.values()} == {2} and after[1]["node"] == lost
    until(lambda: fleet.ask("wide")[0] == 200, "it serves again")
