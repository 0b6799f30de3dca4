"""The memory of one replica, part by part: what all engines' reckonings share.

Sources of the formulas: vLLM 0.33's C{get_pp_indices}, C{FusedMoEParallelConfig} and C{kv_cache_interface}; the safetensors
format (sizes by header). A model's weights over ranks take 3 % more than their share for what is repeated on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from attrs import evolve

from llmgw.engines.cache import LayerCache, config_layers, gguf_layers
from llmgw.engines.memory import shape, text_config
from llmgw.fleet.estimate import Estimate, largest_context
from llmgw.fleet.model import Parallel, Profile
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import IMemoryEstimator

SPREAD = 1.03
T = TypeVar("T")


def layers_of(files: WeightFiles | None) -> tuple[LayerCache, ...] | None:
    """What each layer keeps, None where the files do not tell or nobody has looked."""
    if files is None or not files.found:
        return None
    return gguf_layers(files.gguf) if files.gguf else config_layers(text_config(files))


def context_of(profile: Profile, files: WeightFiles | None) -> int | None:
    """Tokens of one request: what is asked for, else what the model was made for."""
    return profile.context or shape(files).context


def unknown(files: WeightFiles | None, layers: object, context: int | None) -> tuple[str, ...]:
    """What keeps a part unknown, in words."""
    if files is None or not files.found:
        return ("the weights: no node is known to have them",)
    said = []
    if files.bytes is None:
        said.append(f"the weights' size: {files.problem or 'no tensor files were found'}")
    if layers is None:
        said.append("the KV cache: the model's files do not tell its layers, heads or states")
    if context is None:
        said.append("the context: the model's files do not tell, set `context`")
    return tuple(said)


def stages(layers: Sequence[T], count: int) -> list[Sequence[T]]:
    """The layers of each pipeline stage as vLLM cuts them: what is left over goes to the stages before the last, backwards."""
    sizes = [len(layers) // count] * count
    for index in range(2, len(layers) % count + 2):
        sizes[-index] += 1
    cuts = [sum(sizes[:index]) for index in range(count + 1)]
    return [layers[start:end] for start, end in pairwise(cuts)]


def stage_weights(files: WeightFiles, parallel: Parallel, linear: float = 1.0, every: float = 1.0) -> list[int] | None:
    """Bytes of weights on each rank of each pipeline stage; None where the size is not known.

    A layer's own part is divided over C{tensor}, its experts over C{tensor * data}; the input embedding stands on the first
    stage, the head on the last, where a tied embedding is repeated.

    @param linear: bytes in memory for a byte on disk of what stands in layers (quantized while it is loaded).
    @param every: the same of everything (another number format).
    """
    if files.bytes is None:
        return None
    tensor, count = parallel.tensor, parallel.pipeline
    spread = SPREAD if parallel.world > 1 else 1.0
    parts = files.tensors
    if parts is None or not parts.layers:
        # Without the sizes of single tensors experts cannot be told from the rest.
        ranks = tensor * count * (parallel.data if parallel.expert else 1)
        return [int(files.bytes * every / ranks * spread)] * count
    experts = parts.experts or (0,) * len(parts.layers)
    each = [(whole - moe) / tensor + moe / (tensor * parallel.data) for whole, moe in zip(parts.layers, experts, strict=True)]
    sums = [sum(stage) * linear for stage in stages(each, count)]
    sums[0] += (parts.embedding + parts.other) / tensor
    sums[-1] += (parts.output or (parts.embedding if count > 1 else 0)) / tensor
    return [int(total * every * spread) for total in sums]


def context_that_fits(profile: Profile, files: WeightFiles | None, estimator: IMemoryEstimator, memory: int) -> int | None:
    """The largest context with which no rank needs more than C{memory} bytes; 0 if none, None while it is not known.

    @param memory: what the engine may take of the device, by its own way of accounting (see L{Estimate.share}).
    """
    most = shape(files).context or profile.context
    first: Estimate = estimator.estimate(profile, files)
    if most is None or (first.need if first.ranks else first.host and first.host.total) is None:
        return None

    def fits(context: int) -> bool:
        found: Estimate = estimator.estimate(evolve(profile, context=context), files)
        need = found.need if found.ranks else found.host.total if found.host else None
        return need is not None and need <= memory

    return largest_context(fits, most)


def number_format(config: Mapping[str, object]) -> str:
    """C{bfloat16}, C{float16}, C{float32}: what the weights are stored as by their own word; empty where it is not said."""
    said = config.get("dtype") or config.get("torch_dtype")
    return said.removeprefix("torch.") if isinstance(said, str) else ""
