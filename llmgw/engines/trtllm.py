"""TensorRT-LLM, by C{trtllm-serve} of its 1.3 line, on one node.

Which of command line and configuration file wins has changed between its lines, so that every value stands in one of the two
only: the server's own options in argv, everything of the LLM API in the file (JSON, which is YAML). It takes no key at all, so
the router sends none. It binds its port before it loads, without listening; its workers are children of C{orted} in sessions
of their own. After the crash of a rank it lives on and answers 503 for ever.

C{/metrics} is emptied by whoever reads it; load is read from C{/prometheus/metrics}. Before 1.3 it serves under the name of the
weights' folder and asks for no name in requests; then no name is looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.engines import metrics, trtllm_checks
from llmgw.engines.case import version_of
from llmgw.engines.launch import help_flags, http_url, long_options, option, visible_devices, whole
from llmgw.engines.torch_engine import Milestones, TorchEngine, told_share, torch_defaults, weights_words
from llmgw.engines.trtllm_checks import OPTIONS
from llmgw.engines.trtllm_failures import FAILURES, GUESSES
from llmgw.engines.trtllm_memory import OVERHEAD, estimate
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Argument, Profile
from llmgw.fleet.node import Installation
from llmgw.fleet.shard import Allocation, EngineLoad, WeightFiles
from llmgw.interfaces import Flags, IEngineAdapter, IMemoryEstimator, SecretFile, ShardLaunch

CONFIG = "trtllm.yaml"
NAMED_SINCE, CONFIG_SINCE = (1, 3), (1, 2)

# Its workers are started by mpirun, which refuses root otherwise.
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

_MILESTONES: Milestones = (
    (re.compile(r"TensorRT[- ]LLM version: "), "configured", 0.02),
    (re.compile(r"Loading weights|Use \d+\.?\d* GB for model weights"), "weights", 0.1),
    (re.compile(r"Model init total|weights loaded|Loading weights? took"), "weights", 0.6),
    (re.compile(r"\[MemUsageChange\]|KV cache|kv_cache|max_tokens in paged KV"), "cache", 0.8),
    (re.compile(r"[Cc]uda ?[Gg]raph|CUDA graph"), "graphs", 0.9),
    (re.compile(r"Application startup complete"), "ready", 1.0),
)
_RUNNING, _WAITING, _KV = "trtllm_num_requests_running", "trtllm_num_requests_waiting", "trtllm_kv_cache_utilization"


@implementer(IPlugin, IEngineAdapter, IMemoryEstimator)
class Trtllm(TorchEngine):
    """The C{trtllm} engine."""

    name = "trtllm"
    default_command: tuple[str, ...] = ("trtllm-serve",)
    title = "TensorRT-LLM"
    refusals = (trtllm_checks.problems,)
    doubts = (trtllm_checks.warnings,)
    milestones = _MILESTONES
    known, guessed = FAILURES, GUESSES

    def version_argv(self, command: Sequence[str]) -> list[str] | None:
        """It has no option for that, but prints its version whenever it is started."""
        return [*command, "serve", "--help"]

    def version(self, output: str) -> str | None:
        """C{[TensorRT-LLM] TensorRT LLM version: 1.3.0rc25}."""
        found = re.findall(r"TensorRT[- ]LLM version: (\d+\.\d+\S*)", output)
        return found[-1] if found else None

    def flags_argv(self, command: Sequence[str]) -> list[str] | None:
        """C{serve --help}; it imports torch, so it takes seconds."""
        return [*command, "serve", "--help"]

    def flags(self, output: str) -> Flags:
        """What the help shows; its help writes C{--a / --no-a} for both ways of a switch."""
        return help_flags(re.sub(r"(?m)^(\s+--\S+) / (--no-\S+)", r"\1, \2", output))

    def estimate(self, profile: Profile, files: WeightFiles | None) -> Estimate:
        """See L{llmgw.engines.trtllm_memory}."""
        return estimate(profile, files)

    def launch(
        self,
        profile: Profile,
        allocation: Allocation,
        installation: Installation,
        files: WeightFiles | None,
        served: Sequence[str],
        key: str,
    ) -> ShardLaunch:
        """Its one process, which starts the others."""
        version, port = version_of(installation.version), allocation.ports[0]
        # A version that nobody has been told yet is taken for a new one: an old one refuses at once, and is known by then.
        named = version is None or version >= NAMED_SINCE
        given = {name.replace("-", "_"): value for name, value in profile.arguments.items()}
        # The only option with a dash in it.
        cli = {("generation-config" if n == "generation_config" else n): v for n, v in given.items() if n in OPTIONS}
        api = {name: value for name, value in given.items() if name not in OPTIONS and value is not None}
        own = [*weights_words(profile, files), "--host", allocation.address, "--port", str(port)]
        if named:
            own += [*option("--served_model_name", *served[:1]), "--no-telemetry"]
        own += ["--extra_llm_api_options" if version is not None and version < CONFIG_SINCE else "--config"]
        settings = json.dumps(configuration(profile, allocation, files, api), indent=1)
        return ShardLaunch(
            argv=(
                *(installation.command or self.default_command), "serve", *own, f"{{secret:{CONFIG}}}", *_options(cli),
                *profile.extra_argv,
            ),
            environment={**profile.environment, **visible_devices(allocation)},
            defaults=torch_defaults(files, allocation, DO_NOT_TRACK="1", **_AS_ROOT),
            # Nothing in it is secret; a file of the shard's own is what it needs.
            secrets=(SecretFile(CONFIG, settings),),
            url=http_url(allocation.address, port),
            ready="/health",
            models="/v1/models" if named else "",
            metrics="/prometheus/metrics",
            limit=whole(given.get("max_batch_size")),
        )  # fmt: skip

    def load(self, metrics_text: str) -> EngineLoad:
        """Requests and cache; it counts no tokens there."""
        return metrics.engine_load(metrics_text, _RUNNING, _WAITING, _KV)


def _options(given: Mapping[str, Argument]) -> list[str]:
    """An option with several values is repeated."""
    argv: list[str] = []
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            argv += long_options({name: one})
    return argv


def configuration(
    profile: Profile, allocation: Allocation, files: WeightFiles | None, given: Mapping[str, Argument]
) -> dict[str, Argument]:
    """The file's sections: what the profile says, its own LLM API arguments, and what makes load readable."""
    parallel = profile.parallel
    settings: dict[str, Argument] = {
        "tensor_parallel_size": parallel.tensor,
        "pipeline_parallel_size": parallel.pipeline,
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
    }
    if parallel.expert:
        settings["moe_expert_parallel_size"] = parallel.tensor
    if profile.context is not None:
        settings["max_seq_len"] = profile.context
    settings |= given
    if (fraction := cache_fraction(profile, allocation, files)) is not None:
        said = given.get("kv_cache_config")
        settings["kv_cache_config"] = {**(said if isinstance(said, dict) else {}), "free_gpu_memory_fraction": fraction}
    return settings


def cache_fraction(profile: Profile, allocation: Allocation, files: WeightFiles | None) -> float | None:
    """C{free_gpu_memory_fraction}: the cache as a part of what the loaded weights leave; None leaves it to the engine."""
    free = allocation.device_free if allocation.device_free is not None else allocation.device_total
    claimed = profile.resources.share or profile.resources.device_memory is not None
    found = estimate(profile, files)
    weights = max((rank.weights or 0 for rank in found.ranks), default=0)
    if not free or allocation.memory is None or not claimed or not weights:
        return None
    after, mine = free - weights - OVERHEAD, allocation.memory - weights - OVERHEAD
    return told_share(mine / after) if after > 0 else None


trtllm = Trtllm()
