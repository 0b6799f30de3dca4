"""Reconcile as a pure function: each rule alone, with the smallest world that shows it."""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.fleet.model import Catalog, Model, Profile, Resources, Scale
from llmgw.fleet.node import Installation, Inventory, NodeFacts, NodeState
from llmgw.fleet.records import NodeRecord, ShardRecord
from llmgw.fleet.shard import ADDRESS_GONE, Allocation, Diagnosis, ShardExit, ShardReport, ShardState, Wanted
from llmgw.fleet.timing import Timing
from llmgw.interfaces import Needs
from llmgw.planning.orders import orders
from llmgw.planning.reconcile import reconcile
from llmgw.planning.world import Declined, Told, World

NOW = 1_000_000.0
PROFILE = Profile("sim", resources=Resources(devices=0))


def model(name="m", replicas=1, profile=PROFILE, **more):
    return Model(name, replicas=Scale(replicas, replicas), profile=profile, **more)


def node(name="a", state=NodeState.READY, **more):
    facts = NodeFacts(name, name, Inventory(1, 2**30), installations=(Installation("sim", "sim"),))
    return NodeRecord(name, facts=facts, state=state, **more)


def shard(number=1, state=ShardState.READY, name="a", model_name="m", **more):
    known = {
        "generation": PROFILE.generation(model_name), "attempt": 1, "profile": PROFILE, "placed_revision": 5,
        "allocation": Allocation(name, ports=(20000 + number,)), "served": (model_name,),
        "operation": f"{model_name}/{number}/0:1:1.5",
        "url": f"http://{name}:{20000 + number}/v1" if state is ShardState.READY else "", "since": NOW - 100, "nodes": (name,),
    }  # fmt: skip
    return ShardRecord(f"{model_name}/{number}/0", model_name, number, state=state, **(known | more))


def report(number=1, state=ShardState.READY, attempt=1, model_name="m", **more):
    known = {"url": f"http://a:{20000 + number}/v1", "key": "", "ports": (20000 + number,)}
    generation = more.pop("generation", PROFILE.generation(model_name))
    return ShardReport(f"{model_name}/{number}/0", model_name, generation, attempt, state, **(known | more))


def told(*reports, epoch=7, revision=9, complete=True):
    return Told({one.shard: one for one in reports}, epoch, revision, complete)


def world(*records, models=None, **more):
    """Leader of epoch 7, which began at revision 6; the next commit is revision 10."""
    known = {
        "now": NOW, "epoch": 7, "revision": 10, "timing": Timing(),
        "catalog": Catalog(tuple([model()] if models is None else models)),
        "reckon": lambda profile, files: Needs(profile.resources.devices or 0),
        "nodes": {"a": node()}, "shards": {r.shard: r for r in records}, "began": 6, "leading_for": 1000.0,
    }  # fmt: skip
    known |= {"reported": frozenset(more.get("told", {}))}
    return World(**(known | more))


def only(outcome):
    (record,) = outcome.shards.values()
    return record


def test_a_plan_of_its_own_result_changes_nothing():
    """Level-triggered: with no news there is nothing to do, not even a new object."""
    first = reconcile(world(told={"a": told()}))
    second = reconcile(world(shards=first.shards, nodes=first.nodes, told={"a": told()}))
    assert only(first).state is ShardState.PLACED
    assert second.shards == first.shards and not second.events


@pytest.mark.parametrize(
    ("epoch", "revision", "gone"),
    [(7, 9, True), (7, 4, False), (6, 5, True), (6, 4, False), (8, 9, False)],
    ids=["this leader's orders", "older orders", "the last leader's orders", "before the placement", "a later leader's"],
)
def test_silence_counts_only_when_it_is_not_older_than_the_placement(epoch, revision, gone):
    """A shard that is missing from a report is gone only if the node had been told of it."""
    outcome = reconcile(world(shard(state=ShardState.PLACED), told={"a": told(epoch=epoch, revision=revision)}))
    assert (only(outcome).state is ShardState.BACKOFF) == gone


def test_a_placement_of_this_leader_is_not_denied_by_orders_of_the_last():
    """The agent still follows the last leader's orders, with a high revision; it cannot know what we have just placed."""
    outcome = reconcile(world(shard(state=ShardState.PLACED, placed_revision=8), told={"a": told(epoch=6, revision=100)}))
    assert only(outcome).state is ShardState.PLACED


def test_a_registration_denies_only_what_the_node_had_confirmed():
    """Before the first report a placement may still be on its way, but an engine that ran and is not listed is gone."""
    early = {"a": told(revision=0, complete=False)}
    assert only(reconcile(world(shard(state=ShardState.PLACED), told=early))).state is ShardState.PLACED
    assert only(reconcile(world(shard(), told=early))).state is ShardState.BACKOFF


@pytest.mark.parametrize(("revision", "gone"), [(4, False), (5, True)])
def test_a_shard_that_stops_before_its_node_had_the_order_to_start_it_is_not_gone_yet(revision, gone):
    """It was placed by revision 5 and ordered away at once: a report from before that says nothing, and it holds its device."""
    record = shard(state=ShardState.STOPPING, wanted=Wanted.STOP, url="")
    found = reconcile(world(record, models=[model(replicas=0)], told={"a": told(revision=revision)}))
    assert (found.shards["m/1/0"].allocation is None) is gone


def test_an_older_attempt_says_nothing_about_the_newer():
    """The report crossed our order for attempt 2."""
    record = shard(state=ShardState.PLACED, attempt=2)
    outcome = reconcile(world(record, told={"a": told(report(state=ShardState.FAILED, attempt=1))}))
    assert only(outcome) == record


def test_a_newer_attempt_means_that_our_store_is_older():
    """The fleet is right: attempt and generation are taken over, and the order that follows is about that attempt."""
    outcome = reconcile(world(shard(), told={"a": told(report(attempt=4))}))
    record = only(outcome)
    assert (record.attempt, record.state) == (4, ShardState.READY)
    (order,) = orders([record], outcome.nodes, (), Timing())["a"]
    assert order.attempt == 4 and ":4:" in order.operation


def test_an_operation_is_the_same_under_the_next_leader_and_new_after_a_lost_store():
    """A repeated order has no second effect; the same name and number after a lost store are another order."""
    first = reconcile(world(told={"a": told()}))
    record = only(first)
    told_again = orders([record], first.nodes, (), Timing())["a"][0].operation
    later = reconcile(world(record, epoch=8, revision=50, told={"a": told(epoch=7, revision=10)}))
    assert orders([only(later)], later.nodes, (), Timing())["a"][0].operation == told_again
    lost = only(reconcile(world(epoch=9, told={"a": told()})))
    assert lost.shard == record.shard and lost.operation != record.operation


def test_a_diagnosis_is_the_reason_and_its_advice_follows():
    """What an operator reads is the first cause and what to do."""
    why = Diagnosis("configuration", "vLLM could not fit its KV cache", "Lower `context` to 79360.")
    outcome = reconcile(world(shard(state=ShardState.LOADING), told={"a": told(report(state=ShardState.FAILED, diagnosis=why))}))
    said = "vLLM could not fit its KV cache. Lower `context` to 79360. Attempt 2 of 2, next in 10 s."
    assert only(outcome).reason == said
    assert outcome.events[-1].text == f"m/1/0 a: loading -> backoff: {said}"
    assert only(outcome).url == "" and outcome.wake == 10.0


@pytest.mark.parametrize(
    ("wanted", "state", "seen"),
    [
        (Wanted.DRAIN, ShardState.DRAINING, ShardState.READY),
        (Wanted.STOP, ShardState.STOPPING, ShardState.READY),
        (Wanted.STOP, ShardState.STOPPING, ShardState.STOPPING),
    ],
)
def test_why_it_was_ordered_away_stays_the_reason(wanted, state, seen):
    """What a node last said of an engine that served is old news, and that it stops as ordered is none."""
    leaving = shard(wanted=wanted, state=state, reason="m wants 0")
    outcome = reconcile(world(leaving, models=[model(replicas=0)], told={"a": told(report(state=seen, reason="it serves"))}))
    assert only(outcome).state is state and only(outcome).reason == "m wants 0"


def test_an_unseen_exit_is_unknown_never_zero():
    """I-C9."""
    outcome = reconcile(world(shard(), told={"a": told(report(state=ShardState.FAILED, exit=ShardExit()))}))
    assert "exit status unknown" in only(outcome).reason


def test_backoff_doubles_with_jitter_up_to_its_cap():
    """10, 20, 40, 80 s, each times the jitter."""
    delays = []
    for count in range(4):
        record = shard(state=ShardState.LOADING, crashes=tuple(NOW - 60 - n for n in range(count)))
        failed = {"a": told(report(state=ShardState.FAILED))}
        delays.append(only(reconcile(world(record, told=failed, jitter=lambda: 1.25))).next_at - NOW)
    assert delays == [12.5, 25.0, 50.0, 100.0]


def test_crashes_count_for_the_window_and_no_longer():
    """Five in thirty minutes end it; four of an hour ago do not count."""
    failed = {"a": told(report(state=ShardState.FAILED))}
    recent = shard(crashes=tuple(NOW - 60 * n for n in range(1, 5)))
    old = shard(crashes=tuple(NOW - 3600 - n for n in range(4)))
    assert only(reconcile(world(recent, told=failed))).state is ShardState.FAILED
    assert only(reconcile(world(old, told=failed))).crashes == (NOW,)


def test_first_and_last_reason_are_kept_over_attempts():
    """What came first is the cause more often than what came last; after the window a new first one begins."""
    why = [Diagnosis("configuration", f"it failed for reason {n}") for n in range(3)]

    def failed(record, diagnosis):
        return only(reconcile(world(record, told={"a": told(report(state=ShardState.FAILED, diagnosis=diagnosis))})))

    record = failed(shard(state=ShardState.LOADING), why[0])
    assert (record.first_reason, record.last_reason) == ("it failed for reason 0", "it failed for reason 0")
    record = failed(evolve(record, state=ShardState.LOADING, crashes=(NOW - 60,)), why[1])
    assert (record.first_reason, record.last_reason) == ("it failed for reason 0", "it failed for reason 1")
    record = failed(evolve(record, state=ShardState.LOADING, crashes=(NOW - 7200,)), why[2])
    assert (record.first_reason, record.last_reason) == ("it failed for reason 2", "it failed for reason 2")


def test_a_clock_set_back_makes_nobody_wait_for_hours():
    """The retry was due in wall time that is now far ahead."""
    record = shard(state=ShardState.BACKOFF, next_at=NOW + 86400)
    assert only(reconcile(world(record, told={"a": told()}))).state is ShardState.PLACED
    soon = shard(state=ShardState.BACKOFF, next_at=NOW + 60)
    assert only(reconcile(world(soon, told={"a": told()}))) == soon


def test_a_port_that_somebody_else_has_is_no_crash():
    """port_in_use: other ports after a second, and the budget is untouched."""
    declined = {"m/1/0": Declined(1, "port_in_use", "port 20001 is held by pid 5 nginx")}
    placed = shard(state=ShardState.PLACED)
    record = only(reconcile(world(placed, told={"a": told()}, declined=declined, last_ports={"a": 20001})))
    assert (record.state, record.crashes, record.next_at) == (ShardState.BACKOFF, (), NOW + 1)
    again = only(reconcile(world(record, now=NOW + 2, told={"a": told()}, declined=declined, last_ports={"a": 20001})))
    assert (again.attempt, again.allocation.ports, again.state) == (2, (20002,), ShardState.PLACED)


def test_a_declined_order_fails_with_the_agents_words():
    """A profile that the agent refuses is told in its sentence."""
    declined = {"m/1/0": Declined(1, "problems", "vllm has no --max-seqs; did you mean --max-num-seqs")}
    record = only(reconcile(world(shard(state=ShardState.PLACED), told={"a": told()}, declined=declined)))
    assert record.reason.startswith("vllm has no --max-seqs; did you mean --max-num-seqs. Attempt 2 of 5")


def test_what_rests_is_not_ordered():
    """An agent that had lost its memory would start what is listed; a shard in backoff is not."""
    resting = [shard(1, ShardState.BACKOFF, next_at=NOW + 9), shard(2, ShardState.FAILED)]
    assert orders(resting, {"a": node()}, (), Timing()) == {}


def test_an_order_to_leave_waits_for_the_routers():
    """Until every router has let go the shard is listed as running."""
    leaving = shard(wanted=Wanted.DRAIN, state=ShardState.DRAINING, url="http://a:20001/v1")
    never = shard(2, wanted=Wanted.STOP, state=ShardState.STOPPING)
    first = {order.shard: order.wanted for order in orders([leaving, never], {"a": node()}, (), Timing())["a"]}
    assert first == {"m/1/0": Wanted.RUN, "m/2/0": Wanted.STOP}
    assert orders([leaving], {"a": node()}, {"m/1"}, Timing())["a"][0].wanted is Wanted.DRAIN


def test_orphans_are_adopted_up_to_the_number_wanted():
    """Two run, one is wanted: one is adopted, the other left running and explained. Nothing is stopped."""
    outcome = reconcile(world(told={"a": told(report(1), report(2, ports=(20002,)))}))
    assert only(outcome).shard == "m/1/0" and only(outcome).adopted
    (orphan,) = outcome.orphans
    assert (orphan.report.shard, orphan.why) == ("m/2/0", "m has all the replicas it wants")


@pytest.mark.parametrize(
    ("report_", "why"),
    [
        (report(generation="other"), "generation other, the catalog wants"),
        (report(model_name="x"), "the catalog runs no model x"),
        (report(state=ShardState.STOPPING), "it is stopping"),
    ],
)
def test_orphans_that_do_not_match_are_left_and_explained(report_, why):
    """Reported, left running, listed."""
    outcome = reconcile(world(models=[model(replicas=1)], told={"a": told(report_)}, settling=True))
    assert outcome.orphans[0].why.startswith(why)
    assert not outcome.shards


def test_names_that_are_not_ours_are_never_adopted():
    """A hostile or broken name is an orphan and harms nothing."""
    strange = evolve(report(), shard="m/one/0")
    outcome = reconcile(world(told={"a": told(strange)}))
    assert not outcome.broken and only(outcome).shard == "m/1/0" and not only(outcome).adopted


def test_a_lost_store_waits_before_it_starts_anything():
    """Others may still report what runs."""
    outcome = reconcile(world(told={"a": told()}, settling=True))
    assert not outcome.shards and "waiting for nodes to report" in outcome.notes["m"]


def test_the_newest_number_is_remembered_by_a_husk():
    """The last replica is gone; its number is not."""
    gone = shard(7, ShardState.STOPPING, wanted=Wanted.STOP)
    first = reconcile(world(gone, models=[model(replicas=0)], told={"a": told()}))
    assert only(first).allocation is None and only(first).number == 7
    second = reconcile(world(shards=first.shards, told={"a": told()}))
    assert only(second).shard == "m/8/0"


def test_a_copy_on_another_node_is_not_taken_for_the_record():
    """The same name reported by two nodes: each node speaks only for what is recorded there."""
    both = {"a": told(report()), "b": told(report(state=ShardState.FAILED))}
    outcome = reconcile(world(shard(), told=both, nodes={"a": node(), "b": node("b")}))
    assert only(outcome).state is ShardState.READY
    outcome = reconcile(world(shard(), told=both | {"b": told(report())}, nodes={"a": node(), "b": node("b")}))
    assert [(orphan.node, orphan.why) for orphan in outcome.orphans] == [("b", "its name belongs to another copy on a")]


def test_one_broken_record_does_not_stop_the_plan():
    """A guard round each part: the others are planned, and the broken one is named."""
    outcome = reconcile(world(shard(9, model_name="x", allocation=5), told={"a": told()}))
    assert [subject for subject, _ in outcome.broken][:1] == ["x/9/0"]


def test_drain_of_a_node_surges_elsewhere_and_waits_where_it_cannot():
    """The replacement first; with nowhere to go it serves until the deadline."""
    nodes = {"a": node(draining=True, cordoned=True, drain_deadline=NOW + 60), "b": node("b")}
    links = {"a": told(report()), "b": told()}
    outcome = reconcile(world(shard(), nodes=nodes, told=links))
    assert outcome.shards["m/2/0"].allocation.node == "b" and outcome.shards["m/1/0"].wanted is Wanted.RUN
    alone = reconcile(world(shard(), nodes={"a": nodes["a"]}, told={"a": told(report())}))
    assert only(alone).wanted is Wanted.RUN and "it stays as it is" in alone.notes["m"]
    late = reconcile(world(shard(), nodes={"a": nodes["a"]}, told={"a": told(report())}, now=NOW + 61))
    assert only(late).wanted is Wanted.STOP and "deadline has passed" in only(late).reason
    allowed = reconcile(world(shard(), nodes={"a": evolve(nodes["a"], outage=True)}, told={"a": told(report())}))
    assert only(allowed).wanted is Wanted.DRAIN


def test_a_drained_node_gets_nothing_back_before_it_is_uncordoned():
    """Its failed replica is not started again there."""
    nodes = {"a": node(draining=True, cordoned=True, drain_deadline=NOW + 60)}
    first = reconcile(world(shard(state=ShardState.BACKOFF, next_at=NOW - 1), nodes=nodes, told={"a": told()}))
    assert only(first).wanted is Wanted.STOP
    outcome = reconcile(world(shards=first.shards, nodes=nodes, told={"a": told()}))
    assert only(outcome).state is ShardState.STOPPED
    assert outcome.pending["m"].explanation.line() == "0/1 nodes can run this: 1 draining"


S = ShardState
RUNNING = (S.PLACED, S.STARTING, S.LOADING, S.READY, S.UNKNOWN, S.BACKOFF, S.FAILED)


@pytest.mark.parametrize(
    ("wanted", "states"),
    [
        (Wanted.RUN, RUNNING),
        (Wanted.STOP, (S.STOPPING, S.UNKNOWN, S.BACKOFF, S.FAILED)),
        (Wanted.DRAIN, (S.DRAINING, S.UNKNOWN, S.STOPPING)),
        (Wanted.SLEEP, (S.DRAINING, S.SLEEPING, S.UNKNOWN, S.STOPPING)),
    ],
)
def test_whatever_a_node_says_there_is_a_legal_way_from_our_record(wanted, states):
    """Our record may be of an older store, or an order was under way as the shard was found to have ended."""
    for state, said, attempt, gone in itertools.product(states, [None, *S], (0, 1, 2), (False, True)):
        record = shard(state=state, wanted=wanted)
        record = evolve(record, allocation=evolve(record.allocation, address="old"))
        words = {"conditions": (ADDRESS_GONE,), "healthy": False} if gone else {}
        links = {"a": told(*([report(state=said, attempt=attempt, **words)] if said else []))}
        outcome = reconcile(world(record, told=links))
        illegal = [event.text for event in outcome.events if event.kind == "illegal"]
        assert not illegal and not outcome.broken, (state, said, attempt, gone, illegal)


@pytest.mark.parametrize("state", [S.BACKOFF, S.FAILED])
def test_an_engine_that_is_found_after_it_was_ordered_away_is_stopped(state):
    """It had ended as far as we knew, and was not to be started again; its node says that it starts."""
    left = shard(state=state, wanted=Wanted.STOP)
    outcome = reconcile(world(left, models=[model(replicas=0)], told={"a": told(report(state=S.STARTING))}))
    assert (only(outcome).state, only(outcome).wanted) == (S.STOPPING, Wanted.STOP)


STATES = st.sampled_from(list(ShardState))
REPORTS = st.lists(st.tuples(st.integers(1, 3), STATES, st.integers(0, 3)), max_size=4)


@given(st.lists(st.tuples(REPORTS, st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 400)), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_reports_in_any_order_keep_the_books_in_order(story):
    """A5: whatever a node says, transitions are legal, attempts and numbers only grow, and nothing raises."""
    nodes, shards, revision, now = {"a": node(), "b": node("b")}, {}, 10, NOW
    highest = 0
    for said, linked, complete, replicas, later in story:
        now, revision = now + later, revision + 1
        spoken = told(*(report(n, state, attempt) for n, state, attempt in said), revision=revision, complete=complete)
        links = {"a": spoken, "b": told(revision=revision)} if linked else {"b": told(revision=revision)}
        outcome = reconcile(
            world(models=[model(replicas=replicas)], nodes=nodes, shards=shards, told=links, now=now, revision=revision,
                  away={"a": float(later)}, reported=frozenset("ab"))
        )  # fmt: skip
        assert not outcome.broken
        assert not [event.text for event in outcome.events if event.kind == "illegal"]
        for name, record in outcome.shards.items():
            before = shards.get(name)
            assert before is None or record.attempt >= before.attempt
            assert record.allocation is None or record.allocation.node in nodes
            if before is None and not record.adopted:
                assert record.number > highest
        numbers = [record.number for record in outcome.shards.values()]
        highest = max([highest, *numbers])
        nodes, shards = dict(outcome.nodes), dict(outcome.shards)
