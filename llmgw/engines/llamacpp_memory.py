"""What llama.cpp takes of devices and of the host, by its own accounting.

A layer goes with its weights and its part of the cache to a device or stays on the host: with C{n-gpu-layers} N the output and
the last N - 1 layers go (N counts the output), the input embedding never does. Layers are dealt to devices evenly. The cache
is allocated whole at the start: every slot's whole context, or for layers with a window C{window + ubatch} tokens a slot
(C{llama_kv_cache_iswa}). Unlike vLLM it takes no more when there is more, except without C{context}: then it lowers the model's
own until the devices hold it, but not below 4096 tokens (C{--fit}).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

from llmgw.engines.beside import files_named, with_unseen
from llmgw.engines.cache import LayerCache, Pages, bytes_of
from llmgw.engines.estimates import layers_of, unknown
from llmgw.engines.launch import whole
from llmgw.engines.memory import number, shape
from llmgw.fleet.estimate import Estimate, RankMemory
from llmgw.fleet.model import Profile
from llmgw.fleet.shard import WeightFiles

SLOTS = 4
# Beside weights and cache: compute buffers and the program itself.
OVERHEAD = 256 * 2**20
# A device's own: CUDA's context and library beside the compute buffers.
DEVICE_OVERHEAD = 512 * 2**20
UBATCH, PADDING = 512, 256
FIT_LEAST = 4096
# Options with a file that it loads beside the model: a projector of images, a draft model, adapters.
BESIDE = (
    *("mmproj", "mm", "mmproj-url", "mmu", "spec-draft-model", "model-draft", "md", "spec-draft-hf", "hf-repo-draft", "hfd"),
    *("lora", "lora-scaled", "control-vector", "control-vector-scaled", "model-vocoder", "mv"),
)
# Bytes of one number by ggml's block formats.
WIDTHS = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}  # fmt: skip


def slots(profile: Profile) -> int:
    """How many requests it runs at once."""
    wanted = whole(profile.arguments.get("parallel")) or 0
    return wanted if wanted > 0 else SLOTS


def unified(profile: Profile) -> bool:
    """Whether all slots share one context."""
    return profile.arguments.get("kv-unified") is True or (profile.context is None and "kv-unified" not in profile.arguments)


def context_size(profile: Profile) -> int:
    """What C{--ctx-size} gets: tokens over all slots; 0 is the model's own."""
    return (profile.context or 0) * (1 if unified(profile) else slots(profile))


def device_count(profile: Profile) -> int:
    """How many devices one replica takes: none unless asked for."""
    world, devices = profile.parallel.world, profile.resources.devices
    return devices if devices is not None else world if world > 1 else 0


@frozen
class _Split:
    """Bytes of weights by where they can go: C{layers} one by one, C{output}, and C{embedding}, which stays on the host.

    @ivar tied: the output is the embedding again, so it takes room only where it is copied to a device.
    """

    layers: tuple[int, ...]
    output: int = 0
    embedding: int = 0
    tied: bool = False


def estimate(profile: Profile, files: WeightFiles | None) -> Estimate:
    """Rank by rank is device by device here; what stays on the host is the host's."""
    layers, devices, fits = layers_of(files), device_count(profile), _fits_itself(profile)
    context = profile.context or shape(files).context
    context = min(context, FIT_LEAST) if fits and context else context
    sequences = 1 if unified(profile) else slots(profile)
    weights = _split(files)
    count = len(layers) if layers is not None else len(weights.layers) if weights else 0
    first = count + 1 - _offloaded(profile, count) if devices else count + 1
    dealt = _deal(range(first, count + 1), devices)
    pages, tokens = _pages(profile), context

    def part(ids: Sequence[int], overhead: int, host: bool) -> RankMemory:
        held = None if layers is None or tokens is None else bytes_of([layers[i] for i in ids if i < count], tokens, pages)
        size = None if weights is None else _bytes(weights, ids, host)
        return RankMemory(size, None if held is None else held * sequences, overhead)

    logits = 4 * UBATCH * (number(files.gguf, f"{files.gguf.get('general.architecture')}.vocab_size") or 0) if files else 0
    kept = part(range(first), OVERHEAD + (0 if devices else logits), host=True)
    ranks = tuple(part(ids, DEVICE_OVERHEAD + logits, host=False) for ids in dealt)
    token = None
    if layers is not None and context is not None:
        fullest = [[layers[i] for i in ids if i < count] for ids in dealt or [range(count)]]
        more = (bytes_of(ids, context + PADDING, pages) - bytes_of(ids, context, pages) for ids in fullest)
        token = max(more) * sequences // PADDING
    found = Estimate(ranks, kept, context, sequences, token, elastic=fits, unknown=unknown(files, layers, context))
    return with_unseen(found, files_named(profile, *BESIDE)) if files is not None and files.found else found


def _fits_itself(profile: Profile) -> bool:
    """Whether it chooses its context by what the devices have free; on shared ones it would take what others were promised."""
    chosen = profile.context is None and profile.arguments.get("fit", "on") not in ("off", False)
    return chosen and device_count(profile) > 0 and not profile.resources.share


def _deal(ids: range, devices: int) -> list[range]:
    """Even parts, the larger ones first, as llama.cpp cuts a window of layers by equal fractions (C{load_tensors})."""
    cuts = [-(-len(ids) * part // devices) for part in range(devices + 1)] if devices else []
    return [ids[start:end] for start, end in pairwise(cuts)]


def _split(files: WeightFiles | None) -> _Split | None:
    """Where single tensors' sizes are not known, all of it counts as layers."""
    if files is None or not files.found or files.bytes is None:
        return None
    parts = files.tensors
    if parts is not None and parts.layers:
        return _Split(parts.layers, (parts.output or parts.embedding) + parts.other, parts.embedding, tied=not parts.output)
    count = shape(files).layers or 1
    each = files.bytes // count
    return _Split((files.bytes - each * (count - 1), *[each] * (count - 1)))


def _bytes(weights: _Split, ids: Sequence[int], host: bool) -> int:
    count = len(weights.layers)
    found = sum(weights.layers[i] for i in ids if i < count) + (weights.embedding if host else 0)
    if count in ids:
        found += weights.output - (weights.embedding if host and weights.tied else 0)
    return found


def _offloaded(profile: Profile, layers: int) -> int:
    """How many of the layers and the output go to devices: all, unless the profile says how many."""
    named = whole(profile.arguments.get("n-gpu-layers", profile.arguments.get("gpu-layers")))
    return layers + 1 if named is None or named < 0 else min(named, layers + 1)


def _pages(profile: Profile) -> Pages:
    batch = whole(profile.arguments.get("ubatch-size")) or 0
    ubatch = batch if batch > 0 else UBATCH
    in_full = profile.arguments.get("swa-full") is True
    at_once = slots(profile) if unified(profile) else 1

    def held(layer: LayerCache, tokens: int) -> int:
        kept = tokens if layer.window is None or in_full else min(tokens, layer.window * at_once + ubatch)
        return -(-kept // PADDING) * PADDING

    key, value = (WIDTHS.get(str(profile.arguments.get(f"cache-type-{which}", "f16")), 2.0) for which in "kv")
    return Pages(held, key, value)
