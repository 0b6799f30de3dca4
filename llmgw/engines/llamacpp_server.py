"""llama-server's settings on the C{xllamacpp} wheel, for machines without the binary: C{python -m llmgw.engines.llamacpp_server}.

The wheel holds llama.cpp's own HTTP server but none of its command line, so this takes the long options that serving
needs, under llama-server's names. The key comes by C{LLAMA_API_KEY} or C{--api-key-file}, never by argv. SIGTERM ends it at
once: with streams open the wheel's server would hang until its next ping. Nothing else imports this module.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Option to attribute of CommonParams. A word after "|" is another name of the option; switches also exist as --no-NAME.
_NUMBERS = {
    "ctx-size": "n_ctx",
    "parallel": "n_parallel",
    "threads": "cpuparams.n_threads",
    "threads-batch": "cpuparams_batch.n_threads",
    "threads-http": "n_threads_http",
    "batch-size": "n_batch",
    "ubatch-size": "n_ubatch",
    "n-gpu-layers|gpu-layers": "n_gpu_layers",
    "main-gpu": "main_gpu",
    "predict|n-predict": "n_predict",
    "keep": "n_keep",
    "cache-reuse": "n_cache_reuse",
    "cache-ram": "cache_ram_mib",
    "timeout": "timeout_read",
    "sse-ping-interval": "sse_ping_interval",
    "sleep-idle-seconds": "sleep_idle_seconds",
    "verbosity": "verbosity",
    "seed": "sampling.seed",
}
_FRACTIONS = {
    "rope-freq-base": "rope_freq_base",
    "rope-freq-scale": "rope_freq_scale",
    "slot-prompt-similarity": "slot_prompt_similarity",
    "temp": "sampling.temp",
    "top-p": "sampling.top_p",
    "min-p": "sampling.min_p",
}
_TEXTS = {
    "model": "model.path",
    "mmproj": "mmproj.path",
    "chat-template": "chat_template",
    "slot-save-path": "slot_save_path",
}
_SWITCHES = {
    "metrics": "endpoint_metrics",
    "slots": "endpoint_slots",
    "props": "endpoint_props",
    "embeddings|embedding": "embedding",
    "kv-unified": "kv_unified",
    "cont-batching": "cont_batching",
    "context-shift": "ctx_shift",
    "cache-prompt": "cache_prompt",
    "swa-full": "swa_full",
    "warmup": "warmup",
    "jinja": "use_jinja",
    "offline": "offline",
    "check-tensors": "check_tensors",
    "ui|webui": "ui",
}
_CHOICES: dict[str, tuple[str, dict[str, int]]] = {
    "pooling": ("pooling_type", {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}),
    "flash-attn": ("flash_attn_type", {"auto": -1, "off": 0, "on": 1}),
    "fit": ("fit_params", {"off": False, "on": True}),
    "cache-type-k": ("cache_type_k", {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7}),
    "cache-type-v": ("cache_type_v", {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7}),
}


def parser() -> argparse.ArgumentParser:
    """The options, as C{--help} prints them."""
    options = argparse.ArgumentParser("llamacpp_server", allow_abbrev=False, description="llama.cpp's server from a wheel.")
    add = options.add_argument
    add("--version", action="store_true", help="print the version of the wheel")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8080)
    add("--alias", help="names to serve, separated by commas")
    add("--api-key-file", help="a file of keys, one a line")
    add("--reranking", "--rerank", action="store_true", default=None, help="serve a reranker")
    groups: list[tuple[dict[str, str], dict[str, Any]]] = [
        (_NUMBERS, {"type": int}),
        (_FRACTIONS, {"type": float}),
        (_TEXTS, {}),
        (_SWITCHES, {"action": argparse.BooleanOptionalAction}),
    ]
    for table, how in groups:
        for names, attribute in table.items():
            add(*(f"--{name}" for name in names.split("|")), dest=attribute, default=_environment(names), **how)
    for name, (attribute, values) in _CHOICES.items():
        add(f"--{name}", dest=attribute, choices=list(values), default=_environment(name))
    return options


def _environment(names: str) -> str | None:
    # As llama-server: LLAMA_ARG_FIT for --fit, with the option winning.
    return os.environ.get("LLAMA_ARG_" + names.partition("|")[0].upper().replace("-", "_"))


def configure(settings: argparse.Namespace, parameters: Any, convert: Callable[[Any, int], Any]) -> None:
    """Write the settings into a C{CommonParams}.

    @param convert: makes an enumeration value, of the kind of a present value, from its number.
    """
    for attribute in (*_NUMBERS.values(), *_FRACTIONS.values(), *_TEXTS.values(), *_SWITCHES.values()):
        if (value := getattr(settings, attribute)) is not None:
            _assign(parameters, attribute, value)
    for attribute, values in _CHOICES.values():
        if (word := getattr(settings, attribute)) is not None:
            _assign(parameters, attribute, convert(getattr(parameters, attribute), values[word]))
    if settings.reranking:
        parameters.embedding = True
        parameters.pooling_type = convert(parameters.pooling_type, _CHOICES["pooling"][1]["rank"])
    parameters.hostnames, parameters.port = [settings.host], settings.port
    if settings.alias:
        parameters.model_alias = set(settings.alias.split(","))
    parameters.api_keys = _keys(settings.api_key_file)


def _assign(parameters: Any, path: str, value: object) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        parameters = getattr(parameters, parent)
    setattr(parameters, name, value)


def _keys(path: str | None) -> list[str]:
    keys = [os.environ.pop("LLAMA_API_KEY", "")]
    if path:
        keys += Path(path).read_text().splitlines()
    return [key.strip() for key in keys if key.strip()]


def main() -> None:
    """Serve until a signal ends it."""
    options = parser()
    settings = options.parse_args()
    try:
        import xllamacpp
    except ImportError as error:
        sys.exit(f"xllamacpp is not installed for {sys.executable} ({error}): pip install llmgw[llamacpp]")
    if settings.version:
        sys.stdout.write(f"version: {xllamacpp.__version__} (xllamacpp)\n")
        return
    path = getattr(settings, "model.path")
    if path is None:
        options.error("the following arguments are required: --model")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    parameters = xllamacpp.CommonParams()
    configure(settings, parameters, lambda present, number: type(present)(number))
    try:
        server = xllamacpp.Server(parameters)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"exiting due to an error of llama.cpp: {error}")
    sys.stdout.write(f"server is listening on {server.listening_address}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
