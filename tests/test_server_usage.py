"""Usage on its way into the store."""

from __future__ import annotations

import os

import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock, deferLater

from llmgw.server.usage import UsageSpool
from llmgw.store.errors import StoreError
from llmgw.store.records import UsageRow


class Store:
    """Takes batches, or does not."""

    def __init__(self):
        self.batches = []
        self.failing = False
        self.hanging = None
        self.used = []

    def usage(self, since, until, by):
        self.asked = (since, until, by)
        return fail(StoreError("full", "full")) if self.failing else succeed(self.used)

    def add_usage(self, batch, rows):
        self.batches.append((batch, rows))
        if self.hanging is not None:
            return self.hanging
        return fail(StoreError("full", "full")) if self.failing else succeed(True)


def row(requests=1, key="k", model="m", **more):
    return {"key": key, "model": model, "requests": requests, **more}


def spool():
    clock, store = Clock(), Store()
    made = UsageSpool(store, clock, lambda: 7200.5 + clock.seconds())
    made.start()
    return clock, store, made


def test_rows_are_added_up_by_hour_key_and_model():
    """One row for many requests, written every few seconds and not when there is nothing."""
    clock, store, made = spool()
    made.add([row(2, prompt_tokens=10, seconds=0.5), row(1, prompt_tokens=5), row(1, model="n")])
    clock.advance(5)
    ((_, rows),) = store.batches
    assert [(r.hour, r.key, r.model, r.requests, r.prompt_tokens, r.seconds) for r in rows] == [
        (7200, "k", "m", 3, 15, 0.5),
        (7200, "k", "n", 1, 0, 0),
    ]
    clock.advance(20)
    assert len(store.batches) == 1
    made.stop()


def test_a_batch_that_may_have_been_written_keeps_its_id():
    """The store takes an id once; what comes meanwhile goes into the next batch."""
    clock, store, made = spool()
    store.failing = True
    made.add([row()])
    clock.advance(5)
    made.add([row(5)])
    store.failing = False
    clock.advance(5)
    clock.advance(5)
    (first, rows), (again, same), (third, more) = store.batches
    assert first == again != third and rows == same
    assert [r.requests for r in more] == [5]
    made.stop()


def test_a_slow_store_gets_one_batch_at_a_time():
    """The next waits."""
    clock, store, made = spool()
    store.hanging = Deferred()
    made.add([row()])
    clock.advance(5)
    made.add([row()])
    clock.advance(60)
    assert len(store.batches) == 1
    store.hanging.callback(True)
    store.hanging = None
    clock.advance(5)
    assert len(store.batches) == 2
    made.stop()


def test_senseless_rows_and_a_flood_of_names_are_bounded():
    """A bad row harms no other; beyond the limit new names are counted and dropped, known ones still add up."""
    clock, store, made = spool()
    made.LIMIT = 2
    made.add([{"model": "m"}, row(), row(key="l"), row(key="x"), row()])
    made.stop()
    assert made.dropped == 1
    assert sorted((r.key, r.requests) for r in store.batches[0][1]) == [("k", 2), ("l", 1)]


def test_stop_writes_what_there_is():
    """Nothing is left for the next start to miss."""
    clock, store, made = spool()
    made.add([row()])
    made.stop()
    assert len(store.batches) == 1
    clock.advance(60)
    assert len(store.batches) == 1


def test_todays_tokens_are_told_at_the_start():
    """Of this day (UTC), by key; a store that does not answer is said in a line, and nothing stops for it."""
    store, told = Store(), []
    store.used = [UsageRow(0, "k", "", prompt_tokens=30, completion_tokens=12), UsageRow(0, "", "", prompt_tokens=5)]
    made = UsageSpool(store, Clock(), lambda: 3 * 86400 + 7200.5)
    made.on_today = lambda *words: told.append(words)
    made.add([row(key="k", prompt_tokens=1), row(key="other", completion_tokens=3)])
    made.start()
    assert store.asked == (3 * 86400, 4 * 86400, ("key",))
    assert told == [({"k": 43, "other": 3}, 3 * 86400 + 7200.5)]
    store.failing = True
    again = UsageSpool(store, Clock(), lambda: 0.0)
    again.on_today = lambda *words: told.append(words)
    again.start()
    assert len(told) == 1


def on_disk(path, store):
    made = UsageSpool(store, reactor, lambda: 7200.5, path)
    made.start()
    return made


def let_go(*spools):
    """As a process that dies does."""
    for made in spools:
        made._loop.stop()


@pytest_twisted.ensureDeferred
async def test_what_the_store_did_not_take_outlives_the_process_and_is_counted_once(tmp_path):
    """The file is there only while it is needed, and keeps the id of a batch that may have been written."""
    path, store = tmp_path / "usage.json", Store()
    first = on_disk(path, store)
    first.add([row(1)])
    await first.flush()
    assert not path.exists()
    store.failing = True
    first.add([row(2)])
    await first.flush()
    first.add([row(3)])
    await first.stop()
    assert path.stat().st_mode & 0o777 == 0o600
    store.failing, before = False, store.batches[-1][0]
    second = on_disk(path, store)
    await second.flush()
    assert store.batches[-1][0] == before
    await second.flush()
    assert [sum(r.requests for r in rows) for _, rows in store.batches[-2:]] == [2, 3]
    assert not path.exists()
    await second.stop()


@pytest_twisted.ensureDeferred
async def test_a_batch_on_its_way_is_on_disk_under_its_id(tmp_path):
    """A death between the store's yes and our hearing it counts nothing twice."""
    path, store = tmp_path / "usage.json", Store()
    store.failing = True
    first = on_disk(path, store)
    first.add([row(2)])
    await first.flush()
    store.failing = False
    first.add([row(3)])
    await first.flush()
    sent, store.hanging = store.batches[-1][0], Deferred()
    first.flush()
    while store.batches[-1][0] == sent:
        await deferLater(reactor, 0.01)
    third = on_disk(path, Store())
    assert third._batch[0] == store.batches[-1][0] and not third._rows
    let_go(first, third)


@pytest_twisted.ensureDeferred
async def test_a_stop_with_a_store_that_hangs_loses_nothing(tmp_path):
    """Its answer comes too late for this process."""
    path, store = tmp_path / "usage.json", Store()
    made = on_disk(path, store)
    made.add([row(2)])
    store.hanging = Deferred()
    made.flush()
    made.add([row(3)])
    await made.stop()
    again = on_disk(path, Store())
    assert again._batch[0] == store.batches[0][0] and [one.requests for one in again._rows.values()] == [3]
    let_go(again)


@pytest_twisted.ensureDeferred
async def test_a_disk_that_hangs_holds_up_nothing_but_the_file(tmp_path):
    """Nobody reads the pipe that stands where the file is to be written, so opening it blocks as a disk that is gone would."""
    path, store = tmp_path / "usage.json", Store()
    pipe = tmp_path / "usage.json.new"
    os.mkfifo(pipe)
    made = on_disk(path, store)
    made.WITHIN, store.failing = 0.1, True
    for number in range(5):
        made.add([row(1, key=str(number))])
        await made.flush()
    store.failing = False
    await made.flush()
    await made.flush()
    assert sum(r.requests for _, rows in store.batches[-2:] for r in rows) == 5
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    made.WITHIN, store.failing = 10.0, True
    made.add([row(7)])
    while not path.is_file():
        await deferLater(reactor, 0.01)
        await made.flush()
    os.close(reader)
    await made.stop()
    again = on_disk(path, Store())
    assert [r.requests for r in again._batch[1]] == [7]
    let_go(again)


def test_a_spool_that_cannot_be_read_is_put_aside(tmp_path):
    """It keeps no server from starting."""
    path = tmp_path / "usage.json"
    path.write_text("{")
    made = on_disk(path, Store())
    assert not path.exists() and (tmp_path / "usage.json.bad").exists()
    let_go(made)
