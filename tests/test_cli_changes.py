"""Waiting for changes, against recorded answers: C{llmgw drain --wait} and C{llmgw wait}."""

from __future__ import annotations

from tests.admin_stub import admin  # noqa: F401


def draining(*replicas, flags=("draining",)):
    """A status in which node n1 drains."""
    shown = [{"id": name, "state": state, "in_flight": 2, "shards": [{"node": "n1"}]} for name, state in replicas]
    return {"server": {}, "nodes": [{"name": "n1", "state": "ready", "flags": list(flags)}], "models": [{"replicas": shown}]}


def test_a_drain_is_waited_for_and_its_progress_told(admin, capsys):  # noqa: F811
    """Each change is a line on standard error; the end is the answer."""
    admin.answers["POST /v1/drain"] = {"text": "draining", "deadline": 60.0}
    admin.answers["GET /v1/status"] = [draining(("m/1", "ready")), draining(("m/1", "draining")), draining()]
    assert admin.run("drain", "n1", "--wait") == 0
    captured = capsys.readouterr()
    assert captured.out == "n1: drained\n"
    left = "n1: 1 replica left: m/1"
    assert captured.err.splitlines() == [f"{left} ready, 2 in flight", f"{left} draining, 2 in flight", "n1: drained"]


def test_a_drain_that_is_ended_by_somebody_is_no_success(admin, capsys):  # noqa: F811
    """Exit status 1, and who did it."""
    admin.answers["POST /v1/drain"] = {"text": "draining", "deadline": 60.0}
    admin.answers["GET /v1/status"] = [draining(("m/1", "ready")), draining(("m/1", "ready"), flags=())]
    assert admin.run("drain", "n1", "--wait") == 1
    assert "somebody said llmgw uncordon n1" in capsys.readouterr().err


def replica(name, generation, **more):
    """A ready replica in a status."""
    return {"id": name, "state": "ready", "generation": generation, "shards": [], **more}


def test_wait_looks_at_the_profile_and_at_restarts(admin, capsys):  # noqa: F811
    """Ready with the old profile, or about to be restarted, is not ready; a rollback ends the wait with its reason."""
    old = {"name": "m", "wanted": 1, "ready": 1, "generation": "new", "replicas": [replica("m/1", "old")]}
    restarted = old | {"replicas": [replica("m/2", "new", replace="restart ordered")]}
    running = old | {"replicas": [replica("m/2", "new")], "rollout": {"state": "running"}}
    done = running | {"rollout": {"state": "done"}}
    admin.answers["GET /v1/status"] = [{"models": [model]} for model in (old, restarted, running, done)]
    assert admin.run("wait", "m") == 0
    assert len(admin.asked) == 4
    back = old | {"rollout": {"state": "rolled_back", "reason": "rolled back to profile old after 3 failed attempts"}}
    admin.answers["GET /v1/status"] = {"models": [back]}
    assert admin.run("wait", "m") == 1
    assert "m: rolled back to profile old after 3 failed attempts; see: llmgw rollout m" in capsys.readouterr().err


def test_wait_says_that_the_old_ones_serve_while_their_successor_fits_nowhere(admin, capsys, monkeypatch):  # noqa: F811
    """Nobody is without an answer: it says how many serve, with what, and what the new profile waits for."""
    monkeypatch.setattr("llmgw.cli.catalog.POLL", 0.01)
    why = "m/1 should be replaced (its profile changed (old -> new)) but its successor fits nowhere; it stays as it is"
    held = {"name": "m", "wanted": 2, "ready": 2, "generation": "new", "reason": why, "rollout": {"state": "running"}}
    held["replicas"] = [replica("m/1", "old"), replica("m/2", "old")]
    admin.answers["GET /v1/status"] = {"models": [held]}
    assert admin.run("wait", "m", "--timeout", "100ms") == 1
    said = capsys.readouterr().err
    assert f"m is not changed after 0.1 s: 2/2 serve, 2 as before the change, which waits: {why}; see: llmgw rollout m" in said
    loading = {"id": "m/3", "state": "loading", "generation": "new", "shards": [{"node": "n1", "state": "loading"}]}
    admin.answers["GET /v1/status"] = {"models": [held | {"replicas": [replica("m/2", "old"), replica("m/4", "new"), loading]}]}
    assert admin.run("wait", "m", "--timeout", "100ms") == 1
    assert "2/2 serve, 1 as before the change, which waits: n1 loading" in capsys.readouterr().err


def test_apply_waits_for_what_it_changed_if_asked(admin, tmp_path, capsys, monkeypatch):  # noqa: F811
    """--wait: what was done is said at once, and the end is that of the last model; what was kept is not waited for."""
    monkeypatch.setattr("llmgw.cli.catalog.POLL", 0.01)
    file = tmp_path / "models.yaml"
    file.write_text("models: []\n")
    admin.answers["POST /v1/apply"] = {"text": "catalog 2", "lines": ["  add m"], "added": ["m"], "changed": ["k"], "kept": ["x"]}
    m = {"name": "m", "wanted": 1, "ready": 1, "generation": "g", "replicas": [replica("m/1", "g")]}
    admin.answers["GET /v1/status"] = [{"models": [m | {"name": "k"}, one]} for one in (m | {"ready": 0, "replicas": []}, m, m)]
    assert admin.run("apply", str(file), "--wait", "--timeout", "20s") == 0
    captured = capsys.readouterr()
    assert captured.out == "catalog 2\n  add m\nm is ready: 1/1\nk is ready: 1/1\n" and "m: 0/1 ready" in captured.err
    assert len(admin.asked) == 4
