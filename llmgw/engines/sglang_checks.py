"""What SGLang would refuse after it has loaded torch or weights, found in milliseconds. Rules are those of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.engines import lora, model_checks, node_checks
from llmgw.engines.case import Case, divisors
from llmgw.engines.launch import (
    environment_problems,
    reserved_arguments,
    unchecked_arguments,
    unknown_arguments,
    weights_problems,
)
from llmgw.errors import Problem
from llmgw.fleet.model import Profile

_GIVEN = "llmgw gives it host and port"
_SET = "set `parallel` in the profile"
_NODES = "llmgw sets it for `parallel: {nodes}`"
RESERVED = {
    **dict.fromkeys(("host", "port", "fastapi-root-path", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"), _GIVEN),
    **dict.fromkeys(("api-key", "admin-api-key"), "llmgw gives it a key of its own"),
    "config": "llmgw gives it one, with its key",
    "served-model-name": "it serves under the model's name",
    **dict.fromkeys(("model", "model-path"), "set `weights`"),
    "context-length": "set `context`",
    "revision": "set `weights: hf:ORG/NAME@REVISION`",
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size", "pp-size", "pipeline-parallel-size"), _SET),
    **dict.fromkeys(("dp-size", "data-parallel-size", "ep", "ep-size", "expert-parallel-size"), _SET),
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr", "nccl-port"), _NODES),
    **dict.fromkeys(("base-gpu-id", "gpu-id-step"), "llmgw gives it devices by UUID"),
    **dict.fromkeys(("enable-metrics", "uvicorn-access-log-exclude-prefixes"), "llmgw sets it"),
    **dict.fromkeys(("enable-lora", "lora-paths"), "set `loras` on the model"),
    "skip-server-warmup": "it would be ready before its first forward pass has worked",
    "delete-ckpt-after-loading": "it would delete the weights",
    "enable-dp-attention": "it is deprecated: set the argument `attn-dp-size`",
}
RESERVED_ENVIRONMENT = frozenset({"SGLANG_HOST_IP", "SGLANG_PORT", "SGLANG_TCP_STORE_PORT"})
_QUANTIZATIONS = (
    "awq fp8 mxfp8 gptq gptq_marlin awq_marlin bitsandbytes gguf modelopt modelopt_fp8 modelopt_fp4 nvfp4_online modelopt_mixed "
    "petit_nvfp4 w8a8_int8 w8a8_fp8 moe_wna16 w4afp8 mxfp4 auto-round auto-round-int8 compressed-tensors modelslim mxfp_w4a8 "
    "quark quark_int4fp8_moe quark_mxfp4 unquant humming mlx_q4 mlx_q8"
)
QUANTIZATIONS = frozenset(_QUANTIZATIONS.split())
VERSION = (0, 5)
# Ten times the compute capability.
CAPABILITY = {**dict.fromkeys(("awq", "gptq", "fp8", "w8a8_int8"), 75), **dict.fromkeys(("mxfp4", "modelopt", "w8a8_fp8"), 80)}
BUILD_CAPABILITY = 75
_INTEGERS = ("max-running-requests", "max-queued-requests", "chunked-prefill-size", "page-size", "max-lora-rank", "attn-dp-size")


def problems(case: Case) -> list[Problem]:
    """Every reason for which SGLang would not serve this profile."""
    found = weights_problems(case.profile, case.files)
    found += reserved_arguments(lora.without_switch(case.profile), RESERVED)
    found += unknown_arguments(case.profile, case.flags, case.named, "`sglang serve --help`")
    found += environment_problems(case.profile, RESERVED_ENVIRONMENT)
    for check in (
        model_checks.heads,
        model_checks.kv_heads,
        model_checks.layers,
        model_checks.devices,
        model_checks.tokenizer,
        model_checks.quantization_blocks,
        _nodes,
        _experts,
        _attention,
        _format,
        _context,
        _quantization,
        _fraction,
        _values,
        _loras,
        _node,
    ):
        found += check(case)
    return found


def warnings(case: Case) -> list[Problem]:
    """What will work, but not as well as it could."""
    found = [*model_checks.kv_heads_repeated(case), *lora.base_differs(case), *node_checks.warnings(case)]
    return found + unchecked_arguments(case.profile, case.flags)


def _nodes(case: Case) -> Iterator[Problem]:
    """V6: tensor times pipeline is dealt out to the nodes; data parallel replicas live on one."""
    parallel = case.profile.parallel
    ranks = parallel.tensor * parallel.pipeline
    if parallel.nodes > 1 and parallel.data > 1:
        text = "SGLang keeps data parallel copies on one node: use replicas instead of data, or the argument attn-dp-size"
        yield Problem(text, "parallel.data", "data_over_nodes")
    elif ranks % parallel.nodes:
        text = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} cannot be shared equally by {parallel.nodes} nodes"
        yield Problem(text, "parallel.nodes", "nodes_not_divisible")
    if parallel.balance != "internal":
        yield Problem("SGLang balances by itself: leave balance out", "parallel.balance", "balance")


def _experts(case: Case) -> Iterator[Problem]:
    yield from model_checks.experts(case, case.profile.parallel.tensor, "tensor")


def _attention(case: Case) -> Iterator[Problem]:
    """Groups of data parallel attention lie inside the tensor ranks."""
    groups, tensor = case.argument("attn-dp-size"), case.profile.parallel.tensor
    if groups and groups > 1 and tensor % groups:
        text = f"attn-dp-size {groups} does not divide tensor {tensor}; use one of {divisors(tensor)}"
        yield Problem(text, "arguments.attn-dp-size", "attention_groups")
    elif groups and groups > 1 and case.profile.parallel.data > 1:
        text = "attn-dp-size and data cannot go together: set data to 1"
        yield Problem(text, "arguments.attn-dp-size", "attention_groups")


def _format(case: Case) -> Iterator[Problem]:
    yield from model_checks.weights_format(case, instead="")


def _context(case: Case) -> Iterator[Problem]:
    yield from model_checks.context(case, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")


def _quantization(case: Case) -> Iterator[Problem]:
    yield from model_checks.quantization(case, QUANTIZATIONS if case.version == VERSION else ())


def _fraction(case: Case) -> Iterator[Problem]:
    name = "mem-fraction-static"
    yield from model_checks.memory_share(case, name, case.profile.arguments.get(name), f"arguments.{name}")


def _values(case: Case) -> Iterator[Problem]:
    for name in _INTEGERS:
        value = case.profile.arguments.get(name)
        if value is not None and (isinstance(value, bool) or not str(value).lstrip("-").isdigit()):
            yield Problem(f"{name} is a whole number, found {value!r}", f"arguments.{name}", "argument_value")


def fixed_loras(profile: Profile) -> str:
    """Why an engine of this profile takes no adapters while it runs; empty if it does."""
    if not lora.enabled(profile):
        return lora.UNPREPARED
    if profile.parallel.nodes > 1 or profile.parallel.data > 1 or profile.arguments.get("tokenizer-worker-num", 1) != 1:
        return "SGLang over several nodes, data parallel ranks or tokenizers takes adapters only at its start"
    return ""


def _loras(case: Case) -> Iterator[Problem]:
    yield from lora.problems(case, later=not fixed_loras(case.profile), highest=None)
    for one in case.profile.loras:
        if ":" in one.name or "=" in one.name:
            text = f"SGLang cannot serve an adapter under {one.name}: no ':' may stand in its name"
            yield Problem(text, "loras", "served_name")


def _node(case: Case) -> Iterator[Problem]:
    yield from node_checks.library(case)
    yield from node_checks.capability(case, BUILD_CAPABILITY, CAPABILITY)
    yield from node_checks.driver(case, cuda13=case.version == VERSION)
    yield from node_checks.fabric(case)
    yield from node_checks.shared_memory(case)
    yield from node_checks.instances(case)
