"""How well the router uses the engines' prefix caches, replaying traces of requests through the router's own code.

    .venv/bin/python -m bench.prefix --trace conversation.jsonl [--trace synthetic.jsonl]

In one process and on the trace's own clock, so that a trace of an hour takes seconds: L{Group}, L{Prefixes} and L{Scoreboard}
are the router's, the engines are simulated. Each block id of the trace (512 tokens) stands for 2 KiB of text; an engine keeps
an LRU of blocks, "prefills" what it does not hold at 8,000 tokens/s and "decodes" 30 tokens/s for each request. C{little} is a
load with little to share.

Traces are JSON lines with C{timestamp} (ms), C{output_length} and C{hash_ids}, as in github.com/kvcache-ai/Mooncake.
Printed: block hit ratio, hottest engine / mean (by requests, by prefilled tokens), mean spread of requests in flight.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmgw.router.choose import Candidate, Group
from llmgw.router.prefixes import Hints, Prefixes
from llmgw.router.scoreboard import Scoreboard

TOKENS = 512
PREFILL, DECODE = 8000, 30
Row = dict[str, Any]


def block_text(block: int, size: int = 2048) -> bytes:
    seed = b"[%06d] " % block
    return (seed * (size // len(seed) + 1))[:size]


def content(row: Row) -> bytes:
    return b"".join(map(block_text, row["hash_ids"]))


def prompt(row: Row) -> bytes:
    return b'[{"role":"user","content":"' + content(row) + b'"}]'


def little_sharing(count: int = 6000) -> list[Row]:
    """One request in ten begins like an earlier one; all others share one block."""
    draw = random.Random(5)
    rows: list[Row] = []
    for number in range(count):
        fresh = [0, *range(1 + number * 30, number * 30 + draw.randint(4, 28))]
        ids = rows[draw.randrange(len(rows))]["hash_ids"][:8] + fresh[1:] if rows and draw.random() < 0.1 else fresh
        rows.append({"timestamp": number * 300, "output_length": draw.randint(20, 600), "hash_ids": ids})
    return rows


class Engine:
    """An engine's cache and its load."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.in_flight = self.requests = self.prefilled = self.hits = self.blocks = 0

    def use(self, ids: list[int]) -> int:
        matched = next((n for n, block in enumerate(ids) if block not in self.cache), len(ids))
        for block in ids:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.capacity:
            self.cache.popitem(last=False)
        self.requests += 1
        self.hits += matched
        self.blocks += len(ids)
        self.prefilled += (len(ids) - matched) * TOKENS
        return matched


class Worker:
    """What a router worker does with a request, with its own view of the shared files."""

    def __init__(self, folder: Path, server: Scoreboard, rows: list[int], policy: str, draw: random.Random) -> None:
        self.board = Scoreboard.attach(folder / "board", server.claim())
        self.prefixes = Prefixes(folder / "prefixes")
        self.group = Group(self.board, [Candidate(str(n), row) for n, row in enumerate(rows)], policy, draw.random)
        self.hints = Hints(self.prefixes, "m", rows)

    def route(self, text: bytes, now: float) -> tuple[int, str]:
        hint = self.hints.look(text)
        found, reason = self.group.choose(now, hint.held, hint.blocks)
        assert found is not None
        self.board.enter(found.row, 0)
        index = int(found.id)
        self.hints.sent(hint, index, now)
        return index, reason

    def close(self) -> None:
        self.board.close()
        self.prefixes.close()


def replay(trace: list[Row], policy: str, count: int, workers: int, capacity: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    engines = [Engine(capacity) for _ in range(count)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        server = Scoreboard.create(folder / "board")
        rows = list(server.assign([f"endpoint/{n}" for n in range(count)], 1).values())
        routers = [Worker(folder, server, rows, policy, draw) for _ in range(workers)]
        spread, reasons, took = drive(trace, engines, routers, draw)
        for router in routers:
            router.close()
        server.close()
    requests = [engine.requests for engine in engines]
    prefilled = [engine.prefilled for engine in engines]
    return {
        "hit": round(sum(e.hits for e in engines) / sum(e.blocks for e in engines), 3),
        "hottest_requests": round(max(requests) * count / sum(requests), 2),
        "hottest_prefill": round(max(prefilled) * count / sum(prefilled), 2),
        "spread": round(statistics.mean(spread), 2),
        "us_per_request": round(took / len(trace) * 1e6, 1),
        "why": dict(reasons.most_common()),
    }


def drive(
    trace: list[Row], engines: list[Engine], routers: list[Worker], draw: random.Random
) -> tuple[list[int], Counter[str], float]:
    spread, reasons, took = [], Counter[str](), 0.0
    ends: list[tuple[float, int, int, Worker]] = []
    for number, row in enumerate(trace):
        now = row["timestamp"] / 1000
        while ends and ends[0][0] <= now:
            _, _, done, router = heapq.heappop(ends)
            engines[done].in_flight -= 1
            router.board.leave(router.group.rows[done])
            loads = [engine.in_flight for engine in engines]
            spread.append(max(loads) - min(loads))
        text, router = prompt(row), draw.choice(routers)
        begin = time.perf_counter()
        chosen, reason = router.route(text, now)
        took += time.perf_counter() - begin
        reasons[reason] += 1
        matched = engines[chosen].use(row["hash_ids"])
        engines[chosen].in_flight += 1
        seconds = (len(row["hash_ids"]) - matched) * TOKENS / PREFILL + row["output_length"] / DECODE
        heapq.heappush(ends, (now + seconds, number, chosen, router))
    return spread, reasons, took


def ideal(trace: list[Row]) -> float:
    engine = Engine(10**12)
    for row in trace:
        engine.use(row["hash_ids"])
    return engine.hits / engine.blocks


def loads(args: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    for path in args.trace:
        yield Path(path).stem, [json.loads(line) for line in Path(path).read_text().splitlines()][: args.requests]
    yield "little", little_sharing()[: args.requests]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trace", action="append", default=[])
    options.add_argument("--engines", type=int, default=8)
    options.add_argument("--requests", type=int, default=None)
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    for name, trace in loads(args):
        print(f"{name}: {len(trace)} requests, an ideal single cache hits {ideal(trace):.3f}")
        for capacity in (12000, 3000):
            for policy, workers in (("round_robin", 1), ("least_inflight", 1), ("least_cost", 1), ("least_cost", 2)):
                result = replay(trace, policy, args.engines, workers, capacity, args.seed)
                print(f"  {capacity:6} blocks  {policy:14} {workers} worker(s)  {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
