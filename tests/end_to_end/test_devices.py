"""Devices through real daemons: an agent whose NVML is a stub, in the real child process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.end_to_end.fleet import fake_model, until
from tests.test_agent_inventory import GPU, STUB
from tests.test_agent_inventory_amd import GPU as AMD_GPU
from tests.test_agent_inventory_amd import STUB as AMD_STUB

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


AMD_MACHINE = """
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path, **options: str(path) == "/dev/kfd" or exists(path, **options)
"""


def test_engines_see_their_amd_devices_by_the_numbers_that_rocm_has_for_them_now(fleet):
    """Looked up by UUID at each launch, since they move when a device comes or goes; without devices none is seen."""
    (stub := fleet.folder / "stub").mkdir()
    plan = stub / "plan.json"
    (stub / "sitecustomize.py").write_text(AMD_MACHINE)
    (stub / "amdsmi.py").write_text(AMD_STUB)
    (stub / "pynvml.py").write_text("raise ImportError('none here')")

    def machine(**numbers):
        devices = [AMD_GPU | {"uuid": f"amd-{name}", "hip": number} for name, number in numbers.items()]
        plan.with_suffix(".new").write_text(json.dumps({"devices": devices}))
        plan.with_suffix(".new").rename(plan)

    def seen(shard):
        environment = dict(line.split("=", 1) for line in Path(f"/proc/{shard['pid']}/environ").read_text().split("\0") if line)
        return {name: value for name, value in environment.items() if name.endswith("VISIBLE_DEVICES")}

    machine(a=2, b=0, c=1)
    two = MODEL.format(replicas=1, python=sys.executable).replace("devices: 1", "devices: 2")
    fleet.write_server(two + fake_model("cpu"))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.daemon("n1", "agent", fleet.folder / "n1.yaml", {"PYTHONPATH": str(stub), "STUB": str(plan)})
    (first,), (cpu,) = fleet.ready(), fleet.ready("cpu")
    assert seen(first) == {"HIP_VISIBLE_DEVICES": "2,0"}
    assert seen(cpu) == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    machine(a=1, b=0)
    os.kill(first["pid"], signal.SIGKILL)
    (second,) = until(lambda: [shard for shard in fleet.ready() if shard["attempt"] > first["attempt"]], "started anew")
    assert seen(second) == {"HIP_VISIBLE_DEVICES": "1,0"}
