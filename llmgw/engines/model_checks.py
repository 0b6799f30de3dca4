"""Checks of a profile against its model's figures, for all engines of the vLLM kind: each with its numbers and a way out.

These engines cut a model alike, so they refuse alike, a quarter of a minute or more after their start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from llmgw.engines.case import Case, divisors
from llmgw.engines.launch import fraction
from llmgw.engines.memory import number, text_config
from llmgw.errors import Problem


def heads(case: Case) -> Iterator[Problem]:
    """Attention heads are divided over C{tensor}."""
    count, tensor = case.shape.heads, case.profile.parallel.tensor
    if count and count % tensor:
        text = f"tensor {tensor} does not divide the model's {count} attention heads; use one of {divisors(count)}"
        yield Problem(text, "parallel.tensor", "heads_not_divisible")


def kv_heads(case: Case) -> Iterator[Problem]:
    """Key-value heads are divided, or repeated where there are more ranks."""
    count, kv, tensor = case.shape.heads, case.shape.kv_heads, case.profile.parallel.tensor
    if not kv or case.shape.latent is not None or (count and count % tensor):
        return
    if tensor % kv if tensor > kv else kv % tensor:
        text = f"tensor {tensor} and the model's {kv} key-value heads do not divide each other; use one of {divisors(kv)}"
        yield Problem(text, "parallel.tensor", "kv_heads_not_divisible")


def layers(case: Case) -> Iterator[Problem]:
    """A pipeline stage has at least one layer."""
    count, pipeline = case.shape.layers, case.profile.parallel.pipeline
    if count and pipeline > count:
        yield Problem(f"pipeline {pipeline} is more than the model's {count} layers", "parallel.pipeline", "too_few_layers")


def nodes(case: Case) -> Iterator[Problem]:
    """Every node has equally many ranks."""
    parallel = case.profile.parallel
    if parallel.world % parallel.nodes:
        text = f"{parallel.world} ranks (tensor x pipeline x data) cannot be shared equally by {parallel.nodes} nodes"
        yield Problem(text, "parallel.nodes", "nodes_not_divisible")


def devices(case: Case) -> Iterator[Problem]:
    """One rank on each device."""
    parallel, said = case.profile.parallel, case.profile.resources.devices
    each = -(-parallel.world // parallel.nodes)
    if said is not None and said not in (0, each):
        text = f"devices is {said}, but tensor x pipeline x data puts {each} ranks on each node: leave it out"
        yield Problem(text, "resources.devices", "devices_mismatch")


def experts(case: Case, ranks: int, product: str) -> Iterator[Problem]:
    """With C{expert} whole experts are shared out over C{ranks}, which are C{product}."""
    count = case.shape.experts
    if not case.profile.parallel.expert:
        return
    if case.files is not None and case.files.config and not count:
        yield Problem("the model has no experts: set expert to false", "parallel.expert", "no_experts")
    elif count and count % ranks:
        text = f"{count} experts cannot be shared by {ranks} ranks ({product}); use a product of {divisors(count)}"
        yield Problem(text, "parallel.expert", "experts_not_divisible")


def quantization_blocks(case: Case) -> Iterator[Problem]:
    """A rank's part of a layer is a multiple of the block that has one scale."""
    config = text_config(case.files)
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if not (isinstance(block, list | tuple) and block and isinstance(block[0], int) and block[0] > 0):
        return
    parallel = case.profile.parallel
    for name in ("intermediate_size", "moe_intermediate_size"):
        size = number(config, name)
        # Expert parallelism keeps every expert whole.
        if size and size % (parallel.tensor * block[0]) and not (parallel.expert and name.startswith("moe")):
            instead = " or set parallel.expert" if name.startswith("moe") else ""
            text = (
                f"{name} {size} over tensor {parallel.tensor} is no multiple of the quantization block {block[0]}; "
                f"lower tensor{instead}"
            )
            yield Problem(text, "parallel.tensor", "block_not_divisible")
            return


def context(case: Case, long: str) -> Iterator[Problem]:
    """The model was made for so many tokens.

    @param long: a variable that, set to 1, has the engine take more.
    """
    wanted, most = case.profile.context, case.shape.context
    if wanted and most and wanted > most and case.profile.environment.get(long) != "1":
        text = f"context {wanted} is more than the {most} tokens that the model was made for; lower it, or set rope scaling"
        yield Problem(text, "context", "context_too_long")


def weights_format(case: Case, instead: str = "use engine llamacpp, or the model's safetensors") -> Iterator[Problem]:
    """A folder as Hugging Face lays it out.

    @param instead: what to do about GGUF; empty for an engine that reads it.
    """
    if case.files is None or not case.files.found or case.files.problem:
        return
    if case.files.format == "gguf":
        if instead:
            text = f"{case.files.weights} is GGUF, which {case.engine} does not read; {instead}"
            yield Problem(text, "weights", "weights_format")
    elif not case.files.config:
        yield Problem(f"{case.files.path} has no config.json: is it the model's folder?", "weights", "weights_format")
    elif not case.files.config.get("architectures"):
        yield Problem(f"config.json in {case.files.path} names no architecture", "weights", "weights_format")


def tokenizer(case: Case) -> Iterator[Problem]:
    """V12: texts cannot become tokens without one."""
    elsewhere = ("tokenizer", "tokenizer-path", "skip-tokenizer-init", "skip_tokenizer_init", "tokenizer_path")
    if case.files is not None and case.files.tokenizer is False and not any(map(case.profile.arguments.get, elsewhere)):
        text = (
            f"{case.files.path} has no tokenizer (tokenizer.json, tokenizer.model, ...): fetch the whole model again, or name one"
        )
        yield Problem(f"{text} with the argument tokenizer", "weights", "tokenizer_missing")


def quantization(case: Case, known: Collection[str], same: str = "quantization") -> Iterator[Problem]:
    """A method that this version knows, and for weights that are quantized already no other one.

    @param known: the methods of the version that was read; empty where nobody knows them.
    @param same: the argument's name.
    """
    asked = case.profile.arguments.get(same)
    if not isinstance(asked, str):
        return
    if known and asked.lower().replace("-", "_") not in {name.replace("-", "_") for name in known}:
        text = f"{case.named} knows no quantization {asked}; it has {', '.join(sorted(known))}"
        yield Problem(text, f"arguments.{same}", "quantization_unknown")
    elif case.quantization and family(asked) != family(case.quantization):
        text = f"quantization {asked} differs from the weights' own {case.quantization}: leave it out"
        yield Problem(text, f"arguments.{same}", "quantization_mismatch")


def family(method: str) -> str:
    """C{awq} for C{awq_marlin} and C{auto_awq}: other kernels for the same weights."""
    return method.lower().replace("-", "_").removeprefix("auto_").removeprefix("gpt_oss_").removesuffix("_marlin")


def kv_heads_repeated(case: Case) -> Iterator[Problem]:
    """A warning: more ranks than key-value heads save no cache."""
    parallel, kv = case.profile.parallel, case.shape.kv_heads
    if kv and parallel.tensor > kv and case.shape.latent is None:
        times = parallel.tensor // kv
        text = f"tensor {parallel.tensor} is more than the model's {kv} key-value heads: each is kept {times} times"
        yield Problem(text, "parallel.tensor", "kv_heads_repeated")


def memory_share(case: Case, name: str, value: object, where: str, all_of_it: bool = False) -> Iterator[Problem]:
    """The part of a device's memory that an engine is told to take: a fraction, and said in one place only.

    @param value: what stands at C{where} for C{name}, None if nothing does.
    @param all_of_it: whether 1 is one.
    """
    if value is None:
        return
    if (share := fraction(value)) is None or (share == 1 and not all_of_it):
        kind = "above 0 and at most 1" if all_of_it else "between 0 and 1"
        yield Problem(f"{name} is a fraction {kind}, found {value!r}", where, "argument_value")
    elif case.profile.resources.device_memory is not None or case.profile.resources.share:
        yield Problem(f"`resources` say how much device memory it may take: leave {name} out", where, "reserved_argument")
