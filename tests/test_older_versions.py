"""What earlier versions have written: it is read as it was meant, and restarts nothing.

The texts are as version 0.1.0 of 30 November wrote them; a new field may be missing from them for ever.
"""

from __future__ import annotations

import json

import pytest
from attrs import evolve

from llmgw.agent.shardfolder import Intent, ShardFolders
from llmgw.fleet.model import Lora, Model, Parallel, Place, Profile, Resources
from llmgw.fleet.plain import from_text, to_text
from llmgw.fleet.records import NodeRecord, RolloutRecord, ShardRecord
from llmgw.fleet.shard import ShardState, Wanted
from llmgw.interfaces import LoraDoor
from llmgw.planning.orders import orders
from llmgw.planning.reconcile import reconcile
from llmgw.wire.codec import decode_from_agent, decode_from_server, encode
from llmgw.wire.messages import Desired, Report
from tests.test_planning_reconcile import NOW, told, world

ADAPTED = (
    '{"context":2048,"engine":"vllm","loras":[{"name":"tuned","weights":"loras/tuned"}],'
    '"resources":{"devices":0,"host_memory":16777216},"weights":"llama"}'
)
READY = (
    '{"allocation":{"head":"127.0.0.1","host_memory":16777216,"node":"n1","peers":["127.0.0.1"],"ports":[23008]},"attempt":1,'
    '"generation":"GENERATION","key":"7599","model":"vl","nodes":["n1"],"number":1,"operation":"vl/1/0:1:1.3",'
    f'"placed_revision":3,"profile":{ADAPTED},"reason":"it serves after 0.4 s","served":["vl"],"served_since":1000.5,'
    '"shard":"vl/1/0","since":1000.5,"state":"ready","url":"http://127.0.0.1:23008"}'
).replace("GENERATION", "3f96ec2949f5")
ASLEEP = (
    '{"allocation":{"head":"127.0.0.1","node":"n1","peers":["127.0.0.1"],"ports":[23028]},"attempt":1,'
    '"generation":"9336d6c40d61","model":"nap","nodes":["n1"],"number":1,"operation":"nap/1/0:1:1.16","placed_revision":16,'
    '"profile":{"arguments":{"enable-sleep-mode":true},"engine":"vllm","weights":"llama"},'
    '"reason":"nap wants 0; to sleep; drained","served":["nap"],"served_since":1000.5,"shard":"nap/1/0","since":1003.25,'
    '"state":"sleeping","wanted":"sleep"}'
)
CRASHED = (
    '{"allocation":{"head":"127.0.0.1","node":"n2","peers":["127.0.0.1"],"ports":[23047]},"attempt":2,'
    '"crashes":[1000.5,1001.5],"excluded":{"n1":1300.5},"first_reason":"it broke","generation":"615333d462a7",'
    '"last_reason":"it broke","model":"bad","next_at":1010.5,"nodes":["n2"],"number":2,"operation":"bad/2/0:2:1.29",'
    '"placed_revision":29,"profile":{"argv":["/bin/sh","-c","exit 3"],"engine":"command"},'
    '"reason":"it broke. Attempt 3 of 5, next in 9 s.","served":["bad"],"shard":"bad/2/0","since":1001.5,"state":"backoff"}'
)
RANK = (
    '{"allocation":{"head":"127.0.0.1","head_port":23006,"node":"n2","nodes":2,"peers":["127.0.0.1","127.0.0.1"],'
    '"ports":[23044,23045],"rank":1},"attempt":1,"generation":"6a49d3c046b8","key":"1acd","model":"wide","nodes":["n1","n2"],'
    '"number":1,"operation":"wide/1/1:1:1.2","placed_revision":2,"profile":{"argv":["engine","{rank}"],"engine":"command",'
    '"parallel":{"nodes":2,"pipeline":2}},"rank":1,"reason":"the engine runs; this rank serves no HTTP","served":["wide"],'
    '"served_since":1000.5,"shard":"wide/1/1","since":1000.5,"state":"ready"}'
)
NODE = (
    '{"boot":"96cf","drain_deadline":1600.5,"draining":true,"facts":{"address":"127.0.0.1","fabrics":[{"address":"127.0.0.1",'
    '"name":"rack"}],"installations":[{"adapter":"command","name":"command"}],"inventory":{"cpus":2,'
    '"memory_total":25325268992},"name":"n1","ports":[23003,23042],"version":"0.1.0"},"instance":"1395","name":"n1",'
    '"since":1000.5,"state":"ready"}'
)
ROLLOUT = f'{{"model":"vl","since":1000.5,"state":"done","target":{ADAPTED}}}'
INTENT = (
    '{"order": {"shard": "vl/1/0", "model": "vl", "generation": "3f96ec2949f5", "attempt": 1, "wanted": "run", '
    f'"operation": "run:vl/1/0:1:1.3", "profile": {ADAPTED}, '
    '"allocation": {"node": "n1", "ports": [23008], "head": "127.0.0.1", "peers": ["127.0.0.1"]}, "served": ["vl"], '
    '"deadline": 60.0, "grace": 2.0}, "adapter": "vllm", "installation": "vllm", "url": "http://127.0.0.1:23008", '
    '"ready": "/health", "models": "/v1/models", "metrics": "/metrics", "at": 1000.5}'
)
ORDER = (
    b'{"type":"desired","epoch":3,"leader":"cp1@x","revision":31,"part":1,"parts":1,"orders":[{"shard":"qwen/1/0",'
    b'"model":"qwen","generation":"0123456789ab","attempt":2,"wanted":"drain","operation":"drain:qwen/1/0:2:1.31","profile":'
    b'{"engine":"vllm","weights":"w","context":null,"parallel":{"tensor":1,"pipeline":1,"data":1,"expert":false,"nodes":1,'
    b'"balance":"internal"},"resources":{"devices":null,"device_memory":null,"host_memory":null,"share":false},'
    b'"arguments":{},"extra_argv":[],"environment":{},"place":{"labels":{},"fabric":null,"spread":false},'
    b'"start_timeout":1800.0,"argv":[],"health":"/health","loras":[]},"allocation":{"node":"n1","rank":0,"nodes":1,'
    b'"address":"127.0.0.1","devices":["GPU-1"],"memory":1,"host_memory":0,"ports":[8000],"head":"","head_port":0,"peers":[],'
    b'"interface":null,"device_total":null,"device_free":null},"served":["qwen"],"deadline":120.0,"grace":20.0}]}'
)
REPORT = (
    b'{"type":"report","epoch":3,"revision":31,"shards":[{"shard":"qwen/1/0","model":"qwen","generation":"0123456789ab",'
    b'"attempt":2,"state":"ready","serial":7,"rank":0,"pid":12,"since":1.0,"url":"http://127.0.0.1:8000","key":"k",'
    b'"devices":[],"ports":[8000],"installation":"","version":null,"progress":null,"phase":"","reason":"","exit":null,'
    b'"diagnosis":null,"load":{"running":null,"waiting":null,"kv_used":null,"tokens":null},"healthy":true,"conditions":[],'
    b'"limit":null,"order":null,"sleeps":false}],"inventory":null,"beat":0,"clock":0.0,"installations":null,"fetches":[]}'
)

RICH = Profile(
    "vllm",
    weights="hf:Qwen/Qwen3-8B",
    context=32768,
    parallel=Parallel(tensor=2),
    resources=Resources(device_memory=24 * 2**30),
    arguments={"enable-prefix-caching": True, "max-num-seqs": 64, "gpu-memory-utilization": 0.9},
    environment={"A": "1"},
    place=Place({"zone": "a"}),
    loras=(Lora("tuned", "loras/tuned"),),
)
WIDE = Profile(
    "sglang",
    weights="/models/w",
    parallel=Parallel(tensor=8, nodes=2, expert=True),
    extra_argv=("--x",),
    start_timeout=60.0,
    health="/h",
)


@pytest.mark.parametrize(
    ("model", "profile", "generation"),
    [
        ("m", Profile("command", argv=("/bin/engine", "--port", "{port}")), "02554719aec2"),
        ("qwen", RICH, "7396f66b3c16"),
        ("wide", WIDE, "2dd92a356198"),
    ],
)
def test_a_profile_has_the_generation_that_it_had(model, profile, generation):
    """Where this fails, an upgrade of the server would replace every engine of every fleet: a new field needs its default to
    be as if it were not there.
    """
    assert profile.generation(model) == generation


@pytest.mark.parametrize(
    ("text", "kind"),
    [(READY, ShardRecord), (ASLEEP, ShardRecord), (CRASHED, ShardRecord), (RANK, ShardRecord), (NODE, NodeRecord),
     (ROLLOUT, RolloutRecord)],
    ids=["ready", "asleep", "crashed", "rank", "node", "rollout"],
)  # fmt: skip
def test_an_old_record_is_read_and_would_be_written_as_it_was(text, kind):
    """Nothing is lost, and what nobody has changed is no change; keys of a later version are ignored, as a rollback needs."""
    record = from_text(text, kind)
    assert to_text(record) == text
    assert from_text(json.dumps(json.loads(text) | {"of_a_later_version": {"x": [1]}}), kind) == record


def test_a_new_leader_orders_what_the_old_one_did():
    """An engine that an old agent reports: no event, no changed record, and the same order under the same id."""
    profile = from_text(ADAPTED, Profile)
    record = evolve(from_text(READY, ShardRecord), generation=profile.generation("vl"))
    said = evolve(
        decode_from_agent(REPORT, "n1").shards[0],
        shard="vl/1/0", model="vl", generation=record.generation, attempt=1, url=record.url, key=record.key,
        reason=record.reason,
    )  # fmt: skip
    known = {"n1": told(said)}
    before = world(record, models=[Model("vl", profile=profile)], told=known, now=NOW)
    outcome = reconcile(before)
    after = outcome.shards["vl/1/0"]
    assert (after.state, after.attempt, after.wanted, after.loras) == (ShardState.READY, 1, Wanted.RUN, None)
    assert not outcome.events
    (order,) = orders(outcome.shards.values(), outcome.nodes, set(), before.timing)["n1"]
    assert (order.operation, order.profile, order.patience, order.doubted) == ("run:vl/1/0:1:1.3", profile, 0.0, False)


def test_a_new_agent_reads_the_folder_of_an_old_one(tmp_path):
    """It reaches the engine, asks it nothing that it was not started for, and loads no adapters into it."""
    folder = ShardFolders(tmp_path).attempt("vl/1/0", 1)
    folder.create()
    (folder.path / "intent.json").write_text(INTENT)
    (folder.path / "key").write_text("7599\n")
    (folder.path / "state.json").write_text('{"state": "draining", "at": 1000.5}')
    intent = folder.intent()
    assert isinstance(intent, Intent) and intent.order.profile == from_text(ADAPTED, Profile)
    assert (intent.key, intent.url, intent.probe, intent.loras) == ("7599", "http://127.0.0.1:23008", "", LoraDoor())
    assert folder.reached().state is ShardState.DRAINING and folder.loras() == () and not intent.loras.load


def test_peers_of_other_versions_talk():
    """What is missing has its default, what is not known is ignored, in both directions."""
    (order,) = decode_from_server(ORDER, "cp1").orders
    assert (order.wanted, order.deadline, order.profile.probe, order.patience) == (Wanted.DRAIN, 120.0, "", 0.0)
    (shard,) = decode_from_agent(REPORT, "n1").shards
    assert shard.loras is None and shard.fixed == "" and shard.state is ShardState.READY
    for line, decode, kind in ((ORDER, decode_from_server, Desired), (REPORT, decode_from_agent, Report)):
        message = decode(line, "peer")
        assert isinstance(message, kind) and decode(encode(message).strip(), "peer") == message
        later = json.loads(line) | {"of_a_later_version": {"x": 1}}
        for part in later.get("orders", later.get("shards")):
            part["of_a_later_version"] = [1]
        assert decode(json.dumps(later).encode(), "peer") == message
