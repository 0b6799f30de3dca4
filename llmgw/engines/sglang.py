"""SGLang, by C{sglang serve} as of 0.5.23: on one node, or over several.

The key goes by a configuration file, since SGLang takes it from nowhere else but argv. Everything else stands in argv. The
engine takes one served name; routers translate the others. It picks ports by itself where it is not told, so all of them are
told: HTTP, rendezvous (C{dist-init-addr}, whose next six are used, too), NCCL's and its store's; but not to data parallel
copies. Ranks above 0 answer 200 on their health paths whatever happens, so those are never asked: such a rank is ready when it
has begun, and the head waits for what it loads.

SIGTERM drains without any limit, which the agent's grace ends; ranks above 0 ignore it and end when rank 0 tells them, as it does
at its own end: see L{llmgw.planning.orders}.
C{/health} runs a generation, which a long prefill delays; C{/ready} is a flag, and is asked where the version has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.engines import lora, metrics, sglang_checks
from llmgw.engines.case import version_of
from llmgw.engines.launch import first_question, help_flags, http_url, joined, long_options, option, visible_devices, whole, words
from llmgw.engines.sglang_failures import FAILURES, GUESSES
from llmgw.engines.sglang_memory import OVERHEAD, estimate
from llmgw.engines.torch_engine import Milestones, TorchEngine, told_share, torch_defaults, weights_words
from llmgw.errors import Problem
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Installation
from llmgw.fleet.shard import Allocation, EngineLoad, WeightFiles
from llmgw.interfaces import (
    Flags,
    IEngineAdapter,
    IMemoryEstimator,
    IServedNames,
    LoraDoor,
    SecretFile,
    ShardLaunch,
)

# SGLang reads it only if it is named so.
CONFIG = "sglang.yaml"
# HTTP, rendezvous, 14 behind that (six are used, and one for each data parallel rank by some builds), NCCL.
PORTS = 17
# Behind the rendezvous: where ranks keep what they tell each other.
STORE = 12
_TARGETS = "lora-target-modules"
# What adapters mostly change, and what some do beside.
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BESIDE = frozenset({"embed_tokens", "lm_head"})
_LISTS = frozenset({"forward-hooks", "sidecar-args", "decoupled-spec-connect-endpoints"})

_MILESTONES: Milestones = (
    (re.compile(r"server_args=.*\bnode_rank=[1-9]"), "ready", 1.0),
    (re.compile(r"server_args="), "configured", 0.02),
    (re.compile(r"Load weight begin"), "weights", 0.05),
    (re.compile(r"Load weight end"), "weights", 0.6),
    (re.compile(r"KV Cache .*#tokens: |max_total_num_tokens="), "cache", 0.8),
    (re.compile(r"Capture .*graph.* (?:end|finish)"), "graphs", 0.95),
    (re.compile(r"Capture .*graph.* begin"), "graphs", 0.85),
    (re.compile(r"The server is fired up and ready to roll"), "ready", 1.0),
)
_RUNNING, _WAITING, _KV = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"
_TOKENS = ("sglang:prompt_tokens_total", "sglang:generation_tokens_total")
_RANK = re.compile(r'(?P<name>sglang:\w+)\{[^}]*\b(?:tp|pp|moe_ep)_rank="[1-9]')


@implementer(IPlugin, IEngineAdapter, IMemoryEstimator, IServedNames)
class Sglang(TorchEngine):
    """The C{sglang} engine."""

    name = "sglang"
    default_command: tuple[str, ...] = ("sglang",)
    title = "SGLang"
    refusals = (sglang_checks.problems,)
    doubts = (sglang_checks.warnings,)
    milestones = _MILESTONES
    known, guessed = FAILURES, GUESSES

    def version_argv(self, command: Sequence[str]) -> list[str] | None:
        """C{version}; a command of its own, not an option."""
        return [*command, "version"]

    def version(self, output: str) -> str | None:
        """C{sglang version: 0.5.23}."""
        found = re.findall(r"^sglang version: (\d+\.\d+\S*)\s*$", output, re.MULTILINE)
        return found[-1] if found else None

    def flags_argv(self, command: Sequence[str]) -> list[str] | None:
        """C{serve --help}; it imports torch, so it takes seconds."""
        return [*command, "serve", "--help"]

    def flags(self, output: str) -> Flags:
        """What the help shows."""
        return help_flags(output)

    def estimate(self, profile: Profile, files: WeightFiles | None) -> Estimate:
        """See L{llmgw.engines.sglang_memory}."""
        return estimate(profile, files)

    def ports(self, profile: Profile) -> int:
        """All that it would pick by itself."""
        return PORTS

    def name_problems(self, served: Sequence[str]) -> list[Problem]:
        """V27: a colon separates a LoRA adapter's name to SGLang."""
        return [
            Problem(f"SGLang cannot serve under {name}: no ':' may stand in the model's name; rename it", "name", "served_name")
            for name in served[:1]
            if ":" in name
        ]

    def launch(
        self,
        profile: Profile,
        allocation: Allocation,
        installation: Installation,
        files: WeightFiles | None,
        served: Sequence[str],
        key: str,
    ) -> ShardLaunch:
        """One rank's process; rank 0 serves."""
        serves, port = allocation.rank == 0, allocation.ports[0]
        own = [*weights_words(profile, files), "--config", f"{{secret:{CONFIG}}}"]
        own += ["--host", allocation.address, "--port", str(port), *option("--served-model-name", *served[:1])]
        own += _parallel(profile, allocation)
        if (share := memory_fraction(profile, allocation)) is not None:
            own += ["--mem-fraction-static", f"{share:.3f}"]
        if profile.context is not None:
            own += ["--context-length", str(profile.context)]
        own += _loras(profile, files)
        # Its metrics and health are asked for every few seconds; nobody wants to read that.
        own += ["--uvicorn-access-log-exclude-prefixes", "/metrics", "/health", "/ready", "--enable-metrics"]
        arguments = long_options(profile.arguments, lambda name: joined if name in _LISTS else words)
        return ShardLaunch(
            argv=(*(installation.command or self.default_command), "serve", *own, *arguments, *profile.extra_argv),
            environment={**profile.environment, **_environment(allocation)},
            # Under many long prompts 20 s pass without any output of a working engine.
            defaults=torch_defaults(files, allocation, DO_NOT_TRACK="1", SGLANG_HEALTH_CHECK_TIMEOUT="120"),
            # JSON is YAML, and quotes whatever is in the key.
            secrets=(SecretFile(CONFIG, f"api-key: {json.dumps(key)}\n"),),
            url=http_url(allocation.address, port) if serves else "",
            ready=_ready(installation) if serves else None,
            models="/v1/models" if serves else None,
            metrics="/metrics" if serves else None,
            probe=first_question(profile),
            limit=whole(profile.arguments.get("max-running-requests")),
            key=key,
            sleep="/release_memory_occupation" if _sleeps(profile, allocation) else "",
            wake="/resume_memory_occupation" if _sleeps(profile, allocation) else "",
            loras=_door(profile, files, served),
        )

    def load(self, metrics_text: str) -> EngineLoad:
        """Requests summed over data parallel ranks, never over the tensor ranks that work on the same ones."""
        lines = (line for line in metrics_text.splitlines() if not _RANK.match(line))
        return metrics.engine_load("\n".join(lines), _RUNNING, _WAITING, _KV, _TOKENS)


def _loras(profile: Profile, files: WeightFiles | None) -> list[str]:
    """Without adapters at its start it has to be told the largest shape of those to come."""
    if not lora.enabled(profile):
        return []
    door, argv = _door(profile, files, ()), lora.switch(profile)
    if door.fixed:
        return [*argv, "--lora-paths", *(f"{name}={path}" for name, path in lora.paired(profile, files).paths)]
    if "max-lora-rank" not in profile.arguments:
        argv += ["--max-lora-rank", str(door.rank)]
    if _TARGETS not in profile.arguments:
        named = [there.config.get("target_modules") for there in (files.loras if files else ())]
        beside = {name for names in named if isinstance(names, list) for name in names} & _BESIDE
        argv += [f"--{_TARGETS}", *_LINEAR, *sorted(beside)]
    return argv


def _door(profile: Profile, files: WeightFiles | None, served: Sequence[str]) -> LoraDoor:
    """It knows an adapter as C{MODEL:ADAPTER}; by the adapter's name alone it answers as the base model."""
    name = f"{served[0]}:{{name}}" if served else "{name}"
    if fixed := sglang_checks.fixed_loras(profile):
        return LoraDoor(fixed=fixed, served=name)
    found = max(lora.DEFAULT_RANK, lora.paired(profile, files).rank or 0)
    rank, most = whole(profile.arguments.get("max-lora-rank")) or found, whole(profile.arguments.get("max-loaded-loras"))
    return LoraDoor("/load_lora_adapter", "/unload_lora_adapter", "", rank, most, lora.RANKS[-1], name)


def _sleeps(profile: Profile, allocation: Allocation) -> bool:
    """Only if it keeps all its weights on the host meanwhile: made for training, it wakes up with noise otherwise."""
    kept = ["enable-memory-saver", "enable-weights-cpu-backup"]
    if any(name.startswith("speculative-") for name in profile.arguments):
        kept.append("enable-draft-weights-cpu-backup")
    return allocation.nodes == 1 and all(profile.arguments.get(name) is True for name in kept)


def _ready(installation: Installation) -> str:
    """C{/ready} where the version has it. Patch releases count: it is new in 0.5.23."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", installation.version or "")
    old = found is not None and tuple(map(int, found.groups())) < (0, 5, 23)
    return "/health" if old or (found is None and version_of(installation.version) is not None) else "/ready"


def _parallel(profile: Profile, allocation: Allocation) -> list[str]:
    parallel = profile.parallel
    argv = ["--tp-size", str(parallel.tensor)]
    if parallel.pipeline > 1:
        argv += ["--pp-size", str(parallel.pipeline)]
    if parallel.data > 1:
        argv += ["--dp-size", str(parallel.data)]
    if parallel.expert:
        argv += ["--ep-size", str(parallel.tensor)]
    if parallel.data > 1:
        # Its copies choose ports for themselves, one after the other; told one, they would all take that.
        return argv
    if allocation.nodes > 1:
        argv += ["--nnodes", str(allocation.nodes), "--node-rank", str(allocation.rank)]
        argv += ["--dist-init-addr", _address(allocation.head, allocation.head_port)]
    elif len(allocation.ports) > 1:
        argv += ["--dist-init-addr", _address("127.0.0.1", allocation.ports[1])]
    return [*argv, "--nccl-port", str(allocation.ports[-1])] if len(allocation.ports) >= PORTS else argv


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def memory_fraction(profile: Profile, allocation: Allocation) -> float | None:
    """C{--mem-fraction-static}, rounded down: weights and cache as a part of what is free before they are loaded.

    None leaves it to SGLang, which takes its share of a free device, or to the arguments.
    """
    free = allocation.device_free if allocation.device_free is not None else allocation.device_total
    claimed = profile.resources.share or profile.resources.device_memory is not None
    if not free or not allocation.devices or allocation.memory is None or not claimed:
        return None
    if "mem-fraction-static" in profile.arguments:
        return None
    # Activations and graphs come on top of it.
    return told_share((allocation.memory - OVERHEAD) / free)


def _environment(allocation: Allocation) -> dict[str, str]:
    found = visible_devices(allocation)
    if len(allocation.ports) >= PORTS:
        # One port for all ranks, the same for every engine on the node unless it is told.
        found["SGLANG_TCP_STORE_PORT"] = str((allocation.head_port or allocation.ports[1]) + STORE)
    if allocation.nodes > 1 and allocation.rank < len(allocation.peers):
        found["SGLANG_HOST_IP"] = allocation.peers[allocation.rank]
    return found


sglang = Sglang()
