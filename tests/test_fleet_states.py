"""The state tables of nodes and shards, and what makes a generation."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.fleet.model import Model, Parallel, Place, Profile, Resources, Scale
from llmgw.fleet.node import IllegalTransition, NodeEvent, NodeState, next_node_state
from llmgw.fleet.shard import ShardState, move_shard, replica_id, replica_of, shard_id, worst


@given(st.lists(st.sampled_from(NodeEvent), max_size=30))
def test_a_node_never_leaves_removed_but_by_reset(events):
    """Whatever happens in whatever order, a removed node stays removed until an operator resets it."""
    state = NodeState.JOINING
    for event in events:
        before = state
        try:
            state = next_node_state(state, event)
        except IllegalTransition:
            continue
        if before is NodeState.REMOVED:
            assert state is NodeState.REMOVED or event is NodeEvent.RESET
        if state is NodeState.LOST:
            assert before in (NodeState.UNREACHABLE, NodeState.LOST)


def test_a_ready_node_is_never_lost_at_once():
    """A node is unreachable before it is lost."""
    with pytest.raises(IllegalTransition):
        next_node_state(NodeState.READY, NodeEvent.LOST_TIMER)


@given(st.sampled_from(ShardState), st.sampled_from(ShardState))
def test_failed_and_stopped_are_left_only_by_a_new_placement(before, after):
    """An engine that ended never becomes alive without a new attempt."""
    try:
        move_shard(before, after)
    except IllegalTransition:
        return
    if before in (ShardState.FAILED, ShardState.STOPPED) and after.live:
        assert after is ShardState.UNKNOWN


def test_a_replica_is_as_its_worst_shard():
    """One shard that loads makes the replica load; no shard at all is pending."""
    assert worst([ShardState.READY, ShardState.LOADING]) is ShardState.LOADING
    assert worst([ShardState.READY, ShardState.FAILED, ShardState.LOADING]) is ShardState.FAILED
    assert worst([ShardState.READY]) is ShardState.READY
    assert worst([]) is ShardState.PENDING


def test_ids_are_read_from_the_right():
    """Model names may hold slashes."""
    shard = shard_id(replica_id("Qwen/Qwen3-8B", 2), 0)
    assert shard == "Qwen/Qwen3-8B/2/0"
    assert replica_of(shard) == "Qwen/Qwen3-8B/2"


PROFILE = Profile(engine="vllm", weights="w", context=4096, arguments={"a": 1, "b": [1, 2]})


@pytest.mark.parametrize(
    "change",
    [
        {"place": Place(labels={"pool": "a"}, spread=True)},
        {"start_timeout": 5.0},
        {"resources": Resources(host_memory=2**30)},
        {"arguments": {"b": [1, 2], "a": 1}},
    ],
)
def test_what_does_not_make_an_engine_different_keeps_its_generation(change):
    """Placement, deadlines and the order of arguments never cost a reload."""
    assert evolve(PROFILE, **change).generation("m") == PROFILE.generation("m")


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "vllm-next"},
        {"weights": "v"},
        {"context": 8192},
        {"arguments": {"a": 2, "b": [1, 2]}},
        {"parallel": Parallel(tensor=2)},
        {"environment": {"X": "1"}},
        {"extra_argv": ("--x",)},
        {"resources": Resources(devices=2)},
    ],
)
def test_what_makes_an_engine_different_changes_its_generation(change):
    """Everything that reaches the engine's command line, environment or devices."""
    assert evolve(PROFILE, **change).generation("m") != PROFILE.generation("m")


def test_aliases_and_counts_keep_the_generation():
    """Renaming for clients and scaling are not rollouts."""
    model = Model(name="m", profile=PROFILE)
    assert evolve(model, aliases=("x",), replicas=Scale(3, 3)).generation == model.generation
