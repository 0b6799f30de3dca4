"""Changes under constant load through real daemons: rollouts, rollbacks, drains; what clients notice of them is nothing."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time

import pytest

from llmgw.testing.tiny_gguf import write_tiny_gguf
from tests.end_to_end.fleet import QUICK, fake_model, until
from tests.end_to_end.load import Load

STREAM = ("--events", "400", "--interval", "0.02")
TINY = """
  - name: m
    replicas: 2
    profile:
      engine: llamacpp
      weights: tiny.gguf
      context: {context}
      arguments: {{parallel: 2, threads: 1{more}}}
      resources: {{devices: 0, host_memory: 64MiB}}
"""


def start(fleet, models, nodes=("n1",), timing=QUICK):
    """A server and agents; all models are given as text."""
    fleet.write_server(models, timing=timing)
    for name in nodes:
        fleet.write_agent(name)
    fleet.start_server()
    for name in nodes:
        fleet.start_agent(name)
    return fleet


def rollout(fleet):
    """Model m's rollout as status shows it."""
    return next(row for row in fleet.status()["models"] if row["name"] == "m")["rollout"]


def changed(fleet, before, count=2):
    """The shards once none of C{before} is left and all are ready."""

    def look():
        now = fleet.shards()
        pids = {shard["pid"] for shard in now}
        return len(now) == count and not pids & before and all(s["state"] == "ready" for s in now) and pids

    return until(look, "all changed", 60)


def test_f16_a_changed_profile_is_rolled_out_under_load_without_a_failed_request(fleet):
    """F16: apply says how, every replica is another process at the end, and no client saw anything."""
    start(fleet, fake_model("m", 2))
    before = {shard["pid"] for shard in fleet.ready(count=2)}
    load = Load(fleet)
    said = fleet.llmgw("apply", str(fleet.write_server(fake_model("m", 2, "--events", "9"))))
    assert "2 replicas replaced one at a time, each successor ready before the old one drains (the first on n1)" in said
    fleet.llmgw("wait", "m", "--timeout", "30s")
    changed(fleet, before)
    load.end()
    assert rollout(fleet)["state"] == "done"
    assert f"done: all replicas run profile {rollout(fleet)['target']}" in fleet.llmgw("rollout", "m")


def rolled_back(fleet):
    """Apply a profile that cannot start under load, see it rolled back; returns the pids of before."""
    start(fleet, fake_model("m", 2))
    before = {shard["pid"] for shard in fleet.ready(count=2)}
    load = Load(fleet)
    bad = fake_model("m", 2, "--exit-after", "0", "--exit-code", "3", more="    rollout: {failures: 2}\n")
    fleet.llmgw("apply", str(fleet.write_server(bad)))
    assert "rolled back to profile" in fleet.llmgw("wait", "m", "--timeout", "30s", code=1)
    load.end()
    return before


def test_g4_a_profile_that_cannot_start_is_rolled_back_under_load_and_says_why(fleet):
    """G4: it stops and goes back; rollout and explain say why; the engines that served are the same processes."""
    before = rolled_back(fleet)
    for command in ("rollout m", "explain m"):
        said = fleet.llmgw(*command.split())
        assert "after 2 failed attempts" in said and "exit status 3" in said, command
    assert {shard["pid"] for shard in fleet.ready(count=2)} == before


@pytest.mark.slow
def test_g4_a_rollback_is_said_everywhere_and_kept_over_a_restart_of_the_server(fleet):
    """G4: status, its check and events say it, too; the next server leaves the model where it is."""
    before = rolled_back(fleet)
    for command in ("status", "events"):
        said = fleet.llmgw(*command.split())
        assert "after 2 failed attempts" in said and "exit status 3" in said, command
    assert "rolled back" in fleet.llmgw("status", "--check", code=1)
    fleet.end("server")
    fleet.start_server()
    until(lambda: {shard["pid"] for shard in fleet.ready(count=2)} == before, "the same engines")
    assert rollout(fleet)["state"] == "rolled_back" and fleet.ask()[0] == 200


@pytest.mark.slow
def test_a_rollout_is_paused_resumed_and_undone(fleet):
    """What the command says is what happens, and the orders are events."""
    start(fleet, fake_model("m", 1))
    before = {shard["pid"] for shard in fleet.ready()}
    fleet.llmgw("apply", str(fleet.write_server(fake_model("m", 1, "--load-seconds", "1"))))
    assert "paused; no further replica is changed" in fleet.llmgw("rollout", "m", "--pause")
    until(lambda: rollout(fleet)["state"] == "paused", "paused")
    assert before <= {shard["pid"] for shard in fleet.shards()}
    fleet.llmgw("rollout", "m", "--resume")
    changed(fleet, before, 1)
    assert "undone" in fleet.llmgw("rollout", "m", "--undo")
    until(lambda: rollout(fleet)["state"] == "undone" and rollout(fleet)["changed"] == 1, "back")
    assert fleet.llmgw("events").count("rollout") >= 4


def test_g1_a_drain_lets_a_long_stream_end_whole_and_waits_for_it(fleet):
    """G1: the successor serves first, the stream that runs ends with [DONE], and --wait returns when the node is empty."""
    start(fleet, fake_model("m", 1, *STREAM), ("n1", "n2"))
    home = fleet.ready()[0]["node"]
    stream = fleet.stream(tokens=300)
    until(lambda: len(stream.pieces) > 3, "the stream has begun")
    said = fleet.llmgw("drain", home, "--deadline", "1m", "--wait")
    assert stream.done
    stream.whole()
    assert f"{home}: 1 replica left: m/1 draining, 1 in flight" in said and said.endswith(f"{home}: drained\n")
    assert [shard["node"] for shard in fleet.ready()] == [{"n1": "n2", "n2": "n1"}[home]]


def test_g1_at_the_deadline_a_stream_ends_with_an_error_event(fleet):
    """G1: cut, and told so: never a silent end, never [DONE]."""
    start(fleet, fake_model("m", 1, *STREAM))
    fleet.ready()
    stream = fleet.stream(tokens=400)
    until(lambda: len(stream.pieces) > 3, "the stream has begun")
    begun = time.monotonic()
    fleet.llmgw("drain", "n1", "--deadline", "1s", "--force", "--wait")
    assert time.monotonic() - begun < 20
    stream.join(5)
    assert not stream.done and "ended without" not in str(stream.error) and isinstance(stream.error, RuntimeError), stream.error


@pytest.mark.slow
def test_a_drain_that_somebody_ends_is_no_success(fleet):
    """--wait fails with who ended it; a node that runs something is not removed."""
    start(fleet, fake_model("m", 1, *STREAM))
    fleet.ready()
    assert "llmgw drain n1 --wait" in fleet.llmgw("node", "remove", "n1", code=1)
    fleet.stream(tokens=400)
    said: list[str] = []
    waiting = threading.Thread(
        target=lambda: said.append(fleet.llmgw("drain", "n1", "--allow-outage", "--wait", code=1)), daemon=True
    )
    waiting.start()
    until(lambda: "draining" in fleet.status()["nodes"][0]["flags"], "draining")
    fleet.llmgw("uncordon", "n1")
    waiting.join(20)
    assert said and "n1 does not drain any more: somebody said llmgw uncordon n1" in said[0]


@pytest.mark.slow
def test_f16_a_real_model_is_rolled_out_and_damaged_weights_of_it_replace_nothing_under_load(fleet):
    """F16 with llama.cpp: another context comes into force without a failed request; weights that cannot be read stop nothing."""
    (fleet.folder / "models").mkdir()
    write_tiny_gguf(fleet.folder / "models" / "tiny.gguf")
    start(fleet, TINY.format(context=256, more=""))
    before = {shard["pid"] for shard in fleet.ready(count=2, seconds=60)}
    load = Load(fleet, 2)
    fleet.llmgw("apply", str(fleet.write_server(TINY.format(context=512, more=""))))
    fleet.llmgw("wait", "m", "--timeout", "50s")
    good = changed(fleet, before)
    bad = TINY.format(context=512, more="").replace("tiny.gguf", "absent.gguf")
    (fleet.folder / "models" / "absent.gguf").write_bytes(b"GGUF and then nothing")
    fleet.llmgw("apply", str(fleet.write_server(bad)))
    assert "1 with unusable weights" in fleet.llmgw("wait", "m", "--timeout", "5s", code=1)
    load.end()
    assert {shard["pid"] for shard in fleet.ready(count=2)} == good
    assert "its successor fits nowhere; it stays as it is" in fleet.llmgw("explain", "m", code=None)


@pytest.mark.slow
def test_f16_a_rollout_goes_on_after_kill_9_of_the_server_under_load(fleet):
    """F16: killed while the first successor loads: no request fails, and the next server ends the rollout."""
    start(fleet, fake_model("m", 2))
    before = {shard["pid"] for shard in fleet.ready(count=2)}
    load = Load(fleet, 2)
    fleet.llmgw("apply", str(fleet.write_server(fake_model("m", 2, "--load-seconds", "2"))))
    until(lambda: any(shard["state"] == "loading" for shard in fleet.shards()), "a successor loads")
    fleet.end("server", signal.SIGKILL)
    fleet.start_server()
    fleet.llmgw("wait", "m", "--timeout", "50s")
    changed(fleet, before)
    load.end()
    assert rollout(fleet)["state"] == "done"


def install_vllm(fleet, version):
    """Put a vLLM of this version, a stand-in, where the agent's configuration says."""
    path = fleet.folder / "vllm"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo {version} || exec {sys.executable} -m llmgw.testing.standin_vllm "$@"\n'
    )
    path.chmod(0o755)
    return f"engines: {{vllm: {{command: [{path}]}}}}\n"


@pytest.mark.slow
def test_a_replaced_installation_is_taken_up_replica_by_replica_under_load(fleet):
    """Status says which engines still run the former version, and the command it names changes all of them, none at once."""
    (fleet.folder / "models" / "llama").mkdir(parents=True)
    shape = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64}
    (fleet.folder / "models" / "llama" / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 4096}))
    profile = "profile: {engine: vllm, weights: llama, context: 2048, resources: {devices: 0, host_memory: 16MiB}}"
    fleet.write_server(" []")
    fleet.write_agent("n1", install_vllm(fleet, "0.33.0"))
    fleet.start_server()
    fleet.start_agent("n1")
    until(lambda: "0.33.0" in [each["version"] for each in fleet.status()["nodes"][0]["installations"]], "its version", 60)
    fleet.llmgw("apply", str(fleet.write_server(f"\n  - name: m\n    replicas: 2\n    {profile}\n")))
    before = {shard["pid"] for shard in fleet.ready(count=2, seconds=60)}
    load = Load(fleet, 2)
    install_vllm(fleet, "0.34.0")
    fleet.end("n1")
    fleet.start_agent("n1")
    remark = "m/1/0, m/2/0 still on vllm 0.33.0, 0.34.0 is installed: llmgw restart --outdated --node n1"
    until(lambda: remark in fleet.status()["nodes"][0]["notes"], "status remarks it", 60)
    assert fleet.llmgw("restart", "--outdated").startswith("m/1, m/2: replaced one at a time")
    fleet.llmgw("wait", "m", "--timeout", "50s")
    changed(fleet, before)
    load.end()
    assert {shard["version"] for shard in fleet.shards()} == {"0.34.0"}
    assert not fleet.status()["nodes"][0]["notes"] and "nothing to restart" in fleet.llmgw("restart", "--outdated")


@pytest.mark.slow
def test_a_drain_with_a_stream_of_a_minute_ends_whole(fleet):
    """60 s of stream on the drained node, and not one event is lost."""
    start(
        fleet,
        fake_model("m", 1, "--events", "600", "--interval", "0.1"),
        ("n1", "n2"),
        f"{QUICK}, drain: 3m".replace("drain: 10s, ", ""),
    )
    home = fleet.ready()[0]["node"]
    stream = fleet.stream(tokens=600)
    until(lambda: len(stream.pieces) > 3, "the stream has begun")
    fleet.llmgw("drain", home, "--deadline", "3m")
    stream.whole(90)
    assert len(stream.pieces) >= 600
    until(lambda: f"{home}: drained" in fleet.llmgw("events"), "drained")
