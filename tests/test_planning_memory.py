"""What is reckoned and what was seen, as placement takes it; and the smaller context that would fit."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.engines.llamacpp import llamacpp
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Catalog, Model, Profile, Resources, Scale
from llmgw.fleet.node import Device, DeviceProcess, Installation, Inventory, NodeFacts, NodeState
from llmgw.fleet.records import NodeRecord
from llmgw.fleet.shard import ShardState, WeightFiles
from llmgw.planning.fleetroom import want
from llmgw.planning.peaks import follow_peaks, peak_of
from llmgw.planning.reconcile import explain, reconcile
from llmgw.planning.world import Draft, Told
from tests.test_planning_reconcile import report, shard, world

GIB = 2**30
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA = WeightFiles("llama", True, "/m/llama", format="safetensors", bytes=16 * GIB, config=CONFIG)
GGUF = WeightFiles(
    "m.gguf", True, "/m/m.gguf", format="gguf", bytes=4 * GIB,
    gguf={"general.architecture": "llama", "llama.block_count": 32, "llama.attention.head_count": 32,
          "llama.attention.head_count_kv": 8, "llama.embedding_length": 4096, "llama.context_length": 131072},
)  # fmt: skip


def fleet(profile, files, *, total=24, memory=64, processes=(), records=()):
    """One node with one device, on which a model with this profile is wanted."""
    device = Device("a-0", 0, "GPU", total * GIB, memory_used=sum(p.memory for p in processes), processes=processes)
    engines = tuple(Installation(name, name) for name in ("vllm", "llamacpp"))
    facts = NodeFacts("a", "a", Inventory(8, memory * GIB, memory * GIB, (device,)), (20000, 20099), installations=engines)
    adapters = {"vllm": vllm, "llamacpp": llamacpp}
    return world(
        *records,
        models=[Model("m", replicas=Scale(1, 1), profile=profile)],
        nodes={"a": NodeRecord("a", facts=facts, state=NodeState.READY)},
        told={"a": Told({}, 7, 9, complete=True)},
        weights={("a", files.weights): files},
        reckon=lambda profile, found: adapters[profile.engine].needs(profile, found),
    )


def hints(now):
    return [hint.text for hint in explain(now, reconcile(now), "m").hints]


def test_an_estimate_is_the_need_where_the_profile_says_none():
    """16 GiB of weights, a cache and the rest on 24 GiB: 16 k fit, 131 k do not; what the profile says counts instead."""
    small = reconcile(fleet(Profile("vllm", "llama", context=16384), LLAMA))
    [record] = small.shards.values()
    assert record.state is ShardState.PLACED
    assert record.allocation.memory == pytest.approx((16 + 2 + 2) * GIB / 0.92, abs=1)
    large = Profile("vllm", "llama", context=131072)
    assert (
        reconcile(fleet(large, LLAMA)).pending["m"].explanation.line().startswith("0/1 nodes can run this: 1 too little device")
    )
    told = evolve(large, resources=Resources(device_memory=20 * GIB))
    assert not reconcile(fleet(told, LLAMA)).pending


def test_a_smaller_context_that_would_fit_is_offered_and_fits():
    """The largest multiple of 256 with which the very same planner places it."""
    now = fleet(Profile("vllm", "llama", context=131072), LLAMA)
    [first, *_] = hints(now)
    context = int(first.removeprefix("context were at most ").partition(" ")[0])
    assert first == f"context were at most {context} (now 131072)" and context % 256 == 0
    for size, fits in ((context, True), (context + 256, False)):
        changed = fleet(Profile("vllm", "llama", context=size), LLAMA)
        assert bool(reconcile(changed).pending) is not fits


def test_the_models_own_context_is_what_is_lowered():
    """A profile that says nothing of a context has the model's."""
    assert "(now 131072)" in hints(fleet(Profile("vllm", "llama"), LLAMA))[0]


def test_a_context_that_fits_host_memory():
    """llama.cpp without devices: the host's memory decides."""
    now = fleet(Profile("llamacpp", "m.gguf", context=65536, arguments={"parallel": 1}), GGUF, memory=8)
    [first] = hints(now)
    context = int(first.removeprefix("context were at most ").partition(" ")[0])
    assert 0 < context < 32768
    assert not reconcile(fleet(Profile("llamacpp", "m.gguf", context=context, arguments={"parallel": 1}), GGUF, memory=8)).pending


@pytest.mark.parametrize(
    ("profile", "total"),
    [
        (Profile("vllm", "llama", context=4096), 12),  # the weights alone are too large
        (Profile("vllm", "llama", context=4096, resources=Resources(device_memory=30 * GIB)), 24),  # the profile's own word
        (Profile("vllm", "llama", context=4096, resources=Resources(devices=2)), 80),  # not memory but devices lack
    ],
)
def test_no_context_is_offered_where_none_helps(profile, total):
    """Each hint is true or is not given."""
    assert not [text for text in hints(fleet(profile, LLAMA, total=total)) if "context" in text]


OFFLOADED = Profile("llamacpp", "m.gguf", context=4096, resources=Resources(devices=1), arguments={"parallel": 1})


def running(profile, memory, state=ShardState.READY):
    """A replica of this profile whose engine holds so much of the device."""
    record = shard(1, state, generation=profile.generation("m"), profile=profile)
    held = DeviceProcess(5, "engine", memory, "m/1/0")
    now = fleet(profile, GGUF, processes=(held,), records=(record,))
    told = Told({"m/1/0": report(1, state, generation=profile.generation("m"))}, 7, 9, complete=True)
    return evolve(now, told={"a": told})


def test_the_peak_of_a_serving_engine_is_remembered():
    """In its record, as it grows; a hundredth more is no news, and what is still loading is no peak."""
    now = running(OFFLOADED, 5 * GIB)
    after = reconcile(now)
    assert after.shards["m/1/0"].peak == 5 * GIB
    assert follow(running(OFFLOADED, 5 * GIB + GIB // 100), after.shards) == 5 * GIB
    assert follow(running(OFFLOADED, 6 * GIB), after.shards) == 6 * GIB
    assert follow(running(OFFLOADED, 3 * GIB), after.shards) == 5 * GIB
    loading = running(OFFLOADED, 5 * GIB, ShardState.LOADING)
    assert reconcile(loading).shards["m/1/0"].peak is None


def follow(now, shards):
    draft = Draft(evolve(now, shards=shards))
    follow_peaks(draft)
    return draft.shards["m/1/0"].peak


def test_a_peak_outlives_its_replica_and_not_its_profile():
    """The husk that remembers the last number has it, too; another generation is another need."""
    seen = reconcile(running(OFFLOADED, 5 * GIB)).shards
    draft = Draft(evolve(fleet(OFFLOADED, GGUF), shards=seen))
    draft.drop(draft.shards["m/1/0"])
    model = Model("m", profile=OFFLOADED)
    assert peak_of(draft.shards.values(), model) == 5 * GIB
    assert peak_of(draft.shards.values(), evolve(model, profile=evolve(OFFLOADED, context=8192))) is None


@pytest.mark.parametrize(
    ("profile", "files", "takes"), [(OFFLOADED, GGUF, True), (Profile("vllm", "llama", context=4096), LLAMA, False)]
)
def test_what_was_seen_corrects_what_was_reckoned(profile, files, takes):
    """For an engine that takes what it needs; one that fills what it is given was seen to use just that."""
    record = shard(1, ShardState.STOPPED, generation=profile.generation("m"), allocation=None, peak=7 * GIB)
    now = fleet(profile, files, records=(record,))
    need = want(Draft(now), now.catalog.models[0], 2).needs.memory
    assert (need == 7 * GIB) is takes
    said = evolve(profile, resources=evolve(profile.resources, device_memory=3 * GIB))
    told = evolve(record, generation=said.generation("m"))
    now = evolve(fleet(said, files, records=(told,)), catalog=Catalog((Model("m", profile=said),)))
    assert want(Draft(now), now.catalog.models[0], 2).needs.memory == 3 * GIB, "the profile's own word stands"


def test_weights_that_an_engine_would_refuse_are_no_weights():
    """A cut file on the only node: refused there with what is wrong, before anything starts; a whole copy elsewhere counts."""
    broken = evolve(LLAMA, bytes=None, problem="a.safetensors has 10 bytes and should have 20: fetch the file again")
    now = fleet(Profile("vllm", "llama", context=4096), broken)
    found = explain(now, reconcile(now), "m")
    assert found.line() == "0/1 nodes can run this: 1 with unusable weights"
    assert "should have 20" in found.lines()[0]
    now = evolve(now, weights={("a", "llama"): broken, ("b", "llama"): LLAMA})
    assert now.weights_of("llama") == LLAMA
