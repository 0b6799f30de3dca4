"""Workers and their server, as real processes: replaced, orphaned, handed over, without a refused connection or a cut stream."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from llmgw.config.server import Address, RouterSettings, Timeouts
from llmgw.holders import command
from llmgw.router.sharedfile import shared_file
from llmgw.router.table import RoutedModel, Table, endpoint, read_table
from llmgw.server.workers import CannotListen, NotRouting, RouterWorkers
from llmgw.testing.scripted_engine import STREAM_HEAD, ScriptedEngine, chunk
from tests.router_rig import RawClient, request_bytes, until
from tests.shared_files import remove_shared_files

OK = b'{"ok":true}'


def script(talk):
    """Plain answers at once; a stream ticks until the test lets it end."""
    while request := talk.request():
        if not request.json.get("stream"):
            talk.answer(OK)
            continue
        talk.send(STREAM_HEAD)
        while not talk.engine.let_go.wait(0.05):
            if not talk.send(chunk(b"data: tick\n\n")):
                return
        talk.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


@pytest.fixture
def engine():
    ScriptedEngine.let_go = threading.Event()
    with ScriptedEngine(script) as engine:
        yield engine
        ScriptedEngine.let_go.set()


@pytest.fixture
def state():
    path = Path(tempfile.mkdtemp(prefix="llmgw-workers-"))
    yield path
    remove_shared_files(path)
    shutil.rmtree(path, ignore_errors=True)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ask(port, path="/v1/chat/completions", body=b'{"model":"m"}', key=""):
    """The status of a request on a new connection; raises if it is refused or reset."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, body, {"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    finally:
        connection.close()


class Load:
    """Requests without pause, each on a new connection, and what went wrong."""

    def __init__(self, port, clients=4):
        self.port, self.done, self.bad, self._stop = port, 0, [], threading.Event()
        self.threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def _run(self):
        while not self._stop.is_set():
            try:
                status = ask(self.port)
                self.done += 1
                if status != 200:
                    self.bad.append(status)
            except Exception as error:
                self.bad.append(repr(error))
            time.sleep(0.002)

    def end(self):
        self._stop.set()
        for thread in self.threads:
            thread.join(15)


class Parent:
    """tests/worker_parent.py as a process."""

    def __init__(self, state, engine, port=0, count=2, drain=8.0):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker_parent", str(state), str(port), engine.url, str(count), str(drain)],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        words = self.process.stdout.readline().split()
        assert words and words[0] == "routing", words
        self.port, self.workers = int(words[1]), [int(word) for word in words[2:]]

    def end(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        self.process.wait(5)


@contextlib.contextmanager
def cleaned(*parents):
    """Ends all workers of these parents in the end, whoever's children they are by then."""
    everyone = list(parents)
    try:
        yield everyone
    finally:
        for parent in everyone:
            if parent.process.poll() is None:
                parent.end()
            parent.process.stdout.close()
            for pid in parent.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda: not any(map(alive, parent.workers)))  # noqa: B023


def streams(port, count):
    clients = []
    for _ in range(count):
        client = RawClient(port)
        client.send(request_bytes())
        client.read_until(b"data: tick")
        clients.append(client)
    return clients


def all_end_well(clients):
    ends = [client.read_until(b"0\r\n\r\n", 10).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for client in clients]
    for client in clients:
        client.socket.close()
    return all(ends)


def test_server_killed_and_restarted_under_load(state, engine):
    """kill -9 of the server during 20 streams, then a new one: no stream cut, no connection refused, the old workers finish."""
    first = Parent(state, engine)
    with cleaned(first) as parents:
        running = streams(first.port, 20)
        load = Load(first.port)
        first.end(signal.SIGKILL)
        until(lambda: load.done > 50)
        second = Parent(state, engine, first.port)
        parents.append(second)
        assert not set(first.workers) & set(second.workers)
        until(lambda: not list((state / "router").glob("1.*.sock")), 5, "old workers have stopped accepting")
        seen = load.done
        until(lambda: load.done > seen + 100)
        load.end()
        assert all(map(alive, first.workers)), "they still have streams"
        engine.let_go.set()
        assert all_end_well(running)
        until(lambda: not any(map(alive, first.workers)), 10, "old workers have gone")
        assert load.bad == []


def test_server_stopped_and_restarted_under_load(state, engine):
    """SIGTERM of the server, which may be half of a restart: its workers go on accepting until the new ones are there."""
    first = Parent(state, engine, count=1)
    with cleaned(first) as parents:
        running = streams(first.port, 5)
        load = Load(first.port, 2)
        first.end(signal.SIGTERM)
        second = Parent(state, engine, first.port, count=2)
        parents.append(second)
        until(lambda: not list((state / "router").glob("1.*.sock")))
        engine.let_go.set()
        assert all_end_well(running)
        load.end()
        assert load.bad == []
        assert load.done > 20
        until(lambda: not any(map(alive, first.workers)), 10)


def test_who_waits_for_a_model_where_no_server_listens_is_sent_on(state, engine):
    """The workers of a server that was killed cannot have a model started: they say "again" as soon as there are newer ones."""
    first = Parent(state, engine, count=1)
    with cleaned(first) as parents:
        waiting = RawClient(first.port)
        waiting.send(request_bytes(b'{"model":"asleep"}'))
        first.end(signal.SIGKILL)
        parents.append(Parent(state, engine, first.port, count=1))
        assert b" 503 " in waiting.read_until(b"router_leaving", 5)
        waiting.socket.close()


def test_fewer_workers_serve_all_sockets(state, engine):
    """A new server with fewer workers takes over all sockets: none is left without somebody who accepts."""
    first = Parent(state, engine, count=3)
    with cleaned(first) as parents:
        first.end(signal.SIGKILL)
        parents.append(Parent(state, engine, first.port, count=1))
        until(lambda: not any(map(alive, first.workers)), 10)
        assert [ask(first.port) for _ in range(60)] == [200] * 60


def table(engine, *more):
    return Table(models=(RoutedModel("m", endpoints=("m/1",)), *more), endpoints=(endpoint("m/1", engine.url, model="m"),))


async def when(condition, seconds=8.0):
    """Wait for a condition without blocking the reactor."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        turn: Deferred[None] = Deferred()
        reactor.callLater(0.02, turn.callback, None)
        await turn


@pytest_twisted.async_yield_fixture
async def workers(state, engine):
    workers = RouterWorkers(reactor, RouterSettings(Address("127.0.0.1", 0), workers=2, timeouts=Timeouts(queue=0.5)), state)
    workers.listen()
    workers.start()
    await workers.when_routing(workers.publish(table(engine)), 15)
    yield workers
    engine.let_go.set()
    await workers.stop(at_once=True)
    for place in workers.places:
        place.kill()
    await when(lambda: all(place.ended for place in workers.places))


@pytest_twisted.ensureDeferred
async def test_killed_worker_is_replaced_on_its_socket(workers, engine):
    """SIGKILL of a worker under load: another one takes its socket; what it had in flight is not counted for ever."""
    load = Load(workers.address[1], 2)
    try:
        await when(lambda: load.done > 20)
        client = await deferToThread(RawClient, workers.address[1])
        client.send(request_bytes())
        await when(lambda: workers.in_flight("m/1") >= 1)
        before = [place.pid for place in workers.places]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await when(lambda: [place.replaced for place in workers.places] == [1, 1])
        await when(lambda: all(place.version == 1 for place in workers.places))
        assert not set(before) & {place.pid for place in workers.places}
        seen = load.done
        await when(lambda: load.done > seen + 20)
        client.socket.close()
    finally:
        await deferToThread(load.end)
    # Connections that a killed worker had accepted die with it; nobody is refused.
    assert not [bad for bad in load.bad if "Refused" in str(bad)]
    await when(lambda: workers.in_flight("m/1") == 0)


@pytest_twisted.ensureDeferred
async def test_fifty_streams_die_with_their_worker_and_are_forgotten(workers, engine):
    """SIGKILL and SIGSTOP of workers with fifty streams: each client sees its end, nothing stays counted, others are served."""
    for number in (signal.SIGKILL, signal.SIGSTOP):
        replaced = sum(place.replaced for place in workers.places)
        clients = await deferToThread(lambda: [RawClient(workers.address[1]) for _ in range(50)])
        for client in clients:
            client.send(request_bytes())
        await deferToThread(lambda clients=clients: [client.read_until(b"tick", 10) for client in clients])
        assert workers.in_flight("m/1") == 50
        for place in workers.places:
            os.kill(place.pid, number)
        ends = await deferToThread(lambda clients=clients: [client.read_all(15) for client in clients])
        assert not any(b"[DONE]" in end or end.endswith(b"0\r\n\r\n") for end in ends)
        await when(lambda replaced=replaced: sum(place.replaced for place in workers.places) == replaced + 2)
        await when(lambda: workers.in_flight("m/1") == 0)
        await when(lambda: workers.versions() == {0: 1, 1: 1})
        assert await deferToThread(lambda: [ask(workers.address[1]) for _ in range(10)]) == [200] * 10
        for client in clients:
            client.socket.close()


@pytest_twisted.ensureDeferred
async def test_a_worker_is_replaced_when_the_shared_files_have_been_removed(workers, engine):
    """What cleans up shared memory at a logout takes no worker away for good, and all go on counting together."""
    for name in ("scoreboard", "prefixes"):
        shared_file(workers.folder, name).unlink()
    os.kill(workers.places[0].pid, signal.SIGKILL)
    await when(lambda: workers.places[0].replaced == 1 and workers.versions() == {0: 1, 1: 1})
    assert await deferToThread(lambda: [ask(workers.address[1]) for _ in range(20)]) == [200] * 20
    clients = await deferToThread(lambda: [RawClient(workers.address[1]) for _ in range(8)])
    for client in clients:
        client.send(request_bytes())
    await when(lambda: workers.in_flight("m/1") == 8)
    for client in clients:
        client.socket.close()
    await when(lambda: workers.in_flight("m/1") == 0)
    assert workers.places[0].replaced == 1


@pytest_twisted.ensureDeferred
async def test_stopped_worker_is_replaced(workers, engine):
    """SIGSTOP of a worker: after 3 seconds of silence another one takes its place."""
    os.kill(workers.places[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    await when(lambda: workers.places[0].replaced >= 1)
    assert 2.0 < time.monotonic() - began < 6.0
    await when(lambda: workers.versions() == {0: 1, 1: 1})
    results = await deferToThread(lambda: [ask(workers.address[1]) for _ in range(30)])
    assert results == [200] * 30


@pytest_twisted.ensureDeferred
async def test_f03_a_server_that_was_suspended_does_not_replace_its_workers(workers, engine):
    """It did not hear what they said meanwhile; one that says nothing afterwards is replaced as ever."""
    await when(lambda: workers.versions() == {0: 1, 1: 1})
    pids = [place.pid for place in workers.places]
    for place in workers.places:
        place._last_heard -= 10.0
    workers._checked -= 10.0
    workers._check()
    assert not any(place.ended or place.reactor.seconds() < place._last_heard for place in workers.places)
    await when(lambda: all(place.reactor.seconds() - place._last_heard < 1.0 for place in workers.places))
    assert [place.pid for place in workers.places] == pids and [place.replaced for place in workers.places] == [0, 0]


@pytest_twisted.ensureDeferred
async def test_publish_is_acknowledged(workers, engine):
    """A new table is routed by all workers within a moment; the same table again is no new version."""
    assert workers.publish(table(engine)) == 1
    version = workers.publish(table(engine, RoutedModel("new", reason="loading")))
    assert version == 2
    await workers.when_routing(version, 5)
    assert workers.versions() == {0: 2, 1: 2}
    assert read_table(workers.folder / "table.json").version == 2
    assert (workers.folder / "table.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(NotRouting) as caught:
        await workers.when_routing(99, 0.1)
    assert caught.value.versions == {0: 2, 1: 2}


@pytest_twisted.ensureDeferred
async def test_k2_news_that_a_worker_missed(workers, engine, monkeypatch):
    """K2: a worker that was not told of a table routes by it all the same within a moment: it is told again until it does."""
    with monkeypatch.context() as deaf:
        deaf.setattr(type(workers.places[0]), "send", lambda place, type, **values: None)
        version = workers.publish(table(engine, RoutedModel("new")))
        await when(lambda: read_table(workers.folder / "table.json").version == version)
        assert set(workers.versions().values()) == {version - 1}
    await workers.when_routing(version, 3)


@pytest_twisted.ensureDeferred
async def test_what_workers_say_is_passed_on(workers, engine):
    """Demand for a sleeping model and failures of an endpoint reach the server."""
    demanded, failed = [], []
    workers.on_demand, workers.on_failure = demanded.append, lambda *args: failed.append(args)
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = endpoint("m/1", f"http://127.0.0.1:{free.getsockname()[1]}/v1", model="m")
    models = (RoutedModel("m", endpoints=("m/1",)), RoutedModel("asleep", on_demand=True))
    await workers.when_routing(workers.publish(Table(models=models, endpoints=(dead,))), 5)
    assert await deferToThread(ask, workers.address[1]) == 502
    assert await deferToThread(ask, workers.address[1], body=b'{"model":"asleep"}') == 504
    await when(lambda: demanded and failed)
    assert demanded[0] == "asleep"
    assert failed[0][:2] == ("m/1", "connect")
    assert "cannot be connected to" in failed[0][2]


@pytest_twisted.ensureDeferred
async def test_full_disk_keeps_the_table_before(workers, engine, monkeypatch):
    """A table that cannot be written leaves the old one in force, and is tried again."""
    os.mkdir(workers.folder / "table.json.new")  # what the writer wants to create is in the way
    version = workers.publish(table(engine, RoutedModel("new")))
    with pytest.raises(NotRouting):
        await workers.when_routing(version, 0.5)
    assert await deferToThread(ask, workers.address[1]) == 200
    os.rmdir(workers.folder / "table.json.new")
    await workers.when_routing(version, 5)


def test_address_in_use_is_said_in_a_sentence(state):
    """Another program on the port: one sentence that says so and names it, even if it shares its port."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        workers = RouterWorkers(reactor, RouterSettings(Address("127.0.0.1", port)), state)
        with pytest.raises(CannotListen) as caught:
            workers.listen()
    assert str(caught.value) == (
        f"router.listen 127.0.0.1:{port}: Address already in use by pid {os.getpid()} ({command(os.getpid())}). "
        "Stop the program that has it, or set another."
    )


def test_keys_become_required_before_the_first_worker_starts(state, engine):
    """Settings changed while nothing ran: the table on disk gets them before a worker can route by the old ones."""
    parent = Parent(state, engine, count=1)
    with cleaned(parent):
        assert ask(parent.port) == 200
        parent.end(signal.SIGKILL)
        workers = RouterWorkers(reactor, RouterSettings(Address("127.0.0.1", parent.port), keys="required"), state)
        workers.listen()
        before = read_table(state / "router" / "table.json")
        assert not before.keys_required
        workers.prepare()
        after = read_table(state / "router" / "table.json")
        assert after.keys_required
        assert after.version == before.version + 1
        workers.stop(at_once=True)
