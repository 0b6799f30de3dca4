"""The server put together: order of start, what is refused with a sentence, reload, stop, restart."""

from __future__ import annotations

import json
import os
import re

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail

from llmgw.config.server import read_server
from llmgw.errors import LlmgwError
from llmgw.fleet.model import Catalog, Model, Profile, StaticEndpoint
from llmgw.router.table import KeyEntry, RoutedModel, Table, endpoint, write_table
from llmgw.server import service
from llmgw.store.errors import StoreError
from llmgw.testing.simulate import model
from tests.server_rig import Rig

STATIC = Model("s", endpoints=(StaticEndpoint("http://127.0.0.1:9/v1"),))


@pytest.fixture
def rigs():
    """Rigs that are stopped at the end."""
    made = []
    yield made
    for rig in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(rig.stop()))


async def started(rigs, rig):
    rigs.append(rig)
    await rig.start()
    return rig


async def ended(rig, monkeypatch):
    """The sentence with which the daemon gives up."""
    said = Deferred()
    monkeypatch.setattr(service, "give_up", lambda reactor, sentence, code=1: said.called or said.callback(sentence))
    rig.server.startService()
    return await said.addTimeout(10, reactor)


@pytest_twisted.ensureDeferred
async def test_a_server_without_profiles_is_only_a_router(rigs, tmp_path):
    """No fleet section: static endpoints are routed, keys work, and nobody waits for agents."""
    rig = await started(rigs, Rig(tmp_path, STATIC, fleet=False))
    assert rig.server.role == "router" and rig.server.port is None
    await rig.until(lambda: [one.id for one in rig.routers.routing.endpoints] == ["static:s/0"], "routed")
    made = await rig.post("/v1/keys", name="x")
    await rig.until(lambda: [key.id for key in rig.routers.routing.keys] == [made["id"]], "the key")
    assert rig.server.status() == "router for 1 models"


@pytest_twisted.ensureDeferred
async def test_it_takes_its_name_and_fleet_from_its_certificate(rigs, tmp_path):
    """The store is bound to the fleet; another fleet's certificate is refused with both ids."""
    rig = await started(rigs, Rig(tmp_path, model("m", 1)))
    assert rig.server.controller.name == "cp1" and rig.server.role == "leader"
    assert rig.server.port.port > 0
    assert rig.server.status() == "leader epoch 1, 0/0 nodes ready, 0/0 replicas ready"


@pytest_twisted.ensureDeferred
async def test_a_second_server_on_one_store_is_refused_with_a_sentence(rigs, tmp_path, monkeypatch):
    """F19, I-L12."""
    rig = await started(rigs, Rig(tmp_path, STATIC, fleet=False))
    (tmp_path / "x").mkdir()
    second = Rig(tmp_path / "x", STATIC, fleet=False)
    second.settings = evolve(second.settings, store=rig.settings.store)
    second.make()
    rigs.append(second)
    sentence = await ended(second, monkeypatch)
    assert sentence.startswith("llmgw-server cannot start: ") and "pid" in sentence
    assert second.routers.stopped == []


@pytest_twisted.ensureDeferred
async def test_a_fleet_address_in_use_ends_the_daemon(rigs, tmp_path, monkeypatch):
    """Listeners fail hard."""
    rig = await started(rigs, Rig(tmp_path, STATIC))
    (tmp_path / "x").mkdir()
    second = Rig(tmp_path / "x", STATIC)
    taken = evolve(second.settings.fleet.listen, port=rig.server.port.port)
    second.settings = evolve(second.settings, fleet=evolve(second.settings.fleet, listen=taken))
    second.make()
    rigs.append(second)
    assert re.search(rf"cannot listen on {taken}: .* in use by pid {os.getpid()} \(", await ended(second, monkeypatch))


@pytest_twisted.ensureDeferred
async def test_a_store_that_is_away_delays_orders_not_the_router(rigs, tmp_path, monkeypatch):
    """The workers run by the table on disk; the store is tried again until it is there."""
    monkeypatch.setattr(service, "AGAIN", 0.05)
    rig = Rig(tmp_path, STATIC, fleet=False)
    rigs.append(rig)
    rig.server._listen()
    store, opening, tries = rig.server.store, rig.server.store.open, []

    def open_later():
        tries.append(1)
        if len(tries) < 3:
            return fail(StoreError("the disk of /x is full", "full"))
        return opening()

    store.open = open_later
    monkeypatch.setattr(rig.server, "_listen", lambda: None)
    await rig.start()
    assert len(tries) == 3 and rig.server.role == "router"


@pytest_twisted.ensureDeferred
async def test_a_restart_publishes_nothing_emptier(rigs, tmp_path):
    """The first table of the next server has all that the last one's had, though no node has reported."""
    rig = await started(rigs, Rig(tmp_path, model("m", 1), STATIC))
    rig.link("a", 1)
    await rig.ready("m")
    await rig.until(lambda: len(rig.routers.routing.endpoints) == 2, "routed")
    await rig.stop()
    rig.agents.clear()
    rig.make()
    tables = []
    publish = rig.routers.publish
    rig.routers.publish = lambda table: (tables.append(table), publish(table))[1]
    await rig.start()
    await rig.until(lambda: tables, "published")
    assert [sorted(one.id for one in table.endpoints) for table in tables] == [["m/1", "static:s/0"]] * len(tables)
    assert tables[0].endpoints[0].key == "key-101"
    assert rig.server.leadership.epoch == 2


@pytest_twisted.ensureDeferred
async def test_a_lost_store_keeps_routes_and_keys(rigs, tmp_path):
    """The database is gone: the routers' table still knows endpoints and keys, and nobody is turned away."""
    before = Table(
        version=5,
        models=(RoutedModel("m", endpoints=("m/3",)),),
        endpoints=(endpoint("m/3", "http://a.sim:20003/v1", model="m", key="k"),),
        keys=(KeyEntry("llmgw-1", "d" * 64, "ann", rpm=3),),
    )
    path = tmp_path / "state" / "router" / "table.json"
    path.parent.mkdir(parents=True)
    write_table(path, before)
    rig = await started(rigs, Rig(tmp_path, model("m", 1)))
    await rig.until(lambda: rig.routers.routing.version > 5, "published")
    assert [one.id for one in rig.routers.routing.endpoints] == ["m/3"]
    assert [(key.id, key.rpm) for key in rig.routers.routing.keys] == [("llmgw-1", 3)]
    (listed,) = (await rig.get("/v1/keys"))["keys"]
    assert listed["name"] == "ann"


@pytest_twisted.ensureDeferred
async def test_reload_takes_catalog_and_refuses_a_bad_certificate(rigs, tmp_path):
    """SIGHUP: models become a revision; where a certificate cannot be used nothing is taken."""
    rig = await started(rigs, Rig(tmp_path, STATIC))
    rig.server.reload(evolve(rig.settings, catalog=Catalog((STATIC, model("m", 0)))))
    await rig.until(lambda: rig.server.controller.truth.catalog_revision == 2, "taken")
    rig.settings.fleet.tls.key.write_bytes(b"rubbish")
    with pytest.raises(LlmgwError):
        rig.server.reload(evolve(rig.settings, catalog=Catalog((STATIC,))))
    assert rig.server.controller.truth.catalog_revision == 2


@pytest_twisted.ensureDeferred
async def test_reload_fails_with_what_is_not_in_force(rigs, tmp_path):
    """A catalog that is refused, and what takes a restart, of which the rest is taken."""
    rig = await started(rigs, Rig(tmp_path, STATIC))
    bad = evolve(model("m", 0), profile=Profile("command", argv=("run", "{weight}")))
    with pytest.raises(LlmgwError, match="the catalog in force stays: models.m.*{weights}"):
        await rig.server.reload(evolve(rig.settings, catalog=Catalog((STATIC, bad))))
    assert rig.server.controller.truth.catalog_revision == 1
    other = evolve(rig.settings, timing=evolve(rig.settings.timing, drain=7.0), catalog=Catalog((STATIC, model("m", 0))))
    with pytest.raises(LlmgwError, match="^timing changed: that takes a restart of llmgw-server, which cuts no stream; models,"):
        await rig.server.reload(other)
    assert rig.server.controller.truth.catalog_revision == 2
    await rig.server.reload(evolve(rig.settings, catalog=other.catalog))


@pytest_twisted.ensureDeferred
async def test_the_same_file_again_makes_no_revision(rigs, tmp_path):
    """A restart with an unchanged file changes nothing."""
    rig = await started(rigs, Rig(tmp_path, STATIC, fleet=False))
    await rig.stop()
    rig.make()
    await rig.start()
    assert rig.server.controller.truth.catalog_revision == 1


@pytest_twisted.ensureDeferred
async def test_stop_is_quick_and_lets_the_routers_go_on(rigs, tmp_path):
    """Within two seconds; the workers are told how, and the lease is released."""
    rig = await started(rigs, Rig(tmp_path, STATIC))
    began = reactor.seconds()
    await rig.stop()
    assert reactor.seconds() - began < 2 and rig.routers.stopped == [False]
    rig.make()
    await rig.start()
    rig.server.interrupted()
    await rig.stop()
    assert rig.routers.stopped == [True]
    rig.make()
    await rig.start()


@pytest_twisted.ensureDeferred
async def test_a_hanging_store_does_not_hold_the_stop(rigs, tmp_path):
    """Each wait of the stop has a deadline."""
    rig = await started(rigs, Rig(tmp_path, STATIC, fleet=False))
    close = rig.server.store.close
    rig.server.store.close = lambda: Deferred()
    began = reactor.seconds()
    await rig.stop()
    assert reactor.seconds() - began < 2
    await close()
    rigs.clear()


def test_example_of_a_whole_file_is_a_server(tmp_path):
    """What the settings give is what the service is made of; making it opens nothing."""
    file = tmp_path / "server.yaml"
    text = "router: {listen: 127.0.0.1:8080}\nstore: sqlite:///state/x.db\nmodels: [{name: s, endpoints: [{url: 'http://h:1/v1'}]}]\n"
    made = service.make_server(read_server(file, text), reactor)
    assert made.role == "router" and not (tmp_path / "state").exists()
    assert json.dumps(made.view.server())
