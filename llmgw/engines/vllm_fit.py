"""Whether a profile fits: memory for weights and cache, quantization blocks, and what the node lacks beside devices.

The other half of L{vllm_checks}, by the same rule: what nobody knows is no reason to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import evolve

from llmgw.engines import model_checks, node_checks
from llmgw.engines.case import Case
from llmgw.engines.estimates import context_of
from llmgw.engines.launch import unchecked_arguments, whole
from llmgw.engines.vllm_memory import OVERHEAD, SPACE, estimate, host_cache, request_cache
from llmgw.errors import Problem
from llmgw.fleet.estimate import largest_context
from llmgw.fleet.units import show_size

# Options that want a whole number; the latter also with a suffix of thousands.
_INTEGERS = ("max-num-seqs", "block-size", "seed", "api-server-count", "max-loras", "max-lora-rank", "max-logprobs")
_COUNTS = ("max-num-batched-tokens", "kv-cache-memory-bytes")
_INTEGER, _COUNT = re.compile(r"-?\d+\Z"), re.compile(r"\d+(\.\d+)?[kKmMgGtT]?\Z")


def problems(case: Case) -> list[Problem]:
    """What does not fit."""
    checks = (
        _decode_context,
        _memory,
        _fraction,
        _values,
        _offload,
        _space,
        node_checks.shared_memory,
        node_checks.instances,
    )
    return [problem for check in checks for problem in check(case)]


def warnings(case: Case) -> list[Problem]:
    """What may not fit, and what nobody could check."""
    return [*node_checks.warnings(case), *unchecked_arguments(case.profile, case.flags)]


def _decode_context(case: Case) -> Iterator[Problem]:
    name = "decode-context-parallel-size"
    ranks, tensor, kv_heads = case.argument(name), case.profile.parallel.tensor, case.shape.kv_heads
    if not ranks or ranks == 1:
        return
    if tensor % ranks:
        yield Problem(f"{name} {ranks} does not divide tensor {tensor}", f"arguments.{name}", "decode_context")
    elif kv_heads and case.shape.latent is None and ranks > max(1, tensor // kv_heads):
        text = f"{name} {ranks} is more than tensor {tensor} / {kv_heads} key-value heads = {tensor // kv_heads}"
        yield Problem(text, f"arguments.{name}", "decode_context")


def _memory(case: Case) -> Iterator[Problem]:
    """Weights and one context against the largest device. The guessed overhead is left out: only what can never fit."""
    totals = [device.memory_total or 0 for device in case.devices]
    found = estimate(case.profile, case.files)
    if case.node is None or not totals or not all(totals) or found.need is None or found.context is None:
        return
    largest = max(totals)
    if found.need - OVERHEAD <= largest:
        return

    def fits(context: int) -> bool:
        return (estimate(evolve(case.profile, context=context), case.files).need or 0) <= largest

    most = largest_context(fits, found.context)
    lower = f"lower context to {most}, or use" if most else "use"
    text = (
        f"weights and {found.context} tokens of cache need {show_size(found.need)} on each device, the largest of "
        f"{case.node.name} has {show_size(largest)}; {lower} a higher tensor"
    )
    yield Problem(text, "context", "device_memory")


def _fraction(case: Case) -> Iterator[Problem]:
    name = "gpu-memory-utilization"
    yield from model_checks.memory_share(case, name, case.profile.arguments.get(name), f"arguments.{name}", all_of_it=True)


def _values(case: Case) -> Iterator[Problem]:
    for name in (*_INTEGERS, *_COUNTS):
        value = case.profile.arguments.get(name)
        if value is None or whole(value) is not None:
            continue
        if not (isinstance(value, str) and (_COUNT if name in _COUNTS else _INTEGER).match(value)):
            yield Problem(f"{name} is a whole number, found {value!r}", f"arguments.{name}", "argument_value")


def _offload(case: Case) -> Iterator[Problem]:
    """V33: what is kept on the host must fit there."""
    offload, tensor = case.profile.arguments.get("cpu-offload-gb"), case.profile.parallel.tensor
    if case.node is None or not isinstance(offload, int | float):
        return
    total, name = case.node.inventory.memory_total, case.node.name
    if offload * tensor * 2**30 > total:
        text = f"cpu-offload-gb {offload} for {tensor} ranks is more than {name}'s {show_size(total)}; lower it"
        yield Problem(text, "arguments.cpu-offload-gb", "host_memory")


def _space(case: Case) -> Iterator[Problem]:
    """On a processor the cache has a size of its own, which must hold one context."""
    if case.profile.resources.devices != 0:
        return
    where, said = f"environment.{SPACE}", case.profile.environment.get(SPACE, "")
    if said and not said.isdecimal():
        yield Problem(f"{SPACE} is a whole number of GiB, found {said!r}", where, "argument_value")
    profile, files = case.profile, case.files
    held, need, context = host_cache(profile, files), request_cache(profile, files), context_of(profile, files)
    if held is None or need is None or context is None or need <= held:
        return

    def fits(tokens: int) -> bool:
        return (request_cache(evolve(profile, context=tokens), files) or 0) <= held

    most = largest_context(fits, context)
    text = f"{context} tokens need {show_size(need)} of KV cache, it has {show_size(held)}: set {SPACE} to {-(-need // 2**30)}"
    yield Problem(text + (f", or lower context to {most}" if most else ""), where, "host_cache")
