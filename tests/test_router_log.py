"""What is told of requests that no engine saw: who asked, for what, and why not; through a real worker."""

from __future__ import annotations

import json
import threading

import pytest

from llmgw.config.server import Timeouts
from llmgw.router.table import KeyEntry, RoutedModel, key_digest
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.router_rig import KEY, Rig, plain, until


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def one(name, **values):
    return (KeyEntry(name, key_digest(KEY), **values),)


@pytest.mark.parametrize("limits", [{"rpm": 1}, {"tpm": 1}, {"tpd": 1}, {"concurrency": 1}])
def test_who_met_a_limit_is_told(rig, limits):
    """A limit that was met: its key and model stand in the access log and in the metrics."""
    [kind] = limits
    gate, at = threading.Event(), threading.Event()

    def script(talk):
        while talk.request():
            at.set()
            gate.wait(5)
            talk.answer(b"{}")

    with ScriptedEngine(script) as engine:
        rig.use(engine, keys=one(f"met-{kind}", **limits))
        first = threading.Thread(target=rig.post, kwargs={"body": {"model": "alias", "max_tokens": 50}})
        first.start()
        assert at.wait(5)
        answer = rig.post(body={"model": "alias", "max_tokens": 50})
        gate.set()
        first.join()
    assert (answer[0], json.loads(answer[2])["error"]["code"]) == (429, kind)
    row = rig.log(key=f"met-{kind}", status=429)[0]
    assert (row["model"], row["call"], row["reason"], row["outcome"]) == ("m", "chat", kind, "refused")
    assert row["id"] == answer[1]["x-request-id"] and row["duration_ms"] >= 0
    metrics = rig.scrape()
    assert metrics[f'llmgw_limited_total{{kind="{kind}",model="m",key="met-{kind}"}}'] == 1
    assert metrics[f'llmgw_requests_total{{model="m",replica="",status="429",reason="{kind}"}}'] == 1
    rig.use(keys=())
    assert not [series for series in rig.scrape() if f"met-{kind}" in series], "series of a key that is gone are dropped"


def test_what_a_key_may_not_use_is_told(rig):
    """403 with the key and the model, whichever name was asked for; 404 with the key."""
    rig.use(keys=one("narrow", models=("cold",)))
    assert rig.post(body={"model": "alias"})[0] == 403
    assert rig.log(key="narrow", status=403)[0]["model"] == "m"
    assert rig.post(body={"model": "nobody"})[0] == 404
    assert rig.log(key="narrow", status=404)[0]["model"] == ""


def test_a_key_that_has_expired_is_told(rig):
    """Whose it was is known."""
    rig.use(keys=one("old", expires=1.0))
    assert rig.post()[0] == 401
    row = rig.log(key="old", status=401)[0]
    assert (row["reason"], row["model"], row["call"]) == ("key_expired", "", "chat")


def test_who_waited_in_vain_is_told(rig):
    """The log's id is the one that the answer had."""
    gate = threading.Event()

    def script(talk):
        while talk.request():
            gate.wait(5)
            talk.answer(b"{}")

    with ScriptedEngine(script) as engine:
        rig.use(engine, limit=1, keys=one("late"), model=RoutedModel("m"), timeouts=Timeouts(queue=0.3))
        first = threading.Thread(target=rig.post)
        first.start()
        until(lambda: rig.in_flight() == 1)
        answer = rig.post()
        gate.set()
        first.join()
    assert answer[0] == 504
    row = rig.log(key="late", status=504)[0]
    assert (row["model"], row["reason"], row["id"]) == ("m", "queue_timeout", answer[1]["x-request-id"])
    assert rig.scrape()['llmgw_limited_total{kind="queue_timeout",model="m",key="late"}'] == 1


@pytest.mark.parametrize("path, call", [("/v1/models", "models"), ("/v1/models/m", "model")])
def test_lists_of_models_are_told(rig, path, call):
    """One row for each request, also where the router answers by itself; a client's id comes back."""
    rig.use(keys=one("lister"))
    answer = rig.get(path, {"X-Request-Id": f"mine-{call}"})
    assert (answer[0], answer[1]["x-request-id"]) == (200, f"mine-{call}")
    row = rig.log(call=call)[0]
    assert (row["key"], row["client_id"], row["status"], row["outcome"], row["path"]) == (
        "lister", f"mine-{call}", 200, "done", path,
    )  # fmt: skip
    assert rig.get(path)[1]["x-request-id"] == rig.log(2, call=call)[1]["id"]


def test_probes_are_not_told(rig):
    """Whoever looks whether the router is up does so every second."""
    with ScriptedEngine(plain) as engine:
        rig.use(engine)
        assert rig.get("/health")[0] == rig.get("/ready")[0] == 200
        rig.post(headers={"X-Request-Id": "after"})
    rig.log(client_id="after")
    assert not [row for row in rig.log() if row.get("call") in ("health", "ready")]
