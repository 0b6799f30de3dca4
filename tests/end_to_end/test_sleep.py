"""Scale to zero by engines that sleep, through real daemons, with stand-ins for vLLM and SGLang that take their own options."""

from __future__ import annotations

import json
import signal

import pytest

from tests.end_to_end.fleet import until
from tests.end_to_end.test_engines_nodes import LLAMA, STANDINS

MODELS = """
  - name: vl
    replicas: {min: 0, max: 1, idle_after: 1s}
    profile:
      engine: vllm
      weights: llama
      arguments: {enable-sleep-mode: true}
      environment: {VLLM_SERVER_DEV_MODE: "1"}
      resources: {devices: 0, host_memory: 16MiB}
  - name: sg
    replicas: {min: 0, max: 1, idle_after: 1s}
    profile:
      engine: sglang
      weights: llama
      arguments: {enable-memory-saver: true, enable-weights-cpu-backup: true}
      resources: {devices: 0, host_memory: 16MiB}
"""


@pytest.fixture
def sleepers(fleet):
    """A fleet with both models, on one node."""
    (fleet.folder / "models" / "llama").mkdir(parents=True)
    (fleet.folder / "models" / "llama" / "config.json").write_text(json.dumps(LLAMA))
    fleet.write_server(MODELS)
    fleet.write_agent("n1", STANDINS)
    fleet.start_server()
    fleet.start_agent("n1")
    until(lambda: [node for node in fleet.status()["nodes"] if node["state"] == "ready"], "the node is there")
    return fleet


def asleep(fleet, model):
    """The pid of its engine, once that sleeps."""
    shards = until(lambda: [one for one in fleet.shards(model) if one["state"] == "sleeping" and one["pid"]], f"{model} sleeps")
    return shards[0]["pid"]


def test_an_idle_engine_sleeps_and_the_next_request_wakes_it(sleepers):
    """The first request starts it, idleness puts it to sleep, status says so, the next is answered by the same process.

    So also when the agent was killed meanwhile. Some 10 s: two models have to be idle for real, twice.
    """
    fleet, pids = sleepers, {}
    for model in ("vl", "sg"):
        assert fleet.ask(model)[0] == 200
    for model in ("vl", "sg"):
        pids[model] = asleep(fleet, model)
    assert "sleeping" in fleet.llmgw("status")
    fleet.end("n1", signal.SIGKILL)
    fleet.start_agent("n1")
    until(lambda: "engines found running: sg/1/0, vl/1/0" in fleet.log("n1"), "the agent has found them")
    for model in ("vl", "sg"):
        assert asleep(fleet, model) == pids[model]
        status, said = fleet.ask(model)
        assert (status, fleet.shards(model)[0]["pid"]) == (200, pids[model]), said
    told = fleet.llmgw("events")
    assert "it is woken" in told and "it is awake again" in told
    for model in ("vl", "sg"):
        asleep(fleet, model)
    fleet.write_server(MODELS.replace("{min: 0, max: 1, idle_after: 1s}", "0"))
    fleet.llmgw("apply", "server.yaml")
    until(lambda: not [one for model in ("vl", "sg") for one in fleet.shards(model) if one["pid"]], "no replicas are no sleepers")
