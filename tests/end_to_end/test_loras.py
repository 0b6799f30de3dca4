"""LoRA adapters that come and go while engines run, through real daemons, with the stand-ins of vLLM and SGLang."""

from __future__ import annotations

import ast
import http.client
import json
import os
import signal

import pytest

from tests.end_to_end.fleet import until
from tests.end_to_end.test_engines_nodes import LLAMA, STANDINS

MODEL = """
  - name: {engine}
    loras: [{loras}]
    profile:
      engine: {engine}
      weights: llama
      arguments: {{enable-lora: true}}
      environment: {{STANDIN: "--interval 0.05 --events 200"}}
      resources: {{devices: 0, host_memory: 16MiB}}
"""


def write_adapter(fleet, name, rank=8):
    folder = fleet.folder / "models" / "loras" / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "base_model_name_or_path": "llama"}))
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


@pytest.fixture(params=["vllm", "sglang"])
def engine(request):
    return request.param


@pytest.fixture
def equipped(fleet, engine):
    """A fleet whose engine runs, prepared for adapters and without any; some adapters lie on its node."""
    (fleet.folder / "models" / "llama").mkdir(parents=True)
    (fleet.folder / "models" / "llama" / "config.json").write_text(json.dumps(LLAMA))
    for name in ("tuned", "other", "newer"):
        write_adapter(fleet, name)
    write_adapter(fleet, "big", rank=64)
    fleet.write_server(MODEL.format(engine=engine, loras=""))
    fleet.write_agent("n1", STANDINS)
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready(engine)
    return fleet


def entries(*loras):
    return ", ".join(f"{{name: {name}, weights: loras/{weights}}}" for name, weights in loras)


def apply(fleet, engine, *loras):
    fleet.write_server(MODEL.format(engine=engine, loras=entries(*loras)))
    return fleet.llmgw("apply", "server.yaml")


def models(fleet):
    connection = http.client.HTTPConnection("127.0.0.1", fleet.router, timeout=10)
    connection.request("GET", "/v1/models")
    try:
        return {row["id"] for row in json.loads(connection.getresponse().read())["data"]}
    finally:
        connection.close()


def asked(fleet, engine):
    """What its engine was asked to load and to unload, by its own output."""
    lines = [line for line in fleet.llmgw("logs", f"{engine}/1/0").splitlines() if "lora_adapter {" in line]
    words = [line[line.index("/") :].partition(" ") for line in lines]
    return [("unload" if "unload" in path else "load", ast.literal_eval(said)["lora_name"]) for path, _, said in words]


def shard(fleet, engine):
    return fleet.ready(engine)[0]


def loras(fleet, engine):
    return {one["name"]: one["problem"] for one in shard(fleet, engine)["loras"]}


def serves(fleet, name):
    until(lambda: fleet.ask(name)[0] == 200, f"{name} answers")


def test_adapters_come_and_go_under_running_streams(equipped, engine):
    """One engine throughout: streams of the base model and of an adapter that leaves are whole; listed while it is there.

    Its own doors are not the clients'.
    """
    fleet = equipped
    pid = shard(fleet, engine)["pid"]
    running = fleet.stream(engine, 100)
    until(lambda: running.pieces, "it streams")
    fleet.write_server(MODEL.format(engine=engine, loras=entries(("tuned", "tuned"))))
    assert "1 replica changed while it runs" in fleet.llmgw("plan", "server.yaml")
    assert "1 replica changed while it runs" in apply(fleet, engine, ("tuned", "tuned"))
    serves(fleet, "tuned")
    assert not running.done and models(fleet) == {engine, "tuned"}
    with_it = fleet.stream("tuned", 100)
    until(lambda: with_it.pieces, "it streams, too")
    apply(fleet, engine)
    until(lambda: models(fleet) == {engine}, "not listed any more")
    assert fleet.ask("tuned")[0] == 404
    with_it.whole()
    running.whole()
    until(lambda: loras(fleet, engine) == {}, "unloaded")
    assert asked(fleet, engine) == [("load", "tuned"), ("unload", "tuned")] and shard(fleet, engine)["pid"] == pid
    told = fleet.llmgw("events")
    assert f"{engine}/1/0: adapter tuned is loaded" in told and f"{engine}/1/0: adapter tuned is unloaded" in told
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"):
        assert fleet.ask(engine, path)[0] == 404, path


def test_an_adapter_that_cannot_be_loaded_is_told_and_harms_nothing(equipped, engine):
    """Missing, or refused by the engine: with the reason and what to do; the base model and the good one serve; mended, it comes.

    The engine comes back with what there is after it has crashed.
    """
    fleet = equipped
    pid = shard(fleet, engine)["pid"]
    (fleet.folder / "models" / "loras" / "other" / "adapter_model.safetensors").unlink()
    apply(fleet, engine, ("tuned", "tuned"), ("other", "other"), ("gone", "gone"))
    serves(fleet, "tuned")
    until(lambda: len(loras(fleet, engine)) == 3, "all are told of")
    told = loras(fleet, engine)
    assert told["tuned"] == "" and "doesn't contain tensors" in told["other"] and "loras/gone is not on the node" in told["gone"]
    assert "serves without an adapter" in fleet.llmgw("status")
    until(lambda: "loras/gone is not on the node" in fleet.llmgw("status", "--check", code=1), "a complaint")
    assert "loras/gone is not on the node" in fleet.llmgw("events")
    status, said = fleet.ask("gone")
    assert status == 503 and "none of its replicas has the adapter gone loaded" in json.dumps(said)
    assert fleet.ask(engine)[0] == 200 and shard(fleet, engine)["pid"] == pid

    os.kill(pid, signal.SIGKILL)
    until(lambda: shard(fleet, engine)["pid"] != pid, "another one")
    serves(fleet, "tuned")
    assert set(loras(fleet, engine)) == {"tuned", "other", "gone"}
    apply(fleet, engine, ("tuned", "tuned"), ("gone", "newer"))
    serves(fleet, "gone")
    until(lambda: loras(fleet, engine) == {"tuned": "", "gone": ""}, "all is well")
    until(lambda: fleet.llmgw("status", "--check"), "no complaint")


def test_an_agent_that_is_killed_loads_nothing_twice_and_loses_nothing(equipped, engine):
    """What is asked for while it is away comes with it; what its engine has stays loaded and routed."""
    fleet = equipped
    apply(fleet, engine, ("tuned", "tuned"), ("other", "other"))
    for name in ("tuned", "other"):
        serves(fleet, name)
    pid = shard(fleet, engine)["pid"]
    fleet.end("n1", signal.SIGKILL)
    apply(fleet, engine, ("tuned", "newer"))
    fleet.start_agent("n1")
    wanted = [{"name": "tuned", "weights": "loras/newer", "problem": ""}]
    until(lambda: shard(fleet, engine)["loras"] == wanted, "as wanted")
    serves(fleet, "tuned")
    once = [("load", "other"), ("load", "tuned"), ("load", "tuned"), ("unload", "other"), ("unload", "tuned")]
    assert sorted(asked(fleet, engine)) == once and shard(fleet, engine)["pid"] == pid
    fleet.end("n1", signal.SIGKILL)
    fleet.end("server", signal.SIGKILL)
    fleet.start_server()
    serves(fleet, "tuned")
    fleet.start_agent("n1")
    until(lambda: shard(fleet, engine)["loras"] == wanted, "it says so")
    serves(fleet, "tuned")
    assert sorted(asked(fleet, engine)) == once and shard(fleet, engine)["pid"] == pid


def test_what_the_engine_cannot_take_replaces_it(equipped, engine):
    """A rank above that it was started for: its successor, which is started for it, is there before it goes."""
    fleet = equipped
    apply(fleet, engine, ("tuned", "tuned"))
    serves(fleet, "tuned")
    stream = fleet.stream("tuned", 60)
    until(lambda: stream.pieces, "it streams")
    apply(fleet, engine, ("tuned", "tuned"), ("big", "big"))
    serves(fleet, "big")
    stream.whole()
    assert fleet.ask("tuned")[0] == 200
    assert "has rank 64, its engine was started for at most 16" in fleet.llmgw("events")
    until(lambda: [one["id"] for one in fleet.shards(engine)] == [f"{engine}/2/0"], "the first has gone")


def test_a_request_for_an_adapter_wakes_its_model(equipped, engine):
    """At zero replicas an adapter's first request waits until an engine runs that has it."""
    fleet = equipped
    sleeps = MODEL.format(engine=engine, loras=entries(("tuned", "tuned"))) + "    replicas: {min: 0, max: 1, idle_after: 1s}\n"
    fleet.write_server(sleeps)
    fleet.llmgw("apply", "server.yaml")
    until(lambda: not [one for one in fleet.shards(engine) if one["pid"]], "nothing runs")
    assert fleet.ask("tuned")[0] == 200
    assert f"{engine}: wants 1 replica instead of 0: a request waits for it" in fleet.llmgw("events")
