"""What vLLM would refuse after a quarter of a minute or more, found in milliseconds: each check with its numbers and the way out.

A check that lacks a figure says nothing: what nobody knows is no reason to refuse. Rules are those of vLLM 0.33; its own late
texts stand in L{vllm_failures}. Minimum compute capabilities: vLLM's C{get_min_capability} per quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from llmgw.engines.launch import environment_problems, reserved_arguments, unknown_arguments, weights_problems
from llmgw.engines.memory import Shape, shape
from llmgw.errors import Problem
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Installation, NodeFacts
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import Flags

_GIVEN = "llmgw gives it host and port"
_SET = "set `parallel` in the profile"
RESERVED = {
    **dict.fromkeys(("host", "port", "uds", "root-path", "grpc", "grpc-port", "ssl-keyfile", "ssl-certfile"), _GIVEN),
    "api-key": "llmgw gives it a key of its own",
    "hf-token": "argv is readable for everyone on the node: set HF_TOKEN in agent.yaml",
    "disable-log-stats": "llmgw reads its metrics",
    "served-model-name": "it serves under the model's name",
    "model": "set `weights`",
    "max-model-len": "set `context`",
    **dict.fromkeys(
        ("tensor-parallel-size", "tp", "pipeline-parallel-size", "pp", "data-parallel-size", "dp", "enable-expert-parallel"), _SET
    ),
    **dict.fromkeys(
        ("nnodes", "n", "node-rank", "r", "master-addr", "master-port", "headless"), "llmgw sets it for `parallel: {nodes}`"
    ),
    **dict.fromkeys(
        ("data-parallel-address", "dpa", "data-parallel-rpc-port", "dpp", "data-parallel-rank", "dpn"), "llmgw sets it"
    ),
    **dict.fromkeys(("data-parallel-start-rank", "dpr", "data-parallel-size-local", "dpl", "data-parallel-backend", "dpb"), _SET),
    **dict.fromkeys(("data-parallel-hybrid-lb", "dph", "data-parallel-external-lb", "dpe"), _SET),
    **dict.fromkeys(("data-parallel-multi-port-external-lb", "dpm", "distributed-executor-backend", "ep"), _SET),
    **dict.fromkeys(("shutdown-timeout", "disable-access-log-for-endpoints", "config"), "llmgw sets it"),
    "device-ids": "llmgw gives it devices by UUID",
}
RESERVED_ENVIRONMENT = frozenset(
    {"VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "VLLM_SERVER_DEV_MODE"}
)
# Ten times the compute capability.
CAPABILITY = {
    **dict.fromkeys(("gptq",), 60),
    **dict.fromkeys(("moe_wna16",), 70),
    **dict.fromkeys(("awq", "fp8", "w8a8_int8", "wna16", "torchao", "nvfp4"), 75),
    **dict.fromkeys(("mxfp4", "modelopt", "experts_int8", "fbgemm_fp8"), 80),
    **dict.fromkeys(("fp_quant",), 100),
}
WHEEL_CAPABILITY, BF16 = 75, 80
CUDA13_DRIVER = 580


@frozen
class Case:
    """What is known when a profile is looked at; on the server for a whole catalog no more than the profile."""

    profile: Profile
    files: WeightFiles | None
    node: NodeFacts | None
    installation: Installation | None
    flags: Flags

    @property
    def shape(self) -> Shape:
        """The figures of the weights."""
        return shape(self.files)

    def argument(self, name: str) -> int | None:
        """A whole-numbered argument, None where it is not given or not a number."""
        value = self.profile.arguments.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def quantization(self) -> str | None:
        """How the weights are quantized by their own word."""
        config = self.files.config.get("quantization_config") if self.files else None
        method = config.get("quant_method") if isinstance(config, Mapping) else None
        return method if isinstance(method, str) else None


def problems(case: Case) -> list[Problem]:
    """Every reason for which vLLM would not serve this profile."""
    named = f"{case.installation.name} {case.installation.version or ''}".strip() if case.installation else "vllm"
    found = weights_problems(case.profile, case.files)
    found += reserved_arguments(case.profile, RESERVED)
    found += unknown_arguments(case.profile, case.flags, named, "`vllm serve --help=all`")
    found += environment_problems(case.profile, RESERVED_ENVIRONMENT)
    for check in (
        _heads,
        _kv_heads,
        _layers,
        _experts,
        _nodes,
        _devices,
        _context,
        _batch,
        _tools,
        _format,
        _quantization,
        _node,
    ):
        found += check(case)
    return found


def warnings(case: Case) -> list[Problem]:
    """What will work, but not as well as it could."""
    found = []
    parallel, kv_heads = case.profile.parallel, case.shape.kv_heads
    if kv_heads and parallel.tensor > kv_heads and case.shape.latent is None:
        times = parallel.tensor // kv_heads
        text = f"tensor {parallel.tensor} is more than the model's {kv_heads} key-value heads: each is kept {times} times"
        found.append(Problem(text, "parallel.tensor", "kv_heads_repeated"))
    if parallel.nodes > 1 and parallel.tensor > parallel.world // parallel.nodes:
        text = (
            "tensor parallelism goes over nodes: keep it inside a node and use pipeline across, unless the fabric is InfiniBand"
        )
        found.append(Problem(text, "parallel", "tensor_over_nodes"))
    return found


def divisors(value: int, most: int = 64) -> str:
    """C{1, 2, 4, 7, 14}."""
    return ", ".join(str(n) for n in range(1, min(value, most) + 1) if value % n == 0)


def _heads(case: Case) -> Iterator[Problem]:
    heads, tensor = case.shape.heads, case.profile.parallel.tensor
    if heads and heads % tensor:
        text = f"tensor {tensor} does not divide the model's {heads} attention heads; use one of {divisors(heads)}"
        yield Problem(text, "parallel.tensor", "heads_not_divisible")


def _kv_heads(case: Case) -> Iterator[Problem]:
    heads, kv_heads, tensor = case.shape.heads, case.shape.kv_heads, case.profile.parallel.tensor
    if not kv_heads or case.shape.latent is not None or (heads and heads % tensor):
        return
    if tensor % kv_heads if tensor > kv_heads else kv_heads % tensor:
        fit = divisors(kv_heads)
        text = f"tensor {tensor} and the model's {kv_heads} key-value heads do not divide each other; use one of {fit}"
        yield Problem(text, "parallel.tensor", "kv_heads_not_divisible")


def _layers(case: Case) -> Iterator[Problem]:
    layers, pipeline = case.shape.layers, case.profile.parallel.pipeline
    if layers and pipeline > layers:
        yield Problem(f"pipeline {pipeline} is more than the model's {layers} layers", "parallel.pipeline", "too_few_layers")


def _experts(case: Case) -> Iterator[Problem]:
    parallel, experts = case.profile.parallel, case.shape.experts
    known = case.files is not None and bool(case.files.config)
    if not parallel.expert:
        return
    if known and not experts:
        yield Problem("the model has no experts: set expert to false", "parallel.expert", "no_experts")
    elif experts and experts % (ranks := parallel.tensor * parallel.data):
        text = f"{experts} experts cannot be shared by {ranks} ranks (tensor x data); use a product of {divisors(experts)}"
        yield Problem(text, "parallel.expert", "experts_not_divisible")


def _nodes(case: Case) -> Iterator[Problem]:
    parallel = case.profile.parallel
    if parallel.world % parallel.nodes:
        text = f"{parallel.world} ranks (tensor x pipeline x data) cannot be shared equally by {parallel.nodes} nodes"
        yield Problem(text, "parallel.nodes", "nodes_not_divisible")


def _devices(case: Case) -> Iterator[Problem]:
    parallel, devices = case.profile.parallel, case.profile.resources.devices
    each = -(-parallel.world // parallel.nodes)
    if devices is not None and devices not in (0, each):
        text = f"devices is {devices}, but tensor x pipeline x data puts {each} ranks on each node: leave it out"
        yield Problem(text, "resources.devices", "devices_mismatch")


def _context(case: Case) -> Iterator[Problem]:
    wanted, most = case.profile.context, case.shape.context
    if wanted and most and wanted > most and case.profile.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        text = f"context {wanted} is more than the {most} tokens that the model was made for; lower it, or set rope scaling"
        yield Problem(text, "context", "context_too_long")


def _batch(case: Case) -> Iterator[Problem]:
    tokens, seats = case.argument("max-num-batched-tokens"), case.argument("max-num-seqs")
    if tokens is not None and seats is not None and tokens < seats:
        text = f"max-num-batched-tokens {tokens} must be at least max-num-seqs {seats}"
        yield Problem(text, "arguments.max-num-batched-tokens", "batch_too_small")
    chunked = case.profile.arguments.get("enable-chunked-prefill") is not False
    if not chunked and tokens is not None and case.profile.context and tokens < case.profile.context:
        text = f"without chunked prefill max-num-batched-tokens {tokens} must be at least the context {case.profile.context}"
        yield Problem(text, "arguments.max-num-batched-tokens", "batch_too_small")


def _tools(case: Case) -> Iterator[Problem]:
    arguments = case.profile.arguments
    if arguments.get("enable-auto-tool-choice") is True and not arguments.get("tool-call-parser"):
        text = "enable-auto-tool-choice needs tool-call-parser, e.g. hermes, llama3_json or qwen3_coder"
        yield Problem(text, "arguments.enable-auto-tool-choice", "tool_parser_missing")


def _format(case: Case) -> Iterator[Problem]:
    if case.files is None or not case.files.found or case.files.problem:
        return
    if case.files.format == "gguf":
        text = f"{case.files.weights} is GGUF, which vLLM no longer reads; use engine llamacpp, or the model's safetensors"
        yield Problem(text, "weights", "weights_format")
    elif not case.files.config:
        yield Problem(f"{case.files.path} has no config.json: is it the model's folder?", "weights", "weights_format")
    elif not case.files.config.get("architectures"):
        yield Problem(f"config.json in {case.files.path} names no architecture", "weights", "weights_format")


def _quantization(case: Case) -> Iterator[Problem]:
    asked = case.profile.arguments.get("quantization")
    if isinstance(asked, str) and case.quantization and _family(asked) != _family(case.quantization):
        text = f"quantization {asked} differs from the weights' own {case.quantization}: leave it out"
        yield Problem(text, "arguments.quantization", "quantization_mismatch")


def _family(method: str) -> str:
    """C{awq} for C{awq_marlin} and C{auto_awq}: other kernels for the same weights."""
    return method.lower().replace("-", "_").removeprefix("auto_").removeprefix("gpt_oss_").removesuffix("_marlin")


def _node(case: Case) -> Iterator[Problem]:
    """What this node's devices and driver cannot do."""
    if case.node is None or case.profile.resources.devices == 0:
        return
    inventory = case.node.inventory
    capable = [10 * device.capability[0] + device.capability[1] for device in inventory.devices if device.capability]
    if capable:
        yield from _capability(case, max(capable))
    version = case.installation.version if case.installation else None
    major = int(inventory.driver.partition(".")[0]) if inventory.driver and inventory.driver[:1].isdigit() else None
    if version and _at_least(version, (0, 33)) and major is not None and major < CUDA13_DRIVER:
        text = f"driver {inventory.driver} is too old for vLLM {version} (CUDA 13): install {CUDA13_DRIVER} or newer"
        yield Problem(text, "engine", "driver_too_old")


def _capability(case: Case, best: int) -> Iterator[Problem]:
    has = f"{best // 10}.{best % 10}"
    method = case.profile.arguments.get("quantization") or case.quantization
    need = CAPABILITY.get(str(method).lower(), 0) if method else 0
    if best < WHEEL_CAPABILITY:
        yield Problem(f"vLLM's build needs compute capability 7.5, this node has {has}", "engine", "capability")
    elif best < need:
        text = f"quantization {method} needs compute capability {need // 10}.{need % 10}, this node has {has}"
        yield Problem(text, "weights", "capability")
    elif best < BF16 and _dtype(case) == "bfloat16":
        text = f"bfloat16 needs compute capability 8.0, this node has {has}: set the argument dtype to half"
        yield Problem(text, "arguments.dtype", "capability")


def _dtype(case: Case) -> str:
    """The number format asked for; with C{auto} vLLM itself falls back to half where it must."""
    return str(case.profile.arguments.get("dtype", "auto"))


def _at_least(version: str, wanted: tuple[int, int]) -> bool:
    parts = version.split(".")
    return len(parts) > 1 and all(part.isdigit() for part in parts[:2]) and (int(parts[0]), int(parts[1])) >= wanted
