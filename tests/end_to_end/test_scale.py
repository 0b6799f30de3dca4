"""Scaling through real daemons: from zero by a request, up by load, down without a cut stream, and to zero again."""

from __future__ import annotations

import pytest

from tests.end_to_end.fleet import QUICK, fake_model, until

SCALE = "{min: 0, max: 2, target: 2, up_after: 500ms, down_after: 1500ms, idle_after: 1s}"


def running(fleet, model="m"):
    """The shards of engines that live."""
    return [shard for shard in fleet.shards(model) if shard["pid"]]


def row(fleet, model="m"):
    return next(row for row in fleet.status()["models"] if row["name"] == model)


def test_from_zero_to_two_and_back(fleet):
    """The first request is answered after a start, load brings a second replica, idleness takes both, no stream is cut.

    Some 15 s, since real windows of load and idleness have to pass.
    """
    fleet.write_server(fake_model("m", SCALE, "--events", "400", "--interval", "0.02"))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    until(lambda: [node for node in fleet.status()["nodes"] if node["state"] == "ready"], "the node is there")
    assert not running(fleet) and row(fleet)["wanted"] == 0
    assert fleet.ask()[0] == 200
    assert len(running(fleet)) == 1

    streams = [fleet.stream(tokens=250) for _ in range(4)]
    fleet.ready(count=2)
    said = fleet.llmgw("explain", "m")
    assert "0 to 2 replicas, 2 requests each" in said and "1 -> 2: at least 4 requests in flight" in said
    # One stream on each of both: the replica that leaves has to finish one.
    for stream in streams:
        stream.whole()
    last = [fleet.stream(tokens=220) for _ in range(2)]
    until(lambda: sorted(replica["in_flight"] for replica in row(fleet)["replicas"]) == [1, 1], "a stream on each")
    until(lambda: [shard for shard in fleet.shards() if shard["state"] == "draining"], "one drains")
    assert not any(stream.done for stream in last)
    for stream in last:
        stream.whole()
    until(lambda: not running(fleet), "asleep")
    assert fleet.ask()[0] == 200
    told = fleet.llmgw("events")
    assert "m: wants 1 replica instead of 0: a request waits for it" in told
    assert "m: wants 2 replicas instead of 1: at least 4 requests" in told
    assert "m: wants 1 replica instead of 2: at most" in told and "m: wants 0 replicas instead of 1: no request for" in told


@pytest.mark.slow
def test_an_idle_model_makes_room_for_one_that_is_asked_for(fleet):
    """Two models of which the node holds only one: each request finds its model, though the other one has to go for it.

    A stream on the one that serves is not cut for it: the other request waits until it has ended.
    """
    timing = f"{QUICK}, make_room_after: 1s"
    fleet.write_server(fake_model("other", 1), timing=timing)
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready("other")
    (node,) = fleet.status()["nodes"]
    assert node["memory_available"] > 0.6 * node["memory"], "half of this machine has to be free for this test"
    large = f"{int(0.55 * node['memory'])}B"
    slow = ("--events", "400", "--interval", "0.02")
    models = "".join(fake_model(name, "{min: 0, max: 1}", *slow).replace("16MiB", large) for name in ("a", "b"))
    fleet.llmgw("apply", str(fleet.write_server(models, timing=timing)))
    until(lambda: fleet.ask("a")[0] == 200, "a answers")
    stream = fleet.stream("a", tokens=150)
    until(lambda: stream.pieces, "the stream runs")
    assert fleet.ask("b")[0] == 200
    stream.whole()
    assert [row(fleet, name)["ready"] for name in ("a", "b")] == [0, 1]
    told = fleet.llmgw("events")
    assert "a/1: gives its room to b/1; unused for" in told
    assert "ready -> draining: gives its room to b: it is the least recently used" in told
