"""Lives of simulated fleets in which everything fails (llmgw/testing/chaos.py), and one failure at each step of a change."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmgw.server.operations import Operations
from llmgw.testing.chaos import Chaos
from llmgw.testing.invariants import Broken
from llmgw.testing.simulate import Fleet, model
from tests.simulation_rig import serving

SHORT = 10


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_short_lives_break_nothing_and_end_as_wanted(first):
    """Twenty seeds each; one that fails says how to repeat it."""
    for seed in range(first, first + 20):
        Chaos(seed, nodes=3, steps=SHORT).live()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 4000, 250))
def test_thousands_of_lives_break_nothing_and_end_as_wanted(first):
    """Longer ones, too, and of larger fleets."""
    for seed in range(first, first + 250):
        Chaos(seed, nodes=3 + seed % 3, steps=SHORT + seed % 15).live()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_agents_live_through_it():
    """One life of a large fleet."""
    Chaos(1, nodes=1000, steps=8).live()


def test_a_life_that_fails_says_how_to_repeat_it_and_is_the_same_again(monkeypatch):
    """The seed decides everything; the command that is printed is the one that exists."""
    log = Chaos(3, 3, 2).live().log()
    assert Chaos(3, 3, 2).live().log() == log != Chaos(4, 3, 2).live().log()
    monkeypatch.setattr(Fleet, "ready", lambda self, name: 0)
    with pytest.raises(Broken) as failed:
        Chaos(3, 3, 2).live()
    text = str(failed.value)
    assert "all as wanted: not within" in text and "of seed 3" in text
    command = text.rpartition("again: python ")[2].split()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"events {log}" in done.stdout, done.stderr


# One fault at each step.


def changing(fleet):
    """A rollout, and a node drained in its midst."""
    fleet.apply([model("m", 2, version=2), model("n", 1)])
    fleet.run(6)
    Operations(fleet.controller).drain(["b"], None, False, False).addErrback(lambda _: None)


def server_dies(fleet):
    fleet.end()
    fleet.run(3)
    fleet.lead()


def server_is_replaced(fleet):
    fleet.usurp()


def store_stalls(fleet):
    fleet.store.stalled = True
    fleet.run(20)
    fleet.store.resume()


def answers_are_lost(fleet):
    fleet.store.lossy = True
    fleet.run(5)
    fleet.store.lossy = False


def links_break(fleet):
    fleet.cut |= set("abc")
    fleet.run(8)
    fleet.cut.clear()


def a_machine_restarts(fleet):
    for port in fleet.ports:
        port.unlink("a", "it went down")
    fleet.agents["a"].reboot()


FAULTS = [server_dies, server_is_replaced, store_stalls, answers_are_lost, links_break, a_machine_restarts]
EVERY = [pytest.param(6, id="some"), pytest.param(1, id="every", marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", EVERY)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_change_survives_a_fault_at_each_of_its_steps(fault, stride):
    """F20: whatever fails at whichever step, all ends with the new profile where the node is not drained, and nothing twice."""
    for at in range(1, 120, stride):
        fleet = serving({"a": 2, "b": 2, "c": 2}, [model("m", 2), model("n", 1)], seed=at)
        changing(fleet)
        fleet.run(at * 0.25)
        fault(fleet)
        new = model("m", version=2).generation

        def whole(fleet=fleet, new=new):
            running = [(engine.order.model, engine.order.generation) for a in fleet.agents.values() for engine in a.running()]
            return (
                fleet.ready("m") == 2
                and fleet.ready("n") == 1
                and sorted(running) == sorted([("m", new), ("m", new), ("n", model("n").generation)])
                and not fleet.agents["b"].running()
            )

        fleet.until(whole, f"all as wanted, {fault.__name__} at step {at}", 400)
