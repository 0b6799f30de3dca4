"""What routers tell of a replica whose requests fail: shown, written down once, told to its agent, and forgotten again."""

from __future__ import annotations

import re

import pytest_twisted
from twisted.internet.task import Clock

from llmgw.cli.status import complaints, screen
from llmgw.planning.orders import orders
from llmgw.server.doubts import LASTING, Doubts
from llmgw.testing.simulate import model
from tests.test_admin_api import rig_of  # noqa: F401

FAILS = "answered HTTP 500"


def test_a_doubt_ends_when_it_answers_or_nobody_tells_of_it():
    """Each beginning and end is news once; failures meanwhile keep it and are none."""
    clock, told = Clock(), []
    doubts = Doubts(clock.seconds, lambda: told.append(clock.seconds()))
    doubts.failed("m/1", FAILS)
    assert doubts.all() == {"m/1": "its requests fail: it answered HTTP 500"} and len(told) == 1
    doubts.said(dict(doubts.news))
    assert not doubts.news
    clock.advance(LASTING - 1)
    doubts.failed("m/1", FAILS)
    clock.advance(LASTING - 1)
    doubts.look()
    assert doubts.all() and not doubts.news and len(told) == 1
    clock.advance(1)
    doubts.look()
    assert not doubts.all() and "no request has failed there" in doubts.news["m/1"]
    doubts.failed("m/1", FAILS)
    doubts.recovered("m/1")
    doubts.recovered("m/2")
    assert not doubts.all() and doubts.news == {"m/1": "m/1: it answers requests again"}


@pytest_twisted.ensureDeferred
async def test_a_doubt_is_shown_written_down_and_ordered(rig_of):  # noqa: F811
    """From a worker's word, through the server; one on a closed breaker goes no further."""
    rig = await rig_of(model("m"))
    rig.link("a", 1)
    await rig.until(lambda: rig.routers.routing.endpoints, "routed")
    workers, controller = rig.server.workers, rig.server.controller
    workers.on_failure("m/1", "status", FAILS, False)
    assert not controller.routing.doubts.all()
    workers.on_failure("m/1", "status", FAILS, True)
    await rig.until(lambda: not controller.routing.doubts.news, "written down")
    status = await rig.get("/v1/status")
    assert re.search("gpu 0 ready.*, failing: its requests fail: it answered HTTP 500", screen(status, 0.0))
    assert complaints(status, 0.0) == ["model m: m/1 is failing: its requests fail: it answered HTTP 500"]
    assert "  m/1  is failing: its requests fail: it answered HTTP 500" in (await rig.get("/v1/explain", model="m"))["lines"]
    truth, timing = controller.truth, controller.timing
    for doubted in (True, False):
        ordered = orders(truth.shards.values(), truth.nodes, (), timing, controller.routing.doubts.all())
        assert [order.doubted for order in ordered["a"]] == [doubted]
        workers.on_recovered("m/1")
    await rig.until(lambda: not controller.routing.doubts.news, "written down")
    events = [event["text"] for event in (await rig.get("/v1/events"))["events"] if event["kind"] == "failing"]
    assert events == [
        "m/1: its requests fail: it answered HTTP 500; its engine is asked for a token",
        "m/1: it answers requests again",
    ]
    assert complaints(await rig.get("/v1/status"), 0.0) == []
