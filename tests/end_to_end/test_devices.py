"""Devices through real daemons: an agent whose NVML is a stub, in the real child process."""

from __future__ import annotations

import json
import sys

from tests.end_to_end.fleet import until
from tests.test_agent_inventory import GPU, STUB

MODEL = """
  - name: m
    replicas: {replicas}
    profile:
      engine: command
      argv: [{python}, -m, llmgw.testing.fake_engine, --port, "{{port}}", --name, "{{model}}"]
      health: /health
      resources: {{devices: 1, device_memory: 10GiB, host_memory: 16MiB}}
"""


def test_h8_a_cordoned_and_a_missing_device_are_shown_and_get_nothing(fleet):
    """Over a restart of the agent; the engine on the cordoned device goes on."""
    (fleet.folder / "stub").mkdir()
    (fleet.folder / "stub" / "pynvml.py").write_text(STUB)

    def agent(*devices):
        plan = {"devices": [GPU | {"uuid": uuid} for uuid in devices]}
        environment = {"PYTHONPATH": str(fleet.folder / "stub"), "STUB": json.dumps(plan)}
        fleet.daemon("n1", "agent", fleet.folder / "n1.yaml", environment)

    def devices():
        return {one["uuid"]: one for node in fleet.status()["nodes"] for one in node["devices"]}

    fleet.write_server(MODEL.format(replicas=1, python=sys.executable))
    fleet.write_agent("n1")
    fleet.start_server()
    agent("GPU-aaaaaaaa", "GPU-bbbbbbbb", "GPU-cccccccc")
    (first,) = fleet.ready()
    (held,) = [uuid for uuid, one in devices().items() if one["shards"]]
    other, lost = sorted(set(devices()) - {held})
    fleet.llmgw("cordon", "n1", "--device", held[:8], "--reason", "fan is loud")
    fleet.llmgw("cordon", "n1", "--device", other)
    fleet.end("n1")
    agent(held, other)
    until(lambda: devices()[lost]["cordon"], "missed after the agent began anew, and cordoned by itself")
    assert f"{lost}" in (said := fleet.llmgw("status", "n1")) and "cordoned by an operator: fan is loud" in said
    assert "missing since" in said
    fleet.llmgw("apply", str(fleet.write_server(MODEL.format(replicas=2, python=sys.executable))))
    said = until(lambda: "most free 0" in (text := fleet.llmgw("explain", "m")) and text, "explained")
    assert "fan is loud" in said and "missing" in said and "were uncordoned" in said
    assert "closed by itself: missing" in fleet.llmgw("uncordon", "n1", "--device", lost, code=1)
    fleet.llmgw("uncordon", "n1", "--device", other)
    assert first["pid"] in [shard["pid"] for shard in fleet.ready("m", 2)]
