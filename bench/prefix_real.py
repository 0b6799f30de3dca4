"""bench.prefix with real requests: a trace replayed against fake engines through running routers, one after the other.

    .venv/bin/python -m bench.prefix_real --trace conversation.jsonl llmgw sglang vllm

Routers: C{llmgw} (C{llmgw:2} with two workers), C{sglang} and C{vllm} (policy cache_aware), C{rr} (sglang's round robin), or
NAME=PORT for one that listens already. The peers are looked for in $PEERS (~/.cache/llmgw-peers): sglang-router 0.3.2 and
vllm-router 0.1.17 from PyPI, each in an environment of its own (C{--setup} makes them).

Clients, engines and clock are as in bench/prefix.py, but everything is SPEED times faster than it happened, and there are sockets
and processes between them. The times are seconds of the trace, to the first byte of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.prefix import DECODE, PREFILL, TOKENS, Engine, Row, content, ideal, little_sharing
from bench.router import PACKAGES, PEERS, free_port, install

BIN = Path(sys.executable).parent
ANSWER = json.dumps({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [
    {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}).encode()  # fmt: skip
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}],"model_path":"m"}'


class FakeEngine(Engine):
    """An engine's cache and pace behind a socket."""

    def __init__(self, capacity: int, speed: float) -> None:
        super().__init__(capacity)
        self.speed = speed
        self.port = 0

    async def listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=4096, limit=2**26)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"pri "):
                    break  # a router trying HTTP/2
                body = await self.body(reader, head)
                out = await self.answer(json.loads(body)) if head.startswith(b"post") else MODELS
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(out) + out)
                await writer.drain()
        writer.close()

    async def body(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" not in head:
            _, found, rest = head.partition(b"content-length:")
            return await reader.readexactly(int(rest.split(b"\r\n")[0])) if found else b""
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return b"".join(parts)

    async def answer(self, request: dict[str, Any]) -> bytes:
        text = request["messages"][0]["content"]
        ids = [int(text[at + 1 : at + 7]) for at in range(0, len(text) - 2047, 2048)]
        self.in_flight += 1
        try:
            fresh = len(ids) - self.use(ids)
            wanted = request.get("max_tokens") or request.get("max_completion_tokens") or 1
            await asyncio.sleep((fresh * TOKENS / PREFILL + wanted / DECODE) / self.speed)
        finally:
            self.in_flight -= 1
        return ANSWER


async def ask(port: int, body: bytes) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
                     b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        line = await reader.readline()
        await reader.read()
        return line.split(b" ")[1:2] == [b"200"]
    except OSError:
        return False
    finally:
        writer.close()


async def replay(trace: list[Row], port: int, engines: list[FakeEngine], speed: float) -> dict[str, Any]:
    for engine in engines:
        engine.reset()
    spread: list[int] = []
    times: list[float] = []
    failed = 0

    async def one(row: Row) -> None:
        nonlocal failed
        body = {
            "model": "m",
            "max_tokens": row["output_length"],
            "messages": [{"role": "user", "content": content(row).decode()}],
        }
        begin = time.monotonic()
        failed += not await ask(port, json.dumps(body).encode())
        times.append((time.monotonic() - begin) * speed)
        loads = [engine.in_flight for engine in engines]
        spread.append(max(loads) - min(loads))

    start = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for row in trace:
            await asyncio.sleep(max(0.0, start + row["timestamp"] / 1000 / speed - time.monotonic()))
            tasks.create_task(one(row))
    requests, prefilled = ([getattr(engine, name) for engine in engines] for name in ("requests", "prefilled"))
    times.sort()
    return {
        "hit": round(sum(engine.hits for engine in engines) / sum(engine.blocks for engine in engines), 3),
        "hottest_requests": round(max(requests) * len(engines) / sum(requests), 2),
        "hottest_prefill": round(max(prefilled) * len(engines) / sum(prefilled), 2),
        "spread": round(statistics.mean(spread), 2), "failed": failed,
        "p50_s": round(times[len(times) // 2], 1), "p95_s": round(times[int(len(times) * 0.95)], 1),
    }  # fmt: skip


@contextlib.contextmanager
def running(name: str, ports: list[int]) -> Iterator[int]:
    """A router over the engines at these ports; the port on which it listens."""
    label, _, where = name.partition("=")
    if where:
        yield int(where)
        return
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        router = subprocess.Popen(program(label, port, ports, Path(folder)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield port
        finally:
            router.terminate()
            router.wait(30)


def program(label: str, port: int, ports: list[int], folder: Path) -> list[str]:
    kind, _, workers = label.partition(":")
    if kind == "llmgw":
        endpoints = [f'      - {{url: "http://127.0.0.1:{one}/v1", model: m}}' for one in ports]
        settings = folder / "server.yaml"
        settings.write_text("\n".join([
            f"router: {{listen: '127.0.0.1:{port}', workers: {workers or 1}, keys: none}}",
            f"admin: {{socket: {folder}/admin.sock}}",
            f"store: sqlite:///{folder}/llmgw.db", "models:", "  - name: m", "    endpoints:", *endpoints, "",
        ]))  # fmt: skip
        return [str(BIN / "twistd"), "-n", "--pidfile=", "llmgw-server", "--config", str(settings)]
    urls = [f"http://127.0.0.1:{one}" for one in ports]
    policy = "round_robin" if kind == "rr" else "cache_aware"
    start = [f"{PEERS}/vllm/bin/vllm-router"] if kind == "vllm" else [f"{PEERS}/sglang/bin/sglang-router", "launch"]
    return [*start, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", policy,
            "--prometheus-port", str(free_port()), "--log-level", "error"]  # fmt: skip


async def measure(args: argparse.Namespace) -> None:
    trace = (
        little_sharing() if args.trace == "little" else [json.loads(line) for line in Path(args.trace).read_text().splitlines()]
    )
    trace = trace[: args.requests]
    print(f"{len(trace)} requests, an ideal single cache hits {ideal(trace):.3f}", flush=True)
    engines = [FakeEngine(args.capacity, args.speed) for _ in range(args.engines)]
    servers = [await engine.listen() for engine in engines]
    hello = json.dumps({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}).encode()
    for name in args.routers:
        with running(name, [engine.port for engine in engines]) as port:
            deadline = time.monotonic() + 60
            while not await ask(port, hello):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{name} does not answer")
                await asyncio.sleep(0.3)
            print(f"  {name.partition('=')[0]:10} {json.dumps(await replay(trace, port, engines, args.speed))}", flush=True)
    for server in servers:
        server.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("routers", nargs="*", default=["llmgw", "llmgw:2", "sglang", "vllm", "rr"])
    options.add_argument("--trace", default="little", help="a file, or the word little")
    options.add_argument("--speed", type=float, default=25)
    options.add_argument("--capacity", type=int, default=12000, help="blocks in an engine's cache")
    options.add_argument("--engines", type=int, default=8)
    options.add_argument("--requests", type=int, default=None)
    options.add_argument("--setup", action="store_true", help="install the peers first")
    args = options.parse_args()
    if args.setup:
        for name in ("sglang", "vllm"):
            install(name, PACKAGES[name])
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
