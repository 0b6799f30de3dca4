"""A process that is nothing but a parent of router workers, for tests that kill it.

C{python -m tests.worker_parent STATE PORT ENGINE WORKERS DRAIN}
"""

from __future__ import annotations

import sys
from pathlib import Path

from twisted.internet import reactor

from llmgw.config.server import Address, RouterSettings, Timeouts
from llmgw.router.table import RoutedModel, Table, endpoint
from llmgw.server.workers import RouterWorkers


def main() -> None:
    state, port, engine, count, drain = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
    settings = RouterSettings(Address("127.0.0.1", port), workers=count, timeouts=Timeouts(drain=drain))
    workers = RouterWorkers(reactor, settings, state)
    workers.listen()
    workers.start()
    models = (RoutedModel("m", endpoints=("m/1",)), RoutedModel("asleep", on_demand=True))
    version = workers.publish(Table(models=models, endpoints=(endpoint("m/1", engine, model="m"),)))

    def routing(_):
        print("routing", workers.address[1], *(place.pid for place in workers.places), flush=True)

    workers.when_routing(version, 20).addCallbacks(routing, lambda failure: print("failed", failure.value, flush=True))
    reactor.addSystemEventTrigger("before", "shutdown", lambda: workers.stop(at_once=False))
    reactor.run()


if __name__ == "__main__":
    main()
