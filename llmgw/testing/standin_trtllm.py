"""Stands in for TensorRT-LLM: C{python -m llmgw.testing.standin_trtllm serve MODEL ...} takes the options of its 1.3 line.

Its command line is read by C{click}, as TensorRT-LLM's is, from the list of its options, and its configuration file against the
settings that the adapter knows. The port is bound before it loads and listened on afterwards; there is no key. A worker runs in
a session of its own, as under C{orted}: when it dies the server lives on and answers 503 for ever, and when the server is
killed it stays. C{$STANDIN} holds options of L{llmgw.testing.fake_engine}; C{$STANDIN_VERSION} another version.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import click
import yaml

from llmgw.engines.trtllm_checks import SETTINGS
from llmgw.testing import fake_engine
from llmgw.testing.fake_engine import say

VERSION = os.environ.get("STANDIN_VERSION", "1.3.0rc25")
ORPHAN_SECONDS = 60
_TYPES: dict[str, Any] = {"int": int, "float": float}


def option_rows() -> list[tuple[list[str], str]]:
    """Its options: the names of each, and what it takes (value, int, float, append, flag, switch)."""
    text = files("llmgw.testing").joinpath("trtllm_1_3_0_flags.txt").read_text()
    return [(words[:-1], words[-1]) for line in text.splitlines() if (words := line.split())]


def command() -> click.Command:
    """The command line of C{trtllm-serve serve}."""
    parameters: list[click.Parameter] = [click.Argument(["model"])]
    for names, kind in option_rows():
        if kind == "switch":
            parameters.append(click.Option(["/".join(names)], default=True))
        elif kind == "flag":
            parameters.append(click.Option(names, is_flag=True))
        else:
            parameters.append(click.Option(names, type=_TYPES.get(kind, str), multiple=kind == "append"))
    return click.Command("serve", params=parameters, callback=run)


def settings_of(path: str | None) -> dict[str, Any]:
    """The configuration file, held against what it may say.

    @raise ValueError: it has a key that there is not, in pydantic's words.
    """
    if path is None:
        return {}
    with open(path) as file:
        told: dict[str, Any] = yaml.safe_load(file)
    if unknown := [name for name in told if name not in SETTINGS]:
        raise ValueError(f"1 validation error for TorchLlmArgs\n{unknown[0]}\n  Extra inputs are not permitted")
    return told


class Standin(fake_engine.Engine):
    """TensorRT-LLM's own paths, metrics and lines of output around the fake engine's answers."""

    prefix = "trtllm"

    def __init__(self, settings: argparse.Namespace, told: Mapping[str, Any], worker: subprocess.Popen[bytes]) -> None:
        super().__init__(settings, None)
        self.told = told
        self.worker = worker
        self.crashed = False
        self.bound = socket.socket(family(settings.host), socket.SOCK_STREAM)
        self.bound.bind((settings.host, settings.port))

    async def load(self) -> None:
        """Tell what it tells on its way; connections are refused meanwhile."""
        self.watch = asyncio.ensure_future(self.follow_worker())
        say("[TRT-LLM] [I] Loading weights concurrently")
        await asyncio.sleep(self.settings.load_seconds)
        say("[TRT-LLM] [I] Model init total -- 1.00s")
        say(f"[TRT-LLM] [I] max_seq_len={self.told.get('max_seq_len')}, max tokens in paged KV cache: 100000")
        say("INFO:     Application startup complete.")

    async def listen(self) -> None:
        """On the socket that was bound at the start."""
        await asyncio.start_server(self.connection, sock=self.bound)

    async def follow_worker(self) -> None:
        """A dead rank is told, and then nothing works any more."""
        while self.worker.poll() is None:
            await asyncio.sleep(0.05)
        say("[TRT-LLM] [E] Executor loop crashed on this rank; hard-killing all 8 ranks in 9.99947s")
        self.crashed = True

    def end(self) -> None:
        """SIGTERM takes its workers along, and its status is that of a shell's child."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker.pid, signal.SIGKILL)
        os._exit(128 + signal.SIGTERM)

    def get(self, path: str) -> tuple[int, str, str] | None:
        """Health is a flag; metrics under two paths, of which one is emptied by reading."""
        if path == "/health":
            well = self.loaded and not self.crashed
            return (200, "text/plain", "") if well else (503, "text/plain", "LLM is unavailable. Please check the server logs")
        if path == "/version":
            return 200, "application/json", json.dumps({"version": VERSION})
        if path == "/metrics":
            return 200, "application/json", "[]"
        if path == "/prometheus/metrics":
            return super().get("/metrics") if self.told.get("return_perf_metrics") else None
        return super().get(path)

    def metrics(self) -> Mapping[str, float]:
        """By its names."""
        return {
            "trtllm_num_requests_running": self.running,
            "trtllm_num_requests_waiting": 0,
            "trtllm_kv_cache_utilization": min(1.0, self.running / 100),
        }


def family(host: str) -> socket.AddressFamily:
    """Of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def run(model: str, host: str | None, port: int | None, served_model_name: str | None, **options: Any) -> None:
    """Serve."""
    told = settings_of(options["config"])
    name = served_model_name or os.path.basename(model.rstrip("/"))
    words = ["--host", host or "localhost", "--port", str(port or 8000), "--name", name]
    settings = fake_engine.options([*words, *shlex.split(os.environ.get("STANDIN", ""))])
    worker = subprocess.Popen(["sleep", str(ORPHAN_SECONDS)], start_new_session=True)
    try:
        server = Standin(settings, told, worker)
    except OSError as error:
        worker.kill()
        raise RuntimeError(f"Failed to bind socket to {host}:{port}: {error}") from None
    fake_engine.serve(server)


def main() -> None:
    """The program."""
    say(f"[TensorRT-LLM] TensorRT LLM version: {VERSION}")
    arguments = sys.argv[1:]
    command().main(arguments[1:] if arguments[:1] == ["serve"] else arguments, prog_name="trtllm-serve serve")


if __name__ == "__main__":
    main()
