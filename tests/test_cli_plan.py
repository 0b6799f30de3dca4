"""llmgw plan and llmgw estimate: what is asked, what is printed, and the exit status; and the answers of a real server."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.defer import Deferred, succeed

from llmgw.cli.client import Refused
from llmgw.cli.main import run
from llmgw.fleet.model import Lora, Model, Profile, Resources, Scale
from llmgw.fleet.node import Installation
from llmgw.fleet.plain import to_plain
from llmgw.fleet.shard import WeightFiles
from llmgw.testing.simagents import SimAgent
from llmgw.testing.simulate import model
from llmgw.testing.tiny_gguf import write_tiny_gguf
from llmgw.wire.messages import Done
from tests.admin_stub import admin  # noqa: F401
from tests.server_rig import Rig

GIB = 2**30
PLANNED = {"text": "catalog 41 -> 42 would", "lines": ["  start  m  1 replica (n1 gpu 7)"], "steps": []}


@pytest.fixture
def rig_of(tmp_path):
    """Makes rigs; each is stopped at the end."""
    made = []

    async def make(*models, **more):
        rig = Rig(tmp_path, *models, **more)
        made.append(rig)
        await rig.start()
        return rig

    yield make
    for rig in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(rig.stop()))


# The command line.


def test_plan_sends_the_file_and_prints_the_answer(admin, tmp_path, capsys):  # noqa: F811
    """The text and its path, as apply does; --json prints the answer itself."""
    file = tmp_path / "models.yaml"
    file.write_text("models: []\n")
    admin.answers["POST /v1/plan"] = PLANNED
    assert admin.run("plan", str(file), "--allow-removals") == 0
    assert capsys.readouterr().out == "catalog 41 -> 42 would\n  start  m  1 replica (n1 gpu 7)\n"
    assert admin.asked == [
        (
            "POST /v1/plan",
            {"text": "models: []\n", "path": str(file), "allow_removals": True, "allow_outage": False, "without": []},
        ),
    ]
    assert admin.run("plan", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out) == PLANNED


@pytest.mark.parametrize("words", [["--without", "n1", "n2"], ["n1", "--without", "n2"], ["n1", "n2", "--without"]])
def test_plan_without_nodes(admin, tmp_path, words):  # noqa: F811
    """All arguments but a file are nodes, wherever the option stands; no file is the catalog in force."""
    admin.answers["POST /v1/plan"] = PLANNED
    assert admin.run("plan", *words) == 0
    file = tmp_path / "m.yaml"
    file.write_text("models: []\n")
    assert admin.run("plan", str(file), *words) == 0
    assert [(asked["without"], "text" in asked) for _, asked in admin.asked] == [(["n1", "n2"], False), (["n1", "n2"], True)]


@pytest.mark.parametrize("words", [[], ["--without"], ["a.yaml", "b.yaml"], ["--without", "a.yaml", "b.yaml", "n1"]])
def test_plan_of_nothing_or_of_two_files_is_2(admin, words, capsys):  # noqa: F811
    """Told before anybody is asked."""
    assert admin.run("plan", *words) == 2
    assert not admin.asked and capsys.readouterr().err


def test_plan_of_a_bad_catalog_is_2_and_of_an_unknown_node_1(admin, tmp_path, capsys):  # noqa: F811
    """As for apply: a problem a line; and what the server refuses."""
    file = tmp_path / "m.yaml"
    file.write_text("models: 3\n")
    problems = [{"where": "m.yaml:1", "text": "wrong", "code": "type"}]
    admin.answers["POST /v1/plan"] = (400, {"error": {"code": "invalid", "message": "1 problem", "problems": problems}})
    assert admin.run("plan", str(file)) == 2
    assert "m.yaml:1: wrong" in capsys.readouterr().err
    admin.answers["POST /v1/plan"] = (404, {"error": {"code": "not_found", "message": "no node is called x"}})
    assert admin.run("plan", "--without", "x") == 1
    assert "no node is called x" in capsys.readouterr().err


ESTIMATED = {
    "model": "m", "engine": "vllm", "weights": "llama", "node": "n1", "context": 8192, "sequences": 1, "per_token": 131072,
    "share": 0.92, "need": 18 * GIB, "observed": None, "seen": None, "unknown": [], "host": None,
    "ranks": [{"rank": 0, "weights": 15 * GIB, "cache": GIB, "overhead": 2 * GIB, "total": 18 * GIB}],
    "nodes": [
        {"node": "n1", "devices": [{"index": 0, "name": "GPU", "memory_total": 80 * GIB, "free": 20 * GIB}], "host_memory": None,
         "context_free": 11520, "context_empty": 131072},
    ],
}  # fmt: skip


def test_an_estimate_is_a_table_of_ranks_and_one_of_nodes(admin, capsys):  # noqa: F811
    """With sizes, the share of a device, and what would fit where."""
    admin.answers["GET /v1/estimate"] = ESTIMATED
    assert admin.run("estimate", "m", "--node", "n1") == 0
    assert admin.asked == [("GET /v1/estimate", {"model": "m", "node": "n1"})]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "m with vllm (llama on n1), 8192 tokens:"
    assert re.split(r"\s{2,}", lines[2]) == ["0", "15.0 GiB", "1.0 GiB", "2.0 GiB", "18.0 GiB"]
    assert "One more token of context takes 128.0 KiB." in lines
    assert "The engine takes at most 92% of a device's memory." in lines
    assert lines[-1].endswith("  11520 tokens           131072 tokens") and "gpu 0: 20.0 GiB of 80.0 GiB free" in lines[-1]


def test_what_is_unknown_is_said_and_never_0(admin, capsys):  # noqa: F811
    """In the table, and with the reason below."""
    ranks = [{"rank": 0, "weights": None, "cache": None, "overhead": 2 * GIB, "total": None}]
    nodes = [ESTIMATED["nodes"][0] | {"context_free": None, "context_empty": 0}]
    unknown = {"ranks": ranks, "unknown": ["the weights: no node is known to have them"], "per_token": None, "nodes": nodes}
    admin.answers["GET /v1/estimate"] = ESTIMATED | unknown
    assert admin.run("estimate", "m") == 0
    out = capsys.readouterr().out
    assert out.count("unknown") == 4 and "Unknown: the weights: no node is known to have them" in out and "none" in out


def test_what_was_seen_at_work_is_said(admin, capsys):  # noqa: F811
    """It counts for an engine that takes what it needs, and is only told for one that fills what it gets."""
    admin.answers["GET /v1/estimate"] = ESTIMATED | {"observed": 9 * GIB, "seen": 9 * GIB}
    assert admin.run("estimate", "m") == 0
    assert "at most 9.0 GiB of a device, which counts instead" in capsys.readouterr().out
    admin.answers["GET /v1/estimate"] = ESTIMATED | {"seen": 70 * GIB}
    assert admin.run("estimate", "m") == 0
    assert "it held 70.0 GiB of a device: it fills what it is given" in capsys.readouterr().out


def test_an_estimate_of_this_machines_files_asks_nobody(admin, tmp_path, capsys):  # noqa: F811
    """A catalog file and a path: a real GGUF file with two layers; --json is for programs."""
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  - {name: m, profile: {engine: llamacpp, weights: x.gguf, context: 512}}\n")
    assert admin.run("estimate", "m", "-c", str(file), "--weights", str(weights), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["host"]["weights"] < weights.stat().st_size and found["host"]["cache"] > 0 and found["unknown"] == []
    assert admin.run("estimate", "m", "-c", str(file), "--weights", str(tmp_path / "absent")) == 0
    assert f"{tmp_path / 'absent'} is not there (looked at {tmp_path / 'absent'})" in capsys.readouterr().out
    assert admin.run("estimate", "other", "-c", str(file), "--weights", str(weights)) == 2
    assert "no model other; it has: m" in capsys.readouterr().err
    assert run(["estimate", "m", "--weights", str(weights)]) == 2
    assert not admin.asked


# A real server.

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "max_position_embeddings": 131072,
}  # fmt: skip
FILES = WeightFiles("llama", True, "/models/llama", format="safetensors", bytes=15 * GIB, config=CONFIG)


def vllm_model(name="llm", context=8192, **resources):
    profile = Profile("vllm", "llama", context=context, resources=Resources(**resources))
    return Model(name, replicas=Scale(1, 1), profile=profile)


def with_files(rig, **files):
    """Have nodes answer what they have of the weights; counts how often they were asked."""
    asked = []

    def ask(node, message, timeout):
        asked.append(node)
        found = files.get(node, WeightFiles(message.weights, False, looked=(f"/models/{message.weights}",)))
        found = found[message.weights] if isinstance(found, dict) else found
        return succeed(Done(message.operation, True, "", {"files": to_plain(found)}))

    rig.server.port.ask = ask
    return asked


class VllmAgent(SimAgent):
    """A simulated node with one device, on which vLLM is installed, too."""

    def facts(self):
        known = super().facts()
        return evolve(known, installations=(*known.installations, Installation("vllm", "vllm")))


def link(rig, name):
    rig.agents[name] = VllmAgent(name, 1, random.Random(1), load=0.1, grace=0.1)
    rig.link(name)


async def refused(answer):
    with pytest.raises(Refused) as caught:
        await answer
    return caught.value


@pytest_twisted.ensureDeferred
async def test_a_server_estimates_by_what_its_nodes_have(rig_of):
    """The node that has the weights is found; what fits on each node is told, empty and as it is now."""
    command = Model("other", profile=Profile("command", argv=("run",), resources=Resources(devices=1)))
    rig = await rig_of(vllm_model(), model("taken", 1), command)
    asked = with_files(rig, b=FILES)
    link(rig, "a")
    link(rig, "b")
    found = await rig.get("/v1/estimate", model="llm")
    assert (found["model"], found["node"], found["context"], found["per_token"]) == ("llm", "b", 8192, 131072)
    [rank] = found["ranks"]
    assert (rank["weights"], rank["cache"]) == (15 * GIB, GIB) and rank["total"] == found["need"]
    assert {node["node"] for node in found["nodes"]} == {"a", "b"} and set(asked) == {"a", "b"}
    by_name = {node["node"]: node for node in found["nodes"]}
    assert by_name["b"]["context_empty"] == 131072
    assert (await rig.get("/v1/estimate", model="llm", node="a"))["unknown"] == ["the weights: no node is known to have them"]
    assert (await refused(rig.get("/v1/estimate", model="x"))).code == "not_found"
    assert (await refused(rig.get("/v1/estimate", model="llm", node="x"))).code == "not_found"
    taken = await refused(rig.get("/v1/estimate", model="taken"))
    assert taken.code == "conflict" and "no adapter" in str(taken)
    other = await refused(rig.get("/v1/estimate", model="other"))
    assert other.code == "conflict" and "resources.device_memory" in str(other)


@pytest_twisted.ensureDeferred
async def test_adapters_are_looked_at_with_the_weights_and_counted(rig_of):
    """Their rank is what decides how much room they take; an estimate and a placement both ask for it."""
    tuned = vllm_model()
    tuned = evolve(tuned, profile=evolve(tuned.profile, loras=(Lora("tuned", "loras/a"),)))
    rig = await rig_of(tuned)
    adapter = WeightFiles("loras/a", True, "/models/loras/a", config={"r": 16, "peft_type": "LORA"})
    base = evolve(FILES, config=CONFIG | {"vocab_size": 128256, "intermediate_size": 14336})
    with_files(rig, a={"llama": base, "loras/a": adapter})
    link(rig, "a")
    room = 4 * 16 * 2 * (32 * 81920 + 2 * (128256 + 4096))
    await rig.until(lambda: "llm/1/0" in rig.server.controller.truth.shards, "placed")
    assert rig.server.controller.truth.shards["llm/1/0"].allocation.memory == math.ceil((18 * GIB + room) / 0.92)
    [rank] = (await rig.get("/v1/estimate", model="llm"))["ranks"]
    assert rank["overhead"] == 2 * GIB + room


@pytest_twisted.ensureDeferred
async def test_a_server_estimates_a_catalog_that_is_sent(rig_of):
    """With the file's own context; the catalog in force stays."""
    rig = await rig_of(vllm_model())
    with_files(rig, a=FILES)
    link(rig, "a")
    text = "models:\n  - {name: llm, profile: {engine: vllm, weights: llama, context: 4096}}\n"
    found = await rig.post("/v1/estimate", model="llm", text=text, path="/x/models.yaml")
    assert found["context"] == 4096 and found["ranks"][0]["cache"] == GIB // 2
    assert rig.server.controller.truth.catalog_revision == 1


@pytest_twisted.ensureDeferred
async def test_a_plan_asks_for_weights_first(rig_of):
    """Nobody has looked for the new model's weights yet: nodes are asked, and the plan says where it goes."""
    rig = await rig_of(model("m", 1))
    asked = with_files(rig, b=FILES)
    link(rig, "a")
    link(rig, "b")
    await rig.ready("m")
    text = "models:\n  - {name: llm, profile: {engine: vllm, weights: llama, context: 4096}}\n"
    found = await rig.post("/v1/plan", text=text, path="/x/models.yaml")
    assert sorted(asked) == ["a", "b"]
    assert found["text"] == "catalog 1 -> 2 would"
    assert found["lines"] == [
        "  start  llm  1 replica (b gpu 0)",
        "  leave  m    missing from the file, kept (remove it with --allow-removals)",
        "Nothing was done. Apply it with: llmgw apply /x/models.yaml --check-revision 1",
    ]
    assert [(step["kind"], step["replicas"]) for step in found["steps"]][0] == ("start", [{"id": "llm/1", "place": "b gpu 0"}])
    assert rig.server.controller.truth.catalog_revision == 1 and "llm" not in str(rig.server.controller.truth.shards)


@pytest_twisted.ensureDeferred
async def test_a_plan_without_a_node_and_a_revision_that_has_moved(rig_of):
    """What would become of its replicas; then an apply by an older plan is refused and changes nothing."""
    rig = await rig_of(model("m", 1, devices=1))
    rig.link("a", 1)
    rig.link("b", 1)
    await rig.ready("m")
    home = next(iter(rig.server.controller.truth.shards.values())).allocation.node
    other = "b" if home == "a" else "a"
    found = await rig.post("/v1/plan", without=[home])
    assert found["lines"] == [f"  move  m  m/1 {home} gpu 0 -> {other} gpu 0, as m/2: {home} is lost"]
    both = await rig.post("/v1/plan", without=["a", "b"])
    assert [step["kind"] for step in both["steps"]] == ["lose", "wait"]
    assert (await refused(rig.post("/v1/plan", without=["x"]))).code == "not_found"
    assert rig.server.controller.truth.nodes[home].state == "ready", "a question is no order"
    text = "models:\n  - {name: n, profile: {engine: command, argv: [run], resources: {devices: 0}}}\n"
    await rig.post("/v1/apply", text=text, path="/x/m.yaml", check_revision=found["catalog"])
    late = await refused(rig.post("/v1/apply", text=text, path="/x/m.yaml", check_revision=found["catalog"]))
    assert (late.status, late.code) == (409, "moved")


@pytest_twisted.ensureDeferred
async def test_damaged_weights_are_looked_at_again_and_an_agent_that_cannot_look_is_believed(rig_of, monkeypatch):
    """Somebody may have fetched the file again; and an older agent's silence is no reason to refuse a node."""
    rig = await rig_of(vllm_model(devices=1, device_memory=10 * GIB))
    monkeypatch.setattr(type(rig.server.controller.weights), "AGAIN", 0.0)
    files = {"a": evolve(FILES, problem="cut short")}
    asked = with_files(rig, **files)
    link(rig, "a")
    await rig.until(lambda: len(asked) > 1, "asked again")
    said = await rig.get("/v1/explain", model="llm")
    assert "cut short" in str(said["lines"])
    rig.server.port.ask = lambda node, message, timeout: succeed(Done(message.operation, False, "failed", {"text": "cannot"}))
    await rig.until(lambda: "llm/1/0" in rig.server.controller.truth.shards, "placed")
