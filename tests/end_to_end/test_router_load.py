"""What engines tell of their load reaches the routers' choice, and what routers count reaches those who watch."""

from __future__ import annotations

import csv
import http.client
import io
import json
import threading
import urllib.request
from collections import Counter

import pytest

from tests.end_to_end.fleet import RealFleet, fake_model, free_ports, until


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


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


def test_what_was_served_is_seen(fleet):
    """One stream, seen in top, usage, metrics, the access log, and through the list of engines for Prometheus."""
    (port,) = free_ports(1)
    fleet.write_server(fake_model(), router=f", metrics: 127.0.0.1:{port}, keys: required")
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    made = json.loads(fleet.llmgw("key", "create", "alice", "--json"))
    fleet.stream(key=made["key"], tokens=5).whole()

    def usage() -> list[dict[str, str]]:
        text = fleet.llmgw("usage", "--by", "key,model", "--since", "1d", "--csv")
        return list(csv.DictReader(io.StringIO(text)))

    (row,) = until(usage, "usage is in the store")
    assert (row["key"], row["model"], row["requests"], row["failures"]) == (made["id"], "m", "1", "0")
    assert int(row["completion_tokens"]) > 0
    (model,) = json.loads(fleet.llmgw("top", "--json"))["models"]
    assert (model["replicas"][0]["id"], model["replicas"][0]["requests"]) == ("m/1", 1)
    assert "m/1" in fleet.llmgw("top", "--once", "--interval", "100ms")
    metrics = fetch(f"http://127.0.0.1:{port}/metrics")
    assert 'llmgw_requests_total{model="m",replica="m/1",status="200",reason="done"} 1' in metrics
    assert 'llmgw_stream_ends_total{kind="done"} 1' in metrics
    (target,) = json.loads(fetch(f"http://127.0.0.1:{port}/targets"))
    assert target["labels"]["replica"] == "m/1"
    # The engine counts what its agent asked it before it was ready, too.
    assert "requests_total 2" in fetch(f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}")
    log = [json.loads(line) for line in (fleet.folder / "log" / "access.jsonl").read_text().splitlines()]
    assert [(one["key"], one["replica"], one["status"]) for one in log] == [(made["id"], "m/1", 200)]
