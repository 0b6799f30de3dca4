"""What vLLM would refuse after a quarter of a minute or more, found in milliseconds: each check with its numbers and the way out.

A check that lacks a figure says nothing: what nobody knows is no reason to refuse. Rules are those of vLLM 0.33; its own late
texts stand in L{vllm_failures}. Minimum compute capabilities: vLLM's C{get_min_capability} per quantization.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from llmgw.engines import lora, model_checks, node_checks, vllm_known
from llmgw.engines.case import Case
from llmgw.engines.launch import environment_problems, reserved_arguments, unknown_arguments, weights_problems
from llmgw.errors import Problem
from llmgw.fleet.model import Profile

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
    **dict.fromkeys(("enable-lora", "lora-modules"), "set `loras` on the model"),
}
RESERVED_ENVIRONMENT = frozenset({"VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP"})
DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# Ten times the compute capability.
CAPABILITY = {
    **dict.fromkeys(("gptq",), 60),
    **dict.fromkeys(("moe_wna16",), 70),
    **dict.fromkeys(("awq", "fp8", "w8a8_int8", "wna16", "torchao", "nvfp4"), 75),
    **dict.fromkeys(("mxfp4", "modelopt", "experts_int8", "fbgemm_fp8"), 80),
    **dict.fromkeys(("fp_quant",), 100),
}
WHEEL_CAPABILITY = 75


def problems(case: Case) -> list[Problem]:
    """Every reason for which vLLM would not serve this profile."""
    found = weights_problems(case.profile, case.files)
    found += reserved_arguments(lora.without_switch(case.profile), RESERVED)
    found += unknown_arguments(case.profile, case.flags, case.named, "`vllm serve --help=all`")
    found += environment_problems(case.profile, RESERVED_ENVIRONMENT)
    for check in (
        model_checks.heads,
        model_checks.kv_heads,
        model_checks.layers,
        model_checks.nodes,
        model_checks.devices,
        model_checks.weights_format,
        model_checks.tokenizer,
        model_checks.quantization_blocks,
        _experts,
        _data_over_nodes,
        _context,
        _batch,
        _tools,
        _development,
        _processor,
        _quantization,
        _architecture,
        _pipeline,
        _loras,
        _node,
    ):
        found += check(case)
    return found


def warnings(case: Case) -> list[Problem]:
    """What will work, but not as well as it could."""
    found = [*model_checks.kv_heads_repeated(case), *_unknown_architecture(case), *_variables(case), *lora.base_differs(case)]
    parallel = case.profile.parallel
    infiniband = case.node is not None and case.node.inventory.infiniband
    if parallel.nodes > 1 and parallel.tensor > parallel.world // parallel.nodes and not infiniband:
        text = (
            "tensor parallelism goes over nodes: keep it inside a node and use pipeline across, unless the fabric is InfiniBand"
        )
        found.append(Problem(text, "parallel", "tensor_over_nodes"))
    if develops(case.profile) and case.node is not None and not case.node.address.startswith(("127.", "::1")):
        text = (
            f"no key guards the paths of {DEVELOPMENT}: whoever reaches {case.node.name}'s ports may have it run code; let only "
            "the routers in"
        )
        found.append(Problem(text, f"environment.{DEVELOPMENT}", "no_key"))
    return found


def develops(profile: Profile) -> bool:
    """Whether it has the paths for sleep, and for much else."""
    return profile.environment.get(DEVELOPMENT, "0") not in ("", "0")


def _experts(case: Case) -> Iterator[Problem]:
    parallel = case.profile.parallel
    yield from model_checks.experts(case, parallel.tensor * parallel.data, "tensor x data")


def _data_over_nodes(case: Case) -> Iterator[Problem]:
    """Each node runs equally many whole data parallel ranks; V9: who balances for itself needs experts."""
    parallel = case.profile.parallel
    if parallel.data > 1 and parallel.nodes > 1 and parallel.data % parallel.nodes:
        text = (
            f"data {parallel.data} over {parallel.nodes} nodes would cut a data parallel rank: use a multiple of {parallel.nodes}"
        )
        yield Problem(text, "parallel.data", "data_over_nodes")
    if parallel.balance == "hybrid" and (parallel.data == 1 or parallel.nodes == 1):
        text = "balance hybrid is for data parallel ranks over several nodes: leave it out"
        yield Problem(text, "parallel.balance", "balance")
    elif parallel.balance == "hybrid" and case.files is not None and case.files.config and not case.shape.experts:
        text = "balance hybrid is for models with experts; for this one use replicas instead of data"
        yield Problem(text, "parallel.balance", "balance")


def _context(case: Case) -> Iterator[Problem]:
    yield from model_checks.context(case, "VLLM_ALLOW_LONG_MAX_MODEL_LEN")


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


def fixed_loras(profile: Profile) -> str:
    """Why an engine of this profile takes no adapters while it runs; empty if it does."""
    if not lora.enabled(profile):
        return lora.UNPREPARED
    if profile.parallel.nodes > 1 or profile.parallel.data > 1 or profile.arguments.get("api-server-count", 1) != 1:
        return "vLLM over several nodes, data parallel ranks or API servers takes adapters only at its start"
    if profile.environment.get(UPDATING, "1").strip().lower() not in ("1", "true"):
        return f"its profile sets {UPDATING}"
    return ""


def _loras(case: Case) -> Iterator[Problem]:
    yield from lora.problems(case, later=not fixed_loras(case.profile))


def _development(case: Case) -> Iterator[Problem]:
    if develops(case.profile) and case.profile.arguments.get("enable-sleep-mode") is not True:
        text = f"{DEVELOPMENT} opens paths that no key guards: leave it out, or set the argument enable-sleep-mode, too"
        yield Problem(text, f"environment.{DEVELOPMENT}", "environment")


def _processor(case: Case) -> Iterator[Problem]:
    """A build for processors finds no device, and what it has does not sleep."""
    if case.for_processors and case.profile.resources.devices != 0:
        text = f"{case.named} is a build for processors: set `resources: {{devices: 0}}`"
        yield Problem(text, "resources.devices", "processor")
    if case.for_processors and case.profile.arguments.get("enable-sleep-mode") is True:
        text = f"{case.named} is a build for processors, which cannot sleep: leave enable-sleep-mode out"
        yield Problem(text, "arguments.enable-sleep-mode", "processor")


def _known(case: Case) -> bool:
    """Whether the installed version is the one whose names were read."""
    return case.version == vllm_known.VERSION


def _quantization(case: Case) -> Iterator[Problem]:
    yield from model_checks.quantization(case, vllm_known.QUANTIZATIONS if _known(case) else ())


def _architecture(case: Case) -> Iterator[Problem]:
    """V13: what this version had once, or has by a plugin only."""
    name = case.architecture
    if not _known(case) or name is None:
        return
    if last := vllm_known.GONE.get(name):
        text = f"{case.named} has no {name} any more, vLLM {last} was the last: use an installation of that version"
        yield Problem(text, "weights", "architecture")
    elif plugin := vllm_known.PLUGIN.get(name):
        text = f"{case.named} has {name} only by a plugin: install {plugin} beside it, and set VLLM_PLUGINS in `environment`"
        if "VLLM_PLUGINS" not in case.profile.environment:
            yield Problem(text, "weights", "architecture")


def _unknown_architecture(case: Case) -> Iterator[Problem]:
    """Not refused: Transformers may bring it, and so may a plugin."""
    name = case.architecture
    known = vllm_known.ARCHITECTURES | set(vllm_known.GONE) | set(vllm_known.PLUGIN)
    if _known(case) and name is not None and name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        like = f" (it has {close[0]})" if close else ""
        text = f"{case.named} has no {name} of its own{like}: it starts only if its Transformers library or a plugin has it"
        yield Problem(text, "weights", "architecture")


def _pipeline(case: Case) -> Iterator[Problem]:
    """V7: not every model can be cut into stages."""
    name, pipeline = case.architecture, case.profile.parallel.pipeline
    if pipeline > 1 and _known(case) and name in vllm_known.NO_PIPELINE:
        text = f"{case.named} cannot cut {name} into pipeline stages: set pipeline to 1 and use tensor {pipeline} instead"
        yield Problem(text, "parallel.pipeline", "no_pipeline")


def _variables(case: Case) -> Iterator[Problem]:
    """V38: a variable that this version does not know is a mistake more often than a plugin's."""
    for name in case.profile.environment:
        if _known(case) and name.startswith("VLLM_") and name not in vllm_known.VARIABLES:
            close = difflib.get_close_matches(name, vllm_known.VARIABLES, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            yield Problem(f"{case.named} does not know the variable {name}{meant}", f"environment.{name}", "unknown_variable")


def _node(case: Case) -> Iterator[Problem]:
    """What this node's devices and driver cannot do."""
    yield from node_checks.library(case)
    yield from node_checks.capability(case, WHEEL_CAPABILITY, CAPABILITY)
    yield from node_checks.driver(case, cuda13=case.version is not None and case.version >= (0, 33))
    yield from node_checks.fabric(case)
