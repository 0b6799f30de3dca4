"""Scaling through real daemons: from zero by a request, up by load, down without a cut stream, and to zero again."""

from __future__ import annotations

from tests.end_to_end.fleet import fake_model, until

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
