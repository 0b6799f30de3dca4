"""Metrics of workers that come and go, as real processes: what was counted stays."""

from __future__ import annotations

import os
import signal

import pytest_twisted
from twisted.internet.threads import deferToThread

from tests.test_router_workers import ask, engine, state, when, workers  # noqa: F401


@pytest_twisted.ensureDeferred
async def test_totals_do_not_fall_with_a_worker(workers):  # noqa: F811
    """What a worker counted stays when it is killed, and while it is silent: a scraper would take less for a restart of all. That
    it was replaced is counted and told, with its process id."""
    told = []
    workers.on_ended = lambda *what: told.append(what)

    async def total(name):
        return sum(float(line.rpartition(" ")[2]) for line in (await workers.metrics()).splitlines() if line.startswith(name))

    asked = 'llmgw_requests_total{model="m",replica="m/1",status="200"'
    await deferToThread(lambda: [ask(workers.address[1]) for _ in range(40)])
    assert await total(asked) == 40
    killed, stopped = workers.places[0].pid, workers.places[1].pid
    os.kill(killed, signal.SIGKILL)
    await when(lambda: workers.places[0].replaced == 1 and workers.versions() == {0: 1, 1: 1})
    assert await total(asked) == 40
    os.kill(stopped, signal.SIGSTOP)
    assert await total(asked) == 40
    await when(lambda: workers.places[1].replaced == 1 and workers.versions() == {0: 1, 1: 1})
    await deferToThread(lambda: [ask(workers.address[1]) for _ in range(10)])
    assert await total(asked) == 50
    assert await total("llmgw_in_flight{") == 0
    assert await total("llmgw_router_worker_restarts_total ") == 2
    assert [(number, pid) for number, pid, _ in told] == [(0, killed), (1, stopped)]
    assert "signal 9" in told[0][2] and "silent" in told[1][2]
