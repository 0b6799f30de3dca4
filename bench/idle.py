"""What llmgw costs while nothing happens: memory and CPU of server, agent, router worker and shim, with real daemons.

    .venv/bin/python -m bench.idle [--seconds 30] [--replicas 4]

One server, one agent, some fake engines, no requests. Memory is RSS as the kernel has it; CPU is percent of one core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from tests.end_to_end.fleet import RealFleet, fake_model, processes

KINDS = {"llmgw-server": "server", "llmgw-agent": "agent", "router.worker": "worker", "shim": "shim"}


def kind(command: str) -> str | None:
    return next((name for part, name in KINDS.items() if part in command), None)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=30)
    options.add_argument("--replicas", type=int, default=4)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fleet = RealFleet(Path(folder))
        try:
            fleet.write_server(fake_model("m", args.replicas), timing="heartbeat: 5s")
            fleet.write_agent("n1")
            fleet.start_server()
            fleet.start_agent("n1")
            fleet.ready(count=args.replicas, seconds=60)
            watched = {pid: name for pid, command in processes(folder).items() if (name := kind(command))}
            before, begin = {pid: cpu_seconds(pid) for pid in watched}, time.monotonic()
            time.sleep(args.seconds)
            took = time.monotonic() - begin
            print(f"{'process':10} {'RSS MB':>8} {'% of a core':>12}   over {took:.0f} s, {args.replicas} engines")
            for pid, name in sorted(watched.items(), key=lambda row: row[1]):
                print(f"{name:10} {rss_mb(pid):8.1f} {(cpu_seconds(pid) - before[pid]) / took * 100:12.2f}")
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
