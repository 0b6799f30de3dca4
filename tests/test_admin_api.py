"""The admin API over its socket: a real server with a real store; nodes are simulated."""

from __future__ import annotations

import http.client
import os
import socket
import stat

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.defer import Deferred, fail
from twisted.internet.threads import deferToThread

from llmgw.cli.client import Refused
from llmgw.fleet.shard import ShardState
from llmgw.server.workers import NotRouting
from llmgw.store.errors import StoreError
from llmgw.testing.simagents import SimEngine
from llmgw.testing.simulate import model
from tests.server_rig import Rig

YAML = """
models:
  - name: m
    replicas: {count}
    profile:
      engine: command
      argv: [run, "{{port}}"]
      resources: {{devices: 1, device_memory: 10GiB}}
"""


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


async def refused(answer):
    """The refusal that a request gets."""
    with pytest.raises(Refused) as caught:
        await answer
    return caught.value


@pytest_twisted.ensureDeferred
async def test_status_has_the_contracts_shape(rig_of):
    """Every key that the contract names is there, for a running replica on a node with devices."""
    rig = await rig_of(model("m", 1))
    rig.link("a", 2)
    await rig.ready("m")
    status = await rig.get("/v1/status")
    assert status["server"] | {"name": "cp1", "role": "leader", "catalog": 1} == status["server"]
    (node,) = status["nodes"]
    assert node | {"name": "a", "state": "ready", "flags": [], "labels": {}, "fabrics": []} == node
    assert {"version", "devices", "installations", "since", "reason", "certificate_expires"} <= node.keys()
    assert [device["shards"] for device in node["devices"]] == [["m/1/0"], []]
    (row,) = status["models"]
    assert (row["name"], row["wanted"], row["ready"], row["reason"]) == ("m", 1, 1, "")
    (replica,) = row["replicas"]
    assert (replica["id"], replica["state"], replica["endpoint"]) == ("m/1", "ready", "http://a.sim:20000/v1")
    (shard,) = replica["shards"]
    assert shard | {"id": "m/1/0", "node": "a", "rank": 0, "attempt": 1, "state": "ready", "pid": 101, "port": 20000} == shard
    assert "since" in shard and shard["reason"] == ""
    assert status["orphans"] == []
    assert "key-101" not in str(status), "an engine's secret is never shown"


@pytest_twisted.ensureDeferred
async def test_the_socket_is_for_its_group_and_goes_with_the_server(rig_of, tmp_path):
    """0660; a socket that a dead server left is replaced."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "admin.sock"))
    rig = await rig_of()
    assert stat.S_IMODE(os.stat(rig.settings.socket).st_mode) == 0o660
    await rig.get("/v1/status")


@pytest_twisted.ensureDeferred
async def test_explain_says_why_in_one_line_in_rows_and_as_data(rig_of):
    """The section of the design, as an operator gets it, with a hint that holds."""
    rig = await rig_of(model("m", 2))
    rig.link("a", 1)
    await rig.ready("m")
    said = await rig.get("/v1/explain", model="m")
    assert said["text"] == "m wants 2 replicas and has 1. The second cannot be placed: 0/1 nodes can run this."
    assert "need 1, most free 0 (m/1)" in said["lines"][0]
    assert said["explanation"]["counts"] == {"too few devices": 1}
    assert said["lines"][-1] == "It would fit if:  m/1 on a stopped"
    assert (await refused(rig.get("/v1/explain", model="x"))).code == "not_found"


@pytest_twisted.ensureDeferred
async def test_apply_diffs_checks_and_keeps(rig_of):
    """A plan does nothing; a revision is checked; problems come with their lines; absence removes nothing."""
    rig = await rig_of(model("keep", 0))
    dry = await rig.post("/v1/plan", text=YAML.format(count=1), path="/x/models.yaml")
    assert dry["added"] == ["m"] and dry["kept"] == ["keep"] and rig.server.controller.truth.catalog_revision == 1
    done = await rig.post("/v1/apply", text=YAML.format(count=1), path="/x/models.yaml", check_revision=1)
    assert done["revision"] == 2 and done["text"] == "catalog 2"
    assert any("leave keep: missing from the file, kept" in line for line in done["lines"])
    moved = await refused(rig.post("/v1/apply", text=YAML.format(count=2), path="/x/models.yaml", check_revision=1))
    assert (moved.status, moved.code) == (409, "moved")
    again = await rig.post("/v1/apply", text=YAML.format(count=1), path="/x/models.yaml")
    assert again["revision"] == 2, "what changes nothing makes no revision"
    bad = await refused(rig.post("/v1/apply", text="models:\n  - nam: x\n", path="/x/models.yaml"))
    assert (bad.status, bad.code) == (400, "invalid") and any("/x/models.yaml:2" in problem for problem in bad.problems)
    gone = await rig.post("/v1/apply", text=YAML.format(count=1), path="/x/models.yaml", allow_removals=True)
    assert gone["removed"] == ["keep"]


@pytest_twisted.ensureDeferred
async def test_apply_says_when_a_router_does_not_have_it_in_time(rig_of):
    """Nothing is undone for that: it is told which, and that it gets it."""
    rig, asked = await rig_of(), []

    def silent(version, timeout):
        asked.append(version)
        return fail(NotRouting(version, {0: version, 1: version - 1}, timeout))

    rig.routers.when_routing = silent
    done = await rig.post("/v1/apply", text=YAML.format(count=1), path="/x/models.yaml")
    assert asked and not done["routed"] and done["revision"] == 1
    assert f"worker 1 by {asked[-1] - 1}" in done["lines"][-1] and "nothing has to be applied again" in done["lines"][-1]
    rig.routers.publish = lambda table: fail_with(OSError(28, "No space left on device"))
    full = await rig.post("/v1/apply", text=YAML.format(count=1).replace("name: m", "name: n"), path="/x/models.yaml")
    assert not full["routed"] and "cannot be written" in full["lines"][-1] and "No space left" in full["lines"][-1]


def fail_with(error):
    """Raise it."""
    raise error


@pytest_twisted.ensureDeferred
async def test_what_an_engine_would_refuse_is_refused_at_apply(rig_of):
    """In milliseconds, with the model's name, and nothing is changed."""
    rig = await rig_of(model("m", 0))
    bad = YAML.format(count=1).replace("argv: [run", "argv: [run, '--x={weight}'")
    no = await refused(rig.post("/v1/apply", text=bad, path="f"))
    assert no.code == "invalid" and no.problems[0].startswith("models.m") and "{weights}" in no.problems[0]
    assert rig.server.controller.truth.catalog_revision == 1


@pytest_twisted.ensureDeferred
async def test_a_removed_model_is_drained(rig_of):
    """--allow-removals is an order, carried out in the same commit as the catalog."""
    rig = await rig_of(model("m", 1), model("n", 0))
    rig.link("a", 1)
    await rig.ready("m")
    await rig.post(
        "/v1/apply", text="models: [{name: z, endpoints: [{url: 'http://127.0.0.1:1/v1'}]}]", path="f", allow_removals=True
    )
    await rig.until(lambda: not rig.agents["a"].running(), "stopped")
    assert [one.id for one in rig.routers.routing.endpoints] == ["static:z/0"]
    await rig.until(lambda: [row["name"] for row in rig.server.view.models()] == ["z"], "forgotten")


@pytest_twisted.ensureDeferred
async def test_events_are_numbered_and_can_be_waited_for(rig_of):
    """The last ones without a number, the following ones after one, and patience for what is to come."""
    rig = await rig_of(model("m", 0))
    last = (await rig.get("/v1/events", limit=1))["events"][-1]
    assert last["kind"] == "catalog" and last["number"] > 0
    nothing = await rig.get("/v1/events", after=last["number"])
    assert nothing["events"] == []
    asked = deferToThread(rig.client.get, "/v1/events", after=last["number"], wait=5)
    rig.link("a")
    found = (await asked)["events"]
    assert found[0]["number"] > last["number"] and found[0]["node"] == "a"


@pytest_twisted.ensureDeferred
async def test_drain_wants_leave_for_an_outage(rig_of):
    """The only copy with nowhere to go: refused with what to say; with leave it drains, and uncordon brings it back."""
    rig = await rig_of(model("m", 1))
    rig.link("a", 1)
    await rig.ready("m")
    no = await refused(rig.post("/v1/drain", nodes=["a"]))
    assert (no.status, no.code) == (409, "outage") and "--allow-outage" in str(no) and "m/1" in str(no)
    assert rig.server.controller.truth.nodes["a"].draining is False
    await rig.post("/v1/drain", nodes=["a"], allow_outage=True)
    await rig.until(lambda: not rig.agents["a"].running(), "drained")
    assert (await rig.get("/v1/nodes"))["nodes"][0]["flags"] == ["cordoned", "draining"]
    said = await rig.get("/v1/explain", model="m")
    assert "1 draining" in said["explanation"]["text"]
    await rig.post("/v1/uncordon", nodes=["a"])
    await rig.ready("m")
    assert (await refused(rig.post("/v1/drain", nodes=["x"]))).code == "not_found"


@pytest_twisted.ensureDeferred
async def test_drain_moves_what_has_room_elsewhere(rig_of):
    """No leave is needed, and the model is served all the time."""
    rig = await rig_of(model("m", 1))
    rig.link("a", 1)
    await rig.ready("m")
    rig.link("b", 1)
    await rig.until(lambda: rig.server.controller.truth.nodes.get("b"), "b")
    await rig.post("/v1/drain", nodes=["a"])
    await rig.until(lambda: not rig.agents["a"].running() and rig.row("m")["ready"] == 1, "moved")
    assert [one.id for one in rig.routers.routing.endpoints] == ["m/2"]


@pytest_twisted.ensureDeferred
async def test_restart_replaces_by_a_new_number(rig_of):
    """With room: the new one first. Without: only with leave."""
    rig = await rig_of(model("m", 1))
    rig.link("a", 2)
    await rig.ready("m")
    await rig.post("/v1/restart", model="m")
    await rig.until(lambda: [one["id"] for one in rig.row("m")["replicas"]] == ["m/2"] and rig.row("m")["ready"], "replaced")
    assert (await refused(rig.post("/v1/restart", model="m", replica=9))).code == "not_found"


@pytest_twisted.ensureDeferred
async def test_restart_without_room_wants_leave(rig_of):
    """The only replica, and no device beside it."""
    rig = await rig_of(model("m", 1))
    rig.link("a", 1)
    await rig.ready("m")
    no = await refused(rig.post("/v1/restart", model="m"))
    assert no.code == "outage" and "--allow-outage" in str(no)
    await rig.post("/v1/restart", model="m", allow_outage=True)
    await rig.until(lambda: [one["id"] for one in rig.row("m")["replicas"]] == ["m/2"] and rig.row("m")["ready"], "replaced")


@pytest_twisted.ensureDeferred
async def test_orphans_are_listed_adopted_and_stopped(rig_of):
    """What nobody wants is left running until somebody says what to do."""
    rig = await rig_of(model("m", 1))
    rig.link("a", 1)
    await rig.ready("m")
    order = rig.agents["a"].engines["m/1/0"].order
    agent = rig.link("b", 3)
    for number in (7, 8):
        there = evolve(order, shard=f"m/{number}/0", generation="old", allocation=evolve(order.allocation, node="b", devices=()))
        agent.engines[there.shard] = SimEngine(there, 900 + number, ShardState.READY)
    agent.say(agent.report())
    await rig.until(lambda: len(rig.server.operations.orphans()) == 2, "orphans")
    listed = (await rig.get("/v1/orphans"))["orphans"]
    assert [(row["shard"], row["node"], row["pid"]) for row in listed] == [("m/7/0", "b", 907), ("m/8/0", "b", 908)]
    assert "generation old" in listed[0]["reason"]
    await rig.post("/v1/stop", shard="m/7/0")
    await rig.until(lambda: "m/7/0" not in agent.engines, "stopped")
    said = await rig.post("/v1/adopt", shard="m/8/0", node="b")
    assert said["text"] == "m/8/0 on b adopted"
    assert (await refused(rig.post("/v1/stop", shard="m/1/0"))).code == "not_found"


@pytest_twisted.ensureDeferred
async def test_keys_are_shown_once_and_kept_as_hashes(rig_of, tmp_path):
    """The secret is in the answer, in no file; a revoked key leaves the routing table."""
    rig = await rig_of()
    made = await rig.post("/v1/keys", name="ann", models=["m"], rpm=10, expires=3600)
    assert made["key"].startswith(made["id"] + ".") and len(made["key"].partition(".")[2]) >= 27
    secret = made["key"].partition(".")[2].encode()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(secret in path.read_bytes() for path in files)
    (listed,) = (await rig.get("/v1/keys"))["keys"]
    assert listed["name"] == "ann" and listed["rpm"] == 10 and "digest" not in listed and "key" not in listed
    await rig.until(lambda: [key.id for key in rig.routers.routing.keys] == [made["id"]], "routed")
    await rig.post("/v1/keys/revoke", id=made["id"])
    await rig.until(lambda: not rig.routers.routing.keys, "refused")
    assert (await refused(rig.post("/v1/keys/revoke", id="x"))).status == 404


@pytest_twisted.ensureDeferred
async def test_nodes_are_removed_and_reset(rig_of):
    """A removed node is refused from then on, until it is reset."""
    rig = await rig_of()
    agent = rig.link("a")
    await rig.until(lambda: rig.server.controller.truth.nodes.get("a"), "a")
    await rig.post("/v1/node/remove", name="a")
    rig.server.controller.left("a", "s-a", "closed")
    certificate = type("Certificate", (), {"not_after": 1e12})()
    assert rig.server.controller.judge(agent.register(), certificate).reason == "revoked"
    await rig.post("/v1/node/reset", name="a")
    assert rig.server.controller.judge(agent.register(), certificate) is None
    assert (await refused(rig.post("/v1/node/remove", name="zz"))).code == "not_found"


@pytest_twisted.ensureDeferred
async def test_logs_of_a_node_that_is_away_say_so(rig_of):
    """An error is a sentence with the node's name."""
    rig = await rig_of(model("m", 1))
    rig.link("a", 1)
    await rig.ready("m")
    rig.server.controller.left("a", "s-a", "cut")
    no = await refused(rig.get("/v1/logs", shard="m/1/0"))
    assert no.code == "node_away" and "a has no link" in str(no)
    assert (await refused(rig.get("/v1/logs", shard="../../etc"))).code == "not_found"


@pytest_twisted.ensureDeferred
async def test_metrics_and_refusals_are_served(rig_of):
    """Routers' text and the fleet's gauges, as plain text."""
    rig = await rig_of()
    assert (await rig.get("/v1/refusals"))["refusals"] == []

    def scrape():
        connection = http.client.HTTPConnection("llmgw", timeout=5)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(rig.settings.socket))
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        with connection.sock:
            return reply.getheader("content-type"), reply.read().decode()

    kind, text = await deferToThread(scrape)
    assert kind.startswith("text/plain") and "llmgw_router_up 1" in text and "llmgw_leader 1" in text


@pytest_twisted.ensureDeferred
async def test_requests_that_make_no_sense_are_told_why(rig_of):
    """A wrong path, method, field or body gets a sentence, never a traceback."""
    rig = await rig_of()
    cases = [
        (rig.get("/v1/nothing"), 404, "is the command newer"),
        (rig.post("/v1/status"), 405, "does not take POST"),
        (rig.get("/v1/explain"), 400, "model is missing"),
        (rig.get("/v1/events", after="x"), 400, "after must be a whole number"),
        (rig.get("/v1/events", after=-1), 400, "after must be at least 0"),
        (rig.post("/v1/drain", nodes="a"), 400, "nodes must be a list of texts"),
        (rig.post("/v1/drain", nodes=["a"], deadline=-1), 400, "deadline must be a number of seconds"),
        (rig.post("/v1/apply", text=5), 400, "text must be a text"),
        (rig.post("/v1/restart", model="m", allow_outage="perhaps"), 400, "allow_outage must be true or false"),
        (rig.post("/v1/restart", model="m"), 404, "m has no replica to restart; why it has none says: llmgw explain m"),
    ]
    for asked, status, words in cases:
        no = await refused(asked)
        assert (no.status, words in str(no)) == (status, True), str(no)


@pytest_twisted.ensureDeferred
async def test_a_server_that_does_not_lead_says_who_does(rig_of):
    """503 not_leader, for every change; questions are answered."""
    rig = await rig_of()
    rig.server.leadership._held = False
    no = await refused(rig.post("/v1/keys", name="x"))
    assert (no.status, no.code) == (503, "not_leader") and "cp1 does not lead now" in str(no)
    assert (await rig.get("/v1/status"))["server"]["role"] == "standby"


@pytest_twisted.ensureDeferred
async def test_a_store_that_takes_nothing_is_said_and_nothing_happens(rig_of):
    """An answer of the store's is passed on in words; the change did not happen."""
    rig = await rig_of()
    store = rig.server.store
    commit = store.commit
    store.commit = lambda epoch, changes: fail(StoreError("the disk of /x is full: free some", "full"))
    no = await refused(rig.post("/v1/keys", name="x"))
    assert no.status == 503 and "the disk of /x is full" in str(no)
    store.commit = commit
    assert (await rig.get("/v1/keys"))["keys"] == []
