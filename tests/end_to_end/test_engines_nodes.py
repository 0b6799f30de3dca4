"""Replicas over two nodes, through real daemons: placed in one fabric, served from rank 0, and refused with the reason."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.end_to_end.fleet import QUICK, processes, until

RANKED = f"""
  - name: wide
    profile:
      engine: command
      argv: [{sys.executable}, -m, llmgw.testing.ranked_engine, --port, "{{port}}", --name, "{{model}}", --rank, "{{rank}}",
             --nodes, "{{nodes}}", --head, "{{head}}", --head-port, "{{head_port}}"]
      parallel: {{nodes: 2, pipeline: 2}}
      resources: {{devices: 0, host_memory: 16MiB}}
"""
STANDINS = f"""engines:
  sglang: {{command: [{sys.executable}, -m, llmgw.testing.standin_sglang]}}
  vllm: {{command: [{sys.executable}, -m, llmgw.testing.standin_vllm]}}
  trtllm: {{command: [{sys.executable}, -m, llmgw.testing.standin_trtllm]}}
"""
LLAMA = {
    "architectures": ["MixtralForCausalLM"], "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64,
    "max_position_embeddings": 4096, "num_local_experts": 4,
}  # fmt: skip
PYTORCH = """
  - name: sg
    profile:
      engine: sglang
      weights: llama
      parallel: {tensor: 2, nodes: 2}
      resources: {devices: 0, host_memory: 16MiB}
  - name: vl
    loras: [{name: tuned, weights: loras/tuned}]
    profile:
      engine: vllm
      weights: llama
      parallel: {data: 2, nodes: 2, balance: hybrid}
      resources: {devices: 0, host_memory: 16MiB}
  - name: vi
    profile:
      engine: vllm
      weights: llama
      parallel: {data: 2, nodes: 2, balance: internal}
      resources: {devices: 0, host_memory: 16MiB}
"""


TRTLLM = """
  - name: tr
    profile:
      engine: trtllm
      weights: llama
      arguments: {max_batch_size: 8, tool_parser: qwen3}
      resources: {devices: 0, host_memory: 16MiB}
"""


def on(name):
    return f"fabrics: {{{name}: {{address: 127.0.0.1}}}}\n"


def test_a_replica_of_two_nodes(fleet):
    """Refused while its nodes share no fabric; then placed in one, served from rank 0; a lost rank takes both, both return."""
    fleet.write_server(RANKED)
    for name in ("n1", "n2"):
        fleet.write_agent(name, on(f"fabric-of-{name}"))
    fleet.start_server()
    for name in ("n1", "n2"):
        fleet.start_agent(name)
    said = "too few such nodes on one fabric"
    until(lambda: said in json.dumps(fleet.ask("wide")), "the refusal")
    assert fleet.ask("wide")[0] == 503
    told = fleet.llmgw("explain", "wide")
    assert told.count("fabric nodes") == 2 and "need 2" in told, told

    fleet.end("n2")
    fleet.write_agent("n2", on("fabric-of-n1"))
    fleet.start_agent("n2")
    head, other = sorted(fleet.ready("wide", 2), key=lambda shard: shard["rank"])
    assert {head["node"], other["node"]} == {"n1", "n2"}
    assert fleet.ask("wide")[0] == 200
    [endpoint] = [replica["endpoint"] for row in fleet.status()["models"] for replica in row["replicas"]]
    assert str(head["port"]) in endpoint

    lose(fleet, rank=1, attempt=2)


@pytest.mark.slow
def test_a_lost_head_takes_the_other_rank_and_both_return(fleet):
    """The same with rank 0, which serves."""
    fleet.write_server(RANKED)
    for name in ("n1", "n2"):
        fleet.write_agent(name, on("rack"))
    fleet.start_server()
    for name in ("n1", "n2"):
        fleet.start_agent(name)
    fleet.ready("wide", 2)
    lose(fleet, rank=0, attempt=2)


TWO_NODES = PYTORCH.partition("  - name: vl")[0]


def test_ranks_end_in_their_order_and_wait_out_no_grace(fleet):
    """SGLang's rank 1 ignores SIGTERM and gets none in a normal stop: rank 0 tells it. Where rank 0 has died without a word,
    it is killed after some seconds; in neither case after the grace of a minute."""
    weights(fleet)
    fleet.write_server(TWO_NODES, timing=QUICK.replace("stop_grace: 2s", "stop_grace: 1m"))
    for name in ("n1", "n2"):
        fleet.write_agent(name, on("rack") + STANDINS)
    fleet.start_server()
    for name in ("n1", "n2"):
        fleet.start_agent(name)
    head, _ = sorted(fleet.ready("sg", 2), key=lambda shard: shard["rank"])
    until(lambda: fleet.ask("sg")[0] == 200, "it serves")
    os.kill(head["pid"], signal.SIGKILL)
    until(lambda: all(shard["attempt"] == 2 for shard in fleet.ready("sg", 2)), "both ranks anew", 30)
    until(lambda: fleet.ask("sg")[0] == 200, "it serves again")
    fleet.write_server(TWO_NODES.replace("profile:", "replicas: 0\n    profile:"))
    fleet.llmgw("apply", "server.yaml")
    until(lambda: not [one for one in processes(str(fleet.folder)).values() if "standin_" in one], "all gone")
    said = {
        int(log.parent.name): log.read_text()
        for log in fleet.folder.glob("state/*/shards/**/*/output.log")
        if "rank=1" in log.read_text()
    }
    assert "Received SIGTERM on a non-zero rank" in said[1] and "ShutdownReq received" not in said[1]
    assert "ShutdownReq received" in said[2] and "Received SIGTERM" not in said[2]


def weights(fleet):
    """What the models are made of, by their configuration."""
    (fleet.folder / "models" / "llama").mkdir(parents=True)
    (fleet.folder / "models" / "llama" / "config.json").write_text(json.dumps(LLAMA))


def lose(fleet, rank, attempt):
    """Kill one rank: all processes of the replica are replaced, the new ones meet at another port, and it serves again."""
    before = ranks(fleet)
    os.kill(before[rank][0], signal.SIGKILL)
    until(lambda: all(shard["attempt"] >= attempt for shard in fleet.ready("wide", 2)), "both ranks anew")
    until(lambda: fleet.ask("wide")[0] == 200, "it serves again")
    after = ranks(fleet)
    assert not {pid for pid, _ in before.values()} & {pid for pid, _ in after.values()}
    meeting = {port for _, port in after.values()}
    assert len(meeting) == 1 and meeting.isdisjoint(port for _, port in before.values())


def ranks(fleet):
    """By rank, the pid of its engine and the port at which all ranks meet."""
    found = {}
    for pid, words in processes(str(fleet.folder)).items():
        if "llmgw.testing.ranked_engine" in words and "--head-port" in words:
            given = dict(zip(words.split(), words.split()[1:], strict=False))
            found[int(given["--rank"])] = pid, int(given["--head-port"])
    assert set(found) == {0, 1}, found
    return found


def test_engines_over_pytorch(fleet):
    """By the argv of their adapters, taken by stand-ins with the engines' own options.

    Replicas of two nodes have one endpoint, with vLLM's hybrid balancing one a node; an adapter is a model of its own;
    TensorRT-LLM's has no key; all processes end with the models, also ranks that ignore SIGTERM and workers in other sessions.
    """
    weights(fleet)
    (fleet.folder / "models" / "loras" / "tuned").mkdir(parents=True)
    adapter = json.dumps({"peft_type": "LORA", "r": 8, "base_model_name_or_path": "org/llama"})
    (fleet.folder / "models" / "loras" / "tuned" / "adapter_config.json").write_text(adapter)
    fleet.write_server(PYTORCH + TRTLLM)
    for name in ("n1", "n2"):
        fleet.write_agent(name, on("rack") + STANDINS)
    fleet.start_server()
    for name in ("n1", "n2"):
        fleet.start_agent(name)
    for model, count in (("sg", 2), ("vl", 2), ("vi", 2), ("tr", 1)):
        fleet.ready(model, count)
    for model in ("sg", "vl", "vi", "tuned", "tr"):
        until(lambda model=model: fleet.ask(model)[0] == 200, f"{model} answers")
    live = {row["name"]: {one["id"] for one in row["replicas"]} for row in json.loads(fleet.llmgw("top", "--json"))["models"]}
    several = {"vl/1", "vl/1/1"}
    assert live == {"sg": {"sg/1"}, "vl": several, "vi": {"vi/1"}, "tuned": several, "tr": {"tr/1"}}
    versions = ("0.5.23", "0.33.0", "1.3.0rc25")
    until(lambda: all(version in json.dumps(fleet.status()["nodes"]) for version in versions), "each says its version")
    fleet.write_server((PYTORCH + TRTLLM).replace("profile:", "replicas: 0\n    profile:"))
    fleet.llmgw("apply", "server.yaml")
    ours = ("standin_", "sleep ")
    until(lambda: not [one for one in processes(str(fleet.folder)).values() if any(w in one for w in ours)], "all gone", 30)
