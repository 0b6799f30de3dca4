"""What failures are taken for, through real daemons: a profile's mistake closes no node, a node's trouble moves the replica."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmgw.testing.tiny_gguf import write_tiny_gguf
from tests.end_to_end.fleet import fake_model, until

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}
KV_CACHE = "ValueError: No available memory for the cache blocks. Try increasing"
DRIVER = "RuntimeError: Failed to initialize NVML: Driver/library version mismatch"


def broken_vllm(path: Path, line: str) -> Path:
    """An installation that answers what it is asked, and ends with C{line} when it is started."""
    path.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && {{ echo 0.33.0; exit 0; }}
case "$*" in *--help*) exec {sys.executable} -m llmgw.testing.standin_vllm "$@";; esac
echo "(EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:7] {line}"
exit 1
"""
    )
    path.chmod(0o755)
    return path


def llama(fleet) -> None:
    """Weights that every node has."""
    (fleet.folder / "models" / "llama").mkdir(parents=True)
    (fleet.folder / "models" / "llama" / "config.json").write_text(json.dumps(LLAMA))


def vllm_model(name: str, more: str = "", context: int = 2048) -> str:
    return f"""
  - name: {name}
    profile: {{engine: vllm, weights: llama, context: {context}, {more}resources: {{devices: 0, host_memory: 16MiB}}}}
"""


def test_three_wrong_profiles_end_soon_with_what_to_change_and_close_no_node(fleet):
    """A mistyped flag, a context that is too long, a cache that does not fit: the fourth model is right and serves."""
    llama(fleet)
    engine = broken_vllm(fleet.folder / "vllm", KV_CACHE)
    wrong = vllm_model("flag", "arguments: {max-nun-seqs: 4}, ") + vllm_model("long", context=8192) + vllm_model("cache")
    fleet.write_server(wrong)
    for name in ("n1", "n2"):
        fleet.write_agent(name, f"engines: {{vllm: {{command: [{engine}]}}}}\n")
    fleet.start_server()
    for name in ("n1", "n2"):
        fleet.start_agent(name)
    for name, advice in (("flag", "max-nun-seqs"), ("long", "context"), ("cache", "use more devices")):
        (shard,) = until(lambda name=name: [one for one in fleet.shards(name) if one["state"] == "failed"], f"{name} failed")
        assert shard["crashes"] == 2 and "Twice it was the profile's fault" in shard["reason"] and advice in shard["reason"]
    fleet.write_server(wrong + fake_model("right"))
    fleet.llmgw("apply", str(fleet.folder / "server.yaml"))
    fleet.ready("right")
    assert all(node["flags"] == [] and node["quarantine"] is None for node in fleet.status()["nodes"])


def test_a_quarantine_says_what_failed_and_for_how_long_and_a_reset_ends_it(fleet):
    """Nobody knows why three models end there. After the reset the node is open, though none of them is well."""
    dies = ("--exit-after", "0", "--exit-code", "3", "--say", "RuntimeError: no good")
    fleet.write_server("".join(fake_model(name, 1, *dies) for name in "xyz"), timing=fleet_timing("backoff: 30s"))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    (node,) = until(lambda: [one for one in fleet.status()["nodes"] if one["quarantine"]], "in quarantine")
    assert node["flags"] == ["quarantined"] and {one["model"] for one in node["quarantine"]["failures"]} == set("xyz")
    for said in (fleet.llmgw("status"), fleet.llmgw("node", "show", "n1"), fleet.llmgw("status", "--check", code=1)):
        said = " ".join(said.split())
        assert "x, y, z failed there and nothing serves (x: " in said and "RuntimeError: no good" in said
        assert "nothing new for" in said and ", until 20" in said and "end it: llmgw node reset n1" in said
    fleet.llmgw("node", "reset", "n1")
    fleet.write_server("".join(fake_model(name, 1, *dies) for name in "xyz") + fake_model("w"))
    fleet.llmgw("apply", str(fleet.folder / "server.yaml"))
    fleet.ready("w")


def fleet_timing(more: str) -> str:
    return f"heartbeat: 500ms, stop_grace: 2s, drain: 10s, lost_after: 5s, failover_grace: 5s, {more}"


def test_what_is_the_nodes_fault_moves_on_at_once(fleet):
    """The driver of n1 was updated under it: the model serves on n2 long before a retry would be due, its budget untouched."""
    llama(fleet)
    engine = broken_vllm(fleet.folder / "vllm", DRIVER)
    well = fleet.folder / "well"
    well.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmgw.testing.standin_vllm "$@"\n')
    well.chmod(0o755)
    fleet.write_server(vllm_model("m"), timing=fleet_timing("backoff: 200s"))
    fleet.write_agent("n1", f"engines: {{vllm: {{command: [{engine}]}}}}\n")
    fleet.write_agent("n2", f"engines: {{vllm: {{command: [{well}]}}}}\n")
    fleet.start_server()
    fleet.start_agent("n1")
    until(fleet.shards, "placed on n1")
    fleet.start_agent("n2")
    (shard,) = fleet.ready()
    assert shard["node"] == "n2" and shard["crashes"] == 1 and "driver" in shard["last_reason"]


def test_a_failing_replica_finds_the_node_that_was_never_asked_for_its_weights(fleet):
    """n2 came after the model was placed, and nobody had looked whether it has the weights; nor does a new server know."""
    (fleet.folder / "models").mkdir()
    write_tiny_gguf(fleet.folder / "models" / "w.gguf")
    engine = fleet.folder / "engine"
    engine.write_text(
        f'#!/bin/sh\n[ "$NODE" = n1 ] && {{ echo broken; exit 3; }}\nexec {sys.executable} -m llmgw.testing.fake_engine "$@"\n'
    )
    engine.chmod(0o755)
    fleet.write_server(
        f"""
  - name: m
    profile:
      {{engine: command, weights: w.gguf, argv: [{engine}, --port, "{{port}}", --name, "{{model}}"], resources: {{devices: 0}}}}
"""
    )
    for name in ("n1", "n2"):
        fleet.write_agent(name, f"environment: {{NODE: {name}}}\n")
    fleet.start_server()
    fleet.start_agent("n1")
    until(fleet.shards, "placed on n1")
    fleet.start_agent("n2")
    (shard,) = fleet.ready(seconds=60)
    assert shard["node"] == "n2" and shard["crashes"] == 3


def test_a_model_that_sleeps_gets_no_fresh_budget_with_each_request(fleet):
    """Between two requests it is put to sleep; five failures are five, however many replicas had them, and all are told why."""
    dies = ("--exit-after", "0", "--exit-code", "3", "--say", "RuntimeError: no good")
    elastic = fake_model("m", "{min: 0, max: 1, idle_after: 1s}", *dies)  # type: ignore[arg-type]
    fleet.write_server(elastic, router=", timeouts: {queue: 1s}")
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    numbers, said = set(), []

    def failed():
        status, body = fleet.ask()
        assert status in (503, 504)
        said.append(body["error"]["message"])
        numbers.update(shard["id"] for shard in fleet.shards())
        until(lambda: fleet.status()["models"][0]["wanted"] == 0, "asleep again")
        return [shard for shard in fleet.shards() if shard["state"] == "failed"]

    (shard,) = until(failed, "given up", 90)
    assert shard["crashes"] == 5 and len(numbers) > 1
    assert any("RuntimeError: no good" in text for text in said[:-1])
    until(lambda: "m/" in fleet.ask()[1]["error"]["message"], "routers know")
    status, body = fleet.ask()
    assert status == 503 and "has failed: the command ended with exit status 3: RuntimeError: no good" in body["error"]["message"]
    until(lambda: fleet.status()["models"][0]["wanted"] == 0, "nobody wants it")
    for text in (fleet.llmgw("status"), fleet.llmgw("explain", "m"), fleet.llmgw("status", "--check", code=1)):
        assert "no good" in text and "5 failures in 30 m" in text
    fleet.llmgw("restart", "m")
    until(lambda: not fleet.shards(), "an operator's order gives it a new one")
