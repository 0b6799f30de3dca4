"""How long a leader may act and a standby waits: arithmetic over clocks that are given."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.fleet.timing import Timing
from llmgw.store.leaserow import LeaseRow
from llmgw.store.tenure import Tenure, Watch

TIMING = Timing()
ROW = LeaseRow("cp1@1", 4, 7, False)


def test_i_l5_a_tenure_ends_by_the_clock_alone():
    """From the moment its last renewal was sent, without anybody telling it."""
    tenure = Tenure(TIMING, 1, renewed=100.0, ticked=108.0)
    assert tenure.may_act(108.9)
    assert not tenure.may_act(109.0)
    assert not tenure.in_time(109.0)
    tenure.over = True
    assert not tenure.may_act(101.0)


def test_i_l8_a_gap_between_ticks_is_a_doubt_until_the_lease_was_seen_again():
    """After SIGCONT the first to run may be whoever sends commands: it asks before any timer has noticed."""
    tenure = Tenure(TIMING, 1, renewed=100.0, ticked=100.0)
    assert tenure.may_act(105.0)
    assert not tenure.may_act(105.1)
    assert tenure.tick(105.2) == pytest.approx(5.2)
    assert not tenure.may_act(105.3)
    tenure.renewed = 105.15
    assert not tenure.may_act(105.4)
    tenure.renewed = 105.3
    assert tenure.may_act(105.4)
    assert tenure.tick(105.9) == 0.0


def test_i_l9_a_standby_goes_by_changes_it_saw_itself():
    """No clock of a database or another host is compared; a renewal starts the wait anew."""
    watch = Watch(15.0)
    assert not watch.free(1000.0, "cp2@1")
    assert watch.look(ROW, 100.0)
    assert not watch.look(evolve(ROW, at=5e9), 110.0)
    assert not watch.free(115.0, "cp2@1")
    assert watch.free(115.2, "cp2@1")
    assert watch.look(evolve(ROW, renewals=8), 115.3)
    assert not watch.free(116.0, "cp2@1")
    assert watch.free(116.0, "cp1@1")
    watch.look(evolve(ROW, released=True), 117.0)
    assert watch.free(117.0, "cp2@1")
