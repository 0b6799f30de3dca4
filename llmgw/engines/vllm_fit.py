"""Whether a profile fits: memory for weights and cache, quantization blocks, and what the node lacks beside devices.

The other half of L{vllm_checks}, by the same rule: what nobody knows is no reason to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from attrs import evolve

from llmgw.engines.memory import number, text_config
from llmgw.engines.vllm_checks import Case
from llmgw.engines.vllm_memory import OVERHEAD, estimate
from llmgw.errors import Problem
from llmgw.fleet.estimate import largest_context
from llmgw.fleet.node import Device
from llmgw.fleet.units import show_size

# Options that want a whole number; the latter also with a suffix of thousands.
_INTEGERS = ("max-num-seqs", "block-size", "seed", "api-server-count", "max-loras", "max-lora-rank", "max-logprobs")
_COUNTS = ("max-num-batched-tokens", "kv-cache-memory-bytes")
_INTEGER, _COUNT = re.compile(r"-?\d+\Z"), re.compile(r"\d+(\.\d+)?[kKmMgGtT]?\Z")
# Below the first nothing starts (it is what containers get by default), below the second it may not.
_SHM_LEAST, _SHM_GOOD = 128 * 2**20, 2**30
_NOFILE = 65535


def problems(case: Case) -> list[Problem]:
    """What does not fit."""
    checks = (_quantization_blocks, _decode_context, _memory, _fraction, _values, _not_yet, _system)
    return [problem for check in checks for problem in check(case)]


def warnings(case: Case) -> list[Problem]:
    """What may not fit, and what nobody could check."""
    return [*_limits(case), *_unchecked(case)]


def _devices(case: Case) -> list[Device]:
    """The node's healthy devices; none where the node is not known or the profile takes none."""
    if case.node is None or case.profile.resources.devices == 0:
        return []
    return [device for device in case.node.inventory.devices if not device.problem]


def _quantization_blocks(case: Case) -> Iterator[Problem]:
    config = text_config(case.files)
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if not (isinstance(block, list | tuple) and block and isinstance(block[0], int) and block[0] > 0):
        return
    parallel = case.profile.parallel
    for name, ranks in (("intermediate_size", parallel.tensor), ("moe_intermediate_size", parallel.tensor)):
        size = number(config, name)
        # Expert parallelism keeps every expert whole.
        if size and size % (ranks * block[0]) and not (parallel.expert and name.startswith("moe")):
            instead = " or set parallel.expert" if name.startswith("moe") else ""
            text = f"{name} {size} over tensor {ranks} is no multiple of the quantization block {block[0]}; lower tensor{instead}"
            yield Problem(text, "parallel.tensor", "block_not_divisible")
            return


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
    totals = [device.memory_total or 0 for device in _devices(case)]
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
    name, resources = "gpu-memory-utilization", case.profile.resources
    value = case.profile.arguments.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        text = f"{name} is a fraction above 0 and at most 1, found {value!r}"
        yield Problem(text, f"arguments.{name}", "argument_value")
    elif resources.device_memory is not None or resources.share:
        text = f"`resources` say how much device memory it may take: leave {name} out"
        yield Problem(text, f"arguments.{name}", "reserved_argument")


def _values(case: Case) -> Iterator[Problem]:
    for name in (*_INTEGERS, *_COUNTS):
        value = case.profile.arguments.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            continue
        if not (isinstance(value, str) and (_COUNT if name in _COUNTS else _INTEGER).match(value)):
            yield Problem(f"{name} is a whole number, found {value!r}", f"arguments.{name}", "argument_value")


def _not_yet(case: Case) -> Iterator[Problem]:
    parallel = case.profile.parallel
    if parallel.data > 1 and parallel.nodes > 1:
        text = "data parallel ranks over several nodes are not supported yet: use replicas instead of data, or one node"
        yield Problem(text, "parallel.data", "not_yet")
    if case.profile.loras:
        yield Problem("LoRA adapters are not loaded yet: leave `loras` out", "loras", "not_yet")


def _system(case: Case) -> Iterator[Problem]:
    if case.node is None:
        return
    inventory, tensor, name = case.node.inventory, case.profile.parallel.tensor, case.node.name
    if tensor > 1 and inventory.shm_free is not None and inventory.shm_free < _SHM_LEAST:
        text = f"{name} has {show_size(inventory.shm_free)} free in /dev/shm, tensor {tensor} wants 1.0 GiB: enlarge it"
        yield Problem(text, "parallel.tensor", "shm")
    devices = _devices(case)
    if case.profile.parallel.world > 1 and devices and all(_is_mig(device) for device in devices):
        text = f"{name} has MIG instances only, and those cannot work together: set `parallel` to one rank"
        yield Problem(text, "parallel.tensor", "mig")
    offload = case.profile.arguments.get("cpu-offload-gb")
    if isinstance(offload, int | float) and offload * tensor * 2**30 > inventory.memory_total:
        text = f"cpu-offload-gb {offload} for {tensor} ranks is more than {name}'s {show_size(inventory.memory_total)}; lower it"
        yield Problem(text, "arguments.cpu-offload-gb", "host_memory")


def _is_mig(device: Device) -> bool:
    return device.parent is not None or device.uuid.startswith("MIG-")


def _limits(case: Case) -> Iterator[Problem]:
    if case.node is None:
        return
    inventory, name = case.node.inventory, case.node.name
    if inventory.nofile is not None and inventory.nofile < _NOFILE:
        yield Problem(f"{name} allows {inventory.nofile} open files: set LimitNOFILE=65535 for llmgw-agent", "", "nofile")
    shm = inventory.shm_free
    if case.profile.parallel.tensor > 1 and shm is not None and _SHM_LEAST <= shm < _SHM_GOOD:
        yield Problem(f"{name} has only {show_size(shm)} free in /dev/shm; 1.0 GiB is wanted", "parallel.tensor", "shm")
    if inventory.disk_free is not None and inventory.disk_free < 2 * 2**30:
        yield Problem(f"{name} has {show_size(inventory.disk_free)} of disk free; compile caches want 2.0 GiB", "", "disk")


def _unchecked(case: Case) -> Iterator[Problem]:
    if case.profile.arguments and not case.flags.names:
        yield Problem("arguments are not checked: the installation's options are not known", "arguments", "unchecked")
