"""What a large fleet costs its server: CPU, memory, and how its agents come back after a restart.

    .venv/bin/python -m bench.fleet [--agents 500] [--shards 8] [--seconds 180] [--profile FILE]

One real llmgw-server; simulated nodes in a few processes, each with the real agent's end of the link over mutual TLS 1.3 and a
certificate of its own. CPU is percent of one core of the server's process, the median of windows of five seconds; handshakes are
counted where they begin, also those that come to nothing.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from bench.idle import cpu_seconds, rss_mb
from llmgw import pki
from llmgw.pkifolder import read_pair
from tests.end_to_end.fleet import RealFleet, processes

WINDOW = 5.0
say = functools.partial(print, flush=True)
MODEL = """
  - name: {name}
    replicas: {replicas}
    profile:
      engine: command
      argv: [/bin/engine, --port, "{{port}}"]
      health: /health
      resources: {{devices: 1, device_memory: 60GiB, host_memory: 1GiB}}
      place: {{spread: false}}
"""


class Crowd:
    """The processes of agents, and what they told."""

    def __init__(self, fleet: RealFleet, names: list[str], count: int) -> None:
        self._folder = fleet.folder
        self._processes = []
        for part in range(count):
            mine = names[part::count]
            command = [sys.executable, "-m", "bench.fleet_agents", str(fleet.folder), str(fleet.fleet), *mine]
            log = (fleet.folder / "log" / f"crowd-{part}.log").open("ab")
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def told(self, word: str, since: float = 0.0) -> list[float]:
        """When C{word} was told."""
        lines = (line.split("\t") for path in (self._folder / "log").glob("*.tsv") for line in path.read_text().splitlines())
        return sorted(at for at, said in ((float(line[0]), line[1]) for line in lines) if said == word and at >= since)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(20)


def certificates(folder: Path, names: list[str]) -> None:
    (authority, *_), key = read_pair(folder / "ca.pem", folder / "ca.key")
    for name in names:
        pair = pki.issue(pki.Pair(authority, key), pki.NODE, name, datetime.now(UTC))  # type: ignore[arg-type]
        (folder / f"{name}.pem").write_bytes(pki.certificate_text(pair.certificate))
        (folder / f"{name}.key").touch(0o600)
        (folder / f"{name}.key").write_bytes(pki.key_text(pair.key))


def waited(crowd: Crowd, word: str, count: int, since: float, seconds: float) -> float | None:
    """Seconds from C{since} until C{count} told C{word}; None if they did not."""
    while time.time() - since < seconds:
        if len(told := crowd.told(word, since)) >= count:
            return told[count - 1] - since
        time.sleep(0.5)
    return None


def router_worker(fleet: RealFleet) -> int:
    return next(pid for pid, command in processes(str(fleet.folder)).items() if "router.worker" in command)


def watch(server: int, worker: int, seconds: float) -> None:
    shares, beside, begin = [], cpu_seconds(worker), time.monotonic()
    while time.monotonic() - begin < seconds:
        used, at = cpu_seconds(server), time.monotonic()
        time.sleep(min(WINDOW, seconds))
        shares.append((cpu_seconds(server) - used) / (time.monotonic() - at) * 100)
    took = time.monotonic() - begin
    say(f"server CPU: median {statistics.median(shares):.1f} % of a core, highest {max(shares):.1f} % of {len(shares)} windows")
    say(f"server RSS: {rss_mb(server):.0f} MB; its router worker: {(cpu_seconds(worker) - beside) / took * 100:.1f} % of a core")


def restart(fleet: RealFleet, crowd: Crowd, agents: int) -> None:
    since, before = time.time(), len(fleet.log("server"))
    fleet.end("server")
    stopped = time.time() - since
    server = fleet.start_server().pid
    up = time.time() - since
    back = waited(crowd, "accepted", agents, since, 180)
    seconds = Counter(int(at - since) for at in crowd.told("dialed", since))
    most = max(seconds.values(), default=0)
    log = fleet.log("server")[before:]
    say(f"restart: stopped after {stopped:.1f} s, up after {up:.1f} s; {seconds.total()} handshakes for {agents} agents")
    say(f"all are back {f'{back:.1f} s' if back else 'NOT within 180 s'} after the signal")
    say(f"most handshakes in one second: {most}, {most / max(1, seconds.total()) * 100:.1f} % of all")
    say(f"in each second: {' '.join(str(seconds[second]) for second in range(max(seconds, default=0) + 1))}")
    refused = Counter(line.partition("refused ")[2].split(": ")[1] for line in log.splitlines() if ": refused " in line)
    say(f"refused meanwhile: {dict(refused) or 'none'}")
    say(f"the new server took {cpu_seconds(server):.1f} s of CPU")


def run(fleet: RealFleet, args: argparse.Namespace) -> None:
    names = [f"n{number:04}" for number in range(args.agents)]
    certificates(fleet.folder / "pki", names)
    models = "".join(MODEL.format(name=f"m{number:03}", replicas=args.shards * 10) for number in range(args.agents // 10))
    fleet.write_server(models, timing="heartbeat: 5s")
    server = fleet.start_server().pid
    begin = time.time()
    crowd = Crowd(fleet, names, args.processes)
    try:
        linked = waited(crowd, "accepted", args.agents, begin, 300)
        ready = waited(crowd, "ready", args.agents * args.shards, begin, 600)
        shards = args.agents * args.shards
        say(f"{args.agents} agents linked after {linked or 0:.0f} s, {shards} shards ready after {ready or 0:.0f} s")
        say(f"the server took {cpu_seconds(server):.1f} s of CPU for that")
        time.sleep(WINDOW)
        if args.profile:
            profiled = subprocess.Popen(["py-spy", "record", "-p", str(server), "-d", "30", "-o", args.profile, "-f", "raw"])
            profiled.wait(60)
        watch(server, router_worker(fleet), args.seconds)
        restart(fleet, crowd, args.agents)
        time.sleep(WINDOW)
        say(f"server RSS after the restart: {rss_mb(fleet.running['server'].pid):.0f} MB")
    finally:
        crowd.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--agents", type=int, default=500)
    options.add_argument("--shards", type=int, default=8)
    options.add_argument("--seconds", type=float, default=180)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--profile", help="a file for py-spy's stacks of half a minute (pip install py-spy)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fleet = RealFleet(Path(folder))
        try:
            run(fleet, args)
        except BaseException:
            print(fleet.log("server")[-4000:], file=sys.stderr)
            raise
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
