"""What keeps a large fleet cheap for its server, over two real protocols: short reports, and redials that are spread."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from attrs import evolve

from llmgw.fleet.node import Device, Inventory
from llmgw.server.membership import Membership
from llmgw.wire.messages import Report
from tests.fleetlink import Members, Node, a_world, order, shard
from tests.uplink_rig import ScriptedServer, link_to


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def told(server):
    """The orders in each report on the newest link."""
    return [[one.order for one in report.shards] for report in server.link.of(Report)]


def test_an_order_is_told_once_on_a_link(world):
    """The registration has it, the reports that follow have only what is new; the next link begins anew."""
    server, node = ScriptedServer(world), Node("n1")
    node.shards = (shard(),)
    agent = world.agent(node=node)
    link_to(world, server, agent)
    other = order(operation="op2")
    node.shards = (evolve(shard(), order=other), shard("m/2/0"))
    server.beat()
    world.net.run(1)
    server.beat()
    world.net.run(1)
    assert told(server) == [[None], [other, order("m/2/0")], [None, None]]
    server.link.transport.abortConnection()
    world.net.run(1)
    link_to(world, server, agent)
    assert [one.order for one in server.link.heard[0].shards] == [other, order("m/2/0")]
    assert told(server) == [[None, None]]


def test_orders_that_fit_no_line_together_are_told_one_after_the_other(world):
    """A registration of eight shards with 200 KB each would be longer than a line may be, and no link would ever come about."""
    server, node = ScriptedServer(world), Node("n1")
    names = [f"m/{number}/0" for number in range(8)]
    node.shards = tuple(evolve(shard(name), order=order(name, filler="x" * 200_000)) for name in names)
    agent = world.agent(node=node)
    link_to(world, server, agent)
    for _ in range(3):
        server.beat()
        world.net.run(1)
    registered = [one.order for one in server.link.heard[0].shards]
    each = [registered, *told(server)]
    assert [sum(one is not None for one in orders) for orders in each] == [2, 2, 2, 2, 0]
    together = [next(filter(None, column)) for column in zip(*each, strict=True)]
    assert together == [one.order for one in node.shards]


def test_a_report_without_an_order_means_the_one_told_before():
    """For the same attempt only; of another one the server knows none until it is told."""
    members, news = Membership(lambda: 0.0, lambda: None), []
    node = Node("n1")
    node.shards = (shard(),)
    members.joined("n1", "s", node.register("f", ""), None)
    for attempt in (1, 1, 2):
        members.report("n1", "s", Report(1, 1, (evolve(shard(), order=None, attempt=attempt),)))
        news.append(members.present["n1"].told.shards["m/1/0"].order)
    assert news == [order(), order(), None]


def test_more_free_memory_is_news_only_to_what_waits_for_room():
    """It happens somewhere in a large fleet all the time; a device that comes, goes or fails is news for everybody."""
    news, room, node = [], [], Node("n1")
    members = Membership(lambda: 0.0, lambda: news.append(1), lambda: room.append(1))
    members.joined("n1", "s", node.register("f", ""), None)
    gpu = Device("GPU-1", 0, "x", 2**36, memory_used=2**30)
    first = Inventory(8, 2**36, memory_available=2**33, devices=(gpu,))
    steps = [
        (first, 1, 0),
        (evolve(first, memory_available=2**34), 0, 1),
        (evolve(first, memory_available=2**32), 0, 0),
        (evolve(first, memory_available=2**32, devices=(evolve(gpu, memory_used=0),)), 0, 1),
        (evolve(first, memory_available=2**32, devices=(evolve(gpu, memory_used=0, problem="Xid 79"),)), 1, 0),
        (evolve(first, memory_available=2**32, devices=()), 1, 0),
    ]
    members.report("n1", "s", Report(1, 1, ()))
    for inventory, of_all, of_room in steps:
        news.clear()
        room.clear()
        members.report("n1", "s", Report(1, 1, (), inventory))
        assert (len(news), len(room)) == (of_all, of_room), inventory


def test_f39_a_fleet_comes_back_spread_also_when_its_server_is_away_for_a_while(world):
    """F39: those that dialed while nobody listened wait as long a time as the others, not a second: no burst at the start."""
    chance = random.Random(7)
    world.random = chance.random
    port = world.server()
    agents = [world.agent(f"n{number}") for number in range(20)]
    world.net.until(lambda: len(port.sessions()) == 20)
    port.expected = 500  # They were welcomed when there were few.
    world.net.run(6)
    members = Members()
    world.stop(port)
    world.net.run(5)
    world.server(members=members)
    began, seen = world.net.seconds(), []
    while len(seen) < 20:
        world.net.run(0.5)
        seen += [world.net.seconds() - began] * (len(members.of("joined")) - len(seen))
        assert seen[-1:] < [60.0]
    most = max(Counter(int(at / 5) for at in seen).values())
    assert most <= 10 and seen[-1] > 10, seen
    assert all("linked" in agent.status for agent in agents)


def test_b8_a_hundred_agents_come_back_spread_after_a_minute_without_a_server(world):
    """B8: all are back when the longest wait of 15 s is over, and no second has more of them than such waits make likely.

    What is left of waits between nothing and 15 s is under a second for two in 15, so the first seconds have most of them.
    """
    chance = random.Random(8)
    world.random = chance.random
    agents = [world.agent(f"n{number}") for number in range(100)]
    world.net.run(60, 0.25)
    members = Members()
    world.server(members=members)
    began, seen = world.net.seconds(), []
    while len(seen) < 100:
        world.net.run(0.5)
        seen += [world.net.seconds() - began] * (len(members.of("joined")) - len(seen))
        assert world.net.seconds() - began < 17
    assert max(Counter(map(int, seen)).values()) <= 20, seen
    assert all("linked" in agent.status for agent in agents)
