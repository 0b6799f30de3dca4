"""A hint, when followed, fits: whatever the fleet, the change that a hint names makes room for the replica that was refused."""

from __future__ import annotations

import re

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.fleet.node import DeviceProcess, NodeState
from llmgw.planning.explanation import Explanation
from llmgw.planning.hints import with_hints
from llmgw.planning.placement import Ledger, Placement
from tests.test_planning_placement import GIB, candidate, device, want

FLAGS = ("cordoned", "draining", "quarantined")


@st.composite
def nodes(draw, name):
    """One with up to three devices, some of them used by strangers, that may be away or closed."""
    found = []
    for index in range(draw(st.integers(0, 3))):
        strangers = [DeviceProcess(100 * index + pid, "python3", 35 * GIB) for pid in range(draw(st.integers(0, 2)))]
        found.append(device(name, index, used=35 * len(strangers), processes=tuple(strangers)))
    flags = draw(st.sets(st.sampled_from(FLAGS), max_size=2))
    state = draw(st.sampled_from((NodeState.READY, NodeState.READY, NodeState.LOST)))
    return candidate(name, tuple(found), state=state, **dict.fromkeys(flags, True))


def followed(node, hint):
    """What the operator who follows it does."""
    if hint.kind == "node_back":
        return evolve(node, state=NodeState.READY)
    if hint.kind in FLAGS:
        return evolve(node, **{"quarantined": False} if hint.kind == "quarantined" else {"cordoned": False, "draining": False})
    inventory = node.facts.inventory
    if hint.kind == "process":
        pid = int(re.match(r"pid (\d+) on", hint.text)[1])
        left = [[process for process in one.processes if process.pid != pid] for one in inventory.devices]
        devices = tuple(
            evolve(one, processes=tuple(rest), memory_used=35 * GIB * len(rest))
            for one, rest in zip(inventory.devices, left, strict=True)
        )
        return evolve(node, facts=evolve(node.facts, inventory=evolve(inventory, devices=devices)))
    assert hint.kind == "replica", hint
    replica = hint.text.partition(" on ")[0]
    return evolve(node, claims=tuple(claim for claim in node.claims if claim.holder.rpartition("/")[0] != replica))


@settings(deadline=None, max_examples=150)
@given(st.tuples(nodes("a"), nodes("b"), nodes("c")), st.integers(0, 4), st.integers(1, 3), st.sampled_from((20, 50, 79)))
def test_a_hint_that_is_followed_fits(fleet, running, devices, memory):
    """Each is followed alone, and the fleet placed into anew."""
    ledger = Ledger(fleet)
    for number in range(running):
        ledger.place(want(f"old/{number}", 1, 40))
    wanted = want("m/1", devices, memory)
    refused = Ledger([ledger.candidate(name) for name in "abc"]).place(wanted)
    if isinstance(refused, Placement):
        return
    assert isinstance(refused, Explanation)
    for hint in with_hints(ledger.explain(wanted), ledger, wanted).hints:
        changed = [followed(node, hint) if node.name == hint.node else node for node in map(ledger.candidate, "abc")]
        assert isinstance(Ledger(changed).place(wanted), Placement), hint
