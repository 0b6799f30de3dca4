"""llmgw status, node ls and wait: what an operator reads at a glance."""

from __future__ import annotations

import io
import json
import sys
import time

import pytest

from llmgw.cli import render, status
from tests.admin_stub import admin  # noqa: F401

DAY = 86400


def shard(node, state="ready", rank=0, age=6 * DAY, **more):
    return {"id": f"x/1/{rank}", "node": node, "rank": rank, "state": state, "since": time.time() - age} | more


def fleet():
    """Two big machines, one of them away, and models in every condition."""
    gpus = [{"uuid": f"GPU-{n}", "index": n, "shards": ["x/1/0"] if n < 5 else []} for n in range(8)]
    sick = [*gpus[:5], gpus[5] | {"problem": "missing since 02:14 (Xid 79)"}, *gpus[6:]]
    vllm = [{"name": "vllm", "version": "0.33.0"}, {"name": "llamacpp", "version": None}]
    return {
        "server": {"name": "cp1", "role": "leader", "epoch": 7, "catalog": 41},
        "models": [
            {
                "name": "llama-70b",
                "wanted": 2,
                "ready": 2,
                "replicas": [
                    {"id": "llama-70b/1", "state": "ready", "shards": [shard("n1", gpus=[0, 1, 2, 3])]},
                    {"id": "llama-70b/2", "state": "ready", "shards": [shard("n2", gpus=[4])]},
                ],
            },
            {
                "name": "deepseek",
                "wanted": 1,
                "ready": 0,
                "replicas": [
                    {
                        "id": "deepseek/1",
                        "state": "loading",
                        "shards": [
                            shard("n2", "loading", 0, 250, progress=0.62, phase="weights"),
                            shard("n3", "ready", 1),
                        ],
                    }
                ],
            },
            {"name": "smol", "wanted": 1, "ready": 0, "reason": "0/3 nodes can run this", "replicas": []},
            {"name": "elsewhere", "wanted": 0, "ready": 0, "replicas": [], "endpoints": [{"url": "http://x/v1"}]},
        ],
        "nodes": [
            {"name": "n1", "state": "ready", "flags": ["cordoned"], "devices": sick, "installations": vllm},
            {
                "name": "n3",
                "state": "unreachable",
                "flags": [],
                "devices": [],
                "since": time.time() - 131,
                "reason": "lost in 2 m 49 s",
                "installations": [],
                "certificate_expires": time.time() + 3 * DAY + 60,
            },
        ],
        "orphans": [{"shard": "old/1/0", "node": "n1"}],
    }


def test_status_is_one_screen(admin, capsys):  # noqa: F811
    """Header, models, nodes, orphans: each line as an operator needs it."""
    admin.answers["GET /v1/status"] = fleet()
    assert admin.run("status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cp1 leader epoch 7 · catalog 41 · 2 nodes, 8 devices (5 used)"
    assert lines[2].split() == ["MODEL", "READY", "REPLICAS"]
    assert lines[3].split(None, 2) == ["llama-70b", "2/2", "n1 gpus 0-3 ready 6 d · n2 gpu 4 ready 6 d"]
    assert lines[4].split(None, 2) == ["deepseek", "0/1", "n2+n3 loading 62 % (weights, 4 m 10 s)"]
    assert lines[5].split(None, 2) == ["smol", "0/1", "0/3 nodes can run this, see: llmgw explain smol"]
    assert lines[6].split(None, 2) == ["elsewhere", "0/0", "1 endpoint elsewhere"]
    assert lines[8].split() == ["NODE", "STATE", "DEVICES", "ENGINES", "NOTES"]
    assert "ready, cordoned  5/8 used  vllm 0.33.0, llamacpp  gpu 5: missing since 02:14 (Xid 79)" in lines[9]
    assert "cpu only" in lines[10] and lines[10].endswith("2 m 11 s; lost in 2 m 49 s · certificate expires in 3 d")
    assert lines[-1] == "1 orphan left running, see: llmgw orphans"


def test_columns_stand_under_their_headers(admin, capsys):  # noqa: F811
    """Every row's cells begin where the header's words do."""
    admin.answers["GET /v1/nodes"] = {"nodes": fleet()["nodes"]}
    assert admin.run("node", "ls") == 0
    header, *rows = capsys.readouterr().out.splitlines()
    at = header.index("DEVICES")
    assert [row[at:].split("  ")[0] for row in rows] == ["5/8 used", "cpu only"]


def test_many_ready_replicas_are_counted(admin, capsys):  # noqa: F811
    """Forty ready replicas are one phrase; the one in trouble is shown with its reason."""
    replicas = [{"state": "ready", "shards": [shard(f"n{n % 20}")]} for n in range(40)]
    replicas.append({"state": "backoff", "shards": [shard("n7", "backoff", age=5, reason="killed by signal 9")]})
    server = {"name": "cp1", "role": "leader", "epoch": 1, "catalog": 1}
    model = {"name": "m", "wanted": 41, "ready": 40, "replicas": replicas}
    admin.answers["GET /v1/status"] = {"server": server, "models": [model], "nodes": []}
    assert admin.run("status") == 0
    assert "40 ready on 20 nodes · n7 backoff 5 s: killed by signal 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    "state, more, text",
    [
        ("loading", {"reason": "the engine has begun to load", "progress": 0.35}, "n1 loading 35 % (5 s)"),
        ("loading", {"phase": "loading"}, "n1 loading (5 s)"),
        ("placed", {"crashes": 1, "last_reason": "killed"}, "n1 placed (5 s), 1 crash, last: killed"),
        ("ready", {"crashes": 2, "last_reason": "killed", "reason": "it serves"}, "n1 ready 5 s, 2 crashes, last: killed"),
        ("ready", {"crashes": 2, "first_reason": "a", "last_reason": "b"}, "n1 ready 5 s, 2 crashes, first: a; last: b"),
        ("ready", {"crashes": 2, "first_reason": "b", "last_reason": "b"}, "n1 ready 5 s, 2 crashes, last: b"),
        ("ready", {"crashes": 0, "last_reason": "long ago"}, "n1 ready 5 s"),
        (
            "backoff",
            {"crashes": 2, "last_reason": "killed", "reason": "killed; next in 9 s"},
            "n1 backoff 5 s: killed; next in 9 s",
        ),
    ],
)
def test_a_replica_shows_what_matters_in_its_state(state, more, text):
    """How far it is while it comes, why while it is down, and that it has crashed lately even when it serves."""
    now = time.time()
    replica = {"state": state, "shards": [{"node": "n1", "state": state, "since": now - 5} | more]}
    assert status.replica_text(replica, now) == text


def test_json_is_the_answer_itself(admin, capsys):  # noqa: F811
    """--json passes on what the server said, before or after the command's name."""
    admin.answers["GET /v1/status"] = answer = fleet()
    assert admin.run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == answer
    assert admin.run("--json", "status") == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_check_says_only_what_is_wrong(admin, capsys):  # noqa: F811
    """Status 1 with a line per complaint; a cordon is wanted and none; all well is status 0."""
    admin.answers["GET /v1/status"] = answer = fleet()
    assert admin.run("status", "--check") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "model deepseek",
        "model smol",
        "node n1",
        "node n3",
        "orphan old/1/0 on n1",
    ]
    assert "gpu 5" in lines[2] and "cordoned" not in lines[2]
    answer["models"] = answer["models"][:1]
    answer["nodes"] = [answer["nodes"][0] | {"devices": []}]
    answer["orphans"] = []
    assert admin.run("status", "--check") == 0
    assert capsys.readouterr().out == "all is as wanted\n"


def test_a_router_alone_has_no_fleet(admin, capsys):  # noqa: F811
    """Without a fleet the header speaks of none."""
    server = {"name": "r1", "role": "router", "epoch": 0, "catalog": 3}
    admin.answers["GET /v1/status"] = {"server": server, "models": [], "nodes": []}
    assert admin.run("status") == 0
    assert capsys.readouterr().out == "r1 router · catalog 3\n"


def test_one_node_shows_each_device_and_who_holds_it(admin, capsys):  # noqa: F811
    """Claimed beside observed, foreign processes by pid, a cordon with its age; an unknown node is told with those there are."""
    gpu = {"uuid": "GPU-a", "index": 0, "name": "H100", "capability": "9.0", "memory_total": 80 * 2**30, "memory_claimed": 0}
    gpu |= {"memory_reserved": 2**30, "memory_used": 7 * 2**30, "foreign": [{"pid": 8123, "name": "python3", "memory": 6 << 30}]}
    gpu |= {"problem": "cordoned by alice: fan", "cordon": {"since": 0.0, "reason": "fan", "by": "alice"}, "shards": ["m/1/0"]}
    node = {"name": "n1", "state": "ready", "devices": [gpu], "driver": "580.65", "nofile": 4096, "memlock": None}
    admin.answers["GET /v1/nodes"] = {"nodes": [node]}
    assert admin.run("status", "n1") == 0
    said = capsys.readouterr().out
    assert "driver 580.65 · 4096 open files" in said
    row = next(line for line in said.splitlines() if "GPU-a" in line)
    assert row.split()[:4] == ["0", "GPU-a", "H100", "9.0"] and "80 GiB" in row.replace(".0", "")
    assert "m/1/0, pid 8123 python3 (6.0 GiB, not ours)" in row and "fan, cordoned since 1970-01-01" in row
    assert admin.run("node", "show", "n2") == 1
    assert "no node is called n2; known: n1" in capsys.readouterr().err


def test_a_device_that_somebody_closed_is_no_complaint_and_one_that_closed_itself_is(admin, capsys):  # noqa: F811
    """As with nodes: a cordon is wanted, a lost device is not."""
    closed = {"index": 0, "problem": "cordoned by alice: fan", "cordon": {"by": "alice", "reason": "fan", "since": 1.0}}
    lost = {"index": 1, "problem": "missing since 02:14", "cordon": {"by": "", "reason": "missing", "since": 1.0}}
    node = {"name": "n1", "state": "ready", "devices": [closed, lost]}
    admin.answers["GET /v1/status"] = {"server": {"name": "cp1", "role": "leader"}, "nodes": [node]}
    assert admin.run("status", "--check") == 1
    assert capsys.readouterr().out == "node n1: gpu 1: missing since 02:14\n"
    assert admin.run("status") == 0
    assert "gpu 0: cordoned by alice: fan" in capsys.readouterr().out


def test_downloads_are_shown_and_a_failed_one_is_a_complaint(admin, capsys):  # noqa: F811
    """What is under way stands in the node's notes; what was done or cancelled does not."""
    rows = [
        {"weights": "hf:a/b", "state": "downloading", "text": "downloading 43 % (6.4 of 14.9 GiB)"},
        {"weights": "hf:a/c", "state": "failed", "text": "failed: hf:a/c is gated: accept the licence at x"},
        {"weights": "hf:a/d", "state": "done", "text": "done (1.0 GiB)"},
    ]
    server = {"name": "cp1", "role": "leader"}
    admin.answers["GET /v1/status"] = {"server": server, "nodes": [{"name": "n1", "state": "ready", "fetches": rows}]}
    assert admin.run("status") == 0
    said = capsys.readouterr().out
    assert "hf:a/b downloading 43 % (6.4 of 14.9 GiB) · hf:a/c failed: hf:a/c is gated" in said and "hf:a/d" not in said
    assert admin.run("status", "--check") == 1
    said = capsys.readouterr().out
    assert "node n1: hf:a/c failed" in said and "hf:a/b" not in said


def test_what_nodes_say_cannot_act_on_the_terminal(admin, capsys):  # noqa: F811
    """Names and reasons are escaped: a compromised node draws nothing."""
    answer = fleet()
    answer["nodes"][1]["reason"] = "\x1b]0;owned\x07[bold]not markup[/bold]"
    admin.answers["GET /v1/status"] = answer
    assert admin.run("status") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b]0;owned\\x07[bold]not markup[/bold]" in out


def test_a_terminal_gets_colours_and_its_own_width(monkeypatch):
    """On a terminal states are coloured and rows folded; the same table in a pipe is plain and long."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    rows = [("n1", "failed", "word " * 60)]
    plain = render.table(("NODE", "STATE", "NOTES"), rows)
    monkeypatch.setattr(sys, "stdout", Terminal())
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    fancy = render.table(("NODE", "STATE", "NOTES"), rows)
    assert "\x1b[31mfailed" in fancy and len(fancy.splitlines()) > 4
    assert "\x1b" not in plain and len(plain.splitlines()) == 2


@pytest.mark.parametrize("numbers, text", [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([7, 0, 1, 5], "0-1,5,7")])
def test_ranges_are_short(numbers, text):
    """Device indexes as ranges."""
    assert render.ranges(numbers) == text


def model(ready, wanted, *states):
    replicas = [{"state": state, "shards": [shard("n1", state, reason="why")]} for state in states]
    server = {"name": "cp1", "role": "leader"}
    return {"server": server, "models": [{"name": "m", "ready": ready, "wanted": wanted, "replicas": replicas}]}


def test_wait_ends_when_all_are_ready(admin, capsys, monkeypatch):  # noqa: F811
    """It says what is going on, once for each change, outlives a server that is away, and ends with 0."""
    monkeypatch.setattr("llmgw.cli.catalog.POLL", 0.01)
    admin.answers["GET /v1/status"] = [model(0, 1, "loading"), model(0, 1, "loading"), (200, b"gone"), model(1, 1, "ready")]
    assert admin.run("wait", "m", "--timeout", "20s") == 0
    captured = capsys.readouterr()
    assert captured.out == "m is ready: 1/1\n"
    assert captured.err.count("0/1 ready: n1 loading") == 1 and "not llmgw-server" in captured.err


def test_wait_fails_in_time_and_says_why(admin, capsys, monkeypatch):  # noqa: F811
    """The time over, an unknown model and a replica that failed for good are status 1, the latter two at once."""
    monkeypatch.setattr("llmgw.cli.catalog.POLL", 0.01)
    admin.answers["GET /v1/status"] = model(0, 1, "backoff")
    assert admin.run("wait", "m", "--timeout", "100ms") == 1
    assert "m is not ready after 0.1 s: 0/1 ready: n1 backoff: why; see: llmgw explain m" in capsys.readouterr().err
    assert admin.run("wait", "alias", "--timeout", "1h") == 1
    assert "no model 'alias'" in capsys.readouterr().err
    admin.answers["GET /v1/status"] = model(0, 1, "failed")
    assert admin.run("wait", "m", "--timeout", "1h") == 1
    assert "llmgw restart m" in capsys.readouterr().err


def test_wait_does_not_wait_for_what_is_not_wanted(admin):  # noqa: F811
    """A model with no wanted replica is as wanted."""
    admin.answers["GET /v1/status"] = model(0, 0)
    assert admin.run("wait", "m") == 0


def test_a_removed_node_is_no_complaint():
    """Somebody wanted it so, as with a drain; one that is lost is a complaint with its state."""
    nodes = [{"name": name, "state": name, "since": 1.0} for name in ("removed", "lost")]
    assert status.complaints({"server": {}, "nodes": nodes}, 3.0) == ["node lost: lost, 2 s"]


def test_a_failed_replica_is_a_complaint_while_none_is_wanted_as_well():
    """Whoever asks for the model gets an error."""
    failed = {"state": "failed", "shards": [{"node": "n1", "state": "failed", "reason": "no good"}]}
    models = [{"name": "m", "wanted": 0, "ready": 0, "replicas": [failed]}]
    assert status.complaints({"server": {}, "models": models}, 3.0) == ["model m: n1 failed: no good"]


def test_complaints_name_expired_certificates():
    """An expired and a soon expiring certificate are complaints, a fresh one is not."""
    now = 1e9
    nodes = [{"name": f"n{n}", "state": "ready", "certificate_expires": now + n * DAY} for n in (-1, 1, 20)]
    found = status.complaints({"server": {}, "nodes": nodes}, now)
    assert [line.partition(" in ")[0].partition(" 2001")[0] for line in found] == [
        "node n-1: certificate expired",
        "node n1: certificate expires",
    ]


def test_the_servers_own_certificate_is_watched(admin, capsys):  # noqa: F811
    """Its end is shown below the tables and is a complaint; a warning about the configuration is shown and is none."""
    answer = fleet() | {"models": [], "nodes": [], "orphans": []}
    answer["server"] |= {"certificate_expires": time.time() + DAY + 60, "notes": ["the store is slow"], "warnings": ["short"]}
    admin.answers["GET /v1/status"] = answer
    assert admin.run("status") == 0
    assert capsys.readouterr().out.splitlines()[-3:] == ["the store is slow", "cp1: certificate expires in 1 d", "note: short"]
    assert admin.run("status", "--check") == 1
    assert "short" not in capsys.readouterr().out
