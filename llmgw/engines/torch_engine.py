"""What vLLM, SGLang and TensorRT-LLM have in common for being programs over PyTorch: what they need, and how they are asked.

One rank on each device; memory by an estimate of weights and cache, of which they may take a part of what is free. They print
milestones while they load and fail with each other's libraries' words. With their files on disk they would still ask the hub at
each start, and fail when that refuses; so they are told to be offline.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from llmgw.engines import failures
from llmgw.engines.case import Case
from llmgw.engines.failures import Failure
from llmgw.errors import Problem
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Installation, NodeFacts
from llmgw.fleet.shard import Allocation, Diagnosis, ShardExit, WeightFiles
from llmgw.interfaces import Flags, Needs, Phase

Milestones = tuple[tuple[re.Pattern[str], str, float | None], ...]
CaseChecks = tuple[Callable[[Case], list[Problem]], ...]

# The most of a device's memory that an engine is told to take.
MOST = 0.95

_ADAPTER = "/load_lora_adapter HTTP/"
_FILES = re.compile(r"Loading .*checkpoint shards: +(\d+)%")
_WEIGHTS_FROM, _WEIGHTS_TO = 0.05, 0.6


class TorchEngine(ABC):
    """The part of an adapter that is the same for all of them.

    @cvar title: how sentences call the engine.
    @cvar refusals: what would make it refuse a profile; C{doubts}: what it would take, but should not.
    @cvar milestones: lines of its log, and what they say about its start.
    @cvar known: its table of failures; C{guessed}: what to say where none of them fits.
    """

    title: ClassVar[str]
    refusals: ClassVar[CaseChecks]
    doubts: ClassVar[CaseChecks]
    milestones: ClassVar[Milestones]
    known: ClassVar[tuple[Failure, ...]]
    guessed: ClassVar[tuple[Failure, ...]]

    @abstractmethod
    def estimate(self, profile: Profile, files: WeightFiles | None) -> Estimate:
        """What one replica takes, by the engine's own accounting."""

    def ports(self, profile: Profile) -> int:
        """How many ports in a row it wants."""
        return 1

    def needs(self, profile: Profile, files: WeightFiles | None) -> Needs:
        """One device for each rank on the node; memory from the weights and one context where they are known."""
        parallel, resources = profile.parallel, profile.resources
        devices = -(-parallel.world // parallel.nodes) if resources.devices is None else resources.devices
        memory, found = resources.device_memory, self.estimate(profile, files)
        if memory is None and devices and found.need is not None:
            # It may take only a part of what is free, so more must be free than it takes.
            memory = found.need if resources.share else math.ceil(found.need / found.share)
        fixed = not found.elastic and resources.device_memory is None
        held = found.host.known if found.host and found.host.weights is not None else 0
        host = held if resources.host_memory is None else resources.host_memory
        return Needs(devices, memory, host, self.ports(profile), found.context, fixed)

    def problems(
        self,
        profile: Profile,
        files: WeightFiles | None,
        node: NodeFacts | None,
        installation: Installation | None,
        flags: Flags,
    ) -> list[Problem]:
        """By its checks."""
        case = Case(profile, files, node, installation, flags, self.title)
        return [problem for check in self.refusals for problem in check(case)]

    def warnings(
        self,
        profile: Profile,
        files: WeightFiles | None,
        node: NodeFacts | None,
        installation: Installation | None,
        flags: Flags,
    ) -> list[Problem]:
        """By its checks."""
        case = Case(profile, files, node, installation, flags, self.title)
        return [problem for check in self.doubts for problem in check(case)]

    def phase(self, line: str) -> Phase | None:
        """The milestones of its log, and how many files of the weights are read."""
        if (files := _FILES.findall(line)) and (done := int(files[-1])) <= 100:
            return Phase("weights", round(_WEIGHTS_FROM + done / 100 * (_WEIGHTS_TO - _WEIGHTS_FROM), 3))
        return next((Phase(name, progress) for pattern, name, progress in self.milestones if pattern.search(line)), None)

    def diagnose(self, exit: ShardExit, tail: Sequence[str]) -> Diagnosis:
        """By its table of failures. What stands before an answer about an adapter was not its end: it lived to give it."""
        since = max((number + 1 for number, line in enumerate(tail) if _ADAPTER in line), default=0)
        return failures.diagnosis(self.title, self.known, exit, tail[since:], self.guessed)


def weights_words(profile: Profile, files: WeightFiles | None) -> list[str]:
    """The weights in argv: their folder where they are on disk, else the name on the hub and its revision."""
    if files is not None and files.found:
        return [files.path]
    name, _, revision = (profile.weights or "").removeprefix("hf:").partition("@")
    return [name, *(["--revision", revision] if revision else [])]


def told_share(share: float) -> float:
    """A part of a device's memory as an engine is told it: thousandths, rounded down, and never all of it."""
    return max(0.01, int(min(share, MOST) * 1000) / 1000)


def torch_defaults(files: WeightFiles | None, allocation: Allocation, **own: str) -> Mapping[str, str]:
    """The environment that all of them are better off with; C{own} is what this engine wants beside it."""
    found = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **own}
    if files is not None and files.found:
        found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if allocation.nodes > 1 and allocation.interface:
        found |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), allocation.interface)
    return found
