"""Stands in for vLLM where there is none: C{python -m llmgw.testing.standin_vllm serve MODEL ...} takes vLLM 0.33's options.

Its command line is read by C{argparse} from the list of vLLM's own options, so what vLLM would refuse is refused here, with
the same words and status. It is reached only when it has loaded, keeps its key to C{/v1}, and runs a process titled
C{VLLM::EngineCore} that a SIGKILL of the server leaves behind, as vLLM's does (a minute long here); when that one dies,
so does the server, with status 0. SIGTERM does nothing while it loads, and later waits for running requests. It takes adapters
while it runs where vLLM would, with the answers that 0.32.0 has given. C{$STANDIN} holds options of
L{llmgw.testing.fake_engine}, e.g. C{--load-seconds 2}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, NoReturn

from llmgw.testing import fake_engine
from llmgw.testing.doors import TAKES, BadAdapter, cards, read_adapter
from llmgw.testing.fake_engine import say
from llmgw.testing.orphan import fork_worker

VERSION = "0.33.0"
# How long the server outlives its engine's process.
DEAD_SECONDS = 0.5


def option_rows() -> list[tuple[list[str], str]]:
    """vLLM's options: the names of each, and what it takes (value, values, json, switch, flag, append, optional)."""
    text = files("llmgw.testing").joinpath("vllm_0_33_0_flags.txt").read_text()
    return [(words[:-1], words[-1]) for line in text.splitlines() if (words := line.split())]


def human_readable_int_or_auto(text: str) -> int:
    """C{4096}, C{32k}, C{auto}; argparse shows this function's name when it cannot read a value."""
    if text == "auto":
        return -1
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if not found:
        raise ValueError(text)
    return int(float(found[1]) * units[found[2]])


_TYPES: dict[str, Callable[[str], Any]] = {
    "--max-model-len": human_readable_int_or_auto,
    "--gpu-memory-utilization": float,
    **dict.fromkeys(
        (
            "--port",
            "--nnodes",
            "--node-rank",
            "--master-port",
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--shutdown-timeout",
        ),
        int,
    ),
    **dict.fromkeys(("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"), int),
    **dict.fromkeys(
        (
            "--data-parallel-size-local",
            "--data-parallel-start-rank",
            "--data-parallel-rpc-port",
            "--max-loras",
            "--max-lora-rank",
        ),
        int,
    ),
}
_HOW: dict[str, dict[str, Any]] = {
    "value": {},
    "json": {"type": json.loads},
    "values": {"nargs": "+"},
    "optional": {"nargs": "?"},
    "append": {"action": "append"},
    "flag": {"action": "store_true"},
    "switch": {"action": "store_true"},
}


def parser() -> argparse.ArgumentParser:
    """The command line of C{vllm} as far as serving goes."""
    top = argparse.ArgumentParser("vllm", allow_abbrev=False)
    top.add_argument("-v", "--version", action="version", version=VERSION)
    serve = top.add_subparsers(required=True, dest="what").add_parser("serve", allow_abbrev=False, add_help=False)
    serve.add_argument("model_tag", nargs="?")
    for names, kind in option_rows():
        shape = dict(_HOW[kind])
        if kind == "value":
            shape |= {"type": _TYPES.get(names[0], str), "metavar": names[0].lstrip("-").replace("-", "_").upper()}
        serve.add_argument(*names, **shape)
        hidden = [f"--no-{name[2:]}" for name in names if name.startswith("--enable-") and kind == "switch"]
        for name in hidden:
            serve.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    return top


def spelled(word: str) -> str:
    """An option as argparse knows it: underscores are dashes, and C{--a.b} sets something inside C{--a}."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.partition(".")[0].replace("_", "-") + equals + value


def asked(arguments: list[str]) -> argparse.Namespace:
    """The command line as vLLM takes it. Values inside JSON options (C{--a.b 1}) are taken and forgotten."""
    kept, inner = [], False
    for word in arguments:
        if inner and not word.startswith("-"):
            inner = False
            continue
        inner = bool(re.match(r"--[\w-]+\.[^=]*$", word))
        if re.match(r"--[\w-]+\.", word) and spelled(word).partition("=")[0] in _json_options():
            continue
        kept.append(spelled(word))
    return parser().parse_args(kept)


def _json_options() -> set[str]:
    return {name for names, kind in option_rows() if kind == "json" for name in names}


def contradictions(options: argparse.Namespace) -> None:
    """What vLLM refuses of options that each are well.

    @raise ValueError: with vLLM's own words.
    """
    if options.headless and options.data_parallel_hybrid_lb:
        raise ValueError("data_parallel_hybrid_lb is not applicable in headless mode")
    if options.headless and options.api_server_count:
        raise ValueError(f"--api-server-count={options.api_server_count} cannot be used with --headless")
    local, whole = options.data_parallel_size_local, options.data_parallel_size or 1
    if local is not None and local > whole:
        raise ValueError(f"data_parallel_size_local ({local}) must be <= data_parallel_size ({whole})")
    world = (options.tensor_parallel_size or 1) * (options.pipeline_parallel_size or 1) * whole
    if world % (options.nnodes or 1):
        raise ValueError(f"--nnodes {options.nnodes} must evenly divide the total world size")


def show_help() -> None:
    """C{serve --help=all}."""
    serve = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)).choices["serve"]
    say(serve.format_help())


class Standin(fake_engine.Engine):
    """vLLM's own paths, metrics and lines of output around the fake engine's answers."""

    prefix = "vllm"

    def __init__(self, settings: argparse.Namespace, options: argparse.Namespace, core: int) -> None:
        super().__init__(settings, os.environ.get("VLLM_API_KEY"))
        self.options = options
        self.core = core
        self.watch: asyncio.Future[None] | None = None
        self.ending: asyncio.Future[None] | None = None
        developing = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        self.turns = ("/sleep", "/wake_up") if developing and options.enable_sleep_mode else ()
        self.adapters = dict(module.split("=", 1) for module in options.lora_modules or [])
        updating = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() in ("1", "true")
        doors = {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter}
        self.doors = doors if updating else {}

    async def load(self) -> None:
        """Tell what vLLM tells on its way, in its order."""
        self.watch = asyncio.ensure_future(self.follow_core())
        say("INFO [model.py:601] Resolved architecture: LlamaForCausalLM")
        if self.options.headless:
            say(joining(self.options))
        begin, length = time.monotonic(), self.settings.load_seconds
        say(f"(EngineCore pid={self.core}) INFO [gpu_model_runner.py:1] Starting to load model {self.options.model_tag}...")
        while (spent := time.monotonic() - begin) < length:
            say(f"Loading safetensors checkpoint shards: {int(100 * spent / length):3d}% Completed")
            await asyncio.sleep(min(length - spent, max(0.05, length / 20)))
        say(f"(EngineCore pid={self.core}) INFO [kv_cache_utils.py:1] GPU KV cache size: 100,000 tokens")
        if not self.options.headless:
            say("INFO:     Application startup complete.")

    async def listen(self) -> None:
        """Ranks above 0 serve nothing."""
        if not self.options.headless:
            await super().listen()

    async def follow_core(self) -> None:
        """Without its engine the server is unhealthy, and gone soon after."""
        while os.waitpid(self.core, os.WNOHANG) == (0, 0):
            await asyncio.sleep(0.05)
        self.loaded = False
        say("WARNING [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
        say("ERROR [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
        await asyncio.sleep(DEAD_SECONDS)
        os._exit(0)

    def end(self) -> None:
        """SIGTERM: nothing while it loads; else the end, for which running requests have C{--shutdown-timeout} seconds."""
        if self.loaded and self.ending is None:
            self.ending = asyncio.ensure_future(self.finish())

    async def finish(self) -> None:
        """Let running requests finish; the engine's process ends with the server."""
        limit = time.monotonic() + (self.options.shutdown_timeout or 0)
        while self.running and time.monotonic() < limit:
            await asyncio.sleep(0.05)
        self.exit(0)

    async def post(self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Once it ends, new requests fail, while C{/health} is as before. Adapters come and go; whatever runs goes on."""
        if self.ending is not None:
            return self.error(writer, 500, "EngineCore is shutting down")
        if (door := self.doors.get(path)) is None:
            return await super().post(path, body, reader, writer)
        await asyncio.sleep(TAKES)
        asked = json.loads(body)
        say(f"{path} {asked}")
        status, kind, message = door(asked)
        if status == 200:
            return self.answer(writer, 200, "text/plain", message)
        error = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        return self.answer(writer, status, "application/json", json.dumps(error))

    def exit(self, code: int) -> NoReturn:
        """Take the engine's process along."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.core, signal.SIGKILL)
        for line in self.settings.say if code else ():
            say(line)
        os._exit(code)

    def get(self, path: str) -> tuple[int, str, str] | None:
        """An empty C{/health}; a version."""
        if path in ("/health", "/ping"):
            return 200 if self.loaded else 503, "text/plain", ""
        if path == "/version":
            return 200, "application/json", json.dumps({"version": VERSION})
        if path == "/v1/models":
            base = [name for name in self.names if name not in self.adapters]
            return 200, "application/json", cards(base, self.options.model_tag, self.adapters)
        return super().get(path)

    def load_adapter(self, asked: Mapping[str, str]) -> tuple[int, str, str]:
        """Status, type and text."""
        name, path = asked.get("lora_name", ""), asked.get("lora_path", "")
        if not name or not path:
            return 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."
        if name in self.adapters:
            inplace = "If you want to load the adapter in place, set 'load_inplace' to True."
            return 400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded. {inplace}"
        if name in self.names:
            return 400, "InvalidUserInput", f"The lora adapter '{name}' conflicts with a served base model."
        failed = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above"
        try:
            rank, most = read_adapter(path).get("r", 0), self.options.max_lora_rank or 16
        except BadAdapter as error:
            if error.absent:
                return 404, "NotFoundError", f"Loading lora {name} failed: {error}"
            return 500, "InternalServerError", failed.format(error)
        if rank > most:
            return 500, "InternalServerError", failed.format(f"LoRA rank {rank} is greater than max_lora_rank {most}.")
        self.adapters[name] = path
        self.names.append(name)
        return 200, "", f"Success: LoRA adapter '{name}' added successfully."

    def unload_adapter(self, asked: Mapping[str, str]) -> tuple[int, str, str]:
        """Status, type and text. Requests that run with it go on."""
        name = asked.get("lora_name", "")
        if name not in self.adapters:
            return 404, "NotFoundError", f"The lora adapter '{name}' cannot be found."
        del self.adapters[name]
        self.names.remove(name)
        return 200, "", f"Success: LoRA adapter '{name}' removed successfully."

    def metrics(self) -> Mapping[str, float]:
        """By vLLM's names and labels."""
        counts = {
            "num_requests_running": self.running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": min(1.0, self.running / 100),
            "prompt_tokens_total": self.served,
            "generation_tokens_total": self.tokens,
        }
        labels = f'{{engine="0",model_name="{self.names[0]}"}}'
        return {f"vllm:{name}{labels}": value for name, value in counts.items()}


def joining(options: argparse.Namespace) -> str:
    """What a headless rank says: that it has begun, and never that it is done."""
    if options.nnodes and options.nnodes > 1:
        head = f"{options.master_addr}:{options.master_port}"
        return (
            f"INFO [serve.py:1] Launching vLLM (v{VERSION}) headless multiproc executor, with head node address {head} "
            "for torch.distributed process group."
        )
    head = f"tcp://{options.data_parallel_address}:{options.data_parallel_rpc_port}"
    local = options.data_parallel_size_local
    return f"INFO [serve.py:1] Launching {local} data parallel engine(s) in headless mode, with head node address {head}."


def main() -> None:
    """The program."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"] and any(word.partition("=")[0] in ("--help", "-h") for word in arguments):
        show_help()
        return
    options = asked(arguments)
    contradictions(options)
    names = (options.served_model_name or [options.model_tag]) + [
        module.partition("=")[0] for module in options.lora_modules or []
    ]
    words = ["--host", options.host or "0.0.0.0", "--port", str(options.port or 8000)]
    for name in names:
        words += ["--name", name]
    settings = fake_engine.options([*words, *shlex.split(os.environ.get("STANDIN", ""))])
    fake_engine.serve(Standin(settings, options, fork_worker(b"VLLM::EngineCore")))


if __name__ == "__main__":
    main()
