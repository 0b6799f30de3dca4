"""vLLM, by C{vllm serve} as of 0.33: on one node, or over several with the multiprocessing backend.

All ranks of a replica get one argv but for C{--node-rank}; ranks above 0 are headless and serve no HTTP. They count as ready
once they have joined: what they load, the head waits for. Data parallel ranks over several nodes stay whole on one node each;
with C{balance: hybrid} every node serves HTTP for its own. Connections are refused until the engine is ready. The key guards
only C{/v1}. An engine that has its devices to itself takes vLLM's own share of them; C{--gpu-memory-utilization} is set where
devices are shared, where the profile claims memory, or where somebody else's memory would make vLLM refuse to start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.engines import lora, metrics, vllm_checks, vllm_fit
from llmgw.engines.launch import first_question, help_flags, http_url, joined, long_options, option, visible_devices, whole, words
from llmgw.engines.torch_engine import Milestones, TorchEngine, told_share, torch_defaults, weights_words
from llmgw.engines.vllm_failures import FAILURES, GUESSES
from llmgw.engines.vllm_memory import DEFAULT_SHARE, SPACE, estimate, host_cache
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Installation
from llmgw.fleet.shard import Allocation, EngineLoad, WeightFiles
from llmgw.interfaces import Flags, IEngineAdapter, IMemoryEstimator, LoraDoor, ShardLaunch

KEY = "VLLM_API_KEY"
# How long running requests may go on after SIGTERM; llmgw has drained before, so this is for what came late.
SHUTDOWN = 10
# What part of a device's total memory is left free beside other people's.
BESIDE_OTHERS = 0.01

# Options that want a list as JSON; every other list becomes words of its own.
_JSON_LISTS = frozenset({"allowed-origins", "allowed-methods", "allowed-headers"})

_MILESTONES: Milestones = (
    (re.compile(r"Resolved architecture: "), "configured", 0.02),
    (re.compile(r"DP group leader"), "joining ranks", 0.03),
    (re.compile(r"Starting to load model"), "weights", 0.05),
    (re.compile(r"Loading weights took|Model loading took"), "weights", 0.6),
    (re.compile(r"torch\.compile took"), "compiled", 0.75),
    (re.compile(r"Available KV cache memory|KV cache size: "), "cache", 0.8),
    (re.compile(r"Graph capturing finished"), "graphs", 0.95),
    (re.compile(r"init engine .* took"), "warm", 0.97),
    (re.compile(r"Application startup complete|Launching .*headless.*, with head node address"), "ready", 1.0),
)
_RUNNING, _WAITING, _KV = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@implementer(IPlugin, IEngineAdapter, IMemoryEstimator)
class Vllm(TorchEngine):
    """The C{vllm} engine."""

    name = "vllm"
    default_command: tuple[str, ...] = ("vllm",)
    title = "vLLM"
    refusals = (vllm_checks.problems, vllm_fit.problems)
    doubts = (vllm_checks.warnings, vllm_fit.warnings)
    milestones = _MILESTONES
    known, guessed = FAILURES, GUESSES

    def version_argv(self, command: Sequence[str]) -> list[str] | None:
        """C{--version}."""
        return [*command, "--version"]

    def version(self, output: str) -> str | None:
        """The last line that is nothing but a version: warnings of its libraries may stand before it."""
        found = re.findall(r"^(\d+\.\d+\S*)\s*$", output, re.MULTILINE)
        return found[-1] if found else None

    def flags_argv(self, command: Sequence[str]) -> list[str] | None:
        """C{serve --help=all}; it imports torch, so it takes seconds."""
        return [*command, "serve", "--help=all"]

    def flags(self, output: str) -> Flags:
        """What the help shows, and the C{--no-enable-x} forms that it hides but takes."""
        shown = help_flags(output)
        hidden = {f"--no-{name[2:]}" for name in shown.switches if name.startswith(("--enable-", "--disable-"))}
        pairs = {name for name in hidden if _opposite(name[5:]) in shown.switches}
        return Flags(shown.names | pairs, shown.switches | pairs)

    def estimate(self, profile: Profile, files: WeightFiles | None) -> Estimate:
        """See L{llmgw.engines.vllm_memory}."""
        return estimate(profile, files)

    def ports(self, profile: Profile) -> int:
        """HTTP; with several ranks also rendezvous, and what data parallel ranks talk over."""
        return 3 if _several(profile) else 1

    def launch(
        self,
        profile: Profile,
        allocation: Allocation,
        installation: Installation,
        files: WeightFiles | None,
        served: Sequence[str],
        key: str,
    ) -> ShardLaunch:
        """One rank's process; rank 0 serves, and with hybrid balancing every one."""
        sleep, wake = ("/sleep?level=1", "/wake_up") if _sleeps(profile, allocation) else ("", "")
        serves, port = allocation.rank == 0 or _hybrid(profile), allocation.ports[0]
        own = [*weights_words(profile, files), "--host", allocation.address, "--port", str(port)]
        own += option("--served-model-name", *served)
        own += _parallel(profile, allocation)
        if (share := memory_share(profile, allocation)) is not None:
            own += ["--gpu-memory-utilization", f"{share:.3f}"]
        if profile.context is not None:
            own += ["--max-model-len", str(profile.context)]
        own += _loras(profile, files)
        # Its metrics and health are asked for every few seconds; nobody wants to read that.
        own += ["--shutdown-timeout", str(SHUTDOWN), "--disable-access-log-for-endpoints", "/health,/metrics"]
        arguments = long_options(profile.arguments, lambda name: joined if name in _JSON_LISTS else words)
        return ShardLaunch(
            argv=(*(installation.command or self.default_command), "serve", *own, *arguments, *profile.extra_argv),
            environment={**profile.environment, **_environment(profile, allocation, key)},
            defaults=torch_defaults(files, allocation, VLLM_NO_USAGE_STATS="1", **_space(profile, files)),
            url=http_url(allocation.address, port) if serves else "",
            ready="/health" if serves else None,
            models="/v1/models" if serves else None,
            metrics="/metrics" if serves else None,
            probe=first_question(profile),
            limit=whole(profile.arguments.get("max-num-seqs")),
            grace=SHUTDOWN + 10.0,
            key=key,
            sleep=sleep,
            wake=wake,
            loras=_door(profile, files),
        )

    def load(self, metrics_text: str) -> EngineLoad:
        """By vLLM's names."""
        return metrics.engine_load(metrics_text, _RUNNING, _WAITING, _KV, _TOKENS)


def _opposite(name: str) -> str:
    verb, _, rest = name.partition("-")
    return f"--{'disable' if verb == 'enable' else 'enable'}-{rest}"


def _several(profile: Profile) -> bool:
    return profile.parallel.nodes > 1 or profile.parallel.data > 1


def _sleeps(profile: Profile, allocation: Allocation) -> bool:
    """Only where the profile asks for it: its paths are those of the development mode, which no key guards."""
    return vllm_checks.develops(profile) and profile.arguments.get("enable-sleep-mode") is True and allocation.nodes == 1


def _space(profile: Profile, files: WeightFiles | None) -> dict[str, str]:
    """On a processor the size of its cache, where neither arguments nor a fraction say it."""
    if profile.resources.devices != 0 or {"kv-cache-memory-bytes", "gpu-memory-utilization"} & profile.arguments.keys():
        return {}
    held = host_cache(profile, files)
    return {} if held is None else {SPACE: str(held // 2**30)}


def _hybrid(profile: Profile) -> bool:
    return profile.parallel.balance == "hybrid" and profile.parallel.nodes > 1


def _loras(profile: Profile, files: WeightFiles | None) -> list[str]:
    """The adapters by path where it takes none later; the rank that the largest needs, of those that vLLM takes."""
    if not lora.enabled(profile):
        return []
    found, door, argv = lora.paired(profile, files), _door(profile, files), lora.switch(profile)
    if door.fixed:
        argv += ["--lora-modules", *(f"{name}={path}" for name, path in found.paths)]
    if "max-loras" not in profile.arguments:
        argv += ["--max-loras", str(door.most or len(profile.loras))]
    if "max-lora-rank" not in profile.arguments and (rank := lora.fitting(found.rank)) is not None:
        argv += ["--max-lora-rank", str(rank)]
    return argv


def _door(profile: Profile, files: WeightFiles | None) -> LoraDoor:
    """More adapters than it has room for would have it read the weights of each again and again, from wherever they were."""
    if fixed := vllm_checks.fixed_loras(profile):
        return LoraDoor(fixed=fixed)
    rank = whole(profile.arguments.get("max-lora-rank")) or lora.fitting(lora.paired(profile, files).rank) or lora.DEFAULT_RANK
    most = None if "max-loras" in profile.arguments else lora.room(profile)
    return LoraDoor("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "", rank, most, lora.RANKS[-1])


def _parallel(profile: Profile, allocation: Allocation) -> list[str]:
    parallel, argv = profile.parallel, []
    for name, size in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline), ("data", parallel.data)):
        if size > 1 or name == "tensor":
            argv += [f"--{name}-parallel-size", str(size)]
    if parallel.data > 1 and allocation.nodes > 1:
        argv += _data_over_nodes(profile, allocation)
    elif parallel.data > 1 and len(allocation.ports) > 2:
        argv += ["--data-parallel-rpc-port", str(allocation.ports[2])]
    if parallel.expert:
        argv.append("--enable-expert-parallel")
    if allocation.nodes > 1 and parallel.data == 1:
        argv += ["--nnodes", str(allocation.nodes), "--node-rank", str(allocation.rank)]
        argv += ["--master-addr", allocation.head, "--master-port", str(allocation.head_port)]
    return [*argv, "--headless"] if allocation.rank and not _hybrid(profile) else argv


def _data_over_nodes(profile: Profile, allocation: Allocation) -> list[str]:
    """Whole data parallel ranks on each node. A start rank on the head would mean hybrid balancing to vLLM."""
    local = profile.parallel.data // allocation.nodes
    argv = ["--data-parallel-size-local", str(local), "--data-parallel-address", allocation.head]
    # The head's ports are consecutive: HTTP, rendezvous, and this one.
    argv += ["--data-parallel-rpc-port", str(allocation.head_port + 1)]
    if _hybrid(profile):
        argv.append("--data-parallel-hybrid-lb")
    if allocation.rank or _hybrid(profile):
        argv += ["--data-parallel-start-rank", str(allocation.rank * local)]
    return argv


def memory_share(profile: Profile, allocation: Allocation) -> float | None:
    """The fraction of a device's total memory to ask for, rounded down; None leaves it to vLLM or to the arguments."""
    total = allocation.device_total
    if not total or not allocation.devices or "gpu-memory-utilization" in profile.arguments:
        return None
    wanted: float | None = None
    if allocation.memory is not None and (profile.resources.share or profile.resources.device_memory is not None):
        wanted = allocation.memory / total
    elif allocation.device_free is not None and allocation.device_free < (DEFAULT_SHARE + BESIDE_OTHERS) * total:
        wanted = allocation.device_free / total - BESIDE_OTHERS
    return None if wanted is None else told_share(wanted)


def _environment(profile: Profile, allocation: Allocation, key: str) -> dict[str, str]:
    found = {KEY: key, **visible_devices(allocation)}
    if not vllm_checks.fixed_loras(profile):
        found[vllm_checks.UPDATING] = "1"
    address = allocation.peers[allocation.rank] if allocation.rank < len(allocation.peers) else allocation.address
    return found | ({"VLLM_HOST_IP": address} if address else {})


vllm = Vllm()
