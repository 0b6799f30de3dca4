"""Our router for a measurement: real workers with everything on, in front of engines that are given.

    python -m bench.gateway PORT WORKERS ENGINE-PORT...

Keys with limits, least cost over prefixes, metrics, JSON access log, usage: what an operator would run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from twisted.internet import reactor

from llmgw.config.server import Address, RouterSettings
from llmgw.router.table import KeyEntry, RoutedModel, Table, endpoint, key_digest
from llmgw.server.workers import RouterWorkers

KEY = "sk-bench"
PLENTY = 10**12


def table(ports: list[int]) -> Table:
    endpoints = tuple(endpoint(f"m/{n}", f"http://127.0.0.1:{port}/v1", model="m", limit=4096) for n, port in enumerate(ports))
    key = KeyEntry("k1", key_digest(KEY), name="bench", rpm=PLENTY, tpm=PLENTY, tpd=PLENTY, concurrency=100_000)
    return Table(models=(RoutedModel("m", endpoints=tuple(one.id for one in endpoints)),), endpoints=endpoints, keys=(key,))


def main() -> None:
    port, count, *engines = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        settings = RouterSettings(Address("127.0.0.1", port), workers=count, keys="required", access_log=state / "access.jsonl")
        workers = RouterWorkers(reactor, settings, state)
        workers.listen()
        workers.start()
        workers.publish(table(engines))
        reactor.addSystemEventTrigger("before", "shutdown", lambda: [place.kill() for place in workers.places])
        reactor.run()


if __name__ == "__main__":
    main()
