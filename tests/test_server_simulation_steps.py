"""One fault at each message and each commit of a change (llmgw/testing/everystep.py)."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

import pytest

from llmgw.testing.everystep import CHANGES, FAULTS, Trial
from llmgw.testing.invariants import Broken

EVERY = [pytest.param(6, id="some"), pytest.param(1, id="every", marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", EVERY)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_comes_to_its_end_whatever_fails_at_whichever_moment(change, stride):
    """G7, I-C2: no moment is left out; which are looked at by default differs from fault to fault."""
    for offset, fault in enumerate(FAULTS):
        struck = 0
        for at in count(1 + offset % stride, stride):
            if not Trial(change, fault, at).live().struck:
                break
            struck += 1
        assert struck or stride > 1, f"{fault} never struck in {change}"


def test_a_trial_that_fails_says_how_to_repeat_it(monkeypatch):
    """The command that is printed is the one that exists, and does the same."""
    monkeypatch.setattr(Trial, "runs", lambda self, **numbers: False)
    with pytest.raises(Broken) as failed:
        Trial("rollout", "failover", 5).live()
    command = str(failed.value).rpartition("again: python ")[2].split()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "struck True" in done.stdout, done.stderr


def test_a_shard_that_is_ordered_away_before_its_node_heard_of_it_holds_its_device():
    """The orders to start and to stop it are under way together: until the node has both, its silence says nothing."""
    fleet = Trial("zero_and_wake", "store_stalls", 2).live().fleet
    assert not any(agent.clashes for agent in fleet.agents.values())
