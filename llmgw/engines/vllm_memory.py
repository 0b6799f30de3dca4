"""What vLLM takes of each device, by its own accounting.

vLLM asks for a fraction of the device's total, C{gpu-memory-utilization}, and fills with KV cache what weights, runtime and
activations leave of it. So a replica can start where C{fraction x total} holds weights, overhead and the cache of one request
of C{context} tokens (vLLM's C{check_enough_kv_cache_memory}); what is more serves more requests at once.

C{kv-cache-memory-bytes} says the cache's size instead of the fraction; C{cpu-offload-gb} keeps that much of each rank's weights
on the host.

Without devices all of it is the host's. vLLM would then take the fraction of the host's memory, 0.92 of it, so the cache's size
is always said: C{VLLM_CPU_KVCACHE_SPACE}, 4 GiB or one context where nobody says another.

Per layer and request, after vLLM 0.33's C{kv_cache_interface}: all tokens in blocks of 16; with a window C{min(window - 1 +
max_num_batched_tokens, context)} and a block more; with chunks C{min(chunk + max_num_batched_tokens, context)}. Layers of
several kinds stand in groups of one size, and what a group lacks is taken, too (L{_grouped}). Beside recurrent
states blocks are larger, so that one holds a state; what that wastes at a context's end is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import evolve

from llmgw.engines import lora
from llmgw.engines.beside import adapters, drafts, with_adapters, with_unseen
from llmgw.engines.cache import LayerCache, Pages, bytes_of
from llmgw.engines.estimates import context_of, layers_of, number_format, stage_weights, stages, unknown
from llmgw.engines.launch import fraction, whole
from llmgw.engines.memory import text_config
from llmgw.fleet.estimate import Estimate, RankMemory
from llmgw.fleet.model import Argument, Profile
from llmgw.fleet.shard import WeightFiles

# Context and library of CUDA, graphs, activations: a first guess until a run has been seen.
OVERHEAD = 2 * 2**30
# The same of a process on a processor: the HTTP server and the engine's core together, and each rank (measured: 1.2, 1.1 GiB).
HOST_OVERHEAD = 5 * 2**28
SPACE, DEFAULT_SPACE = "VLLM_CPU_KVCACHE_SPACE", 4
# vLLM's own default of gpu-memory-utilization, and what it puts into one batch on large devices.
DEFAULT_SHARE = 0.92
BATCHED = 8192
BLOCK = 16
# What is left of a byte of linear weights that vLLM quantizes while it loads them. bitsandbytes: 4 bits and a scale for 64.
QUANTIZED = {"fp8": 0.5, "bitsandbytes": 0.29}
_WIDTHS = {"float32": 4, "float": 4}
# DeepSeek's packed latents: 512 numbers of fp8, 4 scales, 64 of rope in bf16.
_PACKED = 656
# What layers of one group have in common: window, chunks, a state; None keeps nothing.
_Kind = tuple[int | None, bool, bool] | None


def share(profile: Profile) -> float:
    """The fraction of a device's total that it may take."""
    return fraction(profile.arguments.get("gpu-memory-utilization")) or DEFAULT_SHARE


def cache_width(profile: Profile) -> float:
    """Bytes of one number in the cache; C{auto} is the weights' number format, which quantization of the cache only lessens."""
    kind = str(profile.arguments.get("kv-cache-dtype", "auto"))
    if "fp8" in kind or "int8" in kind:
        return 1.0
    if "fp4" in kind:
        return 0.5625
    wanted = str(profile.arguments.get("dtype", "auto"))
    return float(_WIDTHS.get(wanted, 2))


def estimate(profile: Profile, files: WeightFiles | None) -> Estimate:
    """One request of the whole context on each rank, in vLLM's order of ranks: data, pipeline, tensor."""
    found = _on_host(profile, files) if profile.resources.devices == 0 else _on_devices(profile, files)
    if files is None or not files.found:
        return found
    kept, rank = whole(profile.arguments.get("max-loras")) or lora.room(profile), lora.rank_told(profile, files)
    found = with_adapters(found, adapters(profile, files, kept, lora.fitting(rank) or rank))
    return with_unseen(found, drafts(profile))


def host_cache(profile: Profile, files: WeightFiles | None) -> int | None:
    """Bytes of each rank's cache on a processor; None where it follows from a fraction of the host's memory, or is no number."""
    space, said = profile.environment.get(SPACE), whole(profile.arguments.get("kv-cache-memory-bytes"))
    if space:
        return int(space) * 2**30 if space.isdecimal() else None
    if said is not None or "gpu-memory-utilization" in profile.arguments:
        return said
    return max(DEFAULT_SPACE, -(-(request_cache(profile, files) or 0) // 2**30)) * 2**30


def request_cache(profile: Profile, files: WeightFiles | None) -> int | None:
    """What one request of the whole context takes on the rank that keeps most; None while a part is unknown."""
    caches = [rank.cache for rank in _on_devices(evolve(profile, arguments=_unsized(profile)), files).ranks]
    return max((one for one in caches if one is not None), default=None) if None not in caches else None


def _unsized(profile: Profile) -> Mapping[str, Argument]:
    return {name: value for name, value in profile.arguments.items() if name != "kv-cache-memory-bytes"}


def _on_host(profile: Profile, files: WeightFiles | None) -> Estimate:
    """One node's ranks together."""
    found, cache = _on_devices(profile, files), host_cache(profile, files)
    ranks = found.ranks[: len(found.ranks) // profile.parallel.nodes or 1]
    weights = [rank.weights for rank in ranks if rank.weights is not None]
    host = RankMemory(
        sum(weights) if len(weights) == len(ranks) else None,
        None if cache is None else cache * len(ranks),
        HOST_OVERHEAD * (1 + len(ranks)),
    )
    return evolve(found, ranks=(), host=host, share=1.0, elastic=False)


def _on_devices(profile: Profile, files: WeightFiles | None) -> Estimate:
    parallel, layers, context = profile.parallel, layers_of(files), context_of(profile, files)
    weights = stage_weights(files, parallel, *_scales(profile, files)) if files is not None and files.found else None
    fixed, away = (
        whole(profile.arguments.get("kv-cache-memory-bytes")),
        int((whole(profile.arguments.get("cpu-offload-gb")) or 0) * 2**30),
    )
    cut = _grouped(stages(_packed(_unified(layers, profile), profile), parallel.pipeline)) if layers is not None else None
    pages = _pages(profile)
    ranks = []
    for stage in range(parallel.pipeline):
        cache = bytes_of(cut[stage], _tokens(profile, context), pages) if cut is not None and context is not None else None
        rank = RankMemory(max(0, weights[stage] - away) if weights else None, cache if fixed is None else fixed, OVERHEAD)
        ranks += [rank] * parallel.tensor
    token = None
    if cut is not None and context is not None:
        more = (bytes_of(one, context + BLOCK, pages) - bytes_of(one, context, pages) for one in cut)
        token = max(more) // BLOCK
    return Estimate(
        ranks=tuple(ranks) * parallel.data,
        context=context,
        per_token=token,
        share=share(profile) if fixed is None else 1.0,
        elastic=fixed is None,
        unknown=unknown(files, layers, context),
    )


def _scales(profile: Profile, files: WeightFiles | None) -> tuple[float, float]:
    """Bytes in memory for a byte on disk: of what stands in layers, and of everything."""
    config = text_config(files)
    if config.get("quantization_config") or (files is not None and files.config.get("quantization_config")):
        return 1.0, 1.0
    stored, wanted = number_format(config), str(profile.arguments.get("dtype", "auto"))
    # With auto vLLM takes float32 weights as half.
    every = 0.5 if stored == "float32" and wanted not in _WIDTHS else 2.0 if wanted in _WIDTHS and stored.endswith("16") else 1.0
    return QUANTIZED.get(str(profile.arguments.get("quantization")), 1.0), every


def _tokens(profile: Profile, context: int) -> int:
    """Decode context parallelism divides the tokens of a request over ranks."""
    ranks = whole(profile.arguments.get("decode-context-parallel-size")) or 1
    return -(-context // max(1, ranks))


def _pages(profile: Profile) -> Pages:
    width = cache_width(profile)
    batch = whole(profile.arguments.get("max-num-batched-tokens")) or BATCHED

    def held(layer: LayerCache, tokens: int) -> int:
        kept = tokens
        if layer.window is not None:
            kept = min(tokens, layer.window + batch - (not layer.chunked))
        return (-(-kept // BLOCK) + (layer.window is not None and not layer.chunked)) * BLOCK

    return Pages(held, key=width, value=width, tensor=profile.parallel.tensor)


def _packed(layers: Sequence[LayerCache], profile: Profile) -> Sequence[LayerCache]:
    """C{fp8_ds_mla} packs a latent into bytes of its own."""
    if str(profile.arguments.get("kv-cache-dtype")) != "fp8_ds_mla":
        return layers
    return [LayerCache(extra=_PACKED + layer.extra) if layer.heads is None and layer.key else layer for layer in layers]


def _unified(layers: Sequence[LayerCache], profile: Profile) -> Sequence[LayerCache]:
    """Without its hybrid manager vLLM keeps every token, also where a layer looks back on few."""
    if not profile.arguments.get("disable-hybrid-kv-cache-manager"):
        return layers
    return [evolve(layer, window=None, chunked=False) for layer in layers]


def _kind(layer: LayerCache) -> _Kind:
    return (layer.window, layer.chunked, layer.state > 0) if layer != LayerCache() else None


def _grouped(cut: Sequence[Sequence[LayerCache]]) -> Sequence[Sequence[LayerCache]]:
    """Each stage's layers, and as many more as its groups lack.

    vLLM gives out blocks of one size, each for a whole group of layers. A group has as many layers as the kind that has fewest,
    or as the one that has most where that is less than half as many again (C{_get_kv_cache_groups_uniform_page_size}); a kind's
    layers are dealt out evenly, and every group of a stage costs what its largest does (C{_max_memory_usage_bytes_from_groups}).
    Gemma 3's 10 full layers and 52 with a window are 7 groups of 10, so that it takes what 60 with a window would.
    """
    kinds: dict[_Kind, list[LayerCache]] = {}
    for layer in (layer for stage in cut for layer in stage if _kind(layer)):
        kinds.setdefault(_kind(layer), []).append(layer)
    if len(kinds) < 2:
        return cut
    least, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most < least * 1.5 else least
    groups = {kind: (-(-len(layers) // size), layers[0]) for kind, layers in kinds.items()}
    return [_filled(stage, groups) for stage in cut]


def _filled(stage: Sequence[LayerCache], groups: Mapping[_Kind, tuple[int, LayerCache]]) -> Sequence[LayerCache]:
    own = Counter(map(_kind, stage))
    size = max(-(-own[kind] // count) for kind, (count, _) in groups.items())
    return [*stage, *(layer for kind, (count, layer) in groups.items() for _ in range(size * count - own[kind]))]
