"""What engines tell of their load reaches the routers' choice, through agent, link, server and scoreboard."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter

import pytest

from tests.end_to_end.fleet import RealFleet, fake_model, until


def answered_by(fleet: RealFleet, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", fleet.router, timeout=20)
        body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        reply = connection.getresponse()
        reply.read()
        found[reply.headers["X-Llmgw-Replica"]] += 1
        connection.close()
    return found


@pytest.mark.slow
def test_foreign_load_moves_requests_away(fleet):
    """Slow: agents look at their engines every 5 seconds, and two looks have to agree. Three clients go straight to one engine;
    the router then prefers the other one, though it has nothing in flight on either; when they have gone it is used again."""
    fleet.write_server(fake_model("m", 2, "--interval", "0.2", "--events", "1000"))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready("m", 2)
    until(lambda: len(answered_by(fleet, 6)) == 2, "both are used")
    table = json.loads((fleet.folder / "state" / "router" / "table.json").read_text())
    busy = table["endpoints"][0]
    stop = threading.Event()

    def client() -> None:
        connection = http.client.HTTPConnection(busy["host"], busy["port"], timeout=60)
        body = {"model": busy["model"], "stream": True, "max_tokens": 1000, "messages": [{"role": "user", "content": "x"}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {busy['key']}"})
        reply = connection.getresponse()
        assert reply.status == 200
        while not stop.is_set() and reply.readline():
            pass
        connection.close()

    threads = [threading.Thread(target=client, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: busy["id"] not in answered_by(fleet, 6), "the busy one is left alone", 30)
    stop.set()
    until(lambda: busy["id"] in answered_by(fleet, 6), "it is used again", 30)
