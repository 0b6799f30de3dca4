"""What the control plane makes of requests that failed in the routers."""

from __future__ import annotations

import pytest_twisted
from attrs import evolve
from twisted.internet.task import Clock
from twisted.logger import capturedLogs

from llmgw.router.table import RoutedModel, Table, endpoint
from llmgw.server.routes import address_of, build
from llmgw.server.routing import BANNED, QUIET, Routing
from llmgw.testing.simulate import model
from tests.test_admin_api import rig_of  # noqa: F401
from tests.test_server_routes import known, reported, routed, shard

REFUSES = "refused the router's key (HTTP 401): something else may have its port"


def test_a_replica_whose_address_is_another_engines_is_left_out():
    """The same replica elsewhere, or with another key, is another endpoint."""
    of = lambda **more: known(shard(**more), told={"a": [reported()]})  # noqa: E731
    (one,) = build(of(), None).endpoints
    denied = frozenset({address_of(one)})
    table = build(evolve(of(), denied=denied), None)
    assert not table.endpoints
    assert "another program may have its port" in table.models[0].reason
    assert build(evolve(of(key="fresh"), denied=denied), None).endpoints
    assert not routed(
        build(evolve(known(), denied=denied), Table(models=(RoutedModel("m", endpoints=("m/1",)),), endpoints=(one,)))
    )


def test_it_is_tried_again_after_a_while():
    """So a mistake does no lasting harm; static endpoints are the operator's, and other failures are the breaker's."""
    clock, news = Clock(), []
    routing = Routing(None, lambda: news.append(clock.seconds()), clock.seconds)
    ours, static = endpoint("m/1", "http://a:1", model="m"), endpoint("static:m/0", "http://b:1", model="m", static=True)
    routing.before = Table(models=(RoutedModel("m"),), endpoints=(ours, static))
    for id, kind in (("m/1", "reset"), ("m/1", "forbidden"), ("static:m/0", "key"), ("m/7", "key")):
        routing.failed(id, kind, REFUSES)
    assert not routing.denied() and not news
    routing.failed("m/1", "key", REFUSES)
    assert routing.denied() == {address_of(ours)} and news and not routing.due
    clock.advance(BANNED)
    assert routing.due, "the next plan"
    assert not routing.denied() and not routing.due


def test_failures_are_logged_once_in_a_while():
    """A thousand a second are no thousand lines."""
    clock = Clock()
    routing = Routing(None, lambda: None, clock.seconds)
    with capturedLogs() as lines:
        for _ in range(100):
            routing.failed("m/1", "reset", "closed the connection before it answered")
            routing.failed("m/2", "reset", "closed the connection before it answered")
        clock.advance(QUIET)
        routing.failed("m/1", "reset", "closed the connection before it answered")
    assert [line["id"] for line in lines] == ["m/1", "m/2", "m/1"]


@pytest_twisted.ensureDeferred
async def test_a_refused_key_changes_the_table(rig_of):  # noqa: F811
    """From a worker's word to the table, through the server."""
    rig = await rig_of(model("m"))
    rig.link("a", 1)
    await rig.until(lambda: rig.routers.routing.endpoints, "routed")
    (one,) = rig.routers.routing.endpoints
    rig.server.workers.on_failure(one.id, "key", REFUSES)
    await rig.until(lambda: not rig.routers.routing.endpoints, "left out")


@pytest_twisted.ensureDeferred
async def test_a_router_worker_that_was_replaced_is_told(rig_of):  # noqa: F811
    """As an event, and for a while in the status."""
    rig = await rig_of()
    rig.routers.on_ended(1, 4711, "it was silent for 3.6 s")
    text = "router worker 1 of cp1 (pid 4711) was replaced: it was silent for 3.6 s"
    events = (await rig.get("/v1/events"))["events"]
    assert [(one["kind"], one["subject"], one["text"]) for one in events][-1] == ("router_worker", "cp1", text)
    assert text in (await rig.get("/v1/status"))["server"]["notes"]
