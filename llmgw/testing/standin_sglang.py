"""Stands in for SGLang where there is none: C{python -m llmgw.testing.standin_sglang serve MODEL ...} takes its 0.5.23's options.

Its command line is read by C{argparse} from the list of SGLang's own options, and its configuration file in the way of SGLang's,
so what that would refuse is refused here. It is reached only when it has loaded; then C{/ready} and C{/health} are 503 for
C{$STANDIN_WARMUP} seconds. The key guards C{/v1}. Ranks above 0 answer nothing but 200 on their health paths, ignore SIGTERM and
live until rank 0, at its own end, tells them to end; where it dies without a word, for ever. An adapter is asked for as
C{MODEL:ADAPTER}, and unloaded when nothing runs with it. SIGTERM drains without limit; where a child dies it kills itself by
SIGKILL. C{$STANDIN} holds options of L{llmgw.testing.fake_engine}, e.g. C{--load-seconds 2}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml

from llmgw.testing import fake_engine
from llmgw.testing.doors import TAKES, BadAdapter, cards, read_adapter
from llmgw.testing.fake_engine import say
from llmgw.testing.orphan import fork_worker

VERSION = "0.5.23"
# How often it looks whether requests still run while it drains; SGLang looks every 5 s.
POLL = 0.05
WORD = b"shutdown\n"
_HOW: dict[str, dict[str, Any]] = {
    "value": {},
    "int": {"type": int},
    "float": {"type": float},
    "json": {"type": json.loads},
    "values": {"nargs": "+"},
    "optional": {"nargs": "?"},
    "flag": {"action": "store_true"},
    "switch": {"action": "store_true"},
}


def option_rows() -> list[tuple[list[str], str]]:
    """SGLang's options: the names of each, and what it takes."""
    text = files("llmgw.testing").joinpath("sglang_0_5_23_flags.txt").read_text()
    return [(words[:-1], words[-1]) for line in text.splitlines() if (words := line.split())]


def parser() -> argparse.ArgumentParser:
    """The command line of C{sglang serve}."""
    made = argparse.ArgumentParser("sglang serve", allow_abbrev=False)
    for names, kind in option_rows():
        shape = dict(_HOW[kind])
        if kind not in ("flag", "switch"):
            shape["metavar"] = names[0].lstrip("-").replace("-", "_").upper()
        made.add_argument(*names, **shape)
    return made


def with_config(arguments: list[str]) -> list[str]:
    """The words of the configuration file in front of those of the command line, which win.

    @raise ValueError: it is no YAML file by its name, or holds no section.
    """
    if "--config" not in arguments:
        return arguments
    at = arguments.index("--config")
    path = arguments[at + 1]
    if not path.endswith((".yaml", ".yml")):
        raise ValueError(f"Config file must be YAML format, got: {path}")
    with open(path) as file:
        told = yaml.safe_load(file)
    if not isinstance(told, dict):
        raise ValueError("Config file must contain a dictionary at root level")
    words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
    return words + arguments[:at] + arguments[at + 2 :]


def asked(arguments: list[str]) -> argparse.Namespace:
    """The command line as SGLang takes it, the model in front without an option."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model-path", *arguments]
    found = parser().parse_args(with_config(arguments))
    if (found.tp_size or 1) * (found.pp_size or 1) % (found.nnodes or 1):
        raise AssertionError("tp_size must be divisible by number of nodes")
    if found.enable_lora and not found.lora_paths and not (found.max_lora_rank and found.lora_target_modules):
        both = "you need to specify both --max-lora-rank and --lora-target-modules for LoRA initialization."
        raise AssertionError(f"When no initial --lora-paths is provided, {both}")
    if ":" in (found.served_model_name or ""):
        raise ValueError("served_model_name cannot contain a colon (':') character. ")
    return found


class Standin(fake_engine.Engine):
    """SGLang's own paths, metrics and lines of output around the fake engine's answers."""

    prefix = "sglang"

    def __init__(self, settings: argparse.Namespace, options: argparse.Namespace, scheduler: int) -> None:
        super().__init__(settings, options.api_key)
        self.options = options
        self.scheduler = scheduler
        self.warm = self.draining = False
        self.ranks: list[asyncio.StreamWriter] = []
        # Without a backup it wakes up with weights that are noise; that is no sleep.
        keeps = options.enable_memory_saver and options.enable_weights_cpu_backup
        self.base = self.names[0]
        self.adapters: dict[str, str] = {}
        self.using: Counter[str] = Counter()
        for one in options.lora_paths or []:
            self.put(*one.split("=", 1))
        self.turns = ("/release_memory_occupation", "/resume_memory_occupation") if keeps else ()

    @property
    def follower(self) -> bool:
        """Whether this rank serves nothing."""
        return bool(self.options.node_rank)

    async def load(self) -> None:
        """Tell what SGLang tells on its way, in its order."""
        if (self.options.nnodes or 1) > 1:
            self.group = asyncio.ensure_future(self.join() if self.follower else self.gather())
        self.watch = asyncio.ensure_future(self.follow_scheduler())
        rank = self.options.node_rank or 0
        say(f"[TP0] server_args=ServerArgs(model_path={self.options.model_path!r}, node_rank={rank}, tp_size=1)")
        begin, length = time.monotonic(), self.settings.load_seconds
        say("[TP0] Load weight begin. avail mem=78.00 GB")
        while (spent := time.monotonic() - begin) < length:
            say(f"Loading safetensors checkpoint shards: {int(100 * spent / length):3d}% Completed")
            await asyncio.sleep(min(length - spent, max(0.05, length / 20)))
        say("[TP0] Load weight end. type=LlamaForCausalLM, avail mem=60.00 GB")
        say("[TP0] KV Cache is allocated. #tokens: 100000, K size: 10.00 GB, V size: 10.00 GB")
        warmup = asyncio.ensure_future(self.warm_up())
        warmup.add_done_callback(lambda _: None)

    async def warm_up(self) -> None:
        """HTTP is up before it is ready."""
        await asyncio.sleep(float(os.environ.get("STANDIN_WARMUP", "0")))
        self.warm = True
        if not self.follower:
            say("The server is fired up and ready to roll!")

    async def follow_scheduler(self) -> None:
        """A dead child takes all with it, by SIGKILL."""
        while os.waitpid(self.scheduler, os.WNOHANG) == (0, 0):
            await asyncio.sleep(0.05)
        say("SIGQUIT received. signum=3. It usually means one child failed.")
        os.kill(os.getpid(), signal.SIGKILL)

    async def gather(self) -> None:
        """Rank 0: let the others join."""
        host, _, port = self.options.dist_init_addr.rpartition(":")
        self.meeting = await asyncio.start_server(lambda _, writer: self.ranks.append(writer), host.strip("[]"), int(port))

    async def join(self) -> None:
        """Ranks above 0: wait for rank 0's word; that it is gone means nothing to them."""
        host, _, port = self.options.dist_init_addr.rpartition(":")
        while True:
            try:
                reader, self.head = await asyncio.open_connection(host.strip("[]"), int(port))
                break
            except OSError:
                await asyncio.sleep(POLL)
        if await reader.readline() == WORD:
            say("ShutdownReq received")
            self.exit(0)

    def end(self) -> None:
        """SIGTERM: drain, with no limit; ranks above 0 wait for rank 0's word."""
        if self.follower:
            say("Received SIGTERM on a non-zero rank node; waiting for the rank-0 ShutdownReq broadcast to stop the schedulers.")
            return
        self.draining = True
        self.ending = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Exit when no request is left."""
        while self.running:
            await asyncio.sleep(POLL)
        for rank in self.ranks:
            rank.write(WORD)
            await rank.drain()
        self.exit(0)

    def exit(self, code: int) -> None:
        """Take the scheduler along."""
        os.kill(self.scheduler, signal.SIGKILL)
        super().exit(code)

    def guards(self, path: str) -> bool:
        """All but its health and metrics."""
        return path not in ("/health", "/health_generate", "/ping", "/ready", "/metrics")

    def get(self, path: str) -> tuple[int, str, str] | None:
        """A follower's dummy answers; the flags of rank 0."""
        if path in ("/health", "/health_generate", "/ping", "/ready"):
            up = self.follower or path == "/ping" or (self.warm and not self.draining)
            return (200 if up and not (self.follower and path == "/ready") else 503), "text/plain", ""
        if self.follower:
            return None
        if path == "/metrics" and not self.options.enable_metrics:
            return None
        if path == "/v1/models":
            return 200, "application/json", cards([self.base], self.base, self.adapters)
        return super().get(path)

    def put(self, name: str, path: str) -> None:
        """Serve an adapter."""
        self.adapters[name] = path
        self.names.append(f"{self.base}:{name}")

    async def post(self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Adapters come and go; whatever runs goes on."""
        if path in ("/load_lora_adapter", "/unload_lora_adapter"):
            await asyncio.sleep(TAKES)
            asked = json.loads(body)
            say(f"{path} {asked}")
            problem = self.load_adapter(asked) if path == "/load_lora_adapter" else await self.unload_adapter(asked["lora_name"])
            told = {"rid": None, "success": not problem, "error_message": problem, "loaded_adapters": self.adapters}
            return self.answer(writer, 400 if problem else 200, "application/json", json.dumps(told))
        name = json.loads(body).get("model", "").partition(":")[2] if path.startswith("/v1") else ""
        self.using[name] += 1
        try:
            return await super().post(path, body, reader, writer)
        finally:
            self.using[name] -= 1

    def load_adapter(self, asked: Mapping[str, str]) -> str:
        """Why not."""
        name, path, most = asked["lora_name"], asked["lora_path"], self.options.max_lora_rank
        if not self.options.enable_lora:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        if name in self.adapters:
            return f"LoRA with name {name} already exists. Loaded LoRAs: {self.adapters.keys()}"
        try:
            config = read_adapter(path)
        except BadAdapter as error:
            return str(error)
        if most is not None and config.get("r", 0) > most:
            rank = f"LoRA adapter {name} with rank {config['r']} is incompatible with the current LoRA memory pool configuration."
            return f"{rank} Please ensure that the LoRA adapter's rank is within the configured `--max-lora-rank`"
        self.put(name, path)
        return ""

    async def unload_adapter(self, name: str) -> str:
        """Why not; it waits for what runs with it."""
        if name not in self.adapters:
            return f"LoRA with name {name} does not exist. Loaded LoRAs: {self.adapters.keys()}"
        del self.adapters[name]
        self.names.remove(f"{self.base}:{name}")
        while self.using[name]:
            await asyncio.sleep(POLL)
        return ""

    def metrics(self) -> Mapping[str, float]:
        """By SGLang's names and labels; each tensor rank tells the same."""
        counts = {
            "num_running_reqs": self.running,
            "num_queue_reqs": 0,
            "token_usage": min(1.0, self.running / 100),
            "prompt_tokens_total": self.served,
            "generation_tokens_total": self.tokens,
        }
        ranks = range(self.options.tp_size or 1)
        return {
            f'sglang:{name}{{model_name="{self.names[0]}",engine_type="unified",tp_rank="{rank}",pp_rank="0"}}': value
            for name, value in counts.items()
            for rank in ranks
        }


def main() -> None:
    """The program."""
    what, *arguments = sys.argv[1:] or [""]
    if what == "version":
        say(f"sglang version: {VERSION}\ngit revision: 0000000")
        return
    if what != "serve":
        sys.exit(f"sglang: error: argument subcommand: invalid choice: {what!r}")
    options = asked(arguments)
    name = options.served_model_name or options.model_path
    words = ["--host", options.host or "127.0.0.1", "--port", str(options.port or 30000), "--name", name]
    settings = fake_engine.options([*words, *shlex.split(os.environ.get("STANDIN", ""))])
    fake_engine.serve(Standin(settings, options, fork_worker(b"sglang::schedul")))


if __name__ == "__main__":
    main()
