"""Any program that speaks OpenAI's HTTP: llmgw fills placeholders in its argv, gives it a port and a key, and probes it.

Nothing is known of such a program, so nothing of it is checked but its placeholders, and ready means that its C{health}
path answers 200. It may tell how its start goes by printing lines like C{llmgw: loading 40 %}; ranks above 0 serve no HTTP
and count as ready when they have printed C{llmgw: ready}, or live, if they print nothing of the kind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.engines import failures, metrics
from llmgw.engines.launch import environment_problems, fill, http_url, no_loras, placeholder_problems, visible_devices
from llmgw.errors import Problem
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Installation, NodeFacts
from llmgw.fleet.shard import Allocation, Diagnosis, EngineLoad, ShardExit, WeightFiles
from llmgw.interfaces import Flags, IEngineAdapter, Needs, Phase, ShardLaunch

PLACEHOLDERS = ("host", "port", "model", "weights", "rank", "nodes", "head", "head_port")
KEY = "LLMGW_ENGINE_KEY"

_PHASE = re.compile(r"^llmgw: (?P<name>[a-z][a-z ]*?)(?: (?P<percent>\d{1,3}) ?%)?$")
# In the order of preference: a program behind this adapter often is one of these after all.
_RUNNING = ("vllm:num_requests_running", "llamacpp:requests_processing", "sglang:num_running_reqs", "llmgw:requests_running")
_WAITING = ("vllm:num_requests_waiting", "llamacpp:requests_deferred", "sglang:num_queue_reqs", "llmgw:requests_waiting")
_KV = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
_TOKENS = (
    "vllm:generation_tokens_total",
    "llamacpp:n_decode_total",  # that of its tokens stands still until a request has ended
    "llamacpp:tokens_predicted_total",
    "sglang:generation_tokens_total",
    "llmgw:tokens_total",
)
_NAMES = frozenset((*_RUNNING, *_WAITING, *_KV, *_TOKENS))


@implementer(IPlugin, IEngineAdapter)
class Command:
    """The C{command} engine."""

    name = "command"
    default_command: tuple[str, ...] = ()

    def version_argv(self, command: Sequence[str]) -> list[str] | None:
        """Nothing is known of the program, so nothing is asked."""
        return None

    def version(self, output: str) -> str | None:
        """No version."""
        return None

    def flags_argv(self, command: Sequence[str]) -> list[str] | None:
        """No help text."""
        return None

    def flags(self, output: str) -> Flags:
        """No flags."""
        return Flags()

    def needs(self, profile: Profile, files: WeightFiles | None) -> Needs:
        """What the profile says; without a word about devices, none unless it is cut up over several."""
        parallel, resources = profile.parallel, profile.resources
        implied = parallel.world // parallel.nodes if parallel.world > 1 else 0
        return Needs(
            devices=implied if resources.devices is None else resources.devices,
            memory=resources.device_memory,
            host_memory=resources.host_memory or 0,
            ports=2 if parallel.nodes > 1 else 1,
        )

    def problems(
        self,
        profile: Profile,
        files: WeightFiles | None,
        node: NodeFacts | None,
        installation: Installation | None,
        flags: Flags,
    ) -> list[Problem]:
        """No argv, mistyped placeholders, arguments that nothing would read, weights that are not there."""
        problems = placeholder_problems([*profile.argv, *profile.extra_argv], PLACEHOLDERS)
        problems += environment_problems(profile, nodes_own=False)
        problems += no_loras(profile, "a command engine")
        if not profile.argv:
            problems.append(Problem("a command engine needs `argv`", "argv", "argv"))
        if profile.arguments:
            text = "a command engine takes no `arguments`: write its options into `argv`"
            problems.append(Problem(text, "arguments", "unknown_argument"))
        if files is not None and not files.found and any("{weights}" in word for word in profile.argv):
            problems.append(Problem(files.problem or f"{files.weights} is not on the node", "weights", "weights_missing"))
        return problems

    def warnings(
        self,
        profile: Profile,
        files: WeightFiles | None,
        node: NodeFacts | None,
        installation: Installation | None,
        flags: Flags,
    ) -> list[Problem]:
        """A program that cannot know its port is probed in vain."""
        if not profile.argv or any("{port}" in word for word in (*profile.argv, *profile.extra_argv)):
            return []
        return [Problem("argv has no {port}: the program must find its port by itself", "argv", "placeholder")]

    def launch(
        self,
        profile: Profile,
        allocation: Allocation,
        installation: Installation,
        files: WeightFiles | None,
        served: Sequence[str],
        key: str,
    ) -> ShardLaunch:
        """The profile's argv with its placeholders filled; an installation's command, where it has one, stands before it."""
        port = allocation.ports[0] if allocation.ports else 0
        values = {
            "host": allocation.address,
            "port": port,
            "model": served[0] if served else "",
            "weights": files.path if files is not None and files.found else profile.weights or "",
            "rank": allocation.rank,
            "nodes": allocation.nodes,
            "head": allocation.head or allocation.address,
            "head_port": allocation.head_port,
        }
        serves = allocation.rank == 0
        return ShardLaunch(
            argv=(*installation.command, *fill((*profile.argv, *profile.extra_argv), values)),
            environment={**profile.environment, **visible_devices(allocation), KEY: key},
            defaults={"PYTHONUNBUFFERED": "1"},
            url=http_url(allocation.address, port) if serves else "",
            ready=profile.health if serves else None,
            models="" if serves else None,
            metrics="/metrics" if serves else None,
            key=key,
        )

    def phase(self, line: str) -> Phase | None:
        """Lines like C{llmgw: loading 40 %}."""
        found = _PHASE.match(line)
        if not found:
            return None
        return Phase(found["name"], min(int(found["percent"]), 100) / 100 if found["percent"] else None)

    def load(self, metrics_text: str) -> EngineLoad:
        """The load, if the program prints it under a name of vLLM, llama.cpp, SGLang or C{llmgw:}."""
        found = metrics.samples(metrics_text, _NAMES)

        def first(names: Sequence[str]) -> str:
            return next((name for name in names if name in found), names[0])

        return EngineLoad(
            metrics.total(found, first(_RUNNING)),
            metrics.total(found, first(_WAITING)),
            metrics.highest(found, first(_KV)),
            metrics.total(found, first(_TOKENS)),
        )

    def diagnose(self, exit: ShardExit, tail: Sequence[str]) -> Diagnosis:
        """What any program's end may tell."""
        return failures.diagnosis("the command", (), exit, tail)


command = Command()
