"""A replica of several shards after one of them was lost: nothing starts before all of it is gone, and then with fresh ports."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.fleet.model import Parallel
from llmgw.fleet.shard import Allocation, ShardState, Wanted
from llmgw.planning.orders import orders
from llmgw.planning.reconcile import reconcile
from tests.test_planning_reconcile import NOW, PROFILE, model, node, report, shard, told, world

GANG = evolve(PROFILE, parallel=Parallel(nodes=2))


def rank(number, state, name, **more):
    """One of two shards on two nodes, with a port for HTTP and one for the rendezvous."""
    given = Allocation(
        name, rank=number, nodes=2, ports=(20001, 20002), head="a", head_port=20002, peers=("a", "b"), address=name
    )
    known = {"rank": number, "nodes": ("a", "b"), "generation": GANG.generation("m"), "profile": GANG, "allocation": given}
    record = shard(1, state, name, **(known | more))
    return evolve(record, shard=f"m/1/{number}")


def plan(*records, reports=()):
    """Both nodes are there; what they report is given by node."""
    says = {"a": told(), "b": told(), **dict(reports)}
    nodes = {name: node(name) for name in "ab"}
    return reconcile(world(*records, models=[model(profile=GANG)], nodes=nodes, told=says))


def test_one_rank_lost_stops_the_other_which_says_why():
    """Rank 1 has failed; rank 0, which serves, is told to stop, and is to be started again with it."""
    ranks = rank(0, ShardState.READY, "a"), rank(1, ShardState.READY, "b")
    serves = evolve(report(), shard="m/1/0", generation=GANG.generation("m"))
    fell = evolve(serves, shard="m/1/1", state=ShardState.FAILED, reason="rank 1 fell", rank=1)
    outcome = plan(*ranks, reports={"a": told(serves), "b": told(fell)}.items())
    head, other = outcome.shards["m/1/0"], outcome.shards["m/1/1"]
    assert other.state is ShardState.BACKOFF and head.state is ShardState.STOPPING
    assert head.wanted is Wanted.STOP and head.next_at == other.next_at
    assert head.reason == "m/1/1 ended, and they run together"


@pytest.mark.parametrize(
    ("head", "patience"),
    [
        (ShardState.STOPPING, 30.0),
        (ShardState.DRAINING, 30.0),
        (ShardState.BACKOFF, 0.0),
        (ShardState.UNKNOWN, 0.0),
        (None, 0.0),
    ],
)
def test_rank_0_ends_first_and_the_others_soon_after_it(head, patience):
    """They are left alone while it ends; where it is gone or away they have nothing left to do, and little grace."""
    ranks = [rank(0, head, "a", wanted=Wanted.STOP, url="")] if head else []
    other = rank(1, ShardState.STOPPING, "b", wanted=Wanted.STOP, url="")
    sent = orders([*ranks, other], {name: node(name) for name in "ab"}, frozenset(), world().timing)
    (last,) = sent["b"]
    assert (last.wanted, last.patience, last.grace) == (Wanted.STOP, patience, 5.0)
    assert not head or [(order.patience, order.grace) for order in sent["a"]] in ([], [(0.0, 20.0)])


def test_no_rank_is_stopped_while_routers_send_to_rank_0_nor_waits_where_each_serves():
    """Only rank 0 has an address; with hybrid balancing all have one, and end together."""
    urls = ("http://a:20001/v1", "")
    both = [rank(at, ShardState.STOPPING, name, wanted=Wanted.STOP, url=urls[at]) for at, name in enumerate("ab")]
    nodes, timing = {name: node(name) for name in "ab"}, world().timing
    assert [order.wanted for listed in orders(both, nodes, frozenset(), timing).values() for order in listed] == [Wanted.RUN] * 2
    hybrid = evolve(GANG, parallel=Parallel(nodes=2, data=2, balance="hybrid"))
    sent = orders([evolve(record, profile=hybrid) for record in both], nodes, {"m/1"}, timing)
    found = [(order.wanted, order.patience, order.grace) for listed in sent.values() for order in listed]
    assert found == [(Wanted.STOP, 0.0, 20.0)] * 2


@pytest.mark.parametrize("state", [ShardState.BACKOFF, ShardState.FAILED])
def test_a_rank_that_has_ended_is_not_ordered_to_run_until_routers_let_go_of_rank_0(state):
    """Its node may remember nothing of it and would start it, only to be told to stop it."""
    head = rank(0, ShardState.STOPPING, "a", wanted=Wanted.STOP, url="http://a:20001/v1")
    ended = rank(1, state, "b", wanted=Wanted.STOP, url="")
    sent = orders([head, ended], {name: node(name) for name in "ab"}, frozenset(), world().timing)
    assert [order.wanted for listed in sent.values() for order in listed] == [Wanted.RUN, Wanted.STOP]


@pytest.mark.parametrize("gone", [False, True], ids=["its memory is not back", "all is gone"])
def test_both_start_again_only_when_nothing_is_left_and_with_other_ports(gone):
    """While rank 0 stops, which lasts until its memory is back, nothing starts; then both do, at a rendezvous of their own."""
    ended = evolve(report(), shard="m/1/0", generation=GANG.generation("m"))
    ended = evolve(ended, state=ShardState.STOPPED if gone else ShardState.STOPPING)
    head = rank(0, ShardState.STOPPING, "a", wanted=Wanted.STOP, next_at=NOW - 1, crashes=(NOW - 20,))
    fell = rank(1, ShardState.BACKOFF, "b", next_at=NOW - 1, crashes=(NOW - 20,), url="")
    outcome = plan(head, fell, reports={"a": told(ended)}.items())
    found = [outcome.shards[f"m/1/{number}"] for number in (0, 1)]
    if not gone:
        assert [record.attempt for record in found] == [1, 1] and found[1].state is ShardState.BACKOFF
        return
    assert [record.state for record in found] == [ShardState.PLACED, ShardState.PLACED]
    assert [record.attempt for record in found] == [2, 2]
    used = {port for record in found for port in record.allocation.ports}
    assert used.isdisjoint({20001, 20002})
    rendezvous = {record.allocation.head_port for record in found}
    assert rendezvous == {found[0].allocation.ports[1]}
    sent = orders(outcome.shards.values(), outcome.nodes, frozenset(), world().timing)
    assert {order.allocation.head_port for listed in sent.values() for order in listed} == rendezvous
