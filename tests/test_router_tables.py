"""Tables that say more than others: fallbacks, thousands of keys and models, and what a worker makes of those it cannot use."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_twisted
from msgspec.structs import replace
from twisted.internet.threads import deferToThread

from llmgw.router.admission import WaitingRoom
from llmgw.router.breaker import FAILURES
from llmgw.router.prefixes import Prefixes
from llmgw.router.routes import Routes, Shared
from llmgw.router.scoreboard import WAITING, Scoreboard
from llmgw.router.table import KeyEntry, RoutedModel, Table, endpoint, key_digest, table_steps, write_table
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.router_rig import KEY, OK, Rig, idle, plain, until
from tests.test_router_workers import Load, ask, engine, state, table, when, workers  # noqa: F401


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def test_fallback_to_another_model(rig):
    """A model without endpoints is answered by its fallback, under the name that the fallback serves."""
    with ScriptedEngine(plain) as backend:
        table = rig.use(backend)
        models = (*table.models, RoutedModel("asleep", fallbacks=("nobody", "cold", "m")))
        rig.use(backend, models=models)
        assert rig.post(body={"model": "asleep", "messages": []})[0] == 200
        assert backend.requests[-1].json["model"] == "m"
        assert until(lambda: [m for m in rig.heard if m["type"] == "demand" and m["model"] == "asleep"]), "woken nevertheless"


def dead():
    """An address where nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def fallbacks(rig, *urls, static=False, **models):
    """Route each of these models: to the number of an address, with its fallbacks."""
    table = rig.use(*urls)
    entries = tuple(RoutedModel(name, endpoints=(table.endpoints[number].id,), fallbacks=others)
                    for name, (number, *others) in models.items())  # fmt: skip
    rig.version += 1
    endpoints = tuple(replace(one, static=static) for one in table.endpoints)
    rig.publish(replace(table, version=rig.version, models=entries, endpoints=endpoints))


def test_fallback_when_the_endpoints_do_not_answer(rig):
    """No request fails that another model can answer: neither those that find the endpoint dead nor those after it is known to
    be. The log, the metrics and the answer say who answered. When the endpoint is back, it is used again."""
    with ScriptedEngine(plain) as backend:
        gone = dead()
        fallbacks(rig, gone, backend, static=True, main=(0, "m"), m=(1,))
        for _ in range(FAILURES + 3):
            status, headers, _ = rig.post(body={"model": "main"})
            assert (status, headers["x-llmgw-replica"], headers["x-llmgw-fallback"]) == (200, "m/1", "m")
        assert "x-llmgw-fallback" not in rig.post(body={"model": "m"})[1]
        rows = rig.log(FAILURES + 3, asked="main")
        assert {(row["model"], row["replica"], row["outcome"]) for row in rows} == {("m", "m/1", "done")}
        assert [row["retries"] for row in rows] == [1] * FAILURES + [0] * 3
        assert rig.log(model="m", asked=None)
        assert rig.scrape()['llmgw_fallbacks_total{asked="main",model="m"}'] == FAILURES + 3
        with ScriptedEngine(plain, listening=socket.create_server(("127.0.0.1", int(gone.rpartition(":")[2])))) as back:
            until(lambda: "x-llmgw-fallback" not in rig.post(body={"model": "main"})[1], 20, "used again")
            assert back.requests
    idle(rig)


def test_fallback_to_the_first_that_is_usable(rig):
    """Of several the first one that is not broken as well; if none is, the caller hears why."""
    with ScriptedEngine(plain) as backend:
        fallbacks(rig, dead(), dead(), backend, main=(0, "second", "m"), second=(1,), m=(2,))
        for _ in range(FAILURES + 1):
            assert rig.post(body={"model": "main"})[1]["x-llmgw-fallback"] == "m"
        assert rig.post(body={"model": "second"})[1]["x-llmgw-reason"] == "engines_failing"
    fallbacks(rig, dead(), dead(), main=(0, "second"), second=(1,))
    status, headers, body = rig.post(body={"model": "main"})
    assert (status, headers["x-llmgw-reason"]) == (502, "engine_connect") and b"of second" in body
    idle(rig)


def test_fallback_waits_in_the_line_of_the_other(rig):
    """It takes no place that the other model's own requests wait for."""
    go = threading.Event()

    def slow(talk):
        while talk.request():
            go.wait(10)
            talk.answer(OK)

    with ScriptedEngine(slow) as backend:
        table = rig.use(dead(), backend, limit=1)
        models = (RoutedModel("busy", endpoints=("m/0",), fallbacks=("m",)), RoutedModel("m", endpoints=("m/1",)))
        rig.version += 1
        rig.publish(replace(table, version=rig.version, models=models))
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(rig.post, body={"model": "busy"}) for _ in range(4)]
            waiting = rig.board.row("model/m") + WAITING
            until(lambda: rig.board.total(waiting) == 3, 5, "three in line")
            go.set()
            assert [one.result()[0] for one in answers] == [200] * 4
    assert sum(row["queue_ms"] > 0 for row in rig.log(4, asked="busy")) == 3
    idle(rig)


def test_no_fallback_for_what_may_have_ended_an_engine(rig):
    """A request with which an engine has begun is not tried on another model's."""

    def dies(talk):
        talk.request()
        talk.reset()

    with ScriptedEngine(dies) as bad, ScriptedEngine(plain) as backend:
        fallbacks(rig, bad, backend, main=(0, "m"), m=(1,))
        assert rig.post(body={"model": "main"})[1]["x-llmgw-reason"] == "engine_reset"
        assert not backend.requests


def test_fallback_only_to_what_the_key_may_use(rig):
    """A key that is bound to models reaches no other one by way of a fallback: it hears that its own is not ready."""
    with ScriptedEngine(plain) as one, ScriptedEngine(plain) as other:
        table = rig.use(one, other)
        keys = (
            KeyEntry("k1", key_digest(KEY), models=("asleep",)),
            KeyEntry("k2", key_digest("sk-second"), models=("asleep", "second")),
            KeyEntry("k3", key_digest("sk-any")),
        )
        models = (
            RoutedModel("first", endpoints=(table.endpoints[0].id,)),
            RoutedModel("second", aliases=("2nd",), endpoints=(table.endpoints[1].id,)),
            RoutedModel("asleep", fallbacks=("first", "second"), reason="it is starting"),
        )
        rig.version += 1
        rig.publish(replace(table, version=rig.version, models=models, keys=keys))
        status, headers, body = rig.post(body={"model": "asleep"})
        assert (status, headers["x-llmgw-reason"]) == (503, "not_ready") and b"it is starting" in body
        assert (len(one.requests), len(other.requests)) == (0, 0)
        assert rig.post(body={"model": "asleep"}, key="sk-second")[0] == 200
        assert (len(one.requests), len(other.requests)) == (0, 1)
        assert rig.post(body={"model": "asleep"}, key="sk-any")[0] == 200
        assert (len(one.requests), len(other.requests)) == (1, 1)


def test_a_table_of_a_newer_release(rig):
    """What it says that we do not know is left out; one that cannot be used at all leaves the one before in force."""
    with ScriptedEngine(plain) as backend:
        table = rig.use(backend, model=RoutedModel("m", policy="clairvoyant"))
        assert rig.post()[0] == 200
        path = rig.folder / "table.json"
        good = path.read_bytes()
        newer = {**json.loads(good), "colour": "blue", "models": [{"name": "m", "endpoints": ["m/0"], "mood": 1}]}
        bad = [
            good[: len(good) // 2],
            b"",
            b"[]",
            b'{"version":"x"}',
            good.replace(b'"version"', b'"trusted_proxies":["x"],"version"'),
        ]
        for number, text in enumerate([*bad, json.dumps(newer).encode()]):
            rig.heard.clear()
            path.write_bytes(text)
            rig.channel.sendall(b'{"type":"table","version":%d}\n' % table.version)
            until(lambda: [m for m in rig.heard if m["type"] == "routing"])
            assert bool([m for m in rig.heard if m["type"] == "refused"]) == (number < len(bad))
            assert rig.post()[0] == 200


@pytest_twisted.ensureDeferred
async def test_many_keys_and_models(workers, engine):  # noqa: F811
    """Ten thousand keys with limits and a thousand models have room, and a change of their table holds nobody up for long."""
    models = [RoutedModel(f"m{number}", endpoints=("m/1",)) for number in range(1000)]
    keys = tuple(KeyEntry(f"k{number}", key_digest(f"sk-{number}"), rpm=2) for number in range(10_000))
    load = Load(workers.address[1], 1)
    try:
        for version in (1, 2):
            many = replace(table(engine, *models), keys=keys[version:])
            await workers.when_routing(workers.publish(many), 15)
        await when(lambda: load.done > 20)
        limited = await deferToThread(
            lambda: [ask(workers.address[1], body=b'{"model":"m999"}', key="sk-9999") for _ in range(3)]
        )
    finally:
        await deferToThread(load.end)
    assert limited == [200, 200, 429]
    assert not load.bad


def longest_step(steps):
    """What it returns, and the most processor time that one of its steps took."""
    longest = 0.0
    while True:
        begun = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            return end.value, longest
        longest = max(longest, time.thread_time() - begun)


def large(board, version, changed):
    """1,000 models with two replicas each, and 10,000 keys; some have another address than in the table before."""
    replicas = [f"m{number}/{replica}" for number in range(1000) for replica in range(2)]
    models = tuple(RoutedModel(f"m{number}", endpoints=(f"m{number}/0", f"m{number}/1")) for number in range(1000))
    keys = tuple(KeyEntry(f"k{number}", key_digest(f"sk-{number}"), rpm=2) for number in range(10_000))
    names = [f"endpoint/{id}" for id in replicas] + [f"model/{model.name}" for model in models]
    rows = board.assign([*names, *(f"key/{key.id}" for key in keys)], version)
    port = 8000 + version
    endpoints = tuple(
        endpoint(id, f"http://h:{port if number < changed else 8000}/v1", model="m", row=rows[f"endpoint/{id}"])
        for number, id in enumerate(replicas)
    )
    return Table(version, models=models, endpoints=endpoints, keys=keys)


def test_a_large_table_is_taken_up_in_short_steps(tmp_path):
    """Between two of them a worker's streams go on; what is the same in both tables is kept, and all else begins at the end."""
    loop = asyncio.new_event_loop()
    board, prefixes = Scoreboard.create(tmp_path / "scoreboard"), Prefixes(tmp_path / "prefixes")
    shared = Shared(loop, board, prefixes, WaitingRoom(loop.call_later, time.monotonic), tmp_path)
    routes, path = Routes(Table(), board), tmp_path / "table.json"
    gc.disable()
    for version, changed in ((1, 0), (2, 5), (3, 2000)):
        write_table(path, large(board, version, changed))
        table, longest = longest_step(table_steps(path))
        assert longest < 0.015
        before, (routes, longest) = routes, longest_step(Routes.steps(table, shared, routes))
        assert longest < 0.015
        if version == 2:
            same = [name for name, served in routes.models.items() if served is before.models[name]]
            assert len(same) == 997 and "m2" not in same
            assert before.models["m2"].line.group.candidates == before.models["m2"].upstreams
        assert routes.models["m2"].line is before.models["m2"].line if version > 1 else True
        routes.begin()
        assert routes.models["m2"].line.group.candidates == routes.models["m2"].upstreams
        assert routes.caller(key_digest("sk-9999")).id == "k9999"
    gc.enable()
    prefixes.close()
    board.close()
    loop.close()


@pytest.fixture
def damaged(state):  # noqa: F811
    """A table that a disk has lost the end of."""
    folder = state / "router"
    folder.mkdir(parents=True)
    (folder / "table.json").write_text('{"version":41,"models":[{"name":"m","endpo')
    return folder


@pytest_twisted.ensureDeferred
async def test_a_damaged_table_is_put_aside(damaged, workers, engine):  # noqa: F811
    """It keeps no server from starting: the next table that is published is in force."""
    assert await deferToThread(lambda: [ask(workers.address[1]) for _ in range(4)]) == [200] * 4
    assert (damaged / "table.json.bad").exists()
    assert json.loads((damaged / "table.json").read_bytes())["version"] == 1
