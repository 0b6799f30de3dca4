"""What TensorRT-LLM would refuse after it has loaded torch or weights, found in milliseconds. Rules are those of its 1.3 line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmgw.engines import model_checks, node_checks
from llmgw.engines.case import Case
from llmgw.engines.launch import (
    environment_problems,
    nearest,
    no_loras,
    reserved_arguments,
    unchecked_arguments,
    weights_problems,
)
from llmgw.errors import Problem

_SET = "set `parallel` in the profile"
_ALONE = "llmgw runs it for itself, not as a part of a disaggregated one"
RESERVED = {
    **dict.fromkeys(("host", "port", "grpc"), "llmgw gives it host and port"),
    **dict.fromkeys(("config", "extra-llm-api-options"), "llmgw gives it one: every key of it may stand in `arguments`"),
    **dict.fromkeys(("tensor-parallel-size", "tp-size", "pipeline-parallel-size", "pp-size"), _SET),
    **dict.fromkeys(("moe-expert-parallel-size", "ep-size", "gpus-per-node"), _SET),
    "max-seq-len": "set `context`",
    "served-model-name": "it serves under the model's name",
    **dict.fromkeys(("revision", "hf-revision"), "set `weights: hf:ORG/NAME@REVISION`"),
    **dict.fromkeys(("server-role", "disagg-cluster-uri", "metadata-server-config-file", "report-addr"), _ALONE),
    **dict.fromkeys(("enable-iter-perf-stats", "return-perf-metrics", "telemetry", "no-telemetry"), "llmgw sets it"),
    **dict.fromkeys(("free-gpu-memory-fraction", "kv-cache-free-gpu-memory-fraction"), "set it in `kv_cache_config`"),
    "kv-cache-dtype": "set `dtype` in `kv_cache_config`",
}
# The server's own options; whatever else stands in `arguments` goes into the configuration file.
OPTIONS = frozenset(
    {"agent_percentage", "agent_types", "allow_request_chat_template", "backend", "chat_template", "custom_module_dirs"}
    | {"custom_tokenizer", "enable_visual_gen", "generation_config", "log_level", "media_io_kwargs", "middleware"}
    | {"num_serve_frontends", "num_input_processor_workers", "num_media_load_workers", "post_processor_hook", "tokenizer"}
    | {"tool_parser", "video_pruning_rate", "visual_gen_args"}
)
# The LLM API's, by the reference that its own tests of stability compare with.
SETTINGS = frozenset(
    {"allreduce_strategy", "attn_backend", "backend", "batched_logits_processor", "batching_type", "build_config"}
    | {"cache_transceiver_config", "checkpoint_format", "checkpoint_loader", "context_parallel_size", "cp_config"}
    | {"cuda_graph_config", "disable_overlap_scheduler", "dtype", "enable_attention_dp", "enable_autotuner"}
    | {"enable_chunked_prefill", "enable_iter_perf_stats", "enable_iter_req_stats", "enable_layerwise_nvtx_marker", "enable_lora"}
    | {"enable_min_latency", "enable_mixed_sampler", "enable_trtllm_sampler", "fail_fast_on_attention_window_too_large"}
    | {"force_dynamic_quantization", "garbage_collection_gen0_threshold", "gather_generation_logits", "gpus_per_node"}
    | {"guided_decoding_backend", "iter_stats_max_iterations", "kv_cache_config", "kv_cache_dtype", "load_format", "lora_config"}
    | {"max_batch_size", "max_beam_width", "max_input_len", "max_num_tokens", "max_seq_len", "moe_cluster_parallel_size"}
    | {"moe_config", "moe_expert_parallel_size", "moe_tensor_parallel_size", "normalize_log_probs", "num_postprocess_workers"}
    | {"otlp_traces_endpoint", "peft_cache_config", "pipeline_parallel_size", "postprocess_tokenizer_dir", "print_iter_log"}
    | {"quant_config", "reasoning_parser", "request_stats_max_iterations", "return_perf_metrics", "revision", "sampler_type"}
    | {"scheduler_config", "skip_tokenizer_init", "speculative_config", "stream_interval", "tensor_parallel_size", "tokenizer"}
    | {"tokenizer_mode", "tokenizer_revision", "torch_compile_config", "trust_remote_code"}
)
BUILD_CAPABILITY = 80
_FRACTION = "free_gpu_memory_fraction"
_INTEGERS = ("max_batch_size", "max_num_tokens", "max_beam_width", "max_input_len")


def problems(case: Case) -> list[Problem]:
    """Every reason for which TensorRT-LLM would not serve this profile."""
    found = weights_problems(case.profile, case.files)
    found += reserved_arguments(case.profile, RESERVED)
    found += environment_problems(case.profile)
    found += no_loras(case.profile, "TensorRT-LLM")
    for check in (
        model_checks.heads,
        model_checks.kv_heads,
        model_checks.layers,
        model_checks.devices,
        model_checks.quantization_blocks,
        model_checks.weights_format,
        model_checks.tokenizer,
        _arguments,
        _one_node,
        _experts,
        _context,
        _batch,
        _fraction,
        _node,
    ):
        found += check(case)
    return found


def warnings(case: Case) -> list[Problem]:
    """What will work, but not as well as it could, or for more than it should."""
    found = [*model_checks.kv_heads_repeated(case), *node_checks.warnings(case)]
    if case.node is not None and not case.node.address.startswith(("127.", "::1")):
        text = f"TensorRT-LLM takes no key: whoever reaches {case.node.name}'s ports may use it; let only the routers in"
        found.append(Problem(text, "engine", "no_key"))
    return found + unchecked_arguments(case.profile, case.flags)


def _arguments(case: Case) -> Iterator[Problem]:
    """V24: an option of the server, or a key of the configuration file."""
    if not case.flags.names:
        return
    options = {flag.lstrip("-").replace("-", "_") for flag in case.flags.names}
    for name in case.profile.arguments:
        plain = name.replace("-", "_")
        if plain in SETTINGS or (plain in OPTIONS and plain in options) or plain.replace("_", "-") in RESERVED:
            continue
        text = f"{case.named} has neither an option nor a setting {name}{nearest(plain, OPTIONS & options | SETTINGS)}"
        yield Problem(f"{text} (`trtllm-serve serve --help` lists options)", f"arguments.{name}", "unknown_argument")


def _one_node(case: Case) -> Iterator[Problem]:
    parallel = case.profile.parallel
    if parallel.nodes > 1:
        text = (
            "TensorRT-LLM spans nodes only under MPI or Slurm, which llmgw does not start: use one node, or engine vllm or sglang"
        )
        yield Problem(text, "parallel.nodes", "one_node")
    if parallel.data > 1:
        text = "TensorRT-LLM has no data parallel copies: use replicas, or the argument enable_attention_dp"
        yield Problem(text, "parallel.data", "no_data_parallel")


def _experts(case: Case) -> Iterator[Problem]:
    yield from model_checks.experts(case, case.profile.parallel.tensor, "tensor")


def _context(case: Case) -> Iterator[Problem]:
    yield from model_checks.context(case, "TLLM_ALLOW_LONG_MAX_MODEL_LEN")


def _batch(case: Case) -> Iterator[Problem]:
    for name in _INTEGERS:
        for spelled in (name, name.replace("_", "-")):
            value = case.profile.arguments.get(spelled)
            if value is not None and (isinstance(value, bool) or not str(value).isdigit()):
                yield Problem(f"{name} is a whole number, found {value!r}", f"arguments.{spelled}", "argument_value")


def _fraction(case: Case) -> Iterator[Problem]:
    cache, where = case.profile.arguments.get("kv_cache_config"), "arguments.kv_cache_config"
    if cache is not None and not isinstance(cache, Mapping):
        yield Problem(f"kv_cache_config is a section, found {cache!r}", where, "argument_value")
    elif cache is not None:
        yield from model_checks.memory_share(case, _FRACTION, cache.get(_FRACTION), where)


def _node(case: Case) -> Iterator[Problem]:
    yield from node_checks.library(case)
    yield from node_checks.capability(case, BUILD_CAPABILITY, {})
    yield from node_checks.driver(case, cuda13=case.version is not None and case.version >= (1, 2))
    yield from node_checks.fabric(case)
    yield from node_checks.shared_memory(case)
    yield from node_checks.instances(case)
