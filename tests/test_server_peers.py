"""What a server makes of the other servers' rows, and what it shares with them, on an injected clock."""

from __future__ import annotations

import pytest
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock

from llmgw.fleet.timing import Timing
from llmgw.router.table import RoutedModel, Table, endpoint, read_text
from llmgw.server.peers import STOPPED, Peers
from llmgw.server.routing import ServersBehind
from llmgw.server.sharedrouters import SharedRouters
from llmgw.server.workers import NotRouting
from llmgw.store.errors import StoreError
from llmgw.store.servers import Meeting, ServerRecord
from llmgw.testing.simserver import SimLeadership

TIMING = Timing()  # a lease of 15 s: a look each second, silent after 30 s


class Rows:
    """A store with the others' rows: C{rows} are what they say; C{away} why it cannot be asked."""

    def __init__(self) -> None:
        self.rows: dict[str, ServerRecord] = {}
        self.away = ""
        self.shared: list[object] = []

    def write(self, what, job):
        if self.away:
            return fail(StoreError(self.away, "unreachable"))
        if what.startswith("share"):
            self.shared.append(job)
            return succeed(len(self.shared))
        return succeed(Meeting(tuple(self.rows.values()), None, 1))

    def beat(self, name: str, beat: int, **said) -> None:
        self.rows[name] = ServerRecord(name, f"{name}@1", beat, **said)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rows():
    return Rows()


@pytest.fixture
def peers(clock, rows):
    own = ServerRecord("cp1", "cp1@1")
    made = Peers(rows, clock, TIMING, clock.seconds, clock.seconds, lambda: own, lambda: 0, lambda met: None)  # type: ignore[arg-type]
    made.start()
    yield made
    made._loop.stop()


def names(records):
    return [record.name for record in records]


def test_a_server_is_alive_while_its_row_changes_by_our_own_clock(clock, rows, peers):
    """Two leases without a change are silence; what its routers had running counts on, for as long as a drain may take."""
    rows.beat("cp2", 1, in_flight={"m/1": 3})
    clock.pump([1.0] * 29)
    assert names(peers.live()) == ["cp2"] and list(peers.behind(1)) == ["cp2"]
    clock.pump([1.0] * 3)
    assert peers.live() == [] and list(peers.behind(1)) == [] and names(peers.all()) == ["cp2"]
    assert peers.in_flight("m/1") == 3
    clock.pump([1.0] * 570)
    assert peers.in_flight("m/1") == 0
    rows.beat("cp2", 2)
    clock.advance(1.0)
    assert names(peers.live()) == ["cp2"]


def test_while_the_store_is_away_nobody_is_silent(clock, rows, peers):
    """They could not be heard; when it is back they are waited for as before, and limits stay divided."""
    rows.beat("cp2", 1)
    clock.advance(1.0)
    rows.away = "away"
    clock.pump([1.0] * 60)
    assert peers.problem == "away"
    rows.away = ""
    clock.advance(1.0)
    assert names(peers.live()) == ["cp2"]


def test_a_server_that_took_leave_is_not_waited_for_but_its_streams_are(clock, rows, peers):
    """Its routers finish what they have."""
    rows.beat("cp2", 1, role=STOPPED, in_flight={"m/1": 1})
    clock.advance(1.0)
    assert peers.live() == [] and peers.in_flight("m/1") == 1


class Workers:
    """Our own workers; C{late} is what they raise."""

    def __init__(self) -> None:
        self.published: list[Table] = []
        self.late: Exception | None = None

    def publish(self, table: Table) -> int:
        self.published.append(table)
        return len(self.published)

    def when_routing(self, version: int, timeout: float) -> Deferred[None]:
        return fail(self.late) if self.late else succeed(None)

    def in_flight(self, endpoint_id: str) -> int:
        return 0


@pytest.fixture
def shared(clock, rows, peers):
    leadership = SimLeadership(4, "cp1@1")
    made = SharedRouters(Workers(), rows, leadership, peers, clock, lambda: 0)  # type: ignore[arg-type]
    made.leadership = leadership  # type: ignore[attr-defined]
    return made


TABLE = Table(
    epoch=4, models=(RoutedModel("m"),), endpoints=(endpoint("static:m/0", "http://h:1", model="m", key="k", static=True),)
)


def outcome(waiting):
    found = []
    waiting.addBoth(found.append)
    return found


def test_late_workers_of_ours_do_not_make_the_others_go_unheard(clock, rows, peers, shared):
    """Ours are replaced after that time; of the others' nobody knows it."""
    rows.beat("cp2", 1)
    clock.advance(1.0)
    version = shared.publish(TABLE)
    shared._workers.late = NotRouting(1, {}, 10.0)
    found = outcome(shared.when_routing(version, 10.0))
    for beat in range(2, 13):
        rows.beat("cp2", beat)
        clock.advance(1.0)
        shared.look()
    assert isinstance(found[0].value, ServersBehind) and "cp2" in str(found[0].value)
    rows.beat("cp2", 20, routed=1)
    clock.advance(1.0)
    found = outcome(shared.when_routing(version, 10.0))
    assert isinstance(found[0].value, NotRouting)


def test_who_may_not_act_gives_no_table_to_anybody(rows, shared):
    """I-L6: not even to our own workers, who will get the next leader's."""
    shared.leadership.held = False
    shared.publish(TABLE)
    assert shared._workers.published == [] and rows.shared == []
    shared.leadership.held = True
    shared.end()
    shared.publish(TABLE)
    assert shared._workers.published == [] and rows.shared == []


def test_a_table_that_the_store_did_not_take_is_shared_when_it_is_back(clock, rows, peers, shared):
    """The newest one, once."""
    rows.away = "away"
    shared.publish(TABLE)
    shared.publish(Table(epoch=4, models=(RoutedModel("other"),)))
    assert len(shared._workers.published) == 2 and rows.shared == []
    rows.away = ""
    shared.look()
    assert len(rows.shared) == 1 and (shared.version, shared.local) == (1, 2)
    assert read_text(shared._text).models[0].name == "other"
