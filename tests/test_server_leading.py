"""Several servers, one store: who leads, what a standby answers, whose catalog is in force, what a lost lead throws away."""

from __future__ import annotations

import gc
import json
import socket
import ssl

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.threads import deferToThread

from llmgw.errors import LlmgwError
from llmgw.fleet.model import Model, StaticEndpoint
from llmgw.server.controller import Controller
from llmgw.store import leaserow
from llmgw.store.errors import StoreError
from llmgw.testing.certificates import Fleet
from llmgw.testing.simulate import model
from tests.leading_rig import SharedRig, stop_all, wait
from tests.store_fixtures import needs_postgres, postgres  # noqa: F401

pytestmark = needs_postgres
STATIC = Model("s", endpoints=(StaticEndpoint("http://127.0.0.1:9/v1"),))


@pytest.fixture
def make(tmp_path, postgres):  # noqa: F811
    """Makes servers over one new database; all are stopped at the end."""
    url, authority, made = postgres.database(), Fleet(), []

    def one(name, *models):
        made.append(SharedRig(tmp_path / f"{name}-{len(made)}", name, url, authority, *models))
        return made[-1]

    yield one
    stop_all(made)


async def pair(make, *models, others=None):
    """cp1, which leads, and cp2, which stands by."""
    one, two = make("cp1", *models), make("cp2", *(models if others is None else others))
    await one.start()
    await two.start()
    assert (one.server.role, two.server.role) == ("leader", "standby")
    await wait(lambda: two.server.controller.truth.catalog_revision == 1 and one.shown("cp2"), "they know each other", one, two)
    return one, two


@pytest_twisted.ensureDeferred
async def test_f10_three_that_start_at_once_on_an_empty_database_have_one_leader(make, caplog_twisted):
    """F10. One makes the tables while the others wait, one leads, all are up."""
    rigs = [make(name, STATIC) for name in ("cp1", "cp2", "cp3")]
    await DeferredList([Deferred.fromCoroutine(rig.start()) for rig in rigs], fireOnOneErrback=True)
    roles = lambda: sorted(rig.server.role for rig in rigs)  # noqa: E731
    await wait(lambda: roles() == ["leader", "standby", "standby"], "one leads", *rigs)
    await wait(lambda: all(len(rig.server.view.server()["servers"]) == 3 for rig in rigs), "all are seen", *rigs)
    await wait(lambda: len({rig.server.leadership.epoch for rig in rigs}) == 1, "all know the epoch", *rigs)
    assert not [line for line in caplog_twisted if "cannot be opened" in line]


@pytest_twisted.ensureDeferred
async def test_the_stores_catalog_is_in_force_whatever_a_standbys_file_says(make):
    """Also when it comes to lead: then its file is shown to differ, and nothing moves until somebody applies it."""
    one, two = await pair(make, model("m", 1), others=(model("m", 2), STATIC))
    await wait(lambda: one.shown("cp2").get("differs"), "cp1 sees it", one, two)
    assert not one.shown("cp1")["differs"]
    assert any("the file of cp2 differs from catalog 1" in text for text in one.server.view.server()["warnings"])
    await one.stop()
    await wait(lambda: two.server.role == "leader", "cp2 leads", two)
    assert two.server.controller.truth.catalog_revision == 1
    assert [(one.name, one.replicas.min) for one in two.server.controller.truth.catalog.models] == [("m", 1)]
    assert any("server.yaml differs from catalog 1" in text for text in two.server.view.server()["warnings"])
    two.server.reload(two.settings)
    await wait(lambda: two.server.controller.truth.catalog_revision == 2, "applied by SIGHUP", two)
    assert not two.shown("cp2")["differs"]


@pytest_twisted.ensureDeferred
async def test_i_l6_a_standby_answers_reads_and_sends_writes_to_the_leader(make):
    """I-L6. The sentence names it and where it is."""
    one, two = await pair(make, model("m", 1))
    one.link("a", 1)
    await wait(lambda: one.row("m")["ready"], "ready", one, two)
    await wait(lambda: two.row("m")["ready"], "the standby shows it", one, two)
    status = await two.get("/v1/status")
    assert (status["server"]["role"], [node["name"] for node in status["nodes"]]) == ("standby", ["a"])
    assert {row["name"]: row["role"] for row in status["server"]["servers"]} == {"cp1": "leader", "cp2": "standby"}
    for path, body in (("/v1/keys", {"name": "x"}), ("/v1/cordon", {"nodes": ["a"]})):
        with pytest.raises(LlmgwError) as refused:
            await two.post(path, **body)
        assert "not leader, ask cp1 (cp1.example:7443)" in str(refused.value)
    with pytest.raises(LlmgwError, match="not leader, ask cp1"):
        await two.get("/v1/logs", shard="m/1/0")
    assert one.server.keys.list() == []


def first_line(port, files):
    """What a server says to a node that says nothing."""
    context = ssl.create_default_context(cafile=files.authority)
    context.check_hostname = False
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["llmgw/1"])
    with socket.create_connection(("127.0.0.1", port), 5) as plain, context.wrap_socket(plain) as link:
        return json.loads(link.makefile("rb").readline())


@pytest_twisted.ensureDeferred
async def test_f22_a_standby_says_who_leads_and_where_before_it_reads_anything(make, tmp_path):
    """The agent needs no second word, and no wait, to know where to go."""
    one, two = await pair(make, model("m", 1))
    files = one.authority.write(tmp_path, "n1", one.authority.node("n1"))
    said = await deferToThread(first_line, two.server.port.port, files)
    assert (said["type"], said["reason"], said["leader"], said["addresses"]) == (
        "refused", "standby", "cp1", ["cp1.example:7443"],
    )  # fmt: skip
    assert (await deferToThread(first_line, one.server.port.port, files))["type"] == "welcome"
    (refusal,) = (await two.get("/v1/refusals"))["refusals"]
    assert (refusal["reason"], refusal["text"]) == ("standby", "cp2 stands by; cp1 leads")


@pytest_twisted.ensureDeferred
async def test_f05_i_l7_a_leader_that_cannot_renew_throws_the_leadership_away(make):
    """I-L7. Links are closed with a word, another controller stands by, what the old one still means to do is nothing.

    Takes the lease that has to run out.
    """
    one, two = await pair(make, model("m", 1))
    agent = one.link("a", 1)
    await wait(lambda: one.row("m")["ready"], "ready", one, two)
    await wait(lambda: [e.id for e in two.routers.routing.endpoints] == ["m/1"], "cp2 routes", one, two)
    old, told = one.server.controller, []
    one.server.port.close_all = lambda goaway, seconds=1.0: told.append(goaway)
    one.server.leadership._table.change = cut
    await wait(lambda: one.server.succession.tenure is None, "stepped down", two)
    said = "cp1 leads no more; nobody led when that could last be seen: cut off"
    assert [(goaway.reason, goaway.text) for goaway in told] == [("standby", said)]
    assert one.server.controller is not old and old.emission.port is None
    assert one.server.reception.readiness().reason == "standby"
    old.joined("b", "s-b", agent.register())
    with pytest.raises(LlmgwError):
        await old.change(list)
    await wait(lambda: two.server.role == "leader" and one.routers.table.epoch == 2, "cp2 leads, cp1 follows", two)
    await wait(lambda: one.server.reception.readiness().leader, "cp1 has seen who leads", two)
    assert two.server.leadership.epoch == 2 and "b" not in two.server.controller.truth.nodes
    assert [(name, record.attempt) for name, record in two.server.controller.truth.shards.items()] == [("m/1/0", 1)]
    assert [e.id for e in one.routers.routing.endpoints] == ["m/1"]
    refused = one.server.reception.readiness()
    assert (refused.reason, refused.leader, refused.addresses) == ("standby", "cp2", ("cp2.example:7443",))


def cut(statements):
    """A database that takes nothing more."""
    raise StoreError("cut off", "unreachable")


@pytest_twisted.ensureDeferred
async def test_i_c7_a_new_leader_stops_and_places_nothing_before_the_grace_is_over(make):
    """I-C7: nobody has reported to it yet."""
    one, two = await pair(make, model("m", 1))
    one.link("a", 1)
    await wait(lambda: one.row("m")["ready"], "ready", one, two)
    await wait(lambda: [e.id for e in two.routers.routing.endpoints] == ["m/1"], "cp2 routes", one, two)
    await one.stop()
    await wait(lambda: two.server.role == "leader", "cp2 leads", two)
    await wait(lambda: two.routers.table.epoch == 2, "its table is out", two)
    assert [e.id for e in two.routers.routing.endpoints] == ["m/1"]
    assert two.server.controller.truth.nodes["a"].state == "ready"


@pytest_twisted.ensureDeferred
async def test_f20_what_was_placed_but_not_ordered_is_ordered_by_the_next_leader(make):
    """The lead is lost between the placement's commit and the order: one engine, first attempt, by the new leader's word."""
    one, two = await pair(make, model("m", 1))
    agent = one.link("a", 1)
    await wait(lambda: one.server.controller.truth.shards, "placed, and told to nobody", two)
    assert not agent.engines
    await one.stop()
    await wait(lambda: two.server.role == "leader", "cp2 leads", two)
    two.agents = one.agents
    two.link("a", 1)
    await wait(lambda: two.row("m")["ready"], "ready", two)
    assert [(name, engine.live) for name, engine in agent.engines.items()] == [("m/1/0", True)]
    (record,) = two.server.controller.truth.shards.values()
    assert (record.attempt, two.server.leadership.epoch) == (1, 2)


@pytest_twisted.ensureDeferred
async def test_i_l4_a_leader_that_the_store_has_deposed_does_not_lead_on(make):
    """The fence's row is another's before the lease's thread has noticed."""
    one, two = await pair(make, STATIC)
    epoch = one.server.leadership.epoch

    def take(connection):
        seen = leaserow.made(connection.execute(leaserow.reading()).one())
        assert leaserow.run(connection, leaserow.taking(seen, two.server.store.holder, ("cp2.example:7443",)))

    one.server.leadership._table.change = lambda statements: True  # its thread is told that all is well
    await two.server.store.write("take over", take)
    with pytest.raises(LlmgwError):
        await one.server.keys.create("x")
    await wait(lambda: one.server.role == "standby" and one.server.succession.tenure is None, "deposed", one)
    await wait(lambda: two.server.role == "leader", "led again", one, two)
    assert two.server.leadership.epoch > epoch
    assert two.server.keys.list() == []


@pytest_twisted.ensureDeferred
async def test_i_l3_a_change_that_meets_the_raising_of_the_epoch_deposes_nobody(make):
    """The row says a higher epoch already, and our own name: the change is refused, and the next one goes through."""
    one, two = await pair(make, STATIC)
    leadership = one.server.leadership
    leadership._table.change = lambda statements: True  # no renewal meets it before we do
    raised, statements = leaserow.outranking(one.server.store.holder, leadership.epoch, 41)
    await two.server.store.write("raise", lambda connection: leaserow.run(connection, statements))
    with pytest.raises(LlmgwError, match="the store took nothing"):
        await one.server.keys.create("x")
    assert one.server.role == "leader" and raised == 42
    leadership.epoch = leadership._tenure.epoch = raised
    await one.server.keys.create("y")
    assert [key.name for key in one.server.keys.list()] == ["y"]


@pytest.mark.slow
@pytest_twisted.ensureDeferred
async def test_f21_fifty_failovers_leave_no_leadership_behind(make):
    """Half a minute: each takes a look of the lease's thread. The epoch grew by fifty, the fleet is as it was, memory is flat."""
    one, two = await pair(make, model("m", 1))
    one.link("a", 1)
    await wait(lambda: one.row("m")["ready"], "ready", one, two)
    for epoch in range(2, 52):
        await one.server.store.write("let go", lambda connection: connection.exec_driver_sql("UPDATE lease SET released = 1"))
        leads = lambda rig, epoch=epoch: rig.server.role == "leader" and rig.server.leadership.epoch == epoch  # noqa: E731
        await wait(lambda leads=leads: leads(one) or leads(two), f"epoch {epoch} leads")
        leader = next(rig for rig in (one, two) if leads(rig))
        leader.agents = one.agents or two.agents
        leader.link("a", 1)
    await wait(lambda: leader.row("m")["ready"], "ready at the last", leader)
    gc.collect()
    assert sum(isinstance(each, Controller) for each in gc.get_objects()) <= 4
    (record,) = leader.server.controller.truth.shards.values()
    assert (record.attempt, record.state) == (1, "ready")


@pytest_twisted.ensureDeferred
async def test_f18_a_second_server_of_the_same_name_is_told_of(make, caplog_twisted):
    """Of two with one name neither would be waited for rightly."""
    one, twin = make("cp1", STATIC), make("cp1", STATIC)
    await one.start()
    await twin.start()
    said = "another llmgw-server"
    await wait(lambda: any(said in line for line in caplog_twisted), "it is said", one, twin)


@pytest.fixture
def caplog_twisted():
    """The lines of Twisted's log."""
    from twisted.logger import formatEvent, globalLogPublisher

    lines = []

    def observe(event):
        lines.append(formatEvent(event))

    globalLogPublisher.addObserver(observe)
    yield lines
    globalLogPublisher.removeObserver(observe)
