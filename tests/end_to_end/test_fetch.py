"""C{llmgw fetch} through real daemons: server, agent, link, huggingface_hub in a child, and a small hub on this machine."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.end_to_end.fleet import processes, until
from tests.hub_stub import Hub

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install -e '.[fetch]'")

HEADER = b'{"a": {"dtype": "U8", "shape": [1048576], "data_offsets": [0, 1048576]}}'
FILES = {"config.json": b"{}", "model.safetensors": len(HEADER).to_bytes(8, "little") + HEADER + bytes(2**20)}
MODEL = """
  - name: tiny
    replicas: 1
    profile:
      engine: command
      weights: hf:acme/tiny
      argv: [{python}, -m, llmgw.testing.fake_engine, --port, "{{port}}", --name, "{{model}}"]
      health: /health
      resources: {{devices: 0, host_memory: 16MiB}}
"""


@pytest.fixture
def hub():
    made = Hub(dict(FILES)).start()
    yield made
    made.stop()


@pytest.fixture
def waiting(fleet, hub):
    """One server and one agent; model tiny waits for its weights."""
    fleet.write_server(MODEL.format(python=sys.executable))
    fleet.write_agent("n1", f"environment: {{HF_HOME: {fleet.folder}/hf}}\n")
    fleet.start_server()
    fleet.environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_canary"}
    fleet.daemon("n1", "agent", fleet.folder / "n1.yaml", fleet.environment)
    until(lambda: "without the weights" in fleet.llmgw("explain", "tiny"), "refused for its weights")
    return fleet


def fetches(fleet):
    return {one["weights"]: one for node in fleet.status()["nodes"] for one in node["fetches"]}


def test_a_model_that_waits_for_its_weights_starts_when_they_are_fetched(waiting):
    """Explain names the paths looked at and the command; that command brings the model up."""
    said = waiting.llmgw("explain", "tiny")
    assert f"{waiting.folder}/hf/hub/models--acme--tiny" in said and "llmgw fetch tiny --node n1" in said
    assert "n1: downloading" in (out := waiting.llmgw("fetch", "tiny", "--node", "n1")) or "n1: done (1.0 MiB)" in out
    waiting.ready("tiny")
    assert fetches(waiting)["hf:acme/tiny"]["state"] == "done"
    assert "download ordered by" in waiting.llmgw("events")


def test_a_download_goes_on_after_kill_9_of_the_agent_and_can_be_cancelled(waiting, hub):
    """The next agent takes it up by itself from the bytes that are there; cancel removes them; the token is nowhere seen."""
    hub.cut, hub.held = 600_000, True
    waiting.llmgw("fetch", "tiny")
    until(lambda: fetches(waiting)["hf:acme/tiny"]["bytes"] >= 2**19, "half of it")
    assert "hf:acme/tiny downloading 49 % (512.0 KiB of 1.0 MiB)" in waiting.llmgw("status")
    seen = processes(str(waiting.folder)).values()
    assert any("fetch_child" in line for line in seen) and not any("hf_canary" in line for line in seen)
    waiting.end("n1", signal.SIGKILL)
    hub.cut = 100_000
    waiting.daemon("n1", "agent", waiting.folder / "n1.yaml", waiting.environment)
    until(lambda: "bytes=524288-" in hub.gets("model.safetensors"), "resumed")
    until(lambda: fetches(waiting).get("hf:acme/tiny", {}).get("state") == "downloading", "seen again")
    assert "cancelled" in waiting.llmgw("fetch", "tiny", "--cancel")
    blobs = waiting.folder / "hf" / "hub" / "models--acme--tiny" / "blobs"
    until(lambda: not list(blobs.glob("*.incomplete")), "removed")
    assert "being downloaded on no node" in waiting.llmgw("fetch", "tiny", "--cancel", code=1)
    assert "hf_canary" not in waiting.log("n1") + waiting.log("server") + waiting.llmgw("events")


def test_a_gated_model_and_a_path_are_told_to_the_operator(waiting, hub):
    """With what to do, as the command's own answer, and it exits with 1."""
    hub.gated = "another"
    waiting.llmgw("fetch", "tiny", code=None)
    failed = until(lambda: (one := fetches(waiting)["hf:acme/tiny"])["state"] == "failed" and one, "refused")
    assert f"accept the licence at {hub.url}/acme/tiny, set the token in HF_TOKEN" in failed["text"]
    assert "accept the licence" in waiting.llmgw("status", "--check", code=1)
    path = waiting.folder / "server.yaml"
    path.write_text(path.read_text().replace("hf:acme/tiny", "tiny.gguf"))
    waiting.llmgw("apply", str(path))
    assert "only hf:ORG/NAME can be downloaded" in waiting.llmgw("fetch", "tiny", code=1)
