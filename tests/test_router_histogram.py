"""Metrics: text that Prometheus reads, summed over workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmgw.router import histogram
from llmgw.router.histogram import SECONDS, Family, Metrics, add_up, counted, observe, quantile


def samples(text: str) -> dict:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_it():
    """Every family parses, with its type and its labels, whatever is in them."""
    metrics = Metrics()
    for family in metrics.families:
        family.cell(*(f'{label} "\\\n' for label in family.labels))[0] += 1
    found = {family.name: family for family in text_string_to_metric_families(metrics.text())}
    assert len(found) == len(metrics.families)
    for family in metrics.families:
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        assert found[name].type == family.kind
        assert all(label in found[name].samples[0].labels for label in family.labels)


def test_what_has_to_be_there():
    """Names that dashboards rely on."""
    names = {family.name for family in Metrics().families}
    assert {"llmgw_requests_total", "llmgw_ttft_seconds", "llmgw_inter_token_seconds", "llmgw_request_duration_seconds",
            "llmgw_router_overhead_seconds", "llmgw_waiting", "llmgw_queue_wait_seconds", "llmgw_in_flight",
            "llmgw_retries_total", "llmgw_cancels_total", "llmgw_stream_ends_total", "llmgw_breaker_open",
            "llmgw_breaker_changes_total", "llmgw_prefix_blocks_total", "llmgw_prefix_entries",
            "llmgw_prefix_evictions_total", "llmgw_engine_connections_total", "llmgw_limited_total",
            "llmgw_loop_lag_seconds", "llmgw_tokens_total"} <= names  # fmt: skip


def test_buckets_are_cumulative():
    """A value on a bound belongs below it; the last bucket has all."""
    metrics = Metrics()
    cell = metrics.ttft.cell("m", "m/1")
    for value in (0.0, 0.001, 0.0011, 1e9):
        observe(cell, SECONDS, value)
    found = samples(metrics.text())
    labels = (("model", "m"), ("replica", "m/1"))

    def bucket(le):
        return found["llmgw_ttft_seconds_bucket", ("le", le), *labels]

    assert (bucket("0.001"), bucket("0.0025"), bucket("640"), bucket("+Inf")) == (2, 3, 3, 4)
    assert found["llmgw_ttft_seconds_count", *labels] == 4
    assert found["llmgw_ttft_seconds_sum", *labels] == pytest.approx(1e9 + 0.0021)


def test_workers_add_up():
    """Counts of the same series are added, series of one worker kept, gauges of which the largest matters are not added."""
    one, two = Metrics(), Metrics()
    one.requests.cell("m", "m/1", "200", "prefix")[0] = 3
    two.requests.cell("m", "m/1", "200", "prefix")[0] = 4
    two.requests.cell("m", "m/2", "502", "least")[0] = 1
    one.lag.cell()[0], two.lag.cell()[0] = 0.5, 0.25
    observe(one.duration.cell("m", "m/1"), SECONDS, 0.2)
    observe(two.duration.cell("m", "m/1"), SECONDS, 0.3)
    text = add_up([one.text(), two.text(), "garbage\nmore garbage x\n"])
    found = samples(text)

    def series(replica, status, reason):
        return (
            "llmgw_requests_total", ("model", "m"), ("reason", reason), ("replica", replica), ("status", status))  # fmt: skip

    assert found[series("m/1", "200", "prefix")] == 7
    assert found[series("m/2", "502", "least")] == 1
    assert found["llmgw_loop_lag_seconds",] == 0.5
    assert found["llmgw_request_duration_seconds_count", ("model", "m"), ("replica", "m/1")] == 2
    assert text.count("# TYPE llmgw_requests_total") == 1


def test_what_only_grows_outlives_a_worker():
    """Of a worker that is gone its counters and histograms stay, of replicas that are still there and of none."""
    metrics = Metrics()
    for replica in ("m/1", "m/2", ""):
        metrics.requests.cell("m", replica, "200", "least", *[""] * (len(metrics.requests.labels) - 4))[0] += 2
    observe(metrics.duration.cell("m", "m/1"), SECONDS, 0.2)
    metrics.in_flight.cell("m", "m/1")[0] = 3
    metrics.tokens.cell("m", "prompt")[0] = 7
    found = samples(counted(metrics.text(), ("m/1",)))
    assert sum(value for name, value in found.items() if name[0] == "llmgw_requests_total") == 4
    assert found["llmgw_request_duration_seconds_count", ("model", "m"), ("replica", "m/1")] == 1
    assert found["llmgw_tokens_total", ("kind", "prompt"), ("model", "m")] == 7
    assert not [name for name in found if name[0] in ("llmgw_in_flight", "llmgw_loop_lag_seconds")]
    assert samples(add_up([counted(metrics.text(), ("m/1", "m/2"))])).items() <= samples(metrics.text()).items()


def test_replicas_that_are_gone_are_forgotten():
    """Series of replicas outside the table go; others, and those without a replica, stay."""
    metrics = Metrics()
    for replica in ("m/1", "m/2", ""):
        metrics.requests.cell("m", replica, "200", "least")[0] += 1
    metrics.tokens.cell("m", "prompt")[0] += 1
    metrics.forget("replica", {"m/2"})
    assert sorted(values[1] for values in metrics.requests.series) == ["", "m/2"]
    assert metrics.tokens.series


def test_cardinality_is_bounded(monkeypatch):
    """However many values come, a family has only so many series; the rest is counted together."""
    monkeypatch.setattr(histogram, "MOST", 10)
    family = Family("llmgw_x_total", "counter", "X.", ("a",))
    for number in range(50):
        family.cell(str(number))[0] += 1
    assert len(family.series) == 11
    assert family.series["other",] == [40]


@given(st.lists(st.floats(0, 600), min_size=1, max_size=50), st.sampled_from([0.5, 0.95]))
def test_quantile_lies_in_the_right_bucket(values, share):
    """The estimate is never further off than the bounds of the bucket that the true value is in."""
    cell = [0.0] * (len(SECONDS) + 2)
    for value in values:
        observe(cell, SECONDS, value)
    estimate = quantile(cell, SECONDS, share)
    true = sorted(values)[max(0, -(-len(values) * share // 1).__int__() - 1)]
    below = max((bound for bound in SECONDS if bound < true), default=0.0)
    above = min((bound for bound in SECONDS if bound >= true), default=SECONDS[-1])
    assert below <= estimate <= above or estimate == pytest.approx(above) or estimate == pytest.approx(below)


def test_quantile_of_nothing():
    """No observation, no number."""
    assert quantile([0.0] * (len(SECONDS) + 2), SECONDS, 0.5) is None
