"""What engines refuse minutes after their start, refused in milliseconds: every check of the field's list by its number.

Each sentence has the figures and what to change. Time is the thread's own, so that a busy machine does not matter.
"""

from __future__ import annotations

import json
import socket
import time

import pytest
from attrs import evolve

from llmgw.agent.ports import port_is_free
from llmgw.agent.weights import WeightFinder
from llmgw.engines.sglang import sglang
from llmgw.engines.trtllm import trtllm
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Lora, Parallel, Profile, Resources
from llmgw.fleet.node import Device, Fabric, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import Flags
from llmgw.planning.explanation import Explanation
from llmgw.planning.placement import Ledger, Placement
from tests.test_engines_vllm import FLAGS
from tests.test_planning_placement import candidate, want

GIB = 2**30
QUICK = 0.05
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "hidden_size": 4096, "max_position_embeddings": 131072,
}  # fmt: skip
MOE = {**LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256, "moe_intermediate_size": 2048}
FP8 = {**MOE, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
ADAPTERS = {"vllm": (vllm, "0.33.0"), "sglang": (sglang, "0.5.23"), "trtllm": (trtllm, "1.3.0")}


def files(config=LLAMA, size=16 * GIB, **more):
    return WeightFiles("llama", True, "/models/llama", format="safetensors", bytes=size, config=config, **more)


def gpus(count=8, **more):
    return tuple(Device(f"GPU-{n}", n, "H100", **{"memory_total": 80 * GIB, "capability": (9, 0), **more}) for n in range(count))


def node(devices=None, fabrics=(), **more):
    inventory = Inventory(64, 512 * GIB, devices=gpus() if devices is None else devices, **{"driver": "580.65", **more})
    return NodeFacts("n1", "10.0.0.1", inventory, fabrics=fabrics)


def asked(word, weights, where, flags, engine="vllm", **profile):
    adapter, version = ADAPTERS[engine]
    installation = Installation(engine, engine, (engine,), profile.pop("version", version))
    wanted = evolve(Profile(engine, "llama"), **profile)
    begin = time.thread_time()
    found = getattr(adapter, word)(wanted, weights, where, installation, flags)
    assert time.thread_time() - begin < QUICK
    return found


def refused(*words, weights=None, where=None, flags=Flags(), **profile):
    """The one problem, whose text has all these words."""
    [problem] = asked("problems", weights or files(), where, flags, **profile)
    assert [word for word in words if word not in problem.text] == [], problem.text
    return problem


def warned(*words, weights=None, where=None, **profile):
    """The one warning beside those about unchecked arguments, whose text has all these words."""
    flags = profile.pop("flags", Flags())
    [problem] = [row for row in asked("warnings", weights or files(), where, flags, **profile) if row.code != "unchecked"]
    assert [word for word in words if word not in problem.text] == [], problem.text
    return problem


def fine(weights=None, where=None, **profile):
    assert asked("problems", weights or files(), where, Flags(), **profile) == []


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v1_attention_heads(engine):
    assert refused("tensor 3", "32", "1, 2, 4, 8, 16, 32", engine=engine, parallel=Parallel(tensor=3)).where == "parallel.tensor"
    fine(engine=engine, parallel=Parallel(tensor=4))


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v2_key_value_heads(engine):
    odd = files({**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 128})
    refused("tensor 6", "4 key-value heads", "1, 2, 4", weights=odd, engine=engine, parallel=Parallel(tensor=6))
    fine(engine=engine, parallel=Parallel(tensor=16))
    assert warned("8", "kept 2 times", engine=engine, parallel=Parallel(tensor=16)).code == "kv_heads_repeated"


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v3_quantization_blocks(engine):
    found = refused(
        "2048", "tensor 32", "128", "parallel.expert", weights=files(FP8), engine=engine, parallel=Parallel(tensor=32)
    )
    assert found.code == "block_not_divisible"
    fine(weights=files(FP8), engine=engine, parallel=Parallel(tensor=32, expert=True))


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v4_experts(engine):
    odd = files({**MOE, "n_routed_experts": 60})
    refused("60 experts", "8 ranks", weights=odd, engine=engine, parallel=Parallel(tensor=8, expert=True))
    fine(weights=files(MOE), engine=engine, parallel=Parallel(tensor=8, expert=True))


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v5_devices(engine):
    refused("devices is 2", "4 ranks", "leave it out", engine=engine, parallel=Parallel(tensor=4), resources=Resources(devices=2))


def test_v6_nodes():
    refused("4 ranks", "3 nodes", parallel=Parallel(tensor=4, nodes=3))
    refused("tensor 4", "3 nodes", engine="sglang", parallel=Parallel(tensor=4, nodes=3))
    refused("data 3", "2 nodes", "a multiple of 2", weights=files(MOE), parallel=Parallel(tensor=2, data=3, nodes=2))


def test_v7_pipeline():
    whisper = files({**LLAMA, "architectures": ["Zamba2ForCausalLM"]})
    refused("Zamba2ForCausalLM", "pipeline to 1", "tensor 2", weights=whisper, parallel=Parallel(pipeline=2))
    fine(weights=whisper, parallel=Parallel(pipeline=2), version="0.34.0")
    refused("pipeline 40", "32 layers", parallel=Parallel(pipeline=40))


def test_v8_decode_context():
    name = "decode-context-parallel-size"
    refused("3", "tensor 8", parallel=Parallel(tensor=8), arguments={name: 3})
    refused("4", "tensor 16", "8 key-value heads", "2", parallel=Parallel(tensor=16), arguments={name: 4})


def test_v9_own_balancing_is_for_experts():
    cut = Parallel(data=2, nodes=2, balance="hybrid")
    refused("experts", "replicas instead of data", parallel=cut)
    fine(weights=files(MOE), parallel=cut)
    refused("llmgw's own to set", parallel=Parallel(data=2), arguments={"data-parallel-external-lb": True})


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v10_context(engine):
    refused("200000", "131072", "lower it", engine=engine, context=200000)
    stretched = {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 60000}}
    fine(weights=files(stretched), engine=engine, context=200000)


def test_v11_batch():
    tokens = "max-num-batched-tokens"
    refused("32", "64", arguments={tokens: 32, "max-num-seqs": 64})
    refused("2048", "4096", context=4096, arguments={tokens: 2048, "enable-chunked-prefill": False})


def test_v12_the_folder(tmp_path):
    """Shards that are missing, cut short, or pointers of Git LFS are found by the agent and told with the way out."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    found = WeightFinder([tmp_path]).inspect("m")
    refused("1 of 1 tensor files are missing", "1.safetensors", weights=found)
    (tmp_path / "m" / "1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused("Git LFS pointer", "git lfs pull", weights=WeightFinder([tmp_path]).inspect("m"))
    for engine in ADAPTERS:
        refused("/models/llama has no tokenizer", "fetch the whole model", weights=files(tokenizer=False), engine=engine)
    fine(weights=files(tokenizer=False), arguments={"tokenizer": "org/other"})
    refused("config.json", weights=files({}))
    refused("names no architecture", weights=files({"x": 1}))
    refused("GGUF", "llamacpp", weights=evolve(files(), format="gguf"))


def test_v13_architecture():
    refused(
        "MllamaForConditionalGeneration",
        "0.10.2",
        "that version",
        weights=files({**LLAMA, "architectures": ["MllamaForConditionalGeneration"]}),
    )
    refused("plugin", "bart-plugin", weights=files({**LLAMA, "architectures": ["BartModel"]}))
    strange = files({**LLAMA, "architectures": ["LamaForCausalLM"]})
    fine(weights=strange)
    assert "it has LlamaForCausalLM" in warned("LamaForCausalLM", "Transformers", weights=strange).text


@pytest.mark.parametrize(("engine", "name"), [("vllm", "gguf"), ("sglang", "exl2")])
def test_v14_quantization(engine, name):
    refused(name, "awq_marlin", "fp8", engine=engine, arguments={"quantization": name})
    awq = files({**LLAMA, "quantization_config": {"quant_method": "awq"}})
    refused("gptq", "awq", "leave it out", weights=awq, engine=engine, arguments={"quantization": "gptq"})
    fine(weights=awq, engine=engine, arguments={"quantization": "awq_marlin"})


def test_v15_capability_for_quantization():
    mxfp4 = files({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}})
    refused("mxfp4", "8.0", "7.5", weights=mxfp4, where=node(gpus(capability=(7, 5))))


def test_v16_bfloat16():
    refused("8.0", "7.5", "half", where=node(gpus(capability=(7, 5))), arguments={"dtype": "bfloat16"})


@pytest.mark.parametrize(("engine", "need"), [("vllm", "7.5"), ("sglang", "7.5"), ("trtllm", "8.0")])
def test_v17_build(engine, need):
    refused(need, "7.0", "place.labels", engine=engine, where=node(gpus(capability=(7, 0))))


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v18_driver(engine):
    refused("535.1", "580", "CUDA 13", engine=engine, where=node(driver="535.1"))


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v19_driver_and_library(engine):
    said = "the NVIDIA driver was updated and the node has to be rebooted; running engines are left alone"
    refused("n1", "rebooted", engine=engine, where=node((), problem=said))
    fine(engine=engine, where=node((), problem=said), resources=Resources(devices=0))


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v20_fabric_manager(engine):
    refused("in progress", "nvidia-fabricmanager", "580.65", engine=engine, where=node(gpus(fabric="in progress")))
    fine(engine=engine, where=node(gpus(fabric="completed")))


def test_v21_free_memory():
    """It is the placement's to know what is free: refused with who holds it."""
    held = candidate("a", gpus(1, memory_used=60 * GIB))
    refusal = Ledger([held]).place(want(devices=1, memory=40))
    assert isinstance(refusal, Explanation) and "device memory" in refusal.line()


def test_v22_weights_and_cache():
    shape = {**LLAMA, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128}
    found = refused("131072 tokens", "80.0 GiB", "lower context to", weights=files(shape, 70 * GIB), where=node(), context=131072)
    fits = int(found.text.partition("lower context to ")[2].partition(",")[0])
    fine(weights=files(shape, 70 * GIB), where=node(), context=fits)


def test_v23_ports():
    """Each engine says how many it wants, the leader claims them, the agent tries them without sharing them."""
    counts = {
        name: adapter.needs(Profile(name, "llama", parallel=Parallel(tensor=2, nodes=2)), None).ports
        for name, (adapter, _) in ADAPTERS.items()
    }
    assert counts == {"vllm": 3, "sglang": 17, "trtllm": 1}
    with socket.create_server(("127.0.0.1", 0), reuse_port=False) as taken:
        assert not port_is_free("127.0.0.1", taken.getsockname()[1])


def test_v24_flags():
    refused("vllm 0.33.0 has no option --max-num-seq", "did you mean max-num-seqs?", flags=FLAGS, arguments={"max-num-seq": 3})


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v25_reserved(engine):
    refused("--port", "llmgw's own to set", engine=engine, extra_argv=("--port", "1"))


def test_v26_tool_parsers():
    refused("tool-call-parser", "hermes", arguments={"enable-auto-tool-choice": True})


def test_v27_served_names():
    [problem] = sglang.name_problems(("a:b",))
    assert "a:b" in problem.text and "rename" in problem.text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_v28_loras(engine):
    def adapters(**found):
        there = {"weights": "a", "found": True, "path": "/models/a", **found}
        return {
            "weights": files(loras=(WeightFiles(**there),)),
            "loras": (Lora("tuned", "a"),),
            "engine": engine,
            "parallel": Parallel(data=2),
        }

    refused("tuned", "/x/a", **adapters(found=False, looked=("/x/a",)))
    refused("tuned", "adapter_config.json", **adapters())
    refused("rank 64", "max-lora-rank is 16", **adapters(config={"r": 64, "peft_type": "LORA"}), arguments={"max-lora-rank": 16})
    fine(**adapters(config={"r": 64, "peft_type": "LORA"}))
    other = {"r": 8, "peft_type": "LORA", "base_model_name_or_path": "org/qwen"}
    warned("org/qwen", "llama", **adapters(config=other))


def test_v29_gated_or_absent_model():
    gone = WeightFiles("hf:org/m@main", False, looked=("/hub/models--org--m",))
    refused("/hub/models--org--m", "llmgw fetch", "https://huggingface.co/org/m", "HF_TOKEN", weights=gone)


def test_v30_disk():
    warned("1.0 GiB of disk free", "2.0 GiB", where=node(disk_free=GIB))


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v31_shared_memory(engine):
    refused("64.0 MiB", "tensor 2", "1.0 GiB", engine=engine, where=node(shm_free=64 * 2**20), parallel=Parallel(tensor=2))
    fine(engine=engine, where=node(shm_free=64 * 2**20))


def test_v32_limits():
    warned("1024 open files", "LimitNOFILE", where=node(nofile=1024))
    pair = Parallel(pipeline=2, nodes=2)
    warned("64.0 KiB", "LimitMEMLOCK", where=node(infiniband=True, memlock=2**16), parallel=pair)


def test_v33_host_memory():
    refused("600", "512.0 GiB", arguments={"cpu-offload-gb": 600}, where=node())
    warned("16.0 GiB", "8.0 GiB", where=node(memory_available=8 * GIB), arguments={"enable-sleep-mode": True})


def test_v34_tensor_over_nodes():
    wide = Parallel(tensor=8, nodes=2)
    warned("inside a node", "pipeline", "InfiniBand", parallel=wide)
    assert asked("warnings", files(), node(infiniband=True), FLAGS, parallel=wide) == []


def test_v35_one_version_on_all_nodes():
    """Nodes of different versions are never made one replica, and that is the reason told."""
    rows = [candidate(name, 2, fabrics=("r1",)) for name in ("a", "b", "c")]

    def with_versions(*versions):
        for row, version in zip(rows, versions, strict=True):
            installed = (Installation("vllm", "vllm", version=version),)
            yield evolve(row, facts=evolve(row.facts, installations=installed))

    refusal = Ledger(with_versions("0.33.0", "0.32.0", "0.31.0")).place(want(nodes=2))
    assert isinstance(refusal, Explanation)
    told = {check.name: check for verdict in refusal.verdicts for check in verdict.checks}
    assert set(told) == {"versions"} and "install one version" in told["versions"].detail
    placed = Ledger(with_versions("0.33.0", "0.32.0", "0.33.0")).place(want(nodes=2))
    assert isinstance(placed, Placement) and [allocation.node for allocation in placed.allocations] == ["a", "c"]


def test_v36_host_name():
    pair = Parallel(pipeline=2, nodes=2)
    warned("loopback", "interface", "/etc/hosts", where=node(loopback=True), parallel=pair)
    named = node(loopback=True, fabrics=(Fabric("r1", "10.9.0.1", "ib0"),))
    assert asked("warnings", files(), named, FLAGS, parallel=pair) == []


def test_v37_peers():
    warned("NVLink", "tensor 2", "pipeline", where=node(gpus(peers=())), parallel=Parallel(tensor=2))
    assert asked("warnings", files(), node(gpus(peers=("GPU-0",))), FLAGS, parallel=Parallel(tensor=2)) == []


def test_v38_environment():
    refused("VLLM_PORT", "llmgw's own to set", environment={"VLLM_PORT": "tcp://10.0.0.1:80"})
    warned("VLLM_LOGING_LEVEL", "did you mean VLLM_LOGGING_LEVEL?", environment={"VLLM_LOGING_LEVEL": "DEBUG"})
    assert asked("warnings", files(), None, FLAGS, environment={"VLLM_LOGGING_LEVEL": "DEBUG"}) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_v39_compilers(engine):
    warned("gcc", "nvcc", "n1", engine=engine, where=node(compilers=("ninja",)))
    assert asked("warnings", files(), node(compilers=("gcc",)), FLAGS, engine) == []


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_v40_mig(engine):
    refused("MIG", "one rank", engine=engine, where=node(gpus(2, parent="GPU-a")), parallel=Parallel(tensor=2))
    fine(engine=engine, where=node(gpus(2, parent="GPU-a")))
