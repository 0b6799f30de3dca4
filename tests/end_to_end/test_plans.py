"""llmgw plan and llmgw estimate, typed by an operator, against real daemons."""

from __future__ import annotations

import json
import re

import pytest

from llmgw.testing.tiny_gguf import LAYERS, WIDTH, write_tiny_gguf
from tests.end_to_end.fleet import RealFleet, fake_model, until

TINY = """
  - name: tiny
    replicas: 0
    profile: {engine: llamacpp, weights: tiny.gguf, context: 512, arguments: {parallel: 2}}
  - name: absent
    replicas: 0
    profile: {engine: llamacpp, weights: absent.gguf}
  - name: huge
    profile: {engine: llamacpp, weights: tiny.gguf, context: 1000000000, arguments: {parallel: 2}}
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A server, two agents of which the second has weights, a ready replica of m; for all tests, as asking changes nothing."""
    fleet = RealFleet(tmp_path_factory.mktemp("plans"))
    try:
        yield _start(fleet)
    finally:
        fleet.close()


def _start(fleet):
    (fleet.folder / "models").mkdir()
    (fleet.folder / "more").mkdir()
    write_tiny_gguf(fleet.folder / "more" / "tiny.gguf")
    fleet.write_server(fake_model("m", 1) + TINY)
    fleet.write_agent("n1")
    second = fleet.write_agent("n2")
    second.write_text(second.read_text().replace("models: [models]", "models: [models, more]"))
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.start_agent("n2")
    fleet.ready()
    until(lambda: [node["state"] for node in fleet.status()["nodes"]] == ["ready", "ready"], "both nodes")
    return fleet


def test_an_estimate_is_made_from_the_files_of_the_agent_that_has_them(pair):
    """A table for people, the same as data, and the paths looked at where nobody has the weights."""
    text = pair.llmgw("estimate", "tiny")
    assert "tiny with llamacpp (tiny.gguf on n2), 512 tokens, 2 requests at once:" in text
    assert "CONTEXT THAT FITS NOW" in text and "unknown" not in text
    found = json.loads(pair.llmgw("estimate", "tiny", "--json"))
    assert found["node"] == "n2"
    assert found["host"]["cache"] == 2 * LAYERS * 2 * WIDTH * 2 * 512, "both slots: keys and values in f16 of 512 tokens"
    weights = (pair.folder / "more" / "tiny.gguf").stat().st_size
    assert 0.9 * weights < found["host"]["weights"] <= weights
    assert {node["node"] for node in found["nodes"]} == {"n1", "n2"} and found["nodes"][0]["context_free"] == 512
    assert "unknown" in pair.llmgw("estimate", "absent")
    assert "no node is called n9" in pair.llmgw("estimate", "tiny", "--node", "n9", code=1)
    assert "Unknown: the weights" in pair.llmgw("estimate", "tiny", "--node", "n1")
    file = pair.folder / "other.yaml"
    file.write_text("models:\n  - {name: tiny, profile: {engine: llamacpp, weights: tiny.gguf, context: 256}}\n")
    changed = json.loads(pair.llmgw("estimate", "tiny", "-c", str(file), "--json"))
    assert changed["context"] == 256 and changed["host"]["cache"] > 0


def test_explain_offers_the_context_that_would_fit(pair):
    """What the agent found of the weights is what placement reckons with: a cache for a billion tokens has no room anywhere."""
    text = until(lambda: "host memory" in (said := pair.llmgw("explain", "huge")) and said, "the weights were looked at")
    assert "n2  host memory" in text and "need 953." in text
    assert "n1  without the weights  tiny.gguf is not at" in text
    offered = re.search(r"It would fit if:  context were at most (\d+) \(now 1000000000\)", text)
    assert offered and 0 < int(offered[1]) < 1_000_000_000
    found = json.loads(pair.llmgw("estimate", "huge", "--node", "n2", "--json"))
    assert found["host"]["cache"] == 2 * LAYERS * 2 * WIDTH * 2 * 1_000_000_000 // 256 * 256


def test_a_plan_tells_what_apply_then_does(pair):
    """Where a new model starts, and that nothing is done; then the apply that the plan names, once."""
    until(lambda: [one for one in pair.status()["models"] if one["name"] == "m" and one["ready"]], "m is ready")
    before = pair.status()
    path = pair.write_server(fake_model("m", 1) + TINY + fake_model("new", 2))
    text = pair.llmgw("plan", str(path))
    revision = before["server"]["catalog"]
    assert f"catalog {revision} -> {revision + 1} would" in text and "start  new" in text
    assert f"Apply it with: llmgw apply {path} --check-revision {revision}" in text
    planned = json.loads(pair.llmgw("plan", str(path), "--json"))
    places = {replica["id"]: replica["place"] for step in planned["steps"] for replica in step["replicas"]}
    assert pair.status()["server"]["catalog"] == revision and set(places) == {"new/1", "new/2"}
    pair.llmgw("apply", str(path), "--check-revision", str(revision))
    shards = pair.ready("new", 2)
    assert {shard["id"].rpartition("/")[0]: shard["node"] for shard in shards} == places
    late = pair.llmgw("apply", str(path), "--check-revision", str(revision), code=1)
    assert f"revision {revision + 1} by now, not {revision}" in late


def test_a_plan_without_nodes_moves_or_loses_what_runs_there(pair):
    """The question changes nothing: the replica goes on where it is."""
    (shard,) = pair.ready()
    home, other = shard["node"], {"n1": "n2", "n2": "n1"}[shard["node"]]
    found = json.loads(pair.llmgw("plan", "--without", home, "--json"))
    assert found["steps"][0]["text"] == f"m/1 {home} -> {other}, as m/2: {home} is lost" and found["steps"][0]["kind"] == "move"
    assert f"without {home} would" in pair.llmgw("plan", "--without", home)
    both = json.loads(pair.llmgw("plan", "--without", "n1", "n2", "--json"))
    assert [(step["kind"], step["model"]) for step in both["steps"]][:2] == [("lose", "m"), ("wait", "m")]
    assert "2 lost" in both["steps"][1]["why"]
    assert "no node is called n9" in pair.llmgw("plan", "--without", "n9", code=1)
    assert "Usage" in pair.llmgw("plan", code=2)
    (pair.folder / "bad.yaml").write_text("models: 3\n")
    assert "bad.yaml:1" in pair.llmgw("plan", "bad.yaml", code=2)
    assert pair.ready()[0]["pid"] == shard["pid"]
