"""Several servers route by one table: it comes through the store, is acknowledged, and outlives leader, database and time."""

from __future__ import annotations

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.defer import Deferred

from llmgw.fleet.model import Model, StaticEndpoint
from llmgw.router.scoreboard import ScoreboardFull
from llmgw.store.errors import StoreError
from llmgw.testing.simulate import model
from tests.leading_rig import wait
from tests.store_fixtures import needs_postgres, postgres  # noqa: F401
from tests.test_server_leading import make, pair  # noqa: F401

pytestmark = needs_postgres


@pytest_twisted.ensureDeferred
async def test_keys_and_their_end_reach_a_standbys_routers_before_the_operator_is_told(make):  # noqa: F811
    """When create and revoke answer, every live router knows."""
    one, two = await pair(make, model("m", 1))
    key = await one.post("/v1/keys", name="x", rpm=9)
    assert [(entry.id, entry.rpm) for entry in two.routers.routing.keys] == [(key["id"], 9)]
    await one.post("/v1/keys/revoke", id=key["id"])
    assert two.routers.routing.keys == ()
    assert (one.routers.servers, two.routers.servers) == (2, 2)


def running(rig):
    """The engines of node a that live."""
    return [name for name, engine in rig.agents["a"].engines.items() if engine.live]


@pytest_twisted.ensureDeferred
async def test_a_drain_waits_for_the_routers_and_the_requests_of_every_live_server(make):  # noqa: F811
    """Neither a router that has not read the table nor a stream through another server is cut off."""
    one, two = await pair(make, model("m", 1))
    one.link("a", 1)
    await wait(lambda: one.row("m")["ready"], "ready", one, two)
    await wait(lambda: [e.id for e in two.routers.routing.endpoints] == ["m/1"], "cp2 routes", one, two)
    two.routers.flying["m/1"] = 1
    two.routers.lag = 1000
    routing = one.server.controller.routing
    await one.post("/v1/drain", nodes=["a"], allow_outage=True)
    await wait(lambda: two.routers.routing.endpoints == (), "taken from the table", one, two)
    acknowledged = one.shown("cp2")["routed"]
    await wait(lambda: one.server.company.peers.look() and one.shown("cp2")["routed"] == acknowledged, "seen", one, two)
    assert routing.unrouted == set()
    two.routers.lag = 0
    await wait(lambda: routing.unrouted == {"m/1"}, "acknowledged", one, two)
    assert routing.idle() == frozenset() and running(one) and one.row("m")["in_flight"] == 1
    two.routers.flying["m/1"] = 0
    await wait(lambda: not running(one), "ended", one, two)


@pytest_twisted.ensureDeferred
async def test_a_server_that_is_silent_is_not_waited_for_and_it_is_said(make, caplog_twisted):  # noqa: F811
    """Its row stands still for too long: a drain goes on, limits are no longer shared with it."""
    one, two = await pair(make, model("m", 1))
    one.link("a", 1)
    await wait(lambda: one.row("m")["ready"], "ready", one, two)
    two.server.company.peers._loop.stop()
    one.server.company.peers._patience = 1.0
    await one.post("/v1/drain", nodes=["a"], allow_outage=True)
    await wait(lambda: not running(one), "drained", one, seconds=20.0)
    assert any("cp2: nothing was heard of it for 1 s; it is no longer waited for" in line for line in caplog_twisted)
    assert one.shown("cp2")["role"] == "silent" and one.routers.servers == 1


@pytest_twisted.ensureDeferred
async def test_i_d2_a_store_that_is_away_takes_nothing_from_a_standbys_routers(make):  # noqa: F811
    """I-D2: neither while it is away nor when it comes back without a table. Also after a restart meanwhile."""
    one, two = await pair(make, model("m", 1))
    one.link("a", 1)
    await wait(lambda: one.row("m")["ready"], "ready", one, two)
    await wait(lambda: [e.id for e in two.routers.routing.endpoints] == ["m/1"], "cp2 routes", one, two)
    write = two.server.store.write

    def away(what, job):
        from twisted.internet.defer import fail

        return fail(StoreError("it is away", "unreachable"))

    two.server.store.write = away
    await wait(lambda: two.server.company.peers.problem, "noticed", one, two)
    assert [e.id for e in two.routers.routing.endpoints] == ["m/1"]
    two.server.store.write = write
    await write("lose the table", lambda connection: connection.exec_driver_sql("DELETE FROM routing"))
    await wait(lambda: not two.server.company.peers.problem, "back", one, two)
    assert [e.id for e in two.routers.routing.endpoints] == ["m/1"]


@pytest_twisted.ensureDeferred
async def test_a_table_that_a_standby_cannot_route_by_is_tried_again(make):  # noqa: F811
    """It goes on by the one before and does not say that it has the new one."""
    one, two = await pair(make, model("m", 1))
    publish, tried = two.routers.publish, []

    def full(table):
        tried.append(table)
        raise ScoreboardFull("no row is left")

    two.routers.publish = full
    creating = Deferred.fromCoroutine(one.post("/v1/keys", name="x"))
    await wait(lambda: len(tried) > 1, "tried twice", one, two)
    assert two.routers.routing.keys == () and not creating.called
    two.routers.publish = publish
    await creating
    assert [entry.name for entry in two.routers.routing.keys] == ["x"]


@pytest_twisted.ensureDeferred
async def test_a_request_at_a_standby_wakes_a_model_that_sleeps(make):  # noqa: F811
    """The leader hears of it at its next look."""
    from llmgw.fleet.model import Scale

    sleeping = evolve(model("z", 1), replicas=Scale(0, 1, 60.0))
    one, two = await pair(make, sleeping)
    one.link("a", 1)
    await wait(lambda: one.server.controller.truth.nodes.get("a"), "linked", one, two)
    two.routers.on_demand("z")
    await wait(lambda: one.row("z")["ready"], "woken", one, two)


@pytest_twisted.ensureDeferred
async def test_what_a_standbys_routers_used_is_written_to_the_store(make):  # noqa: F811
    """By itself: usage needs no leader."""
    one, two = await pair(make, model("m", 1))
    two.server.usage.add([{"key": "k", "model": "m", "requests": 2, "prompt_tokens": 5}])
    await two.server.usage.flush()
    (row,) = (await one.get("/v1/usage"))["usage"]
    assert (row["key"], row["requests"], row["prompt_tokens"]) == ("k", 2, 5)


@pytest_twisted.ensureDeferred
async def test_keys_of_upstreams_stay_out_of_the_store_and_come_from_each_servers_file(make, tmp_path):  # noqa: F811
    """The database knows where a key is, not what it is."""
    secret = tmp_path / "up.key"
    secret.write_text("sk-upstream\n")
    one, two = await pair(make, Model("s", endpoints=(StaticEndpoint("http://127.0.0.1:9/v1", key_file=str(secret)),)))
    await wait(lambda: [e.key for e in two.routers.routing.endpoints] == ["sk-upstream"], "cp2 has it", one, two)
    text = await two.server.store.read("look", lambda c: c.exec_driver_sql("SELECT text FROM routing").scalar())
    assert "127.0.0.1" in text and "sk-upstream" not in text
    secret.write_text("sk-new\n")
    two.server.reload(two.settings)
    await wait(lambda: [e.key for e in two.routers.routing.endpoints] == ["sk-new"], "read anew by SIGHUP", one, two)


@pytest.fixture
def caplog_twisted():
    """The lines of Twisted's log."""
    from twisted.logger import formatEvent, globalLogPublisher

    lines = []
    observe = lambda event: lines.append(formatEvent(event))  # noqa: E731
    globalLogPublisher.addObserver(observe)
    yield lines
    globalLogPublisher.removeObserver(observe)
