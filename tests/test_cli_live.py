"""C{llmgw top} and C{llmgw usage}: from the workers' metrics to what people see."""

from __future__ import annotations

from llmgw.cli.live import as_text, quantile, screen
from llmgw.fleet.shard import EngineLoad
from llmgw.router.histogram import SECONDS, Metrics, observe
from llmgw.router.table import RoutedModel, Table, endpoint
from llmgw.server.live import targets, top

TABLE = Table(
    version=3,
    models=(RoutedModel("org/m", endpoints=("org/m/1", "org/m/2")), RoutedModel("cold", reason="0/3 nodes can run this")),
    endpoints=(
        endpoint("org/m/1", "http://10.0.0.5:20001/v1", model="m"),
        endpoint("org/m/2", "http://[fd00::5]:20001/v1", model="m"),
        endpoint("static:org/m/0", "https://elsewhere/v1", model="m", static=True),
    ),
)


def worked(requests):
    metrics = Metrics()
    metrics.requests.cell("org/m", "org/m/1", "200", "done")[0] = requests
    metrics.requests.cell("org/m", "org/m/1", "502", "engine_reset")[0] = 2
    for _ in range(requests):
        observe(metrics.ttft.cell("org/m", "org/m/1"), SECONDS, 0.2)
    metrics.in_flight.cell("org/m", "org/m/1")[0] = 4
    metrics.waiting.cell("org/m", "high")[0] = 1
    metrics.waiting.cell("org/m", "low")[0] = 2
    metrics.tokens.cell("org/m", "completion")[0] = requests * 50
    metrics.prefix_blocks.cell("org/m")[0] = requests * 10
    metrics.prefix_held.cell("org/m")[0] = requests * 4
    metrics.breaker.cell("org/m", "org/m/2")[0] = 1
    return metrics.text()


def answer(requests, now):
    return top(worked(requests), TABLE, {"org/m/1": EngineLoad(running=4, waiting=3, kv_used=0.62)}, now)


def test_top_is_made_from_metrics_and_engines():
    """Counters and gauges land at their model and replica; names with slashes are whole."""
    model, cold = answer(100, 10.0)["models"]
    assert (model["name"], model["waiting"], model["waiting_high"]) == ("org/m", 3, 1)
    assert (model["completion_tokens"], model["prefix_blocks"], model["prefix_held"]) == (5000, 1000, 400)
    one, two = model["replicas"]
    assert (one["id"], one["in_flight"], one["requests"], one["failed"]) == ("org/m/1", 4, 102, 2)
    assert one["ttft"]["+Inf"] == 100
    assert (one["kv_used"], one["engine_waiting"]) == (0.62, 3)
    assert two["breaker_open"]
    assert cold["reason"] == "0/3 nodes can run this"


def test_top_shows_what_happened_between_two_looks():
    """Rates, quantiles and hits are of the time between; a model without replicas says why."""
    text = screen(answer(100, 10.0), answer(200, 20.0))
    assert text.startswith("4 requests in flight, 3 waiting")
    line = next(line for line in text.splitlines() if "org/m/1" in line)
    assert line.split()[:7] == ["org/m", "org/m/1", "4", "3", "(1", "high)", "10.0"]
    assert "500" in line
    assert "62%" in line
    assert "40%" in line
    assert "3 wait in the engine" in line
    assert "left alone after failures" in text
    assert "0/3 nodes can run this" in text


def test_quantiles():
    """Within a bucket by its share; beyond the last bound it is said so; nothing where nothing came."""
    assert quantile([(0.1, 0), (0.2, 10), (float("inf"), 10)], 0.5) == "150 ms"
    assert quantile([(0.1, 5), (4.0, 10), (float("inf"), 10)], 0.9) == "3.2 s"
    assert quantile([(0.1, 0), (0.5, 0), (float("inf"), 10)], 0.5) == "> 500 ms"
    assert quantile([(0.1, 0)], 0.5) == ""
    assert quantile([], 0.5) == ""


def test_targets_for_prometheus():
    """Engines of ours with their own metrics' address and labels; static endpoints are somebody else's."""
    assert targets(TABLE) == [
        {"targets": ["10.0.0.5:20001"], "labels": {"__metrics_path__": "/metrics", "model": "org/m", "replica": "org/m/1"}},
        {"targets": ["[fd00::5]:20001"], "labels": {"__metrics_path__": "/metrics", "model": "org/m", "replica": "org/m/2"}},
    ]
    assert targets(None) == []


ROW = {"key": "k1", "model": "m", "requests": 3, "failures": 1, "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5,
       "seconds": 1.25, "hour": 3600}  # fmt: skip


def test_usage_as_text_and_csv():
    """Columns are what was asked for, then the sums."""
    text = as_text([ROW], ["key", "model"], as_csv=False)
    assert text.splitlines()[0].split() == ["KEY", "MODEL", "REQUESTS", "FAILURES", "PROMPT", "CACHED", "COMPLETION", "SECONDS"]
    assert text.splitlines()[1].split() == ["k1", "m", "3", "1", "10", "4", "5", "1.2"]
    assert as_text([ROW], ["hour"], as_csv=True) == (
        "hour,requests,failures,prompt_tokens,cached_tokens,completion_tokens,seconds\n1970-01-01 01:00,3,1,10,4,5,1.2"
    )
