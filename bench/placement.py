"""How long a plan takes against the size of the fleet: as many replicas as nodes of 8 devices, each its own model.

    .venv/bin/python bench/placement.py [NODES ...]

Prints seconds of one core and time per node; the last column tells growth (1.0 is linear).
"""

from __future__ import annotations

import sys
import time

from llmgw.fleet.model import Place, Profile
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.interfaces import Needs
from llmgw.planning.checks import Want
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.room import Candidate

GIB = 2**30


def fleet(count: int) -> list[Candidate]:
    nodes = []
    for number in range(count):
        name = f"n{number}"
        devices = tuple(Device(f"{name}-{i}", i, "H100", 80 * GIB, memory_used=GIB) for i in range(8))
        facts = NodeFacts(name, name, Inventory(64, 2**40, 2**40, devices), labels={"pool": "ab"[number % 2]})
        facts = NodeFacts(
            name, name, facts.inventory, labels=facts.labels, installations=(Installation("vllm", "vllm", version="0.33.0"),)
        )
        nodes.append(Candidate(name, facts))
    return nodes


def wants(count: int) -> list[Want]:
    found = []
    for number in range(count):
        profile = Profile("vllm", place=Place({"pool": "ab"[number % 2]}, spread=False))
        needs = Needs((1, 2, 4, 8)[number % 4], (20 + number % 40) * GIB, 4 * GIB, 1)
        found.append(Want(f"m{number}/1", f"m{number}", profile, needs))
    return found


def once(count: int) -> tuple[float, int]:
    nodes, wanted = fleet(count), wants(count)
    began = time.process_time()
    ledger = Ledger(nodes)
    placed = sum(isinstance(ledger.place(want), Placement) for want in wanted)
    return time.process_time() - began, placed


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:]] or [125, 250, 500, 1000, 2000]
    before = None
    print(f"{'nodes':>6} {'placed':>7} {'seconds':>8} {'ms/node':>8} {'growth':>7}")
    for size in sizes:
        seconds, placed = min(once(size) for _ in range(3))
        each = seconds / size * 1000
        growth = f"{each / before:.2f}" if before else "-"
        print(f"{size:>6} {placed:>7} {seconds:>8.3f} {each:>8.3f} {growth:>7}")
        before = each


if __name__ == "__main__":
    main()
