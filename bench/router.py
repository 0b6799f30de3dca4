"""What the router costs, beside its peers, in one run.

    .venv/bin/python -m bench.router --setup             install the peers (once, into ~/.cache/llmgw-peers)
    .venv/bin/python -m bench.router nginx sglang llmgw  measure these
    .venv/bin/python -m bench.router llmgw --memory      ... and memory with 2,000 open streams

Routers: nginx, sglang, vllm, litellm, llmgw, llmgw2 (two workers). Each stands in front of the same two engines that do nothing
(bench/engine.py). Rounds are interleaved, A B C A B C, so that a busy machine disturbs all alike: the figures to quote are the
ratios within one run, medians of rounds with their spread. CPU is what the kernel charged to the router's whole process tree,
per small request and per streamed event (100 events, 10 ms apart, many streams at once). llmgw runs with everything on
(bench/gateway.py). Needs wrk and nginx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.gateway import KEY

PEERS = Path(os.environ.get("PEERS", Path.home() / ".cache" / "llmgw-peers"))
PACKAGES = {"sglang": "sglang-router==0.3.2", "vllm": "vllm-router==0.1.17", "litellm": "litellm[proxy]==1.108.7"}
EVENTS = 100
PROMPT = "Hello, how are you today? Tell me a short story about a fox."
BODY = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": PROMPT}]}
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  upstream engines {{ {servers} keepalive 1024; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 10000000;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def command(name: str, port: int, engines: list[int], folder: Path) -> list[str]:
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    if name == "nginx":
        conf = folder / "nginx.conf"
        servers = " ".join(f"server 127.0.0.1:{engine};" for engine in engines)
        conf.write_text(NGINX.format(folder=folder, port=port, servers=servers))
        return ["nginx", "-c", str(conf)]
    if name in ("sglang", "vllm"):
        program = [f"{PEERS}/sglang/bin/sglang-router", "launch"] if name == "sglang" else [f"{PEERS}/vllm/bin/vllm-router"]
        return [*program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", "power_of_two",
                "--prometheus-port", str(free_port()), "--log-level", "error"]  # fmt: skip
    if name == "litellm":
        conf = folder / "litellm.json"
        models = [
            {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": url + "/v1", "api_key": "x"}} for url in urls
        ]
        conf.write_text(json.dumps({"model_list": models}))
        return [
            f"{PEERS}/litellm/bin/litellm",
            "--config",
            str(conf),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--num_workers",
            "1",
        ]
    if name in ("llmgw", "llmgw2"):
        return [sys.executable, "-m", "bench.gateway", str(port), "2" if name == "llmgw2" else "1", *map(str, engines)]
    raise SystemExit(f"unknown router {name}: nginx, sglang, vllm, litellm, llmgw, llmgw2")


def tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += tree(int(child))
    return found


def cpu(pid: int) -> float:
    ticks = 0
    for one in tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss(pid: int) -> float:
    """Megabytes, of what does the work: the largest child where there is one (of llmgw and nginx the worker)."""
    sizes = [re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text()) for one in tree(pid)[1:] or [pid]]
    return max(int(found[1]) for found in sizes if found) / 1024


def lua(folder: Path, streaming: bool) -> Path:
    path = folder / ("stream.lua" if streaming else "request.lua")
    body = json.dumps({**BODY, "stream": True} if streaming else BODY)
    path.write_text(
        f"wrk.method='POST'\nwrk.body='{body}'\nwrk.headers['Content-Type']='application/json'\n"
        f"wrk.headers['Authorization']='Bearer {KEY}'\n"
    )
    return path


def measure(pid: int, port: int, streaming: bool, connections: int, seconds: int, folder: Path) -> dict[str, float]:
    before = cpu(pid)
    out = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(lua(folder, streaming)),
         f"http://127.0.0.1:{port}/v1/chat/completions"], capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    spent = cpu(pid) - before
    count = int(re.search(r"(\d+) requests in", out)[1])
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1])
    each = EVENTS + 1 if streaming else 1
    return {"us": spent * 1e6 / max(count, 1) / each, "rate": rate, "bad": int(bad[1]) if bad else 0}


async def hold(port: int, count: int, seconds: float, look) -> float:
    """Open streams, keep them for a while, and look meanwhile."""
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        try:
            while await reader.read(65536):
                pass
        finally:
            writer.close()

    streams = [asyncio.ensure_future(one()) for _ in range(count)]
    await asyncio.sleep(seconds)
    found = look()
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return found


class Routers:
    """All that a run starts, and ends."""

    def __init__(self, names: list[str], folder: Path, interval: float = 0.01, events: int = EVENTS) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        self.engines = [free_port(), free_port()]
        for port in self.engines:
            self._start([sys.executable, "-m", "bench.engine", str(port), "--interval", str(interval), "--events", str(events)])
        self.targets = {}
        for name in names:
            port = free_port()
            self.targets[name] = (self._start(command(name, port, self.engines, folder)).pid, port)

    def _start(self, argv: list[str]) -> subprocess.Popen:
        env = {**os.environ, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
        self.started.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env))
        return self.started[-1]

    def wait(self) -> None:
        for name, (_, port) in self.targets.items():
            deadline = time.monotonic() + 90
            while not answers(port):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{name} does not answer on port {port}")
                time.sleep(0.3)

    def end(self) -> None:
        for process in reversed(self.started):
            process.send_signal(signal.SIGTERM)
        for process in self.started:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(port: int) -> bool:
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(BODY).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def run(args, folder: Path) -> dict[str, dict]:
    routers = Routers(args.routers, folder)
    results = {name: {"request": [], "event": []} for name in args.routers}
    try:
        routers.wait()
        idle = {name: rss(pid) for name, (pid, _) in routers.targets.items()}
        for _ in range(args.rounds):
            for kind, connections, extra in (("request", args.connections, 0), ("event", args.streams, 2)):
                for name, (pid, port) in routers.targets.items():
                    results[name][kind].append(measure(pid, port, kind == "event", connections, args.seconds + extra, folder))
    finally:
        routers.end()
    return {name: {"rss": idle[name], **kinds} for name, kinds in results.items()}


def ratios(mine: list[dict], other: list[dict]) -> str:
    found = sorted(a["us"] / b["us"] for a, b in zip(mine, other, strict=True))
    return f"{statistics.median(found):5.2f} ({found[0]:.2f}-{found[-1]:.2f})"


def show(results: dict[str, dict]) -> None:
    for kind in ("request", "event"):
        against = [name for name in ("nginx", "sglang", "vllm", "llmgw") if name in results]
        print(f"\nCPU per {kind:8} {'us':>8} {'rate/s':>8} {'bad':>4}  " + "  ".join(f"/ {name:17}" for name in against))
        for name, kinds in results.items():
            rounds = kinds[kind]
            us, rate = (statistics.median(one[key] for one in rounds) for key in ("us", "rate"))
            cells = [f"{ratios(rounds, results[other][kind]):19}" if other != name else " " * 19 for other in against]
            print(f"  {name:14} {us:8.1f} {rate:8.0f} {sum(one['bad'] for one in rounds):4}  " + "  ".join(cells))
    print("\nRSS before load, MB:  " + "  ".join(f"{name} {kinds['rss']:.1f}" for name, kinds in results.items()))


def memory(args, folder: Path) -> None:
    routers = Routers(args.routers, folder, interval=1.0, events=1000)
    try:
        routers.wait()
        for name, (pid, port) in routers.targets.items():
            before = rss(pid)
            during = asyncio.run(hold(port, args.open, 8, lambda pid=pid: rss(pid)))
            each = (during - before) * 1024 / args.open
            print(f"{name:10} {before:7.1f} MB, with {args.open} open streams {during:7.1f} MB: {each:.1f} KB each")
    finally:
        routers.end()


def install(name: str, package: str) -> None:
    """A peer, in an environment of its own, unless it is there."""
    if not (PEERS / name / "ok").exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS / name], check=True)
        subprocess.run([PEERS / name / "bin" / "pip", "install", "-q", package], check=True)
        (PEERS / name / "ok").touch()


def setup() -> None:
    for name, package in PACKAGES.items():
        install(name, package)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("routers", nargs="*", default=["nginx", "sglang", "llmgw"])
    options.add_argument("--setup", action="store_true")
    options.add_argument("--memory", action="store_true")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=int, default=5)
    options.add_argument("--connections", type=int, default=16)
    options.add_argument("--streams", type=int, default=256)
    options.add_argument("--open", type=int, default=2000)
    options.add_argument("--json", action="store_true")
    args = options.parse_args()
    if args.setup:
        setup()
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.memory:
            memory(args, Path(folder))
            return
        results = run(args, Path(folder))
        print(json.dumps(results, indent=1)) if args.json else show(results)


if __name__ == "__main__":
    main()
