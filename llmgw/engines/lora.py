"""LoRA adapters beside a base model: where they are on the node, and whether the engine takes them.

An adapter is a folder with adapter_config.json (PEFT's), whose C{r} is its rank. What the agent found of each stands in
C{WeightFiles.loras}, in the order of the profile's C{loras}. An engine that takes adapters while it runs is started with none, so
that a bad one never keeps its base model from serving; the agent loads them one by one (see L{llmgw.agent.loras}).
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve, frozen

from llmgw.engines.case import Case
from llmgw.engines.launch import whole
from llmgw.engines.memory import number
from llmgw.errors import Problem
from llmgw.fleet.model import Lora, Profile
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import LoraDoor

# What vLLM's --max-lora-rank takes, and its default.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 16
# An engine that is started with adapters, or for them, has room for so many: another one comes without a restart.
ROOM = 4
_ENABLE = "enable-lora"
UNPREPARED = "it was started without adapters (`arguments: {enable-lora: true}` prepares an engine for them)"


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
    known = [rank for rank in ranks if rank is not None and rank <= RANKS[-1]]
    return Loras(tuple(paths), max(known) if known else None)


def enabled(profile: Profile) -> bool:
    """Whether an engine of this profile is started for adapters."""
    return bool(profile.loras) or profile.arguments.get(_ENABLE) is True


def room(profile: Profile) -> int:
    """How many vLLM is started for where C{max-loras} does not say."""
    kept = whole(profile.arguments.get("max-cpu-loras"))
    return max(min(ROOM, kept or ROOM), len(profile.loras))


def rank_told(profile: Profile, files: WeightFiles | None) -> int | None:
    """The highest rank that an engine is started for; None while nobody knows that of the profile's adapters."""
    said, found = whole(profile.arguments.get("max-lora-rank")), paired(profile, files).rank
    if said is not None or (profile.loras and found is None):
        return said
    return max(DEFAULT_RANK, found or 0)


def switch(profile: Profile) -> list[str]:
    """The option that has it take adapters, unless the arguments have it."""
    return [] if _ENABLE in profile.arguments else [f"--{_ENABLE}"]


def without_switch(profile: Profile) -> Profile:
    """The profile without C{enable-lora: true}, which may stand there by itself; any other value may not."""
    return evolve(profile, arguments={n: v for n, v in profile.arguments.items() if n != _ENABLE or v is not True})


def refused(one: Lora, there: WeightFiles, door: LoraDoor, profile: Profile, count: int) -> tuple[str, bool]:
    """Why a running engine cannot take an adapter, empty if it may; and whether one that is started anew could.

    @param count: how many it has.
    """
    if fault := _fault(one, there):
        return fault, False
    rank = number(there.config, "r") or 0
    if door.highest is not None and rank > door.highest:
        return f"adapter {one.name} has rank {rank}, its engine takes at most {door.highest}", False
    for most, has, name, what in (
        (door.rank, rank, "max-lora-rank", f"adapter {one.name} has rank {rank}, its engine was started for at most"),
        (door.most, count + 1, "max-loaded-loras", f"adapter {one.name} is one too many: its engine was started for"),
    ):
        if most is not None and has > most:
            given = name in profile.arguments
            return f"{what} {most}" + (f" (raise arguments.{name})" if given else ""), not given
    return "", False


def fitting(rank: int | None) -> int | None:
    """The least rank that vLLM can be told and that holds this one; None for its default."""
    if rank is None or rank <= DEFAULT_RANK:
        return None
    return next((one for one in RANKS if one >= rank), rank)


def _fault(one: Lora, there: WeightFiles) -> str:
    if not there.found:
        looked = f" (looked at {', '.join(there.looked)})" if there.looked else ""
        return f"adapter {one.name}: {there.problem or f'{one.weights} is not on the node{looked}'}"
    if there.problem:
        return f"adapter {one.name}: {there.problem}"
    if "peft_type" not in there.config and number(there.config, "r") is None:
        return f"adapter {one.name}: {there.path} has no adapter_config.json: name the adapter's folder"
    return ""


def problems(case: Case, later: bool, most: str = "max-lora-rank", highest: int | None = RANKS[-1]) -> Iterator[Problem]:
    """V28: the adapter is there, is one, and is no larger than the engine was told.

    @param later: they are loaded when the engine runs, so that none of them keeps it from being started.
    @param most: the argument that bounds ranks; C{highest} what that can be at most.
    """
    yield from _counts(case)
    if later:
        return
    seen = case.files.loras if case.files is not None else ()
    for one, there in zip(case.profile.loras, seen, strict=False):
        rank, allowed = number(there.config, "r"), case.argument(most)
        if fault := _fault(one, there):
            yield Problem(fault, "loras", "lora")
        elif rank is not None and allowed is not None and rank > allowed:
            text = f"adapter {one.name} has rank {rank}, {most} is {allowed}: raise it or leave it out"
            yield Problem(text, f"arguments.{most}", "lora_rank")
        elif rank is not None and highest is not None and rank > highest:
            yield Problem(f"adapter {one.name} has rank {rank}, {case.engine} takes at most {highest}", "loras", "lora_rank")


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
