"""An installation whose command begins with another program, as a container's: what it started goes with it, however it ends."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.end_to_end.fleet import processes, until
from tests.end_to_end.test_engines_nodes import LLAMA

# Like a container's front: it passes on no signal, and what it started stays when it dies.
WRAPPED = f"""engines:
  vllm: {{command: [sh, -c, '"$@" & wait', front, {sys.executable}, -m, llmgw.testing.standin_vllm]}}
"""
MODEL = """
  - name: m
    replicas: {replicas}
    profile:
      engine: vllm
      weights: llama
      resources: {{devices: 0, host_memory: 16MiB}}
"""


@pytest.fixture
def wrapped(fleet):
    (fleet.folder / "models" / "llama").mkdir(parents=True)
    (fleet.folder / "models" / "llama" / "config.json").write_text(json.dumps(LLAMA))
    fleet.write_server(MODEL.format(replicas=1))
    fleet.write_agent("n1", WRAPPED)
    fleet.start_server()
    fleet.start_agent("n1")
    return fleet


def engines(fleet):
    """pids of the stand-in that serve."""
    return {pid for pid, command in processes(str(fleet.folder)).items() if "standin_vllm" in command and "serve" in command}


def test_a_command_with_a_prefix_serves_and_leaves_nothing_behind(wrapped):
    """Ready through the prefix; the front killed: all of it goes before its successor starts; stopped: nothing is left."""
    [shard] = wrapped.ready()
    until(lambda: wrapped.ask()[0] == 200, "it serves")
    first = engines(wrapped)
    assert len(first) >= 2 and shard["pid"] in first, "the front and what it started"
    os.kill(shard["pid"], signal.SIGKILL)
    [again] = until(lambda: [one for one in wrapped.ready() if one["attempt"] == 2], "a second attempt", 30)
    assert again["pid"] != shard["pid"] and not first & engines(wrapped)
    until(lambda: wrapped.ask()[0] == 200, "it serves again")
    wrapped.write_server(MODEL.format(replicas=0))
    wrapped.llmgw("apply", "server.yaml")
    until(lambda: not engines(wrapped), "nothing is left", 30)
