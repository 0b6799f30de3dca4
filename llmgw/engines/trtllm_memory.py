"""What TensorRT-LLM takes of each device: weights, runtime, and of what is free after them the part that its cache may have.

C{kv_cache_config.free_gpu_memory_fraction}, 0.9 unless said otherwise. Weights are cut and the cache laid out as vLLM does it.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from llmgw.engines import vllm_memory
from llmgw.engines.launch import fraction
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Profile
from llmgw.fleet.shard import WeightFiles

OVERHEAD = 3 * 2**30
DEFAULT_SHARE = 0.9


def share(profile: Profile) -> float:
    """The part of what the weights leave that the cache may take."""
    cache = profile.arguments.get("kv_cache_config")
    value = cache.get("free_gpu_memory_fraction") if isinstance(cache, Mapping) else None
    return fraction(value) or DEFAULT_SHARE


def estimate(profile: Profile, files: WeightFiles | None) -> Estimate:
    """One request of the whole context on each rank, in the order of ranks: pipeline, tensor."""
    cache = profile.arguments.get("kv_cache_config")
    kind = cache.get("dtype") if isinstance(cache, Mapping) else None
    given = {"kv-cache-dtype": kind} if isinstance(kind, str) else {}
    alone = evolve(profile, arguments=given, parallel=evolve(profile.parallel, data=1))
    found = vllm_memory.estimate(alone, files)
    return evolve(found, ranks=tuple(evolve(r, overhead=OVERHEAD) for r in found.ranks), share=share(profile), elastic=True)
