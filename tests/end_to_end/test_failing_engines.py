"""Engines that say that they are well and fail what they are asked, through real daemons."""

from __future__ import annotations

import http.client

from tests.end_to_end.fleet import QUICK, fake_model, until

HASTY = "      start_timeout: 1s\n    rollout: {failures: 1}\n"


def start(fleet, models, timing=QUICK):
    fleet.write_server(models, timing=timing)
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")


def test_a_profile_whose_engines_fail_every_request_is_never_ready_and_rolled_back(fleet):
    """The old replica serves throughout; what the new one lacked is in the rollout's reason."""
    start(fleet, fake_model("m", 1, more=HASTY))
    (old,) = fleet.ready()
    fleet.write_server(fake_model("m", 1, "--health-lies", more=HASTY))
    fleet.llmgw("apply", str(fleet.folder / "server.yaml"))

    def rolled_back():
        assert fleet.ask()[0] == 200
        (row,) = fleet.status()["models"]
        return row["rollout"]["state"] == "rolled_back" and row["rollout"]

    reason = until(rolled_back, "rolled back", 60)["reason"]
    assert "asked for one token: it answers 500: told to fail" in reason and "`llmgw logs m/2/0`" in reason
    until(lambda: len(fleet.shards()) == 1, "the new one is gone")
    for more in ((), ("--node", "n1")):
        assert "/v1/completions 500" in fleet.llmgw("logs", "m/2/0", *more), "what it printed is still there"
    assert "no shard is called m/7/0; known: m/1/0" in fleet.llmgw("logs", "m/7/0", code=1)
    assert fleet.ready()[0]["pid"] == old["pid"]
    assert "asked for one token" in fleet.llmgw("status", "--check", code=1)


def fail(fleet, shard) -> None:
    """Have a fake engine fail every request from now on, or no more."""
    (key,) = (fleet.folder / "state" / "n1" / "shards").glob(f"{shard['id'].replace('/', '?*')}/{shard['attempt']}/key")
    connection = http.client.HTTPConnection("127.0.0.1", shard["port"], timeout=10)
    connection.request("POST", "/fake/fail", "{}", {"authorization": f"Bearer {key.read_text().strip()}"})
    assert connection.getresponse().status == 200
    connection.close()


def test_an_engine_whose_requests_fail_is_told_of_left_out_and_taken_back(fleet):
    """Its breaker opens, the agent asks for a token in vain; when it makes one again it serves, and was never restarted."""
    start(fleet, fake_model("m"))
    (shard,) = fleet.ready()
    fail(fleet, shard)
    until(lambda: fleet.ask()[0] == 503, "left alone")
    until(lambda: "m/1 is failing: its requests fail: it answered HTTP 500" in fleet.llmgw("status", "--check", code=1), "said")
    assert "m/1  is failing" in fleet.llmgw("explain", "m")
    until(lambda: "m/1: its requests fail: it answered HTTP 500" in fleet.llmgw("events"), "written down")
    # The agent looks every 5 s, and three times before it believes.
    until(lambda: "asked for one: it answers 500" in fleet.llmgw("status", "--check", code=1), "unhealthy", 60)
    until(lambda: "no ready replica" in fleet.ask()[1]["error"]["message"], "left out")
    fail(fleet, shard)
    until(lambda: fleet.ask()[0] == 200, "taken back", 60)
    (now,) = fleet.ready()
    assert now["pid"] == shard["pid"] and now["crashes"] == 0
