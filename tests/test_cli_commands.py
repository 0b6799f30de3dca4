"""The llmgw command against recorded answers: what is asked, what is printed, and the exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.cli.main import COMMANDS, run
from tests.admin_stub import admin  # noqa: F401

LLMGW = Path(sys.executable).parent / "llmgw"


def refusal(status, code, message, problems=()):
    return status, {"error": {"code": code, "message": message, "problems": list(problems)}}


def test_help_names_every_command(capsys):
    """The help lists all commands, and each of them has a sentence."""
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        line = next(line for line in out.splitlines() if line.startswith(f"  {name} "))
        assert len(line.split()) > 3


@pytest.mark.parametrize("arguments", [["nonsense"], ["status", "--nonsense"], ["explain"], ["wait", "m", "--timeout", "soon"]])
def test_bad_usage_is_2(arguments, capsys):
    """A wrong command line is status 2, with what is allowed on standard error."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert "Error" in captured.err and not captured.out


def test_no_server_is_3(tmp_path, capsys):
    """No socket, nobody behind it, a path too long for one: each is status 3 and says what to look at."""
    assert run(["--socket", str(tmp_path / "absent.sock"), "status"]) == 3
    assert "is llmgw-server running" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    assert run(["--socket", str(tmp_path / "dead.sock"), "status"]) == 3
    assert "nobody listens" in capsys.readouterr().err
    assert run(["--socket", "/" + "x" * 200, "status"]) == 3
    assert "too long" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can step down to a user without access")
def test_a_socket_one_may_not_open_names_the_group(admin, capsys):  # noqa: F811
    """Permission denied tells whom to ask."""
    os.chmod(admin.path, 0o660)
    os.seteuid(65534)
    try:
        assert admin.run("status") == 3
    finally:
        os.seteuid(0)
    assert "join the group that owns it" in capsys.readouterr().err


def test_something_else_at_the_socket_is_3(admin, capsys):  # noqa: F811
    """What speaks no JSON is not our server."""
    admin.answers["GET /v1/status"] = (200, b"hello")
    assert admin.run("status") == 3
    assert "not llmgw-server" in capsys.readouterr().err


def test_a_hung_server_is_given_up_on(tmp_path, monkeypatch, capsys):
    """A server that accepts and never answers is status 3 when patience is over."""
    from llmgw.cli import client

    monkeypatch.setattr(client.Client.get, "__kwdefaults__", {"timeout": 0.1})
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "hung.sock"))
        listening.listen()
        assert run(["--socket", str(tmp_path / "hung.sock"), "status"]) == 3
    assert "did not answer" in capsys.readouterr().err


def test_refusals_are_1_and_said_once(admin, capsys):  # noqa: F811
    """The server's sentence goes to standard error; --json has code, message and problems on standard output."""
    admin.answers["POST /v1/drain"] = refusal(409, "outage", "m would have no replica: say --allow-outage")
    assert admin.run("drain", "n1") == 1
    captured = capsys.readouterr()
    assert captured.err == "llmgw: m would have no replica: say --allow-outage\n" and not captured.out
    assert admin.run("drain", "n1", "--json") == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "outage"


def test_what_the_server_cannot_yet_is_said(admin, capsys):  # noqa: F811
    """501 reads as "not yet" and is status 1."""
    admin.answers["GET /v1/top"] = refusal(501, "not_yet", "top comes with a later version")
    assert admin.run("top") == 1
    assert capsys.readouterr().err == "llmgw: not yet: top comes with a later version\n"


@pytest.mark.parametrize(
    "arguments, request_line, body",
    [
        ("explain a/b", "GET /v1/explain", {"model": "a/b"}),
        ("cordon n1 n2", "POST /v1/cordon", {"nodes": ["n1", "n2"]}),
        ("uncordon n1", "POST /v1/uncordon", {"nodes": ["n1"]}),
        (
            "cordon n1 --device GPU-a --reason fan",
            "POST /v1/cordon",
            {"nodes": ["n1"], "device": "GPU-a", "reason": "fan"},
        ),
        ("uncordon n1 --device GPU-a", "POST /v1/uncordon", {"nodes": ["n1"], "device": "GPU-a"}),
        (
            "drain n1 --deadline 30m --force",
            "POST /v1/drain",
            {"nodes": ["n1"], "deadline": 1800.0, "force": True, "allow_outage": False},
        ),
        ("drain n1", "POST /v1/drain", {"nodes": ["n1"], "force": False, "allow_outage": False}),
        ("restart a/b --replica 2", "POST /v1/restart", {"model": "a/b", "replica": 2, "allow_outage": False}),
        ("adopt a/b/1/0 --node n1", "POST /v1/adopt", {"shard": "a/b/1/0", "node": "n1"}),
        ("stop m/1/0", "POST /v1/stop", {"shard": "m/1/0"}),
        ("fetch m --node n1", "POST /v1/fetch", {"model": "m", "node": "n1", "cancel": False}),
        ("fetch m --cancel", "POST /v1/fetch", {"model": "m", "cancel": True}),
        ("node reset n1", "POST /v1/node/reset", {"name": "n1"}),
        ("node remove n1", "POST /v1/node/remove", {"name": "n1", "force": False}),
        ("restart --replica a/b/2", "POST /v1/restart", {"model": "a/b", "replica": 2, "allow_outage": False}),
        ("restart a/b --replica a/b/2", "POST /v1/restart", {"model": "a/b", "replica": 2, "allow_outage": False}),
        ("restart --node n1", "POST /v1/restart", {"node": "n1", "allow_outage": False}),
        ("restart --outdated", "POST /v1/restart", {"outdated": True, "allow_outage": False}),
        ("rollout m --resume --allow-outage", "POST /v1/rollout", {"model": "m", "action": "resume", "allow_outage": True}),
        ("key revoke k1", "POST /v1/keys/revoke", {"id": "k1"}),
        ("key rotate alice", "POST /v1/keys/rotate", {"name": "alice"}),
        ("key rotate k1 --overlap 24h", "POST /v1/keys/rotate", {"name": "k1", "overlap": 86400.0}),
        ("key create vip --class high", "POST /v1/keys", {"name": "vip", "priority": 1}),
        (
            "key create alice --model m --rpm 60 --expires 90d",
            "POST /v1/keys",
            {"name": "alice", "models": ["m"], "rpm": 60, "expires": 7776000.0},
        ),
        ("rollout m --undo", "POST /v1/rollout", {"model": "m", "action": "undo"}),
    ],
)
def test_orders_are_sent_as_typed(admin, capsys, arguments, request_line, body):  # noqa: F811
    """Each command asks exactly one thing, and prints the server's sentence."""
    admin.answers[request_line] = {"text": "done as told", "key": "llmgw-x", "id": "k1"}
    assert admin.run(*arguments.split()) == 0
    assert admin.asked == [(request_line, body)]
    assert ("llmgw-x" if arguments.startswith(("key create", "key rotate")) else "done as told") in capsys.readouterr().out


def test_apply_sends_the_file(admin, tmp_path, capsys):  # noqa: F811
    """Text and absolute path go to the server, which has the one validation."""
    file = tmp_path / "models.yaml"
    file.write_text("models: []\n")
    admin.answers["POST /v1/apply"] = {"text": "catalog 42 is in force", "lines": ["  start m"]}
    assert admin.run("apply", str(file), "--check-revision", "41", "--allow-removals") == 0
    assert capsys.readouterr().out == "catalog 42 is in force\n  start m\n"
    body = {"text": "models: []\n", "path": str(file), "allow_removals": True, "check_revision": 41}
    assert [asked for _, asked in admin.asked] == [body]


def test_apply_of_a_bad_catalog_is_2(admin, tmp_path, capsys):  # noqa: F811
    """Every problem on its own line, and status 2 as for llmgw check."""
    file = tmp_path / "models.yaml"
    file.write_text("models: 3\n")
    problems = [{"where": f"{file}:1", "text": "models: found 3, want a list", "code": "type"}, "another"]
    admin.answers["POST /v1/apply"] = refusal(400, "invalid", "the catalog has 2 problems", problems)
    assert admin.run("apply", str(file)) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{file}:1: models: found 3, want a list",
        "another",
        "llmgw: the catalog has 2 problems",
    ]
    assert admin.run("apply", str(tmp_path / "absent.yaml")) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_key_is_shown_once(admin, capsys):  # noqa: F811
    """create prints the key on a line of its own; list has everything but the key."""
    admin.answers["POST /v1/keys"] = {"id": "k1", "key": "llmgw-secret"}
    assert admin.run("key", "create", "alice") == 0
    said = capsys.readouterr()
    assert said.out == "llmgw-secret\n" and "not shown again" in said.err  # so that a script can take it
    row = {"id": "k1", "name": "alice", "created": 1790000000.0, "expires": None, "revoked": None, "rpm": 60, "models": []} | {
        "state": "good"
    }
    admin.answers["GET /v1/keys"] = {"keys": [row, row | {"id": "k2", "revoked": 1790000001.0, "state": "revoked"}]}
    assert admin.run("key", "list") == 0
    out = capsys.readouterr().out
    assert "60 rpm" in out and "2026-09-21" in out and "never" in out
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["good", "revoked"]


def test_events_are_one_line_each(admin, capsys):  # noqa: F811
    """Time, subject, change, sentence; the engine's last words below, with nothing a terminal would act on."""
    event = {"number": 7, "at": 1790000000.0, "kind": "shard_state", "subject": "m/1/0", "node": "n2"}
    event |= {"text": "m/1/0 n2: loading -> backoff: no room\x1b[31m", "tail": ["last \x07word"]}
    admin.answers["GET /v1/events"] = {"events": [event]}
    assert admin.run("events", "--limit", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("m/1/0 n2: loading -> backoff: no room\\x1b[31m")
    assert lines[1] == "    last \\x07word"
    assert admin.asked == [("GET /v1/events", {"limit": "5"})]
    assert admin.run("events", "--json") == 0
    assert json.loads(capsys.readouterr().out) == event


def test_following_events_outlives_the_server(admin, tmp_path):  # noqa: F811
    """--follow asks on from the last number, and Ctrl-C ends it with 130."""
    admin.answers["GET /v1/events"] = [{"events": [{"number": n, "at": 0, "text": f"event {n}"}]} for n in (1, 2, 3)] + [
        (503, b"oops"),
        (503, b"oops"),
        {"events": [{"number": 4, "at": 0, "text": "event 4"}]},
        {"events": []},
    ]
    process = subprocess.Popen(
        [LLMGW, "--socket", admin.path, "events", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    seen = [process.stdout.readline().rpartition("  ")[2].strip() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert seen == ["event 1", "event 2", "event 3", "event 4"]
    assert err.count("trying again") == 1 and process.returncode == 130
    assert [asked.get("after") for _, asked in admin.asked[:4]] == [None, "1", "2", "3"]


def piece(attempt, offset, text, size=None):
    return {"attempt": attempt, "offset": offset, "next": offset + len(text), "size": size or offset + len(text), "text": text}


def test_logs_are_read_to_their_end(admin, capsys):  # noqa: F811
    """Pieces are fetched until one is empty, and printed as they came."""
    admin.answers["GET /v1/logs"] = [piece(2, 0, "one\n"), piece(2, 4, "two\x1b[1m\n"), piece(2, 12, "")]
    assert admin.run("logs", "a/b/1/0") == 0
    assert capsys.readouterr().out == "one\ntwo\x1b[1m\n"
    assert [(asked["shard"], asked["attempt"], asked["offset"]) for _, asked in admin.asked] == [
        ("a/b/1/0", "0", "0"),
        ("a/b/1/0", "2", "4"),
        ("a/b/1/0", "2", "12"),
    ]


def test_last_lines_of_a_log(admin, capsys):  # noqa: F811
    """--lines asks from the end and prints no more than it was told."""
    admin.answers["GET /v1/logs"] = [piece(1, 900, "a\nb\nc\n"), piece(1, 906, "")]
    assert admin.run("logs", "m/1/0", "--lines", "2", "--attempt", "1") == 0
    assert capsys.readouterr().out == "b\nc\n"
    assert int(admin.asked[0][1]["offset"]) < 0 and admin.asked[0][1]["attempt"] == "1"


def test_following_logs_goes_into_the_next_attempt(admin):  # noqa: F811
    """--follow waits at the end, notices a newer attempt and reads it from its start."""
    admin.answers["GET /v1/logs"] = [
        piece(1, 0, "dying\n"),
        piece(1, 6, ""),
        piece(2, 0, "x"),
        piece(2, 0, "born again\n"),
        piece(2, 11, ""),
    ]
    process = subprocess.Popen(
        [LLMGW, "--socket", admin.path, "logs", "m/1/0", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    seen = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert seen == ["dying\n", "born again\n"] and "attempt 2" in err and process.returncode == 130


def test_output_is_made_fit_for_a_terminal():
    """Colours go, of a progress bar the last state stays, everything else a terminal would obey is escaped."""
    from llmgw.cli.logs import fit

    assert fit("\x1b[32mINFO\x1b[0m a\tb\n 10%\r 50%\r100%\r\n\x1b]0;title\x07") == "INFO a  b\n100%\n\\x1b]0;title\\x07"


def test_orphans_and_refusals_are_tables(admin, capsys):  # noqa: F811
    """Empty ones say so; rows carry what an operator needs to act."""
    admin.answers["GET /v1/orphans"] = [
        {"orphans": []},
        {"orphans": [{"shard": "m/1/0", "node": "n1", "pid": 7, "reason": "gone"}]},
    ]
    assert admin.run("orphans") == 0 and capsys.readouterr().out == "no orphans\n"
    assert admin.run("orphans") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["m/1/0", "n1", "7", "gone"]
    admin.answers["GET /v1/refusals"] = {
        "refusals": [{"at": 0, "peer": "10.0.0.5:4", "reason": "name_mismatch", "text": "n1, not n2"}]
    }
    assert admin.run("refusals") == 0
    assert "name_mismatch  n1, not n2" in capsys.readouterr().out


def test_start_is_quick():
    """Nothing of Twisted, cryptography or the configuration is imported to show a status; the best of three is quick."""
    code = "import sys; from llmgw.cli.main import run; run(['--socket', '/nonexistent', 'status']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "llmgw.cli.status" in loaded
    assert not loaded & {"twisted", "cryptography", "yaml", "cattrs", "rich.markdown", "llmgw.config"}


def test_output_into_a_closed_pipe_is_no_traceback(admin):  # noqa: F811
    """llmgw events | head -1 ends quietly."""
    admin.answers["GET /v1/events"] = {"events": [{"number": n, "at": 0, "text": "x" * 1000} for n in range(1000)]}
    done = subprocess.run(
        f"{LLMGW} --socket {admin.path} events | head -1", shell=True, capture_output=True, text=True, timeout=20
    )
    assert len(done.stdout.splitlines()) == 1 and "Traceback" not in done.stderr
