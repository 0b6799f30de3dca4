"""What SGLang takes of each device, by its own accounting.

C{mem-fraction-static} of what is free before the load goes to weights and KV cache; activations and graphs come on top. Unset,
SGLang reserves for those C{512 MiB + 1.5 MiB x max(chunked prefill, 2048) + 1 GiB x tensor x pipeline / 8} and more on large
devices (0.5.23's C{memory_hook}). Weights are cut and the cache is laid out as vLLM does it; data parallel ranks share nothing.
"""

from __future__ import annotations

from attrs import evolve

from llmgw.engines import lora, vllm_memory
from llmgw.engines.beside import adapters, drafts, with_adapters, with_unseen
from llmgw.engines.launch import fraction, whole
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Profile
from llmgw.fleet.shard import WeightFiles

# Context and library of CUDA, activations, graphs: a first guess until a run has been seen.
OVERHEAD = 2 * 2**30
# About what it leaves to weights and cache of an 80 GB device.
DEFAULT_SHARE = 0.88
# How many adapters it has room for, unless C{max-loras-per-batch} says.
LORAS = 8
_SAME = ("kv-cache-dtype", "dtype", "quantization")


def share(profile: Profile) -> float:
    """The part of a device that weights and cache may take."""
    return fraction(profile.arguments.get("mem-fraction-static")) or DEFAULT_SHARE


def estimate(profile: Profile, files: WeightFiles | None) -> Estimate:
    """One request of the whole context on each rank, in the order of ranks: data, pipeline, tensor."""
    given = {name: profile.arguments[name] for name in _SAME if name in profile.arguments}
    if chunk := profile.arguments.get("chunked-prefill-size"):
        given["max-num-batched-tokens"] = chunk
    alone = evolve(profile, arguments=given, loras=(), parallel=evolve(profile.parallel, data=1))
    found = vllm_memory.estimate(alone, files)
    ranks = tuple(evolve(rank, overhead=OVERHEAD) for rank in found.ranks)
    found = evolve(found, ranks=ranks * profile.parallel.data, share=share(profile), elastic=True)
    if files is None or not files.found:
        return found
    kept = whole(profile.arguments.get("max-loras-per-batch")) or LORAS
    found = with_adapters(found, adapters(profile, files, kept, lora.rank_told(profile, files)))
    return with_unseen(found, drafts(profile, "speculative-draft-model-path"))
