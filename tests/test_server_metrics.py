"""The control plane's gauges, and the alerts that are shipped: they speak of the same metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from llmgw.router.histogram import Metrics, add_up
from llmgw.server.metrics import fleet_metrics

ALERTS = Path(__file__).resolve().parent.parent / "etc" / "alerts.yaml"

STATUS = {
    "server": {
        "name": "cp1",
        "role": "leader",
        "epoch": 7,
        "catalog": 41,
        "notes": ["x"],
        "certificate_expires": 1.8e9,
        "https_expires": 1.7e9,
    },
    "nodes": [
        {
            "name": "n1",
            "state": "ready",
            "certificate_expires": 1.9e9,
            "devices": [{"shards": ["m/1/0"], "problem": ""}, {"shards": [], "problem": "missing"}],
        },
        {"name": "n2", "state": "lost", "certificate_expires": None, "devices": []},
    ],
    "models": [{"name": 'org/"m"', "wanted": 2, "ready": 1}],
    "orphans": [{}],
}


def samples(text):
    return {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_status_becomes_gauges():
    """Every fact that an alert needs, as Prometheus reads it."""
    found = samples(fleet_metrics(STATUS))
    assert found["llmgw_leader",] == 1 and found["llmgw_epoch",] == 7 and found["llmgw_catalog_revision",] == 41
    assert found["llmgw_nodes", "ready"] == 1 and found["llmgw_nodes", "lost"] == 1 and found["llmgw_nodes", "unreachable"] == 0
    assert (found["llmgw_replicas_wanted", 'org/"m"'], found["llmgw_replicas_ready", 'org/"m"']) == (2, 1)
    assert [found[f"llmgw_devices{suffix}", "n1"] for suffix in ("", "_used", "_sick")] == [2, 1, 1]
    assert found["llmgw_certificate_expires", "server", "cp1"] == 1.8e9
    assert found["llmgw_certificate_expires", "router", "cp1"] == 1.7e9
    assert found["llmgw_certificate_expires", "node", "n1"] == 1.9e9 and ("llmgw_certificate_expires", "node", "n2") not in found
    assert found["llmgw_orphans",] == 1 and found["llmgw_notes",] == 1


def test_an_empty_fleet_has_gauges_too():
    """No node, no model, no certificate: zeros, so that an alert can tell them from a server that is down."""
    server = {
        "name": "r1",
        "role": "router",
        "epoch": 0,
        "catalog": 0,
        "notes": [],
        "certificate_expires": None,
        "https_expires": None,
    }
    found = samples(fleet_metrics({"server": server, "nodes": [], "models": [], "orphans": []}))
    assert found["llmgw_leader",] == 0 and found["llmgw_nodes", "ready"] == 0


def test_both_halves_make_one_text():
    """The routers' sum and the control plane's gauges are one well-formed exposition without a name in common."""
    text = add_up([Metrics().text()]) + fleet_metrics(STATUS)
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names)) > 15


@pytest.mark.parametrize("rule", yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"], ids=lambda rule: rule["alert"])
def test_alerts_use_metrics_that_exist(rule):
    """Each name and each label in an alert's expression is one that we have; each alert says what to do or look at."""
    ours = {family.name: set(family.labels) for family in Metrics().families}
    text = fleet_metrics(STATUS)
    for family in text_string_to_metric_families(text):
        ours[family.name] = {label for sample in family.samples for label in sample.labels}
    for name, labels in re.findall(r"(llmgw_[a-z_]+)(?:\{([^}]*)\})?", rule["expr"]):
        assert name in ours
        assert set(re.findall(r"([a-z_]+)=", labels)) <= ours[name]
    assert rule["labels"]["severity"] in ("page", "ticket") and len(rule["annotations"]["summary"]) > 20
