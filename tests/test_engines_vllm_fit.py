"""What of vLLM's checks is about fitting: memory, blocks, values, and what a node lacks."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.engines.memory import shape
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Lora, Parallel, Profile, Resources
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, WeightFiles
from llmgw.interfaces import Flags

GIB = 2**30
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 8192, "max_position_embeddings": 131072,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "max_position_embeddings": 163840, "n_routed_experts": 256, "moe_intermediate_size": 2048,
    "intermediate_size": 18432, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def files(config, size=None):
    return WeightFiles("m", True, "/models/m", format="safetensors", bytes=size, config=config)


def node(*devices, **given):
    return NodeFacts("n1", "10.0.0.1", Inventory(64, 512 * GIB, devices=devices, **given))


def gpus(count=8, total=80 * GIB, **given):
    return [Device(f"GPU-{index}", index, "H100", total, capability=(9, 0), **given) for index in range(count)]


def found(profile, weights=None, where=None, version="0.33.0"):
    return vllm.problems(profile, weights, where, Installation("vllm", "vllm", ("vllm",), version), Flags())


def codes(problems):
    return [problem.code for problem in problems]


@pytest.mark.parametrize(
    ("config", "tensor", "expected"),
    [
        ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 1, 131072),
        (LLAMA_70B, 1, 327680),
        (LLAMA_70B, 8, 40960),
        (LLAMA_70B, 16, 40960),
        ({"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}, 1, 262144),
        (DEEPSEEK, 1, 70272),
        (DEEPSEEK, 8, 70272),
        ({"text_config": LLAMA_70B}, 1, 327680),
        ({"num_hidden_layers": 80}, 1, None),
    ],
)
def test_cache_of_a_token(config, tensor, expected):
    """The known figures of public models; a latent cache is not divided, heads are repeated and never cut; unknown is None."""
    assert shape(files(config)).kv_per_token(tensor) == expected


def test_what_can_never_fit_is_refused_with_what_would():
    """Weights and one whole context on the largest device. What is offered leaves room for the runtime."""
    profile = Profile("vllm", "m", context=131072, parallel=Parallel(tensor=2))
    [problem] = found(profile, files(LLAMA_70B, 140 * GIB), node(*gpus()))
    assert problem.code == "device_memory"
    assert "n1 has 80.0 GiB" in problem.text
    fits = int(problem.text.partition("lower context to ")[2].partition(",")[0])
    assert fits % 256 == 0
    weights = files(LLAMA_70B, 140 * GIB)
    assert found(evolve(profile, context=fits), weights, node(*gpus())) == []
    assert codes(found(evolve(profile, context=fits + 2 * GIB // 163840 + 512), weights, node(*gpus()))) == ["device_memory"]
    assert found(evolve(profile, parallel=Parallel(tensor=4)), weights, node(*gpus())) == []


def test_nothing_fits_when_the_weights_do_not():
    """No context is offered where there is none."""
    [problem] = found(Profile("vllm", "m"), files(LLAMA_70B, 140 * GIB), node(*gpus()))
    assert "lower context" not in problem.text and "a higher tensor" in problem.text


@pytest.mark.parametrize(
    ("weights", "where"),
    [
        (None, node(*gpus())),
        (files(LLAMA_70B), node(*gpus())),
        (files({"architectures": ["X"]}, 10**15), node(*gpus())),
        (files(LLAMA_70B, 10**15), None),
        (files(LLAMA_70B, 10**15), node(*gpus(total=None))),
        (files(LLAMA_70B, 10**15), node(*gpus(problem="lost"))),
    ],
)
def test_unknown_memory_refuses_nothing(weights, where):
    """Each figure that is missing makes the check silent."""
    assert found(Profile("vllm", "m"), weights, where) == []


@pytest.mark.parametrize(
    ("profile", "code", "part"),
    [
        (Profile("vllm", "m", parallel=Parallel(tensor=32)), "block_not_divisible", "18432 over tensor 32"),
        (
            Profile("vllm", "m", parallel=Parallel(tensor=16), arguments={"decode-context-parallel-size": 3}),
            "decode_context",
            "16",
        ),
    ],
)
def test_blocks_and_ranks_of_a_quantized_mixture(profile, code, part):
    """What vLLM finds while it builds the layers."""
    problems = [problem for problem in found(profile, files(DEEPSEEK)) if problem.code == code]
    assert len(problems) == 1 and part in problems[0].text


def test_whole_experts_are_not_cut_into_blocks():
    """Expert parallelism is the way out that the refusal names."""
    narrow = files({**DEEPSEEK, "moe_intermediate_size": 1536})
    [problem] = found(Profile("vllm", "m", parallel=Parallel(tensor=16)), narrow)
    assert problem.code == "block_not_divisible" and "or set parallel.expert" in problem.text
    assert found(Profile("vllm", "m", parallel=Parallel(tensor=16, expert=True)), narrow) == []


@pytest.mark.parametrize(
    ("profile", "code"),
    [
        (Profile("vllm", "m", arguments={"max-num-seqs": "many"}), "argument_value"),
        (Profile("vllm", "m", arguments={"max-num-batched-tokens": "8x"}), "argument_value"),
        (Profile("vllm", "m", arguments={"gpu-memory-utilization": 90}), "argument_value"),
        (Profile("vllm", "m", arguments={"gpu-memory-utilization": 0.5}, resources=Resources(share=True)), "reserved_argument"),
        (Profile("vllm", "m", arguments={"hf-token": "hf_x"}), "reserved_argument"),
        (Profile("vllm", "m", extra_argv=("-dpl", "2")), "reserved_argument"),
        (Profile("vllm", "m", parallel=Parallel(tensor=2, data=3, nodes=2)), "data_over_nodes"),
        (Profile("vllm", "m", parallel=Parallel(data=2, balance="hybrid")), "balance"),
        (Profile("vllm", "m", loras=(Lora("a", "b"), Lora("c", "d")), arguments={"max-cpu-loras": 1}), "lora_count"),
        (Profile("vllm", "m", arguments={"lora-modules": ["a=b"]}), "reserved_argument"),
        (Profile("vllm", "m", arguments={"cpu-offload-gb": 600}), "host_memory"),
    ],
)
def test_values(profile, code):
    """Found at once, and nothing else with it."""
    assert codes(found(profile, where=node(*gpus()))) == [code]


@pytest.mark.parametrize(
    "arguments", [{"max-num-batched-tokens": "16k"}, {"seed": -1}, {"max-num-seqs": "64"}, {"gpu-memory-utilization": 1}]
)
def test_values_that_are_right(arguments):
    """Numbers as vLLM reads them pass."""
    assert found(Profile("vllm", "m", arguments=arguments)) == []


def test_kernels_for_the_same_weights_are_no_mismatch():
    """C{awq_marlin} runs C{awq} weights; C{gptq} does not."""
    weights = files({**LLAMA_70B, "quantization_config": {"quant_method": "awq"}})
    assert found(Profile("vllm", "m", arguments={"quantization": "awq_marlin"}), weights) == []
    assert codes(found(Profile("vllm", "m", arguments={"quantization": "gptq"}), weights)) == ["quantization_mismatch"]


def test_what_a_node_lacks():
    """Shared memory and whole GPUs for several ranks; limits that may bite only warn."""
    pair = Profile("vllm", "m", parallel=Parallel(tensor=2))
    assert codes(found(pair, where=node(*gpus(), shm_free=64 * 2**20))) == ["shm"]
    assert codes(found(pair, where=node(*gpus(parent="GPU-x")))) == ["mig"]
    poor = node(*gpus(), shm_free=512 * 2**20, nofile=1024, disk_free=GIB)
    assert found(pair, where=poor) == []
    said = vllm.warnings(evolve(pair, arguments={"seed": 1}), None, poor, None, Flags())
    assert codes(said) == ["nofile", "shm", "disk", "unchecked"]


def test_names_of_interfaces_give_way_to_the_node():
    """The fabric's interface is a default: agent.yaml may know better. The address is not."""
    allocation = Allocation(
        "n2",
        1,
        2,
        "10.0.0.2",
        ("GPU-a",),
        ports=(1, 2, 3),
        head="10.9.0.1",
        head_port=9,
        peers=("10.9.0.1", "10.9.0.2"),
        interface="ib0",
    )
    launch = vllm.launch(
        Profile("vllm", "m", parallel=Parallel(tensor=2, nodes=2)), allocation, Installation("v", "vllm"), None, ("m",), "k"
    )
    assert launch.defaults["NCCL_SOCKET_IFNAME"] == "ib0" and "NCCL_SOCKET_IFNAME" not in launch.environment
    assert launch.environment["VLLM_HOST_IP"] == "10.9.0.2"


CPU = Resources(devices=0)


def test_on_a_processor_all_of_it_is_the_hosts():
    """Weights of all ranks, a cache of 4 GiB for each or what is said, and its processes; no device, and told so at the start."""
    weights = files(LLAMA_70B, 140 * GIB)
    profile = Profile("vllm", "m", context=8192, parallel=Parallel(tensor=2), resources=CPU)
    needs = vllm.needs(profile, weights)
    assert (needs.devices, needs.memory) == (0, None)
    assert needs.host_memory == pytest.approx(140 * GIB * 1.03 + 2 * 4 * GIB + 3 * 1.25 * GIB, abs=2)
    said = vllm.needs(evolve(profile, environment={"VLLM_CPU_KVCACHE_SPACE": "16"}), weights)
    assert said.host_memory - needs.host_memory == 2 * 12 * GIB
    sized = evolve(profile, arguments={"kv-cache-memory-bytes": 8 * GIB})
    assert vllm.needs(sized, weights).host_memory - needs.host_memory == 2 * 4 * GIB
    fraction = vllm.needs(evolve(profile, arguments={"gpu-memory-utilization": 0.5}), weights).host_memory
    assert needs.host_memory - fraction == 2 * 4 * GIB, "what is known, without a cache whose size is the node's to say"
    assert vllm.needs(evolve(profile, resources=evolve(CPU, host_memory=GIB)), weights).host_memory == GIB

    def space(one):
        made = vllm.launch(one, Allocation("n1", ports=(1,)), Installation("vllm", "vllm", ("vllm",)), weights, ("m",), "k")
        return made.defaults.get("VLLM_CPU_KVCACHE_SPACE")

    assert [space(one) for one in (profile, sized, evolve(profile, resources=Resources()))] == ["4", None, None]


def test_on_a_processor_the_cache_holds_one_context():
    """As vLLM refuses it; with the size that would do, and the context that would fit."""
    profile = Profile("vllm", "m", context=65536, resources=CPU)

    def asked(space):
        return found(evolve(profile, environment={"VLLM_CPU_KVCACHE_SPACE": space}), files(LLAMA_70B))

    (told,) = asked("4")
    assert told.code == "host_cache"
    assert "65536 tokens need 20.0 GiB" in told.text
    assert "set VLLM_CPU_KVCACHE_SPACE to 20, or lower context to 13056" in told.text
    assert (asked("20"), codes(asked("1.5"))) == ([], ["argument_value"])
    assert found(profile, files(LLAMA_70B)) == [], "where nobody says, it is made large enough"
    assert vllm.estimate(profile, files(LLAMA_70B)).host.cache == 20 * GIB


def test_a_build_for_processors_has_no_devices_and_does_not_sleep():
    """By its version's own word; one whose version nobody knows is believed."""
    asked = Profile("vllm", "m", arguments={"enable-sleep-mode": True})
    assert codes(found(asked, files(LLAMA_70B), version="0.32.0+cpu")) == ["processor", "processor"]
    assert codes(found(Profile("vllm", "m", resources=CPU), files(LLAMA_70B), version="0.32.0+cpu")) == []
    assert found(asked, files(LLAMA_70B)) == []
