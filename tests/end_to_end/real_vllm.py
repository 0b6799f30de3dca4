"""vLLM itself for tests: where it is installed, a fleet of one node that runs it, and which of its processes are there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.fleet import RealFleet, processes, until

HOME = Path(__file__).parent.parent.parent / ".engines" / "vllm"
HOW = "vLLM is not installed: `make engines` puts it into .engines/vllm (3.4 GB), or LLMGW_TEST_VLLM names its command"
# An idle machine needs half a minute for a start, one that has other work to do some minutes.
PATIENCE = 400.0
TIMING = "heartbeat: 500ms, stop_grace: 4s, drain: 30s, lost_after: 60s, failover_grace: 5s, backoff: 1s"
MODEL = """
  - name: {name}
    replicas: {replicas}
    loras: [{{name: {name}-tuned, weights: tuned}}]
    profile:
      engine: vllm
      weights: tiny-llama
      context: {context}
      parallel: {{tensor: {tensor}}}
      arguments: {{enforce-eager: true, {arguments}}}
      environment: {{VLLM_CPU_KVCACHE_SPACE: "1"}}
      resources: {{devices: 0}}
"""


def vllm_command() -> Path | None:
    """The installed C{vllm}, None where there is none."""
    found = Path(os.environ.get("LLMGW_TEST_VLLM") or HOME / "bin" / "vllm")
    return found.absolute() if os.access(found, os.X_OK) else None


NEEDS_VLLM = [pytest.mark.engines, pytest.mark.timeout(3 * PATIENCE), pytest.mark.skipif(vllm_command() is None, reason=HOW)]


def write_models(folder: Path) -> None:
    """C{tiny-llama} and its adapter C{tuned}, written by vLLM's own Python."""
    command = vllm_command()
    assert command is not None
    script = Path(__file__).with_name("tiny_llama.py")
    words = [str(command.with_name("python")), str(script), str(folder)]
    subprocess.run(words, check=True, capture_output=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def model(name: str = "tiny", replicas: int = 1, context: object = 4096, tensor: int = 1, **arguments: object) -> str:
    """A catalog entry for vLLM on the processor, with an adapter C{NAME-tuned}."""
    given = {"max-num-seqs": 8} | {key.replace("_", "-"): value for key, value in arguments.items()}
    words = ", ".join(f"{key}: {value}" for key, value in given.items())
    return MODEL.format(name=name, replicas=replicas, context=context, tensor=tensor, arguments=words)


def start(folder: Path) -> RealFleet:
    """A server and a node with vLLM and the model, on its way to be served."""
    fleet = RealFleet(folder)
    write_models(folder / "models")
    fleet.write_server(model(), timing=TIMING)
    fleet.write_agent("n1", f"engines:\n  vllm: {{command: [{vllm_command()}]}}\n")
    fleet.start_server()
    fleet.start_agent("n1")
    until(lambda: [row for row in fleet.status()["models"] if row["name"] == "tiny"], "the catalog is in force")
    return fleet


def apply(fleet: RealFleet, models: str) -> None:
    """Make these the catalog."""
    fleet.llmgw("apply", str(fleet.write_server(models, timing=TIMING)), "--allow-removals")


def of_vllm(fleet: RealFleet) -> dict[int, str]:
    """pid and title of each of vLLM's processes that run for a model: the server, its engine's core, workers and helpers.

    C{fleet}'s own, the shim among them, are run by another Python.
    """
    command = vllm_command()
    homes = {str(command.parent), str(command.resolve().parent)} if command else set()
    asking = ("--help=all", "--version")
    return {
        pid: words
        for pid, words in processes(str(fleet.folder)).items()
        if words.startswith("VLLM::") or (any(home in words for home in homes) and not any(word in words for word in asking))
    }
