"""Judgements over time, on numbers."""

from __future__ import annotations

import pytest

from llmgw.agent.progress import HUNG_AFTER, STILL_FULL, Health, StartDeadline


def test_a_silent_start_ends_at_its_timeout():
    """Nothing moves: the timeout counts."""
    deadline = StartDeadline(100.0, 30.0)
    assert not deadline.over(129.9)
    assert deadline.over(130.0)


def test_output_and_memory_extend_a_start():
    """What moves gets more time: as much as its quiet time may last."""
    deadline = StartDeadline(0.0, 100.0)
    deadline.saw(90.0, 10)
    assert not deadline.over(149.0)
    deadline.saw(149.0, 10, 2**30)
    assert not deadline.over(208.0)
    assert deadline.over(209.0)


def test_memory_that_flutters_is_no_movement():
    """Half a per cent up and down says nothing."""
    deadline = StartDeadline(0.0, 10.0)
    deadline.saw(1.0, 0, 10**9)
    for second in range(2, 20):
        deadline.saw(float(second), 0, 10**9 + (second % 2) * 4 * 10**6)
    assert deadline.moved == 1.0


def test_two_hours_are_the_end():
    """Even an engine that never stops talking is given up, but not before a longer timeout of its own."""
    for timeout, end in ((60.0, 7200.0), (9000.0, 9000.0)):
        deadline = StartDeadline(0.0, timeout)
        deadline.saw(end - 1, 1)
        assert not deadline.over(end - 0.5)
        assert deadline.over(end)


def test_three_failures_and_two_recoveries():
    """One lost probe is nothing."""
    health = Health()
    seen = []
    for problem in ("x", "x", "", "x", "x", "x", "", "x", "", ""):
        health.saw(0.0, problem, None)
        seen.append(health.healthy)
    assert seen == [True] * 5 + [False] * 4 + [True]


@pytest.mark.parametrize("what", ["tokens", "output"])
def test_a_busy_engine_is_not_unhealthy(what):
    """While it makes tokens, or prints, an engine that does not answer is busy."""
    health = Health()
    for step in range(1, 40):
        health.saw(step * 5.0, "no answer", step if what == "tokens" else None, step if what == "output" else 0)
    assert health.healthy
    assert not health.hangs(1000.0)


def test_hanging():
    """No answer, no token and no output for a minute."""
    health = Health()
    for step in range(20):
        health.saw(step * 5.0, "no answer", None)
        assert health.hangs(step * 5.0) == (step * 5.0 >= HUNG_AFTER)
    health.saw(100.0, "", None)
    assert not health.hangs(100.0)


def test_a_token_that_a_full_engine_may_only_have_waited_with_is_weak_evidence():
    """It takes 10 minutes, and one sign of life ends it."""
    health = Health()
    for step in range(125):
        health.saw(step * 5.0, "no token", None, weak=True)
        assert health.hangs(step * 5.0) == (step * 5.0 >= STILL_FULL)
    assert not health.healthy
    health.saw(620.0, "", None)
    assert not health.hangs(5000.0)


def test_what_is_sure_after_weak_evidence_has_its_own_minute():
    """One refused connection after minutes of a slow token ends nothing."""
    health = Health()
    for step in range(30):
        health.saw(step * 5.0, "no token", None, weak=True)
    for step in range(30, 45):
        health.saw(step * 5.0, "refused", None)
        assert health.hangs(step * 5.0) == (step * 5.0 >= 150.0 + HUNG_AFTER)
