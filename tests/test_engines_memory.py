"""The KV cache of public models against figures worked out by hand, and weights over ranks.

The models' figures are those of config.json at C{https://huggingface.co/ORG/NAME}; the formulas those that
L{llmgw.engines.cache} and L{llmgw.engines.vllm_memory} name. Each expectation stands as a product of the model's own numbers
(layers x keys and values x heads x head size x bytes), never as a call of what is tested.
"""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.engines.estimates import context_that_fits, stage_weights, stages
from llmgw.engines.llamacpp import llamacpp
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Parallel, Profile, Resources
from llmgw.fleet.shard import WeightFiles
from llmgw.fleet.tensors import TensorBytes

GIB = 2**30


def model(layers, heads, kv_heads, hidden, context, **more):
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden,
        "max_position_embeddings": context, **more,
    }  # fmt: skip


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# A window w holds min(w - 1 + 8192, context) tokens in blocks of 16, and one block more.
MODELS = {
    # Multi-head attention: every head has keys and values of its own.
    "openai-community/gpt2": (
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
        1024,
        12 * 2 * 12 * 64 * 2 * 1024,
    ),
    "microsoft/phi-2": (model(32, 32, 32, 2560, 2048), 2048, 32 * 2 * 32 * 80 * 2 * 2048),
    # One head for all.
    "tiiuae/falcon-7b": (
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "max_position_embeddings": 2048,
        },
        2048,
        32 * 2 * 1 * 64 * 2 * 2048,
    ),
    # Grouped queries.
    "HuggingFaceTB/SmolLM2-135M": (model(30, 9, 3, 576, 8192), 8192, 30 * 2 * 3 * 64 * 2 * 8192),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (model(22, 32, 4, 2048, 2048), 2048, 22 * 2 * 4 * 64 * 2 * 2048),
    "meta-llama/Llama-3.2-1B": (model(16, 32, 8, 2048, 131072, head_dim=64), 131072, 32_768 * 131072),
    "meta-llama/Llama-3.1-8B": (model(32, 32, 8, 4096, 131072), 131072, 131_072 * 131072),
    "meta-llama/Llama-3.3-70B-Instruct": (model(80, 64, 8, 8192, 131072), 131072, 327_680 * 131072),
    "meta-llama/Llama-3.1-405B": (model(126, 128, 8, 16384, 131072), 131072, 126 * 2 * 8 * 128 * 2 * 131072),
    "Qwen/Qwen3-32B": (model(64, 64, 8, 5120, 40960, head_dim=128), 40960, 262_144 * 40960),
    "Qwen/Qwen3-235B-A22B": (model(94, 64, 4, 4096, 40960, head_dim=128), 40960, 94 * 2 * 4 * 128 * 2 * 40960),
    "mistralai/Mixtral-8x7B-v0.1": (model(32, 32, 8, 4096, 32768, sliding_window=None), 32768, 131_072 * 32768),
    # A window that is there and not used.
    "Qwen/Qwen2.5-7B-Instruct": (
        model(28, 28, 4, 3584, 32768, use_sliding_window=False, sliding_window=131072, max_window_layers=28),
        32768,
        28 * 2 * 4 * 128 * 2 * 32768,
    ),
    # A window in every layer: ceil((4095 + 8192) / 16) + 1 = 769 blocks.
    "mistralai/Mistral-7B-v0.1": (model(32, 32, 8, 4096, 32768, sliding_window=4096), 32768, 131_072 * 769 * 16),
    # In every other layer; the context is shorter than window and batch, so that windows cost one block more than the rest.
    "google/gemma-2-9b": (
        model(42, 16, 8, 3584, 8192, head_dim=256, sliding_window=4096, model_type="gemma2"),
        8192,
        21 * 2 * 8 * 256 * 2 * (8192 + 8208),
    ),
    # In five of six: layers 6, 12, ... 60 of 62 are full; ceil((1023 + 8192) / 16) + 1 = 577 blocks.
    "google/gemma-3-27b-it": (
        {
            "model_type": "gemma3",
            "text_config": model(62, 32, 16, 5376, 131072, head_dim=128, sliding_window=1024, model_type="gemma3_text"),
        },
        131072,
        2 * 16 * 128 * 2 * (10 * 131072 + 52 * 577 * 16),
    ),
    # The file is silent about heads: 8 with 4 for keys and values, of 256, are the class's; 5 of 34 layers are full.
    "google/gemma-3-4b-it": (
        {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}},
        131072,
        2 * 4 * 256 * 2 * (5 * 131072 + 29 * 577 * 16),
    ),
    # Named layer by layer: ceil((127 + 8192) / 16) + 1 = 521 blocks.
    "openai/gpt-oss-120b": (
        model(36, 64, 8, 2880, 131072, head_dim=64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18),
        131072,
        2 * 8 * 64 * 2 * 18 * (131072 + 521 * 16),
    ),
    # Chunks of 8192 in three of four layers: they hold 8192 + 8192 tokens.
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        {"text_config": model(48, 40, 8, 5120, 10485760, head_dim=128, attention_chunk_size=8192, model_type="llama4_text")},
        131072,
        2 * 8 * 128 * 2 * (12 * 131072 + 36 * 16384),
    ),
    # Latents: 512 and 64 of rope, in bf16.
    "deepseek-ai/DeepSeek-V3": (model(61, 128, 128, 7168, 163840, **MLA), 163840, 70_272 * 163840),
    "deepseek-ai/DeepSeek-V2-Lite": (model(27, 16, 16, 2048, 163840, **MLA), 163840, 27 * 576 * 2 * 163840),
    # And an index of 128 bytes and a scale of 4.
    "deepseek-ai/DeepSeek-V3.2-Exp": (
        model(61, 128, 128, 7168, 163840, index_head_dim=128, **MLA),
        4096,
        61 * (1152 + 132) * 4096,
    ),
    # One layer in four has attention; the others a state of 32 x 128 x 128 and 3 inputs of (2 x 16 + 32) x 128, of 4 bytes.
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        model(
            48,
            16,
            2,
            2048,
            262144,
            head_dim=256,
            full_attention_interval=4,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
        ),
        262144,
        12 * 2 * 2 * 256 * 2 * 262144 + 36 * (32 * 128 * 128 + 3 * 8192) * 4,
    ),
    # One in eight; Mamba's inner width is 2 x 4096, with 16 states and 3 inputs.
    "ai21labs/Jamba-v0.1": (
        model(
            32, 32, 8, 4096, 262144, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2
        ),
        262144,
        4 * 2 * 8 * 128 * 2 * 262144 + 28 * 8192 * (16 + 3) * 4,
    ),
    # 4 stars and 24 Ms; Mamba 2: 128 heads of 64, 128 states, and 3 inputs of 128 x 64 + 2 x 8 x 128.
    "nvidia/Nemotron-H-8B-Base-8K": (
        model(
            52,
            32,
            8,
            4096,
            8192,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            mamba_num_heads=128,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
        ),
        8192,
        4 * 2 * 8 * 128 * 2 * 8192 + 24 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 8 * 128)) * 4,
    ),
    # An encoder keeps nothing.
    "sentence-transformers/all-MiniLM-L6-v2": ({"model_type": "bert", **model(6, 12, 12, 384, 512)}, 512, 0),
}


def files(config, size=0, tensors=None):
    return WeightFiles("m", True, "/m", format="safetensors", bytes=size, config=config, tensors=tensors)


def cache(config, context, tensor=1, **more):
    profile = Profile("vllm", "m", context=context, parallel=Parallel(tensor=tensor), arguments=more)
    return vllm.estimate(profile, files(config)).ranks[0].cache


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_of_one_request_of_public_models(name):
    """One request of the whole context on one device, by vLLM's accounting."""
    config, context, expected = MODELS[name]
    assert cache(config, context) == expected


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
    config, context, _ = MODELS[name]
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
    config, context, expected = MODELS["meta-llama/Llama-3.1-8B"]
    assert cache(config, context, **arguments) == expected * factor


def test_packed_latents():
    """fp8_ds_mla: 656 bytes a token and layer (vLLM's FlashMLA sparse format)."""
    config, context, _ = MODELS["deepseek-ai/DeepSeek-V3.2-Exp"]
    assert cache(config, context, **{"kv-cache-dtype": "fp8_ds_mla"}) == 61 * (656 + 132) * context


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 32, "max_position_embeddings": 8192},
        {"num_attention_heads": 32, "hidden_size": 4096, "max_position_embeddings": 8192},
        {k: v for k, v in MODELS["ai21labs/Jamba-v0.1"][0].items() if k != "mamba_d_state"},
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
    found = vllm.estimate(Profile("vllm", "m"), evolve(files(MODELS["microsoft/phi-2"][0]), bytes=None))
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
    config, _, _ = MODELS["meta-llama/Llama-3.1-8B"]
    profile = Profile("vllm", "m", context=8192)
    least = 16 * GIB + 8192 * 131072 + 2 * GIB
    assert vllm.needs(profile, files(config, 16 * GIB)).memory == pytest.approx(least / 0.92, abs=1)
    half = evolve(profile, arguments={"gpu-memory-utilization": 0.5})
    assert vllm.needs(half, files(config, 16 * GIB)).memory == 2 * least
    assert vllm.needs(evolve(profile, resources=Resources(share=True)), files(config, 16 * GIB)).memory == least


def test_a_cache_of_a_given_size_and_weights_that_stay_on_the_host():
    """Then the fraction says nothing, and vLLM takes what it needs and no more."""
    given = {"kv-cache-memory-bytes": 4 * GIB, "cpu-offload-gb": 5}
    config, _, _ = MODELS["meta-llama/Llama-3.1-8B"]
    found = vllm.estimate(Profile("vllm", "m", arguments=given), files(config, 16 * GIB))
    assert (found.ranks[0].weights, found.ranks[0].cache, found.share, found.elastic) == (11 * GIB, 4 * GIB, 1.0, False)
    assert vllm.needs(Profile("vllm", "m", arguments=given), files(config, 16 * GIB)).memory == (11 + 4 + 2) * GIB


def test_the_context_that_fits():
    """The largest multiple of 256 whose need is within what is given; all of it; none; unknown."""
    config, _, _ = MODELS["meta-llama/Llama-3.1-8B"]
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
