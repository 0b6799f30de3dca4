"""The address for Prometheus: the metrics and nothing else, on a real port."""

from __future__ import annotations

import pytest_twisted
import treq
from twisted.internet.defer import succeed

from llmgw.admin.api import MetricsPort
from llmgw.config.settings import Address
from tests.ports import free_port


class OnlyMetrics:
    """Of a server, what the port asks for."""

    def metrics(self):
        return succeed("llmgw_leader 1\n")


@pytest_twisted.ensureDeferred
async def test_metrics_and_nothing_else():
    """/metrics in Prometheus' type; the admin API is not there, neither to read nor to order."""
    from twisted.internet import reactor

    port = free_port()
    service = MetricsPort(Address("127.0.0.1", port), OnlyMetrics(), reactor)
    service.startService()
    try:
        answer = await treq.get(f"http://127.0.0.1:{port}/metrics", persistent=False)
        assert answer.code == 200 and answer.headers.getRawHeaders("content-type")[0].startswith("text/plain; version=0.0.4")
        assert await answer.text() == "llmgw_leader 1\n"
        for method, path in (("GET", "/v1/status"), ("POST", "/v1/drain"), ("GET", "/")):
            answer = await treq.request(method, f"http://127.0.0.1:{port}{path}", persistent=False)
            assert answer.code == 404
            await answer.content()
    finally:
        await service.stopService()
