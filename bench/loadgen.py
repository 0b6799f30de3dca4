"""A public load generator against the router, unchanged: guidellm drives it as it would drive an engine.

    .venv/bin/python -m bench.loadgen --setup    install guidellm (once, into ~/.cache/llmgw-peers; it brings PyTorch)
    .venv/bin/python -m bench.loadgen            200 streamed chats, 16 at a time, with a key and everything on

What counts is that every request succeeds and that guidellm finds in the streams what it looks for: the tokens one by one, and
the usage that it asks for at their end. Its figures are those of an engine that does nothing (bench/engine.py, an event every
10 ms) behind one worker; what it takes for the time to the first token is the router's and its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from bench.gateway import KEY
from bench.router import EVENTS, PEERS, Routers, install

PACKAGE = "guidellm==0.8.1"
DEADLINE = 300


def prompts(folder: Path, count: int) -> Path:
    path = folder / "prompts.jsonl"
    rows = [
        {"prompt": f"Question {number}: what do {number} hens say to a fox?", "output_tokens_count": EVENTS}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(port: int, folder: Path, requests: int, streams: int) -> list[str]:
    target = f"kind=openai_http,target=http://127.0.0.1:{port},model=m,api_key={KEY},request_format=/v1/chat/completions"
    return [
        str(PEERS / "guidellm" / "bin" / "guidellm"), "run", "--backend", target,
        "--data", f"kind=json_file,path={prompts(folder, requests)}", "--profile", f"kind=concurrent,streams={streams}",
        "--constraint", f"kind=max_requests,count={requests}", "--disable-console",
        "--output", f"kind=json,path={folder}/report.json",
    ]  # fmt: skip


def run(folder: Path, requests: int, streams: int) -> None:
    routers = Routers(["llmgw"], folder)
    try:
        routers.wait()
        _, port = routers.targets["llmgw"]
        done = subprocess.run(
            command(port, folder, requests, streams), env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=DEADLINE,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        routers.end()
    if done.returncode:
        raise SystemExit(f"guidellm failed ({done.returncode}): {done.stderr[-2000:]}")
    show(json.loads((folder / "report.json").read_text())["benchmarks"][0]["metrics"])


def show(metrics: dict) -> None:
    totals = metrics["request_totals"]
    first, output = metrics["time_to_first_token_ms"]["successful"], metrics["output_token_count"]["successful"]
    print(f"requests: {totals['successful']} answered, {totals['errored']} failed, {totals['incomplete']} broken off")
    print(f"tokens per answer: {output['median']:.0f}; time to first token: median {first['median']:.1f} ms")
    if totals["errored"] or totals["incomplete"]:
        raise SystemExit(1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--setup", action="store_true")
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--streams", type=int, default=16)
    args = options.parse_args()
    if args.setup:
        install("guidellm", PACKAGE)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args.requests, args.streams)


if __name__ == "__main__":
    main()
