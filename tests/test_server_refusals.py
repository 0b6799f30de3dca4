"""What is written of models that cannot be placed: once, again for another reason, and when they wait no more."""

from __future__ import annotations

import pytest_twisted
from twisted.internet.task import Clock

from llmgw.planning.checks import Want
from llmgw.planning.explanation import Check, Explanation, Verdict
from llmgw.planning.rollout import Pending
from llmgw.server.refusals import EVERY, Refusals
from llmgw.testing.simulate import model
from tests.test_admin_api import rig_of  # noqa: F401


def pending(*texts, have=1.0, looked=None):
    verdicts = tuple(Verdict(f"n{number}", (Check("devices", text, 2, have, "devices"),)) for number, text in enumerate(texts))
    return {"m": Pending(Want("m/1", "m", None, None), Explanation("m", len(texts) if looked is None else looked, verdicts))}


def test_a_refusal_is_written_once_and_again_for_another_reason():
    """Not for another amount, not more than once a minute, and not again when it was not written."""
    clock = Clock()
    refusals = Refusals(clock.seconds, lambda: 7.0)

    def written(found):
        events = refusals.news(found, 3)
        assert events == refusals.news(found, 3)
        refusals.said(found)
        return [event.text for event in events]

    (event,) = refusals.news(pending("too few devices"), 3)
    assert (event.kind, event.subject, event.at, event.epoch) == ("refused", "m", 7.0, 3)
    text = "m cannot be placed: 0/1 nodes can run this: 1 too few devices (need 2, most free 1)"
    assert written(pending("too few devices")) == [text]
    assert written(pending("too few devices", have=0.0)) == written(pending("draining")) == []
    clock.advance(EVERY)
    assert written(pending("draining")) != []
    assert written({}) == ["m waits for a place no more"] and written({}) == []
    assert written(pending("not looked at")) and not Refusals(clock.seconds, clock.seconds).news(pending(looked=0), 3)


@pytest_twisted.ensureDeferred
async def test_it_is_in_the_events_until_there_is_room(rig_of):  # noqa: F811
    """Of a model that asks for more devices than there are; and when a node with more of them has come."""
    rig = await rig_of(model("m", devices=2))
    rig.link("a", 1)
    await rig.until(lambda: rig.server.controller.refusals._said, "written")
    rig.link("b", 2)
    await rig.ready("m")
    events = [one["text"] for one in (await rig.get("/v1/events"))["events"] if one["kind"] == "refused"]
    assert events[0].startswith("m cannot be placed: 0/1 nodes can run this: 1 too few devices")
    assert events[1:] == ["m waits for a place no more"]
