"""Public models' config.json, as far as it decides the KV cache, and the bytes of one request's cache worked out by hand.

Each row names where its values were read. config.json of the model itself is behind an address that tests do not ask, so these
are copies of it, or statements about it, in public repositories and documents, by file and commit where that is known. C{quoted}
means: public code or prose that names the model shows its fields, and where several do they agree.

Read from a copy of the whole file: gpt2, TinyLlama, SmolLM2, Llama 3.1 8B, 3.2 and 3.3, Mixtral, Gemma 2, DeepSeek V2 Lite,
Llama 4 Scout. Quoted in full or by every field that is used here: Qwen3 32B and 235B, Gemma 3, DeepSeek V3 and V3.2, Jamba,
all-MiniLM. Confirmed in part only:

  - Falcon 7B: the heads are vLLM's and the class's; the context is not in the file but the model's sequence length.
  - Phi 2: the values are those of the first revision, which calls them n_layer, n_head, n_embd and n_positions.
  - Mistral 7B v0.1: the copy calls the window sliding_window_size.
  - Llama 3.1 405B: 8 heads for keys and values by all but one source, which has 16 (a checkpoint converted in the first days);
    rope_scaling is that of its smaller siblings.
  - Qwen2.5 7B: its sibling's (Qwen2 7B) file, and the language part of a model made from it.
  - gpt-oss 120B: from one quotation; rope_scaling is that of the 20B.
  - Qwen3-Next: its Thinking twin's file; layers, heads and their size confirmed for Instruct by vLLM.
  - Nemotron-H 8B: figures from NVIDIA's documentation, groups and kernel from its configuration class's defaults; that the file
    itself says attention_head_dim is not confirmed.

No row is without a source. None was compared with the file at a given revision on the hub.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen


@frozen
class PublicModel:
    """One row.

    @ivar context: tokens that the model was made for, and that the request has.
    @ivar cache: bytes on one device by vLLM's accounting, as a product of the model's own numbers; recurrent states in 4 bytes,
        which is the most (see L{llmgw.engines.cache.Pages}).
    @ivar source: where the values of C{config} were read.
    """

    config: dict[str, Any]
    context: int
    cache: int
    source: str


def model(layers: int, heads: int, kv_heads: int, hidden: int, context: int, **more: object) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden,
        "max_position_embeddings": context, **more,
    }  # fmt: skip


PRESETS = "mlc-ai/mlc-llm python/mlc_llm/model/model_preset.py@01ced331, "
TRUTH = "vllm-project/vllm tests/config/base_model_arch_groundtruth.json@1ac8cdb4"
COPIES = "ai-dynamo/aiconfigurator model_configs, "
QUOTED = "config.json, quoted"

YARN = {"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}
MLA: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, **YARN}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}


def llama3(factor: float) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}}


# A window w holds min(w - 1 + 8192, context) tokens in blocks of 16, and one block more.
MODELS = {
    # Multi-head attention: every head has keys and values of its own.
    "openai-community/gpt2": PublicModel(
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
        1024,
        12 * 2 * 12 * 64 * 2 * 1024,
        PRESETS + "gpt2",
    ),
    "microsoft/phi-2": PublicModel(
        model(32, 32, 32, 2560, 2048), 2048, 32 * 2 * 32 * 80 * 2 * 2048, PRESETS + "phi-2 (first revision)"
    ),
    # One head for all.
    "tiiuae/falcon-7b": PublicModel(
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "max_position_embeddings": 2048,
        },
        2048,
        32 * 2 * 1 * 64 * 2 * 2048,
        TRUTH + "; defaults of huggingface/transformers configuration_falcon.py@05585536",
    ),
    # Grouped queries.
    "HuggingFaceTB/SmolLM2-135M": PublicModel(
        model(30, 9, 3, 576, 8192), 8192, 30 * 2 * 3 * 64 * 2 * 8192, PRESETS + "smollm2_135m"
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": PublicModel(
        model(22, 32, 4, 2048, 2048), 2048, 22 * 2 * 4 * 64 * 2 * 2048, PRESETS + "tinyllama_1b_chat_v1.0"
    ),
    "meta-llama/Llama-3.2-1B": PublicModel(
        model(16, 32, 8, 2048, 131072, head_dim=64, **llama3(32.0)), 131072, 32_768 * 131072, PRESETS + "llama3_2_1b"
    ),
    "meta-llama/Llama-3.1-8B": PublicModel(
        model(32, 32, 8, 4096, 131072, **llama3(8.0)), 131072, 131_072 * 131072, PRESETS + "llama3_1_8b"
    ),
    "meta-llama/Llama-3.3-70B-Instruct": PublicModel(
        model(80, 64, 8, 8192, 131072, **llama3(8.0)),
        131072,
        327_680 * 131072,
        COPIES + "meta-llama--Llama-3.3-70B-Instruct_config.json@f577ab84",
    ),
    "meta-llama/Llama-3.1-405B": PublicModel(
        model(126, 128, 8, 16384, 131072, **llama3(8.0)),
        131072,
        126 * 2 * 8 * 128 * 2 * 131072,
        "ApX Machine Learning, model page Llama 3.1 405B; " + QUOTED,
    ),
    "Qwen/Qwen3-32B": PublicModel(
        model(64, 64, 8, 5120, 40960, head_dim=128, sliding_window=None, use_sliding_window=False, max_window_layers=64),
        40960,
        262_144 * 40960,
        QUOTED + " (a download of Qwen/Qwen3-32B@main in 2026)",
    ),
    "Qwen/Qwen3-235B-A22B": PublicModel(
        model(94, 64, 4, 4096, 40960, head_dim=128, sliding_window=None, use_sliding_window=False, max_window_layers=94),
        40960,
        94 * 2 * 4 * 128 * 2 * 40960,
        QUOTED + " in full, transformers_version 4.51.0",
    ),
    "mistralai/Mixtral-8x7B-v0.1": PublicModel(
        model(32, 32, 8, 4096, 32768, sliding_window=None), 32768, 131_072 * 32768, PRESETS + "Mixtral-8x7B-v0.1"
    ),
    # A window that is there and not used.
    "Qwen/Qwen2.5-7B-Instruct": PublicModel(
        model(28, 28, 4, 3584, 32768, use_sliding_window=False, sliding_window=131072, max_window_layers=28),
        32768,
        28 * 2 * 4 * 128 * 2 * 32768,
        QUOTED + " (as BAGEL's language part, transformers_version 4.43.1); equals " + PRESETS + "qwen2_7b",
    ),
    # A window in every layer: ceil((4095 + 8192) / 16) + 1 = 769 blocks.
    "mistralai/Mistral-7B-v0.1": PublicModel(
        model(32, 32, 8, 4096, 32768, sliding_window=4096), 32768, 131_072 * 769 * 16, PRESETS + "mistral_7b"
    ),
    # In every other layer; the context is shorter than window and batch, so that windows cost one block more than the rest.
    "google/gemma-2-9b": PublicModel(
        model(42, 16, 8, 3584, 8192, head_dim=256, sliding_window=4096, model_type="gemma2"),
        8192,
        21 * 2 * 8 * 256 * 2 * (8192 + 8208),
        PRESETS + "gemma2_9b",
    ),
    # In five of six: layers 6, 12, ... 60 of 62 are full; ceil((1023 + 8192) / 16) + 1 = 577 blocks; 52 stand in 6 groups of 10.
    "google/gemma-3-27b-it": PublicModel(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "hidden_size": 5376,
                "head_dim": 128,
                "sliding_window": 1024,
                **LINEAR,
            },
        },
        131072,
        2 * 16 * 128 * 2 * (10 * 131072 + 60 * 577 * 16),
        QUOTED + " in full (text_config, transformers_version 4.50.0.dev0)",
    ),  # fmt: skip
    # The file is silent about heads: 8 with 4 for keys and values, of 256, are the class's; 5 are full, 29 in 6 groups of 5.
    "google/gemma-3-4b-it": PublicModel(
        {
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "hidden_size": 2560,
                "sliding_window": 1024,
                **LINEAR,
            }
        },
        131072,
        2 * 4 * 256 * 2 * (5 * 131072 + 30 * 577 * 16),
        QUOTED + " (text_config); heads as in Transformers' Gemma3TextConfig",
    ),  # fmt: skip
    # Named layer by layer: ceil((127 + 8192) / 16) + 1 = 521 blocks.
    "openai/gpt-oss-120b": PublicModel(
        model(
            36,
            64,
            8,
            2880,
            131072,
            head_dim=64,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 18,
            rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        ),
        131072,
        2 * 8 * 64 * 2 * 18 * (131072 + 521 * 16),
        QUOTED + " in full from openai/gpt-oss-120b@main; rope_scaling as in gpt-oss-20b",
    ),  # fmt: skip
    # Chunks of 8192 in three of four layers: they hold 8192 + 8192 tokens.
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": PublicModel(
        {
            "text_config": model(
                48, 40, 8, 5120, 10485760, head_dim=128, attention_chunk_size=8192, model_type="llama4_text", **llama3(16.0)
            )
        },
        10485760,
        2 * 8 * 128 * 2 * (12 * 10485760 + 36 * 16384),
        COPIES + "meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json@64c5ddb6; " + TRUTH,
    ),
    # Latents: 512 and 64 of rope, in bf16.
    "deepseek-ai/DeepSeek-V3": PublicModel(
        model(61, 128, 128, 7168, 163840, **MLA), 163840, 70_272 * 163840, QUOTED + " in full in a vllm-ascend issue"
    ),
    "deepseek-ai/DeepSeek-V2-Lite": PublicModel(
        model(27, 16, 16, 2048, 163840, **MLA), 163840, 27 * 576 * 2 * 163840, PRESETS + "deepseek_v2_lite"
    ),
    # And an index of 128 bytes and a scale of 4.
    "deepseek-ai/DeepSeek-V3.2-Exp": PublicModel(
        model(61, 128, 128, 7168, 163840, index_head_dim=128, **MLA),
        163840,
        61 * (1152 + 132) * 163840,
        TRUTH + "; DeepSeek V3.2-Exp architecture (block-level), transcribed from config.json",
    ),
    # One layer in four has attention; the others a state of 32 x 128 x 128 and 3 inputs of (2 x 16 + 32) x 128, of 4 bytes.
    "Qwen/Qwen3-Next-80B-A3B-Instruct": PublicModel(
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
            use_sliding_window=False,
        ),
        262144,
        12 * 2 * 2 * 256 * 2 * 262144 + 36 * (32 * 128 * 128 + 3 * 8192) * 4,
        COPIES + "Qwen--Qwen3-Next-80B-A3B-Thinking_config.json@1b7cfb10; " + TRUTH,
    ),  # fmt: skip
    # One in eight; Mamba's inner width is 2 x 4096, with 16 states and 3 inputs.
    "ai21labs/Jamba-v0.1": PublicModel(
        model(
            32, 32, 8, 4096, 262144, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2
        ),
        262144,
        4 * 2 * 8 * 128 * 2 * 262144 + 28 * 8192 * (16 + 3) * 4,
        QUOTED + "; defaults of Transformers' JambaConfig",
    ),
    # 4 stars and 24 Ms; Mamba 2: 128 heads of 64, 128 states, and 3 inputs of 128 x 64 + 2 x 8 x 128.
    "nvidia/Nemotron-H-8B-Base-8K": PublicModel(
        model(
            52,
            32,
            8,
            4096,
            8192,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            attention_head_dim=128,
            mamba_num_heads=128,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
        ),
        8192,
        4 * 2 * 8 * 128 * 2 * 8192 + 24 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 8 * 128)) * 4,
        "NVIDIA NeMo Megatron Bridge, Nemotron H and Nemotron Nano v2; vLLM's configs/nemotron_h.py; " + QUOTED,
    ),  # fmt: skip
    # An encoder keeps nothing.
    "sentence-transformers/all-MiniLM-L6-v2": PublicModel(
        {"model_type": "bert", **model(6, 12, 12, 384, 512)}, 512, 0, QUOTED + " in full, transformers_version 4.8.2"
    ),
}
