"""The router's address, its keys, and a server that is only a router."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time

import openai
import pytest

from llmgw.router.sharedfile import shared_file
from tests.end_to_end.fleet import BIN, RealFleet, fake_model, processes, until


def client(fleet: RealFleet, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.router}/v1", api_key=key, max_retries=0, timeout=20)


def refused(one: openai.OpenAI) -> bool:
    try:
        one.models.list()
    except openai.AuthenticationError:
        return True
    return False


MESSAGE = [{"role": "user", "content": "x"}]


def test_keys_are_made_used_and_revoked(fleet):
    """The official client gets its own exceptions; a revoked key is refused when the command has returned."""
    fleet.write_server(fake_model(), router=", keys: required")
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    with pytest.raises(openai.AuthenticationError):
        client(fleet, "sk-wrong").models.list()
    key = re.search(r"llmgw[_-]\S+", fleet.llmgw("key", "create", "alice"))[0]
    good = client(fleet, key)
    assert not refused(good), "in force when it has been printed"
    assert [model.id for model in good.models.list()] == ["m"]
    answer = good.chat.completions.create(model="m", messages=MESSAGE)
    assert answer.choices[0].message.content
    pieces = [
        event.choices[0].delta.content or ""
        for event in good.chat.completions.create(model="m", messages=MESSAGE, stream=True)
        if event.choices
    ]
    assert "".join(pieces)
    with pytest.raises(openai.NotFoundError):
        good.chat.completions.create(model="none", messages=MESSAGE)
    assert key not in fleet.llmgw("key", "list")
    (row,) = json.loads(fleet.llmgw("key", "list", "--json"))["keys"]
    fleet.llmgw("key", "revoke", row["id"])
    assert refused(good)


def test_l10_a_revoked_key_is_refused_within_a_second(fleet):
    """L10: by every worker, a second after the server has written down that it was; streams that run go on."""
    fleet.write_server(fake_model(), router=", keys: required, workers: 2")
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    took = []
    for name in ("a", "b", "c"):
        made = json.loads(fleet.llmgw("key", "create", name, "--json"))
        running = fleet.stream(tokens=200, key=made["key"])
        until(lambda running=running: running.pieces, "it streams")
        revoke = [str(BIN / "llmgw"), "--socket", str(fleet.socket), "key", "revoke", made["id"]]
        with subprocess.Popen(revoke, stdout=subprocess.DEVNULL):
            last_good, refusals = 0.0, 0
            # Each request is a connection of its own, so of eight one has come to either worker.
            while refusals < 8:
                began = time.time()
                if fleet.ask(key=made["key"])[0] == 401:
                    refusals += 1
                else:
                    last_good, refusals = began, 0
        running.whole()
        events = [json.loads(line) for line in fleet.llmgw("events", "--json").splitlines()]
        (event,) = [event for event in events if made["id"] in event["text"] and "revoked" in event["text"]]
        took.append(last_good - event["at"])
    assert min(took) < 1.0, f"a busy machine is slow, but not each time: {took}"


def test_a_key_gets_a_new_secret(fleet):
    """Both secrets work when the command has returned, the old one until the overlap ends; both are one key with one usage."""
    fleet.write_server(fake_model(), router=", keys: required")
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    old = client(fleet, json.loads(fleet.llmgw("key", "create", "alice", "--json"))["key"])
    first = json.loads(fleet.llmgw("key", "rotate", "alice", "--overlap", "24h", "--json"))
    new = client(fleet, first["key"])
    assert not refused(old) and not refused(new), "in force as soon as it has been printed"
    for one in (old, new):
        assert one.chat.completions.create(model="m", messages=MESSAGE).choices
    used = until(lambda: json.loads(fleet.llmgw("usage", "--json"))["usage"], "usage")
    assert {row["key"] for row in used} == {first["id"]}
    newest = client(fleet, json.loads(fleet.llmgw("key", "rotate", first["id"], "--overlap", "0s", "--json"))["key"])
    assert refused(new), "no overlap"
    assert not refused(old) and not refused(newest), "an earlier overlap is not cut short"
    fleet.llmgw("key", "revoke", first["id"])
    until(lambda: refused(old) and refused(newest), "a revoked key has no secret any more", 5)


def test_tokens_per_day_outlive_a_stop_of_everything(fleet):
    """Server and workers have gone, and the memory they counted in; the day's limit holds when they come back."""
    fleet.write_server(fake_model(), router=", keys: required")
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    key = json.loads(fleet.llmgw("key", "create", "alice", "--tpd", "150", "--json"))["key"]

    def limited() -> bool:
        status, body = fleet.ask(key=key)
        assert status in (200, 429), body
        return status == 429 and body["error"]["code"] == "tpd"

    until(limited, "the day's tokens are used")
    fleet.end("server", signal.SIGINT)
    until(lambda: not any("llmgw.router.worker" in command for command in processes(str(fleet.folder)).values()), "all gone")
    for name in ("scoreboard", "prefixes"):  # as a reboot would
        shared_file(fleet.folder / "state" / "router", name).unlink(missing_ok=True)
    fleet.start_server()
    fleet.ready()
    assert limited()


def test_an_open_address_without_keys_is_refused(fleet):
    """Any address but loopback must say whether keys are required."""
    path = fleet.write_server(fake_model())
    path.write_text(path.read_text().replace(f"listen: 127.0.0.1:{fleet.router}", f"listen: 0.0.0.0:{fleet.router}"))
    done = fleet.command("check", str(path))
    assert done.returncode == 2
    assert "keys" in done.stdout + done.stderr
    path.write_text(path.read_text().replace("router: {", "router: {keys: none, "))
    assert fleet.command("check", str(path)).returncode == 0


def test_a_server_without_profiles_is_only_a_router(fleet):
    """Static endpoints, no fleet section, role router."""
    # Not one of free_ports: the fleet has the first of them and has not bound them yet.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = subprocess.Popen([sys.executable, "-m", "llmgw.testing.fake_engine", "--port", str(port), "--name", "upstream"])
    try:
        path = fleet.folder / "server.yaml"
        path.write_text(
            f"router: {{listen: 127.0.0.1:{fleet.router}}}\nadmin: {{socket: {fleet.socket}}}\nstore: sqlite:///state/llmgw.db\n"
            f"models:\n  - name: elsewhere\n    aliases: [other]\n"
            f"    endpoints:\n      - {{url: 'http://127.0.0.1:{port}/v1', model: upstream}}\n"
        )
        fleet.start_server()
        until(lambda: fleet.ask("elsewhere")[0] == 200, "served")
        assert fleet.ask("other")[0] == 200
        assert fleet.status()["server"]["role"] == "router"
    finally:
        engine.terminate()
        engine.wait()
