"""llama.cpp: the C{llama-server} binary, or its server inside the xllamacpp wheel through our launcher, on equal terms.

C{context} is what one request may use. llama.cpp divides its context over its slots, so it is started with context times
slots, unless C{kv-unified} is asked for; then all slots share one context. Settings that older builds do not know go by
C{LLAMA_ARG_*} variables, which those ignore, where an unknown option would end them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.engines import failures, metrics
from llmgw.engines.failures import failure
from llmgw.engines.launch import (
    commas,
    environment_problems,
    first_question,
    help_flags,
    http_url,
    long_options,
    no_loras,
    reserved_arguments,
    unchecked_arguments,
    unknown_arguments,
    visible_devices,
    weights_problems,
)
from llmgw.engines.llamacpp_memory import OVERHEAD, context_size, device_count, estimate, slots
from llmgw.engines.memory import shape
from llmgw.errors import Problem
from llmgw.fleet.causes import CONFIGURATION, NODE, RETRY, SOURCE
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Installation, NodeFacts
from llmgw.fleet.shard import Allocation, Diagnosis, EngineLoad, ShardExit, WeightFiles
from llmgw.fleet.units import show_size
from llmgw.interfaces import Flags, IEngineAdapter, IMemoryEstimator, Needs, Phase, ShardLaunch

KEY = "LLAMA_API_KEY"

_WEIGHTS = "set `weights`"
_ADDRESS = "llmgw gives it host and port"
_SECRET = "llmgw gives it a key of its own"
_RESERVED = {
    **dict.fromkeys(
        ("model", "m", "model-url", "mu", "hf-repo", "hf", "hfr", "hf-file", "hff", "models-dir", "models-preset"), _WEIGHTS
    ),
    **dict.fromkeys(("host", "port", "path", "api-prefix", "reuse-port"), _ADDRESS),
    **dict.fromkeys(("api-key", "api-key-file", "ssl-key-file", "ssl-cert-file"), _SECRET),
    **dict.fromkeys(("alias", "a"), "it serves under the model's name"),
    **dict.fromkeys(("ctx-size", "c"), "set `context`, in tokens of one request"),
    **dict.fromkeys(("metrics", "no-metrics"), "llmgw reads its metrics"),
    **dict.fromkeys(("rpc", "log-file", "log-disable", "daemon"), "llmgw supervises one process and keeps its output"),
}
FAILURES = (
    failure(
        r"(?:invalid argument: |unrecognized arguments: )(?P<what>.+)",
        CONFIGURATION,
        "it does not know the argument {what}",
        "Correct `arguments` or `extra_argv`; `llama-server --help` lists all.",
    ),
    failure(
        r"""error while handling argument "(?P<what>[^"]+)": (?P<why>.+)""",
        CONFIGURATION,
        "it cannot use the value of {what} ({why})",
        "Correct it in `arguments`.",
    ),
    failure(
        r"failed to open GGUF file '(?P<path>[^']*)' \((?P<why>[^)]*)\)",
        SOURCE,
        "it cannot open {path}: {why}",
        "Put the weights under a model root of the node, readable for the engine's user.",
    ),
    failure(
        r"invalid magic characters: '(?P<found>[^']*)'",
        SOURCE,
        "the weights are not a GGUF file (it begins with {found!r})",
        "Fetch the file again; a Git LFS pointer or an error page looks like this.",
    ),
    failure(
        r"(?:failed to read key-value pairs|failed to read tensor (?:data|info)|tensor .* data is not within the file bounds)",
        SOURCE,
        "the GGUF file is cut short or damaged",
        "Fetch the file again.",
    ),
    failure(
        r"unknown model architecture: '(?P<what>[^']*)'",
        CONFIGURATION,
        "this build does not know the model architecture {what}",
        "Install a newer llama.cpp.",
    ),
    failure(
        r"llama_init_from_model: (?P<why>[^\n]*(?:not|requires|does)[^\n]*)",
        CONFIGURATION,
        "its settings do not go together: {why}",
        "Correct them in `arguments`.",
    ),
    failure(
        r"(?:failed to create_context|failed to allocate buffer for kv cache|failed to create context)",
        CONFIGURATION,
        "it could not allocate its context",
        "Lower `context` or the `parallel` argument, or give it more memory.",
    ),
    failure(
        r"(?:unable to allocate \S+ buffer|failed to allocate \S* ?buffer)",
        CONFIGURATION,
        "it ran out of device memory",
        "Lower `context`, use more devices, or set the argument n-gpu-layers.",
    ),
    failure(
        r"Remote RPC server crashed or returned malformed response",
        RETRY,
        "an RPC server that holds a part of the model is gone, or of another build",
        "Run one build of llama.cpp on all its nodes, and start the RPC servers anew.",
        id="F46",
    ),
    failure(
        r"xllamacpp is not installed for (?P<what>\S+)",
        NODE,
        "neither llama-server nor the xllamacpp wheel is installed ({what})",
        "Install llama.cpp, or `pip install llmgw[llamacpp]`.",
    ),
    failure(
        r"exiting due to model loading error",
        CONFIGURATION,
        "it could not load the model",
        "Read its output: `llmgw logs SHARD`.",
    ),
)

_PHASES = (
    (re.compile(r"loading model '"), Phase("weights")),
    (re.compile(r"load_model: initializing, n_slots"), Phase("context", 0.9)),
    (re.compile(r"server is listening on|model loaded"), Phase("ready", 1.0)),
)
_RUNNING, _WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"
# Predicted tokens are counted only when a request ends; decodes move while it runs, and moving is what counts.
_PROGRESS = "llamacpp:n_decode_total"


@implementer(IPlugin, IEngineAdapter, IMemoryEstimator)
class LlamaCpp:
    """The C{llamacpp} engine."""

    name = "llamacpp"
    default_command: tuple[str, ...] = ("llama-server",)

    def version_argv(self, command: Sequence[str]) -> list[str] | None:
        """C{--version}."""
        return [*command, "--version"]

    def version(self, output: str) -> str | None:
        """C{b11434} from C{version: 11434 (0c1e5709)}; of the wheel, its date version."""
        found = re.search(r"version: (\S+)(?: \((\w+)\))?", output)
        if not found:
            return None
        return found[1] if "." in found[1] else f"b{found[1]}"

    def flags_argv(self, command: Sequence[str]) -> list[str] | None:
        """C{--help}."""
        return [*command, "--help"]

    def flags(self, output: str) -> Flags:
        """From lines like C{-c,    --ctx-size N      size of the prompt context}."""
        return help_flags(output)

    def needs(self, profile: Profile, files: WeightFiles | None) -> Needs:
        """No device unless asked for; the memory of weights, cache and buffers where the weights are known."""
        resources, devices, found = profile.resources, device_count(profile), self.estimate(profile, files)
        host = found.host.known if found.host and found.host.weights is not None else 0
        return Needs(
            devices=devices,
            memory=found.need if resources.device_memory is None else resources.device_memory,
            host_memory=(OVERHEAD if devices else host) if resources.host_memory is None else resources.host_memory,
            context=found.context,
            fixed=resources.device_memory is None and not found.elastic,
        )

    def estimate(self, profile: Profile, files: WeightFiles | None) -> Estimate:
        """See L{llmgw.engines.llamacpp_memory}."""
        return estimate(profile, files)

    def problems(
        self,
        profile: Profile,
        files: WeightFiles | None,
        node: NodeFacts | None,
        installation: Installation | None,
        flags: Flags,
    ) -> list[Problem]:
        """What llama.cpp would refuse or could not hold."""
        whose = f"{installation.name} {installation.version or ''}".strip() if installation else "llama.cpp"
        return [
            *weights_problems(profile, files),
            *reserved_arguments(profile, _RESERVED),
            *environment_problems(profile, {KEY, "LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_API_KEY_FILE"}),
            *unknown_arguments(profile, flags, whose, "llama-server --help"),
            *_parallel_problems(profile),
            *no_loras(profile, "llama.cpp"),
            *_file_problems(files),
            *_memory_problems(profile, files, node),
        ]

    def warnings(
        self,
        profile: Profile,
        files: WeightFiles | None,
        node: NodeFacts | None,
        installation: Installation | None,
        flags: Flags,
    ) -> list[Problem]:
        """A context beyond the training's, more threads than processors, arguments that nobody could check."""
        found = []
        trained = shape(files).context
        if profile.context and trained and profile.context > trained:
            text = f"context {profile.context} is more than the {trained} tokens that the model was trained for"
            found.append(Problem(text, "context", "context_beyond_training"))
        threads = profile.arguments.get("threads")
        if node and isinstance(threads, int) and threads > node.inventory.cpus:
            text = f"{threads} threads on {node.inventory.cpus} processors are slower than {node.inventory.cpus}"
            found.append(Problem(text, "arguments.threads", "threads"))
        return found + unchecked_arguments(profile, flags)

    def launch(
        self,
        profile: Profile,
        allocation: Allocation,
        installation: Installation,
        files: WeightFiles | None,
        served: Sequence[str],
        key: str,
    ) -> ShardLaunch:
        """One process on one node. Without devices none is visible to it, so that it never takes a GPU by surprise."""
        port = allocation.ports[0]
        arguments = {name: value for name, value in profile.arguments.items() if name != "parallel"}
        own: list[str] = ["--model", files.path if files and files.found else profile.weights or "", "--alias", served[0]]
        own += ["--host", allocation.address, "--port", str(port)]
        own += ["--ctx-size", str(context_size(profile)), "--parallel", str(slots(profile)), "--metrics"]
        if profile.context is None and "kv-unified" not in arguments:
            own.append("--kv-unified")
        if not {"n-gpu-layers", "gpu-layers"} & arguments.keys():
            own += ["--n-gpu-layers", "999" if allocation.devices else "0"]
        command = installation.command or self.default_command
        return ShardLaunch(
            argv=(*command, *own, *long_options(arguments, lambda name: commas), *profile.extra_argv),
            environment={**profile.environment, **visible_devices(allocation), KEY: key},
            # Without the ping's write a server with streams open takes 30 s to notice SIGTERM.
            defaults={"LLAMA_ARG_SSE_PING_INTERVAL": "1", "LLAMA_ARG_OFFLINE": "1"}
            | ({"LLAMA_ARG_FIT": "off"} if profile.context else {}),
            url=http_url(allocation.address, port),
            probe=first_question(profile),
            limit=slots(profile),
            grace=5.0,
            key=key,
        )

    def phase(self, line: str) -> Phase | None:
        """The three steps that it prints."""
        return next((phase for pattern, phase in _PHASES if pattern.search(line)), None)

    def load(self, metrics_text: str) -> EngineLoad:
        """Requests running and deferred. It has no figure for its cache."""
        return metrics.engine_load(metrics_text, _RUNNING, _WAITING, tokens=(_PROGRESS,))

    def diagnose(self, exit: ShardExit, tail: Sequence[str]) -> Diagnosis:
        """By the texts that llama.cpp ends with."""
        return failures.diagnosis("llama.cpp", FAILURES, exit, tail)


def _parallel_problems(profile: Profile) -> list[Problem]:
    parallel, problems = profile.parallel, []
    if parallel.nodes > 1:
        problems.append(Problem("llama.cpp runs on one node; set parallel.nodes to 1", "parallel.nodes", "nodes"))
    if parallel.data > 1:
        text = f"llama.cpp has no data parallel ranks: use replicas: {parallel.data} instead"
        problems.append(Problem(text, "parallel.data", "data_parallel"))
    if parallel.expert:
        problems.append(Problem("llama.cpp has no expert parallel mode: leave it out", "parallel.expert", "expert_parallel"))
    wanted = profile.arguments.get("parallel")
    if "parallel" in profile.arguments and slots(profile) != wanted:
        text = f"parallel is the number of slots, a whole number from 1, found {wanted!r}"
        problems.append(Problem(text, "arguments.parallel", "argument_value"))
    return problems


def _file_problems(files: WeightFiles | None) -> list[Problem]:
    if files is None or not files.found or files.format in ("", "gguf"):
        return []
    text = f"llama.cpp reads GGUF files; {files.weights} is {files.format}. Convert it, or use an engine for {files.format}"
    return [Problem(text, "weights", "weights_format")]


def _memory_problems(profile: Profile, files: WeightFiles | None, node: NodeFacts | None) -> list[Problem]:
    """Only what can never fit: the cache is allocated whole at the start, while weights are mapped and may be paged."""
    if node is None or profile.resources.devices or profile.parallel.world > 1:
        return []
    per_token, tokens = shape(files).kv_per_token(), context_size(profile) or shape(files).context
    if per_token is None or tokens is None or per_token * tokens <= node.inventory.memory_total:
        return []
    fits = int(node.inventory.memory_total // per_token // max(1, tokens // (profile.context or tokens)))
    text = (
        f"context {profile.context or tokens} in {slots(profile)} slots needs {show_size(per_token * tokens)} for its cache, "
        f"{node.name} has {show_size(node.inventory.memory_total)}; set context to at most {fits}"
    )
    return [Problem(text, "context", "kv_cache_too_large")]


llamacpp = LlamaCpp()
