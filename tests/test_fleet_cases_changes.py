"""Cases that fleets of other programs have failed at: orphans and what is left of engines (D), routing (F), deletion, updates and
drains (G). Here are those about processes that no other file has, and where the others are tested.

    D1   here, test_death_of_the_engine_takes_what_it_left in test_agent_supervisor.py,
         test_d1_d7_a_lost_rank_is_replaced_only_when_its_memory_is_back in end_to_end/test_memory_awaited.py
    D2   test_stop_takes_a_grandchild_in_its_own_session in test_agent_supervisor.py,
         test_a_cgroup_per_engine_where_one_is_delegated in test_agent_node_deaths.py
    D3   here, test_a_model_deleted_while_its_node_is_away_is_stopped_on_return in test_server_simulation_changes.py,
         test_d3_a_returning_node_is_reconciled_by_the_models_policy in test_planning_rollout_orders.py
    D4   test_two_agents_of_one_machine_do_not_touch_each_other in test_agent_node.py
    D5   test_f49_an_engine_survives_kill_9_of_the_agent in end_to_end/test_systemd.py,
         test_a_daemon_whose_parent_has_exited in test_agent_supervisor.py,
         test_a_second_agent_on_one_state_folder_is_refused in end_to_end/test_bad_input.py
    D6   here for the report; test_d6_memory_that_no_engine_of_ours_holds_is_not_offered here for the placement
    D7   here
    D9   test_a_reused_pid_is_neither_adopted_nor_signalled in test_agent_adoption.py
    D10  here; what SIGKILL does not end is killed again each second and named
    F1   test_dead_replica_is_skipped in test_router_faults.py,
         test_a_killed_engine_is_placed_again_and_the_reason_is_shown in end_to_end/test_first_slice.py
    F2   test_an_engine_that_is_only_slow_is_asked_and_left_alone in test_agent_turns.py,
         test_an_engine_that_is_well_but_makes_no_token_is_ended_as_hung in test_agent_turns.py
    F3   test_f36_f37_a_dead_child_kills_all_and_a_killed_server_leaves_its_scheduler in test_engines_sglang.py; an engine that
         does not end by itself then makes no token, and is found out as in F2, later than in 5 s
    F4   test_l4_codes in test_router_faults.py, test_l12_models in test_router_faults.py
    F5   test_replica_that_turns_away in test_router_faults.py, test_b4_never_again_after_the_first_byte in test_router_cases.py
    F6   test_c1_any_split in test_router_streams.py
    F7   test_engine_that_dies_in_a_plain_answer in test_router_connections.py: its head is on the way by then, so it is no 502;
         the answer ends short of its length and with a broken connection, which no client takes for whole
    F8   test_m1_a_long_prefill_passes in test_router_streams.py, test_m2_silence_in_mid_stream in test_router_streams.py
    F9   test_d7_content_type_is_kept in test_router_cases.py
    F10  test_a1_client_gone_after_first_byte in test_router_broken_streams.py,
         test_a6_l1_random_cancels in test_router_broken_streams.py; over many clients test_soak in test_router_soak.py
    F11  test_statuses_that_are_not_the_engines_fault in test_router_breaker.py
    F12  test_opens_after_consecutive_failures_only in test_router_breaker.py, test_probe_decides in test_router_breaker.py
    F13  test_dead_replica_is_skipped in test_router_faults.py
    F14  test_f14_a_cordoned_node_whose_agent_ends_shows_its_shards_as_unknown in test_planning_rollout_orders.py
    F16  test_f16_a_changed_profile_is_rolled_out_under_load_without_a_failed_request in end_to_end/test_rollout.py
    G1   test_g1_a_drain_lets_a_long_stream_end_whole_and_waits_for_it in end_to_end/test_rollout.py,
         test_g1_at_the_deadline_a_stream_ends_with_an_error_event in end_to_end/test_rollout.py, and here with SIGKILL
    G2   test_cordon_survives_restarts_of_agent_and_server in end_to_end/test_operations.py
    G4   test_g4_a_failing_rollout_stops_rolls_back_and_says_why in test_planning_rollout.py,
         test_g4_a_profile_that_cannot_start_is_rolled_back_under_load_and_says_why in end_to_end/test_rollout.py
    G5   test_g5_one_replica_that_does_not_stop_holds_nobody_else in test_planning_rollout_orders.py
    G6   test_g6_in_place_never_two_at_once in test_planning_rollout.py,
         test_g6_apply_says_beforehand_that_a_successor_fits_nowhere in test_planning_rollout_orders.py
    G7   test_g7_a_removal_ends_as_gone_wherever_the_server_dies in test_planning_rollout_orders.py
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.defer import succeed
from zope.interface import implementer

from llmgw.agent.release import Release
from llmgw.fleet.node import Device, DeviceProcess, Inventory
from llmgw.fleet.shard import ShardState
from llmgw.interfaces import IInventory
from llmgw.testing.simulate import model
from tests.agent_rig import Rig, alive, printed_child, settle, until
from tests.simulation_rig import serving

TESTS = Path(__file__).parent
FAILED, STOPPED = ShardState.FAILED, ShardState.STOPPED
IDS = {"D": (1, 2, 3, 4, 5, 6, 7, 9, 10), "F": (*range(1, 15), 16), "G": (1, 2, 4, 5, 6, 7)}


def test_every_case_is_in_the_table_and_the_tests_it_names_exist():
    """No id is missing, and a test that is renamed or deleted does not leave its case behind."""
    assert __doc__ is not None
    listed = re.findall(r"^    ([DFG]\d+) ", __doc__, re.M)
    assert listed == [f"{letter}{number}" for letter, numbers in IDS.items() for number in numbers]
    named = re.findall(r"(test_\w+)\s+in\s+((?:end_to_end/)?test_\w+\.py)", __doc__)
    assert len(named) > 30
    for name, file in named:
        assert f"def {name}(" in (TESTS / file).read_text(), name
    for name in re.findall(r"(test_\w+) here", __doc__):
        assert name in globals(), name


@implementer(IInventory)
class Driver:
    """One device; C{holders} are the pids that it shows as holding its memory, C{asked} how often it was looked at."""

    holders: tuple[int, ...] = ()
    asked = 0

    def take(self):
        self.asked += 1
        held = tuple(DeviceProcess(pid, "engine") for pid in self.holders)
        return succeed(Inventory(1, 1, devices=(evolve(Device("GPU-a", 0, "a"), processes=held),)))


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def rig(reactor, tmp_path, driver, monkeypatch):
    monkeypatch.setattr("llmgw.agent.release.EVERY", 0.02)
    found = Rig(reactor, tmp_path)
    found.around = evolve(found.around, released=Release(reactor, driver).wait)
    yield found
    found.close()
    settle(reactor)


@pytest_twisted.ensureDeferred
async def test_d1_what_a_killed_engine_leaves_is_ended_and_its_memory_awaited(rig, driver):
    """D1: kill -9 of the engine; its child, in a session of its own, holds memory: ended within 5 s, and the shard has not ended
    before the driver lets go, so that nothing is started in its place."""
    shard = await rig.ready("--fork-setsid", devices=("GPU-a",))
    child = await until(rig.reactor, lambda: printed_child(shard), "a child")
    driver.holders = (child,)
    began = time.monotonic()
    os.kill(shard.report().pid, signal.SIGKILL)
    await until(rig.reactor, lambda: not alive(child), "the child is ended", 5)
    await until(rig.reactor, lambda: driver.asked >= 5, "the device is looked at")
    assert time.monotonic() - began < 5 and shard.state is ShardState.STOPPING
    driver.holders = ()
    await rig.reach(shard, FAILED)
    assert not any("leaked_vram" in text for text in shard.conditions)


@pytest_twisted.ensureDeferred
async def test_d7_an_engine_that_died_by_itself_has_failed_when_its_memory_is_back(rig, driver):
    """D7: its own pid is still shown by the driver when it has long been reaped; what starts next would be out of memory."""
    shard = await rig.ready(devices=("GPU-a",))
    pid = shard.report().pid
    driver.holders = (pid,)
    os.kill(pid, signal.SIGKILL)
    await until(rig.reactor, lambda: driver.asked >= 5 or shard.is_over, "the device is looked at")
    assert shard.state is ShardState.STOPPING
    driver.holders = ()
    await rig.reach(shard, FAILED)


@pytest_twisted.ensureDeferred
async def test_d7_a_stop_is_over_when_the_memory_is_back(rig, driver):
    """D7: the processes are gone at once, their memory is not: until then the shard is stopping and holds its device."""
    shard = await rig.ready(devices=("GPU-a",))
    driver.holders = (shard.report().pid,)
    shard.stop()
    await until(rig.reactor, lambda: driver.asked >= 5, "the device is looked at")
    assert shard.state is ShardState.STOPPING and not rig.left()
    driver.holders = ()
    await rig.reach(shard, STOPPED)


@pytest_twisted.ensureDeferred
async def test_d6_d10_memory_that_never_comes_back_is_said_with_device_and_pid(rig, driver, monkeypatch):
    """D6, D10: the driver goes on showing the pid: after the deadline the shard is over and its report says who holds what."""
    monkeypatch.setattr("llmgw.agent.release.DEADLINE", 0.2)
    shard = await rig.ready(devices=("GPU-a",))
    driver.holders = (pid := shard.report().pid,)
    shard.stop()
    await rig.reach(shard, STOPPED)
    assert f"leaked_vram: gpu 0 by pid {pid}" in shard.report().conditions


@pytest_twisted.ensureDeferred
async def test_g1_an_engine_that_ignores_sigterm_is_killed_when_its_time_is_up(rig):
    """G1: drained, then stopped: SIGTERM does nothing, SIGKILL ends the whole tree, and the report says that it was forced."""
    shard = await rig.ready("--ignore-term", "--fork-setsid", grace=0.5)
    child = await until(rig.reactor, lambda: printed_child(shard), "a child")
    shard.drain()
    assert shard.state is ShardState.DRAINING
    began = time.monotonic()
    shard.stop()
    await rig.reach(shard, STOPPED)
    assert time.monotonic() - began < 5.5 and shard.exit.forced and not alive(child) and not rig.left()


def test_d3_an_agent_that_comes_to_another_store_is_listed_and_nothing_of_it_is_stopped():
    """D3: this control plane knows neither the model nor its shards: an hour later they run on, as orphans with a reason."""
    fleet = serving(models=[model("m", 2)])
    pids = fleet.pids()
    fleet.end()
    fleet.forget()
    fleet.lead([model("other", 1)])
    fleet.run(3600)
    assert pids.items() <= fleet.pids().items() and fleet.ready("other") == 1
    found = {orphan.report.shard: orphan.why for orphan in fleet.controller.outcome.orphans}
    assert set(found) == {"m/1/0", "m/2/0"} and all(found.values())


def test_d6_memory_that_no_engine_of_ours_holds_is_not_offered(monkeypatch):
    """D6: a pid that nobody ended holds 70 of 80 GiB of one device: the model goes to the other one."""
    fleet = serving({"a": 2}, [model("m", 0)])
    facts = fleet.agents["a"].facts()
    first, second = facts.inventory.devices
    held = evolve(first, memory_used=75 * 2**30, processes=(DeviceProcess(4242, "engine", 75 * 2**30),))
    inventory = evolve(facts.inventory, devices=(held, second))
    monkeypatch.setattr(type(fleet.agents["a"]), "facts", lambda self: evolve(facts, inventory=inventory))
    fleet.cut.add("a")
    fleet.run(1)
    fleet.cut.clear()
    fleet.run(1)
    fleet.apply([model("m", 2)])
    fleet.until(lambda: fleet.ready("m") == 1, "one is there")
    fleet.run(60)
    (record,) = [one for one in fleet.controller.truth.shards.values() if one.allocation]
    assert record.allocation.devices == (second.uuid,)
    assert "pid 4242" in str(fleet.controller.outcome.pending["m"].explanation)
