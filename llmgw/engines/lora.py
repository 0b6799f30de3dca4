"""LoRA adapters beside a base model: where they are on the node, and whether the engine takes them.

An adapter is a folder with adapter_config.json (PEFT's), whose C{r} is its rank. What the agent found of each stands in
C{WeightFiles.loras}, in the order of the profile's C{loras}.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from llmgw.engines.case import Case
from llmgw.engines.memory import number
from llmgw.errors import Problem
from llmgw.fleet.model import Profile
from llmgw.fleet.shard import WeightFiles

# What vLLM's --max-lora-rank takes, and its default.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 16


@frozen
class Loras:
    """Names with their paths, and the highest rank among them, None where nobody knows."""

    paths: tuple[tuple[str, str], ...]
    rank: int | None


def paired(profile: Profile, files: WeightFiles | None) -> Loras:
    """The profile's adapters by what was found of them; by their own words where nobody has looked."""
    seen = files.loras if files is not None else ()
    paths, ranks = [], []
    for index, one in enumerate(profile.loras):
        there = seen[index] if index < len(seen) else None
        paths.append((one.name, there.path if there is not None and there.found else one.weights.removeprefix("hf:")))
        ranks.append(number(there.config, "r") if there is not None else None)
    known = [rank for rank in ranks if rank is not None]
    return Loras(tuple(paths), max(known) if known else None)


def fitting(rank: int | None) -> int | None:
    """The least rank that vLLM can be told and that holds this one; None for its default."""
    if rank is None or rank <= DEFAULT_RANK:
        return None
    return next((one for one in RANKS if one >= rank), rank)


def problems(case: Case, most: str = "max-lora-rank", highest: int | None = RANKS[-1]) -> Iterator[Problem]:
    """V28: the adapter is there, is one, and is no larger than the engine was told.

    @param most: the argument that bounds ranks; C{highest} what that can be at most.
    """
    seen = case.files.loras if case.files is not None else ()
    for one, there in zip(case.profile.loras, seen, strict=False):
        if not there.found:
            looked = f" (looked at {', '.join(there.looked)})" if there.looked else ""
            yield Problem(there.problem or f"adapter {one.name}: {one.weights} is not on the node{looked}", "loras", "lora")
            continue
        rank, allowed = number(there.config, "r"), case.argument(most)
        if "peft_type" not in there.config and rank is None:
            text = f"adapter {one.name}: {there.path} has no adapter_config.json: name the adapter's folder"
            yield Problem(text, "loras", "lora")
        elif rank is not None and allowed is not None and rank > allowed:
            text = f"adapter {one.name} has rank {rank}, {most} is {allowed}: raise it or leave it out"
            yield Problem(text, f"arguments.{most}", "lora_rank")
        elif rank is not None and highest is not None and rank > highest:
            yield Problem(f"adapter {one.name} has rank {rank}, {case.engine} takes at most {highest}", "loras", "lora_rank")
    yield from _counts(case)


def _counts(case: Case) -> Iterator[Problem]:
    count, kept = len(case.profile.loras), case.argument("max-cpu-loras")
    if kept is not None and count > kept:
        text = f"{count} adapters are more than max-cpu-loras {kept}: raise it or leave it out"
        yield Problem(text, "arguments.max-cpu-loras", "lora_count")


def base_differs(case: Case) -> Iterator[Problem]:
    """A warning: an adapter made for another base model loads and then answers nonsense, or not at all."""
    base = (case.profile.weights or "").removeprefix("hf:").partition("@")[0].rstrip("/").rpartition("/")[2].lower()
    seen = case.files.loras if case.files is not None else ()
    for one, there in zip(case.profile.loras, seen, strict=False):
        said = there.config.get("base_model_name_or_path")
        if isinstance(said, str) and said and base and said.rstrip("/").rpartition("/")[2].lower() != base:
            yield Problem(f"adapter {one.name} was made for {said}, not for {case.profile.weights}", "loras", "lora_base")
