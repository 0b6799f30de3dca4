"""The KV cache of public models against figures worked out by hand, and weights over ranks.

L{tests.public_models} has the models' figures, where they were read, and which of them are confirmed in part only; the formulas
are those that L{llmgw.engines.cache} and L{llmgw.engines.vllm_memory} name. Each expectation stands as a product of the model's
own numbers (layers x keys and values x heads x head size x bytes), never as a call of what is tested.
"""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.engines.estimates import context_that_fits, stage_weights, stages
from llmgw.engines.llamacpp import llamacpp
from llmgw.engines.sglang import sglang
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Lora, Parallel, Profile, Resources
from llmgw.fleet.shard import WeightFiles
from llmgw.fleet.tensors import TensorBytes
from tests.public_models import MODELS, model

GIB = 2**30


def files(config, size=0, tensors=None):
    return WeightFiles("m", True, "/m", format="safetensors", bytes=size, config=config, tensors=tensors)


def cache(config, context, tensor=1, **more):
    profile = Profile("vllm", "m", context=context, parallel=Parallel(tensor=tensor), arguments=more)
    return vllm.estimate(profile, files(config)).ranks[0].cache


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_of_one_request_of_public_models(name):
    """One request of the context that the model was made for, which its file tells, on one device, by vLLM's accounting."""
    public = MODELS[name]
    found = vllm.estimate(Profile("vllm", "m"), files(public.config))
    assert (found.context, found.ranks[0].cache) == (public.context, public.cache)
    assert public.source


@pytest.mark.parametrize(
    ("windows", "full", "expected"),
    [
        # One more than half as many again as the fewest: groups of 4, so 2 of windows.
        (7, 4, (4, 8)),
        # Less than that: groups of the most, filled up on either side.
        (5, 4, (5, 5)),
        (4, 5, (5, 5)),
        (4, 4, (4, 4)),
        (4, 0, (0, 4)),
    ],
)
def test_groups_of_layers_are_filled_up(windows, full, expected):
    """vLLM takes a block for every layer of a group, also where the group lacks layers; one kind alone has no groups to fill."""
    kinds = ["sliding_attention"] * windows + ["full_attention"] * full
    config = model(windows + full, 8, 2, 512, 65536, sliding_window=1024, layer_types=kinds)
    assert cache(config, 65536) == 2 * 2 * 64 * 2 * (expected[0] * 65536 + expected[1] * 577 * 16)


def test_groups_of_layers_over_the_stages_of_a_pipeline():
    """The whole model's 7 groups: a stage of 5 full layers and 26 with a window has 5 layers in each."""
    profile = Profile("vllm", "m", context=131072, parallel=Parallel(pipeline=2))
    found = vllm.estimate(profile, files(MODELS["google/gemma-3-27b-it"].config))
    assert [rank.cache for rank in found.ranks] == [2 * 16 * 128 * 2 * (5 * 131072 + 30 * 577 * 16)] * 2


def test_without_the_hybrid_manager_every_layer_keeps_every_token():
    """C{--disable-hybrid-kv-cache-manager}."""
    config = MODELS["google/gemma-3-27b-it"].config
    found = cache(config, 131072, **{"disable-hybrid-kv-cache-manager": True})
    assert found == 2 * 16 * 128 * 2 * 62 * 131072


def test_heads_that_are_wider_than_their_share_of_the_model():
    """Nemotron-H 4B: 32 heads of 128, named C{attention_head_dim}, in a width of 3072."""
    assert cache(model(1, 32, 8, 3072, 8192, attention_head_dim=128), 8192) == 2 * 8 * 128 * 2 * 8192


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 8, 80 * 2 * 1 * 128 * 2),
        ("meta-llama/Llama-3.3-70B-Instruct", 16, 80 * 2 * 1 * 128 * 2),
        ("Qwen/Qwen3-235B-A22B", 2, 94 * 2 * 2 * 128 * 2),
        ("deepseek-ai/DeepSeek-V3", 8, 70_272),
        ("tiiuae/falcon-7b", 4, 32 * 2 * 64 * 2),
    ],
)
def test_heads_are_divided_and_repeated_and_latents_are_neither(name, tensor, expected):
    """Bytes per token on each of C{tensor} ranks."""
    config = MODELS[name].config
    assert cache(config, 2048, tensor) == expected * 2048
    found = vllm.estimate(Profile("vllm", "m", context=2048, parallel=Parallel(tensor=tensor)), files(config))
    assert (found.per_token, len(found.ranks)) == (expected, tensor)


@pytest.mark.parametrize(
    ("arguments", "factor"),
    [
        ({"kv-cache-dtype": "fp8"}, 0.5),
        ({"kv-cache-dtype": "fp8_e4m3"}, 0.5),
        ({"kv-cache-dtype": "nvfp4"}, 0.28125),
        ({"dtype": "float32"}, 2),
        ({"decode-context-parallel-size": 4}, 0.25),
    ],
)
def test_number_formats_of_the_cache(arguments, factor):
    """Bytes of one number in the cache, and tokens divided over ranks."""
    public = MODELS["meta-llama/Llama-3.1-8B"]
    assert cache(public.config, public.context, **arguments) == public.cache * factor


def test_packed_latents():
    """fp8_ds_mla: 656 bytes a token and layer (vLLM's FlashMLA sparse format)."""
    config = MODELS["deepseek-ai/DeepSeek-V3.2-Exp"].config
    assert cache(config, 4096, **{"kv-cache-dtype": "fp8_ds_mla"}) == 61 * (656 + 132) * 4096


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 32, "max_position_embeddings": 8192},
        {"num_attention_heads": 32, "hidden_size": 4096, "max_position_embeddings": 8192},
        {k: v for k, v in MODELS["ai21labs/Jamba-v0.1"].config.items() if k != "mamba_d_state"},
    ],
)
def test_a_missing_figure_is_unknown_and_said(config):
    """None, never 0; and the words say what is missing."""
    found = vllm.estimate(Profile("vllm", "m", context=4096), files(config, size=GIB))
    assert found.ranks[0].cache is None and found.ranks[0].total is None and found.need is None
    assert "KV cache" in " ".join(found.unknown)
    assert vllm.needs(Profile("vllm", "m", context=4096), files(config, size=GIB)).memory is None


def test_unknown_weights_are_said():
    """Nobody has them, or their size is not told."""
    assert "no node is known" in vllm.estimate(Profile("vllm", "m"), None).unknown[0]
    found = vllm.estimate(Profile("vllm", "m"), evolve(files(MODELS["microsoft/phi-2"].config), bytes=None))
    assert found.ranks[0].weights is None and found.ranks[0].cache and "size" in found.unknown[0]


TENSORS = TensorBytes(layers=(100,) * 6, experts=(0, 60, 60, 60, 60, 60), embedding=40, output=20, other=8, largest=40)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (Parallel(), [668]),
        (Parallel(tensor=2), [344]),
        # Two stages of three layers: embedding and the rest on the first, the head on the second.
        (Parallel(pipeline=2), [int(348 * 1.03), int(320 * 1.03)]),
        # Experts over tensor x data, everything else over tensor alone.
        (Parallel(tensor=2, data=2, expert=True), [int((300 / 4 + 300 / 2 + 34) * 1.03)]),
    ],
)
def test_weights_over_ranks(parallel, expected):
    """By stage; a replica of several ranks repeats 3 %."""
    assert stage_weights(files({}, 668, TENSORS), parallel) == expected


def test_a_tied_embedding_stands_on_both_ends_of_a_pipeline():
    """Where there is no head of its own, the last stage has the embedding again."""
    tied = evolve(TENSORS, output=0, other=0)
    assert stage_weights(files({}, 640, tied), Parallel(pipeline=2)) == [int(340 * 1.03), int(340 * 1.03)]
    assert stage_weights(files({}, 640, tied), Parallel()) == [640]


def test_layers_left_over_go_to_the_stages_before_the_last():
    """vLLM's own cut: 61 layers over 4 stages are 15, 15, 16, 15; 63 are 16, 16, 16, 15."""
    assert [len(stage) for stage in stages(range(61), 4)] == [15, 15, 16, 15]
    assert [len(stage) for stage in stages(range(63), 4)] == [16, 16, 16, 15]


@pytest.mark.parametrize(
    ("arguments", "config", "expected"),
    [
        ({"quantization": "fp8"}, {}, 600 / 2 + 68),
        ({"quantization": "fp8"}, {"quantization_config": {"quant_method": "fp8"}}, 668),
        ({}, {"torch_dtype": "float32"}, 334),
        ({"dtype": "float32"}, {"torch_dtype": "bfloat16"}, 1336),
        ({"dtype": "float32"}, {"torch_dtype": "float32"}, 668),
    ],
)
def test_weights_that_change_while_they_are_loaded(arguments, config, expected):
    """Quantized in memory: layers only; another number format: everything; what is quantized on disk stays so."""
    found = vllm.estimate(Profile("vllm", "m", context=16, arguments=arguments), files(config, 668, TENSORS))
    assert found.ranks[0].weights == expected


def test_a_need_leaves_what_vllm_does_not_take():
    """vLLM takes a fraction of what is there, so more must be free than it needs."""
    config = MODELS["meta-llama/Llama-3.1-8B"].config
    profile = Profile("vllm", "m", context=8192)
    least = 16 * GIB + 8192 * 131072 + 2 * GIB
    assert vllm.needs(profile, files(config, 16 * GIB)).memory == pytest.approx(least / 0.92, abs=1)
    half = evolve(profile, arguments={"gpu-memory-utilization": 0.5})
    assert vllm.needs(half, files(config, 16 * GIB)).memory == 2 * least
    assert vllm.needs(evolve(profile, resources=Resources(share=True)), files(config, 16 * GIB)).memory == least


def test_a_cache_of_a_given_size_and_weights_that_stay_on_the_host():
    """Then the fraction says nothing, and vLLM takes what it needs and no more."""
    given = {"kv-cache-memory-bytes": 4 * GIB, "cpu-offload-gb": 5}
    config = MODELS["meta-llama/Llama-3.1-8B"].config
    found = vllm.estimate(Profile("vllm", "m", arguments=given), files(config, 16 * GIB))
    assert (found.ranks[0].weights, found.ranks[0].cache, found.share, found.elastic) == (11 * GIB, 4 * GIB, 1.0, False)
    assert vllm.needs(Profile("vllm", "m", arguments=given), files(config, 16 * GIB)).memory == (11 + 4 + 2) * GIB


def test_the_context_that_fits():
    """The largest multiple of 256 whose need is within what is given; all of it; none; unknown."""
    config = MODELS["meta-llama/Llama-3.1-8B"].config
    profile, weights = Profile("vllm", "m"), files(config, 16 * GIB)
    assert context_that_fits(profile, weights, vllm, 18 * GIB + 10_000 * 131072) == 9984
    assert context_that_fits(profile, weights, vllm, 80 * GIB) == 131072
    assert context_that_fits(profile, weights, vllm, 17 * GIB) == 0
    assert context_that_fits(profile, files(config, None), vllm, 80 * GIB) is None


# llama.cpp.

GGUF = {
    "general.architecture": "llama", "llama.block_count": 4, "llama.context_length": 8192, "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2, "llama.embedding_length": 512,
}  # fmt: skip
TOKEN = 2 * 2 * 64 * 2  # one layer: keys and values, two heads of 64, f16


def gguf_files(header=GGUF, output=30):
    parts = TensorBytes(layers=(100, 101, 102, 103), embedding=50, output=output, largest=50)
    return WeightFiles("m", True, "/m", format="gguf", bytes=456 + output, gguf=header, tensors=parts)


def on_devices(devices, *, context=1024, found=None, **arguments):
    profile = Profile(
        "llamacpp", "m", context=context, resources=Resources(devices=devices), arguments={"parallel": 1, **arguments}
    )
    return llamacpp.estimate(profile, found or gguf_files())


@pytest.mark.parametrize(
    ("layers", "device", "host"),
    [
        (None, (436, 4), (50, 0)),
        (999, (436, 4), (50, 0)),
        (5, (436, 4), (50, 0)),
        (4, (101 + 102 + 103 + 30, 3), (150, 1)),
        (1, (30, 0), (456, 4)),
        (0, (0, 0), (486, 4)),
    ],
)
def test_offloaded_layers(layers, device, host):
    """The output goes first, then layers from the last; the embedding never does. The cache goes with its layer."""
    found = on_devices(1, **({} if layers is None else {"n-gpu-layers": layers}))
    assert (found.ranks[0].weights, found.ranks[0].cache) == (device[0], device[1] * TOKEN * 1024)
    assert (found.host.weights, found.host.cache) == (host[0], host[1] * TOKEN * 1024)


def test_a_tied_output_is_copied_to_the_device():
    """Without an output of its own the embedding is there twice, but only when the output is offloaded."""
    assert on_devices(1, found=gguf_files(output=0)).ranks[0].weights == 406 + 50
    assert on_devices(0, found=gguf_files(output=0)).host.weights == 456


def test_layers_over_devices():
    """Four layers and the output over two devices: three and two of five, the larger part first."""
    found = on_devices(2)
    assert [rank.weights for rank in found.ranks] == [303, 133]
    assert [rank.cache for rank in found.ranks] == [3 * TOKEN * 1024, TOKEN * 1024]


@pytest.mark.parametrize(
    ("arguments", "factor"),
    [
        ({"parallel": 4}, 4),
        ({"parallel": 4, "kv-unified": True}, 1),
        ({"cache-type-k": "q8_0", "cache-type-v": "q8_0"}, 34 / 64),
        ({"cache-type-v": "q4_0"}, (2 + 18 / 32) / 4),
    ],
)
def test_slots_and_formats_of_llama_cpps_cache(arguments, factor):
    """Every slot has a context of its own unless they share one; ggml's blocks of 32 numbers have their scale with them."""
    assert on_devices(0, **arguments).host.cache == int(4 * TOKEN * factor * 1024)


def test_a_context_that_llamacpp_chooses_itself():
    """On devices of its own it needs 4096 tokens and takes what there is; on the host, shared or told not to: the model's."""
    for given, tokens in (({}, 4096), ({"fit": "off"}, 8192)):
        found = on_devices(1, context=None, **given)
        assert (found.context, found.ranks[0].cache, found.elastic) == (tokens, 4 * TOKEN * tokens, tokens == 4096)
    assert on_devices(0, context=None).host.cache == 4 * TOKEN * 8192
    shared = Profile("llamacpp", "m", resources=Resources(devices=1, share=True))
    assert llamacpp.estimate(shared, gguf_files()).context == 8192


def test_windows_in_a_gguf_file():
    """Gemma 3's five of six by its architecture: a window and a batch of 512 tokens; all of it with swa-full."""
    header = {key.replace("llama.", "gemma3."): value for key, value in GGUF.items()}
    header |= {"general.architecture": "gemma3", "gemma3.block_count": 6, "gemma3.attention.sliding_window": 1024}
    found = WeightFiles("m", True, "/m", format="gguf", bytes=600, gguf=header)
    assert on_devices(0, context=8192, found=found).host.cache == TOKEN * (8192 + 5 * 1536)
    assert on_devices(0, context=8192, found=found, **{"swa-full": True}).host.cache == TOKEN * 6 * 8192


def test_what_a_gguf_header_does_not_tell_is_unknown():
    """A recurrent model, or one without its heads: no figure, and no claim."""
    for header in ({**GGUF, "llama.ssm.state_size": 16}, {k: v for k, v in GGUF.items() if "head_count" not in k}):
        found = on_devices(1, found=gguf_files(header))
        assert found.ranks[0].cache is None and found.need is None and "KV cache" in found.unknown[0]


TUNED = model(32, 32, 8, 4096, 131072) | {"vocab_size": 128256, "intermediate_size": 14336}


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [(1, 7 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336), (4, 7 * 4096 + 2 * 1024 + 2 * 256 + 3 * 3584)],
)
def test_the_room_for_adapters(tensor, layer):
    """Room for four of rank 40, for which vLLM is told 64: what they change of attention, feed forward, embedding and head, in
    16 bits; what tensor parallel ranks divide is one side of each matrix. An engine that waits for adapters has room for 16."""
    loras = (Lora("a", "loras/a"), Lora("b", "loras/b"))
    seen = tuple(WeightFiles(one.weights, True, config={"r": 40, "peft_type": "LORA"}) for one in loras)
    there = evolve(files(TUNED, 16 * GIB), loras=seen)
    profile = Profile("vllm", "m", context=4096, parallel=Parallel(tensor=tensor))
    without, found = vllm.estimate(profile, there).ranks[0], vllm.estimate(evolve(profile, loras=loras), there).ranks[0]
    assert found.overhead - without.overhead == 4 * 64 * 2 * (32 * layer + 2 * (128256 + 4096))
    waiting = vllm.estimate(evolve(profile, arguments={"enable-lora": True}), there).ranks[0]
    assert waiting.overhead - without.overhead == 4 * 16 * 2 * (32 * layer + 2 * (128256 + 4096))
    told = evolve(profile, loras=loras, arguments={"max-loras": 1, "max-lora-rank": 8})
    assert vllm.estimate(told, there).ranks[0].overhead - without.overhead == 8 * 2 * (32 * layer + 2 * (128256 + 4096))


def test_adapters_that_nobody_has_looked_at_are_unknown_and_never_0():
    """Nor are those of experts, whose matrices differ by version."""
    profile = Profile("vllm", "m", context=4096, loras=(Lora("a", "loras/a"),))
    for engine, there, more in (
        (vllm, files(TUNED, GIB), {}),
        (sglang, files(TUNED, GIB), {}),
        (vllm, files(TUNED | {"num_local_experts": 8}, GIB), {"max-lora-rank": 8}),
    ):
        found = engine.estimate(evolve(profile, engine=engine.name, arguments=more), there)
        assert found.need is None and found.ranks[0].weights is not None
        assert any(text.startswith("the adapters") for text in found.unknown)
        assert engine.needs(evolve(profile, engine=engine.name, arguments=more), there).memory is None
    eight = sglang.estimate(evolve(profile, arguments={"max-lora-rank": 8}), files(TUNED, GIB)).ranks[0].overhead
    assert eight == 2 * GIB + 8 * 8 * 2 * (32 * 81920 + 2 * (128256 + 4096))


@pytest.mark.parametrize(
    ("engine", "arguments", "extra", "named"),
    [
        (vllm, {"speculative-config": {"method": "eagle3", "model": "org/eagle"}}, (), "org/eagle"),
        (vllm, {"speculative-config": '{"model": "org/small", "num_speculative_tokens": 3}'}, (), "org/small"),
        (vllm, {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}, (), ""),
        (vllm, {"speculative-config": {"method": "deepseek_mtp", "model": "m"}}, (), ""),
        (sglang, {"speculative-draft-model-path": "org/eagle"}, (), "org/eagle"),
        (llamacpp, {"mmproj": "/m/mmproj.gguf"}, (), "mmproj /m/mmproj.gguf"),
        (llamacpp, {}, ("-md", "/m/draft.gguf"), "md /m/draft.gguf"),
        (llamacpp, {}, ("--lora=/m/a.gguf",), "lora /m/a.gguf"),
        (llamacpp, {"threads": 2}, ("--no-mmap",), ""),
    ],
)
def test_models_beside_the_model_are_unknown_and_never_0(engine, arguments, extra, named):
    """Only the engine reads their files: the sum is unknown and says why, and a device is then wanted whole."""
    there = files(TUNED, 16 * GIB)
    profile = Profile(engine.name, "m", context=4096, arguments=arguments, extra_argv=extra, resources=Resources(devices=1))
    found = engine.estimate(profile, there)
    assert (found.need is None) == bool(named)
    assert [text for text in found.unknown if named and named in text and "resources.device_memory" in text] == list(
        found.unknown
    )
    assert (engine.needs(profile, there).memory is None) == bool(named)


def test_what_is_known_beside_a_projector_is_claimed_of_the_host():
    """A sum that is unknown is no reason to claim nothing."""
    there = files(TUNED, 16 * GIB)
    profile = Profile("llamacpp", "m", context=4096)
    plain = llamacpp.needs(profile, there).host_memory
    assert llamacpp.needs(evolve(profile, arguments={"mmproj": "/p"}), there).host_memory == plain - 256 * 2**20 > 16 * GIB
