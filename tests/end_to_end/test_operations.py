"""What operators type, against real daemons."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from llmgw.cli.client import Client, Local
from tests.end_to_end.fleet import QUICK, fake_model, processes, until


@pytest.fixture
def serving(fleet):
    """One server, one agent, one ready replica of model m."""
    fleet.write_server(fake_model("m", 1))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    return fleet


def test_apply_adds_a_model_and_absence_removes_none(serving):
    """A new revision; a model missing from the file is kept unless removals are allowed."""
    revision = serving.status()["server"]["catalog"]
    path = serving.write_server(fake_model("two", 1))
    serving.llmgw("apply", str(path))
    serving.ready("two")
    assert serving.status()["server"]["catalog"] > revision
    assert serving.ask("m")[0] == 200
    serving.llmgw("apply", str(path), "--allow-removals")
    until(lambda: "m" not in [row["name"] for row in serving.status()["models"]], "m is gone")
    assert serving.ask("m")[0] == 404
    assert serving.ask("two")[0] == 200


def test_what_was_applied_is_routed_when_apply_returns(serving):
    """Nobody who asks right after it gets a 404, nor for a model that is gone an answer."""
    operator = Client(Local(str(serving.socket)))
    for number in range(5):
        models = f"models:{fake_model('m', 1)}    aliases: [a{number}]\n"
        done = operator.post("/v1/apply", text=models, path="models.yaml")
        asked = [serving.ask(name)[0] for name in (f"a{number}", f"a{number - 1}")]
        assert done["routed"] and asked == [200, 404]


def test_sighup_takes_a_good_file_and_keeps_the_old_for_a_bad_one(serving):
    """Reload of the catalog without a restart; a bad file is named in the log and changes nothing."""
    path = serving.write_server(fake_model("m", 1) + fake_model("two", 1))
    serving.running["server"].send_signal(signal.SIGHUP)
    serving.ready("two")
    path.write_text(path.read_text().replace("models:", "modles:"))
    serving.running["server"].send_signal(signal.SIGHUP)
    until(lambda: "modles" in serving.log("server"), "the log names the key")
    assert serving.ask("two")[0] == 200


def test_zero_replicas_is_an_order(serving):
    """The engine is stopped; the model stays known and answers 503 with Retry-After, never 404."""
    path = serving.write_server(fake_model("m", 0))
    serving.llmgw("apply", str(path))
    until(lambda: not [s for s in serving.shards() if s.get("pid")], "stopped")
    until(lambda: serving.ask()[0] == 503, "503")


def test_explain_says_why_nothing_fits(serving):
    """One line that adds up, and the same as data."""
    text = serving.write_server(fake_model("m", 1) + fake_model("big", 1).replace("devices: 0", "devices: 2"))
    serving.llmgw("apply", str(text))
    said = until(lambda: "nodes can run this" in (out := serving.llmgw("explain", "big", code=None)) and out, "explained")
    assert "0/1 nodes can run this" in said and "need 2" in said
    data = json.loads(serving.llmgw("explain", "big", "--json", code=None))
    assert "n1" in json.dumps(data)
    assert serving.llmgw("status", "--check", code=None)


def test_drain_and_uncordon(serving):
    """A drained node runs nothing and takes nothing; the only copy of a model goes only with leave; uncordon brings it back."""
    assert "--allow-outage" in serving.llmgw("drain", "n1", code=1)
    serving.llmgw("drain", "n1", "--allow-outage")
    until(lambda: not [s for s in serving.shards() if s["state"] == "ready"], "drained")
    until(lambda: serving.ask()[0] == 503, "not routed")
    assert "draining" in serving.llmgw("explain", "m", code=None)
    serving.llmgw("uncordon", "n1")
    serving.ready(seconds=40)


def test_cordon_survives_restarts_of_agent_and_server(serving):
    """A cordoned node keeps what it runs and gets nothing new, whoever restarts."""
    serving.llmgw("cordon", "n1")
    serving.end("n1")
    serving.end("server")
    serving.start_server()
    serving.start_agent("n1")
    until(lambda: serving.status()["nodes"][0]["state"] == "ready", "back")
    assert "cordoned" in serving.status()["nodes"][0]["flags"]
    assert serving.ready()[0]
    serving.llmgw("uncordon", "n1")
    assert "cordoned" not in serving.status()["nodes"][0]["flags"]


def test_logs_come_through_the_link(serving):
    """The engine's output, found by its shard, never by a path."""
    shard = serving.ready()[0]["id"]
    until(lambda: "ready" in serving.llmgw("logs", shard).lower(), "the engine's own words")
    assert serving.llmgw("logs", "../../etc/passwd", code=None).count("root:") == 0


def test_restart_needs_leave_for_an_outage(serving):
    """The only replica is not taken down by a word alone."""
    before = serving.ready()[0]
    out = serving.llmgw("restart", "m", code=None)
    if "--allow-outage" in out:
        assert serving.ready()[0]["pid"] == before["pid"]
        serving.llmgw("restart", "m", "--allow-outage")
    after = until(lambda: (s := serving.ready(seconds=30)[0])["pid"] != before["pid"] and s, "restarted", 40)
    assert after["attempt"] > before["attempt"] or after["id"] != before["id"]


def test_wait_returns_when_ready_and_fails_in_time(serving):
    """Exit status 0 for a ready model, not 0 for one that cannot be within the time."""
    serving.llmgw("wait", "m", "--timeout", "5s")
    path = serving.write_server(fake_model("m", 1) + fake_model("big", 1).replace("devices: 0", "devices: 2"))
    serving.llmgw("apply", str(path))
    done = serving.command("--socket", str(serving.socket), "wait", "big", "--timeout", "1s")
    assert done.returncode == 1
    assert "big" in done.stdout + done.stderr


def test_no_engine_key_is_seen_anywhere(serving):
    """The engine's secret is in no command line, no status, no log, no event."""
    keys = [
        text
        for path in (serving.folder / "state" / "n1").rglob("*")
        if path.is_file() and "key" in path.name
        for text in [path.read_text().strip()]
        if text
    ]
    assert keys
    seen = serving.llmgw("status", "--json") + serving.llmgw("events", "--json") + serving.log("server") + serving.log("n1")
    seen += " ".join(processes(str(serving.folder)).values())
    for key in keys:
        assert key not in seen


def test_zero_replicas_after_an_adoption(fleet):
    """The order counts at once, also for an engine whose agent has just come back, however new the store is."""
    fleet.write_server(fake_model("m", 1), timing=f"{QUICK}, failover_grace: 60s".replace("failover_grace: 5s, ", ""))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    serving = fleet
    serving.end("n1", signal.SIGKILL)
    serving.start_agent("n1")
    until(lambda: serving.status()["nodes"][0]["state"] == "ready" and serving.ready(), "adopted")
    serving.llmgw("apply", str(serving.write_server(fake_model("m", 0), timing=QUICK)))
    until(lambda: not [s for s in serving.shards() if s.get("pid")], "stopped", 15)


def test_at_the_end_of_a_drain_streams_end_with_that_word_and_not_with_the_engine(fleet):
    """The engine heeds no SIGTERM and has 12 s of grace: the client hears of the drain at its deadline all the same."""
    fleet.write_server(
        fake_model("m", 1, "--events", "900", "--interval", "0.1", "--ignore-term"),
        timing=QUICK.replace("stop_grace: 2s", "stop_grace: 12s").replace("drain: 10s", "drain: 1s"),
    )
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    (shard,) = fleet.ready()
    running = fleet.stream(tokens=900)
    until(lambda: running.pieces, "streams")
    fleet.llmgw("apply", str(fleet.write_server(fake_model("m", 0))))
    until(lambda: running.error, "ended", 8)
    assert "engine_drained" in str(running.error) and "m/1 of m is being stopped" in str(running.error)
    assert Path(f"/proc/{shard['pid']}").exists()
