"""A Hypothesis state machine over the lease: contenders on real databases, with answers lost and commits that come late.

True time is the machine's; each contender's own clock runs a little fast or slow and from another origin. The law: there are
never two that may act at one moment of true time, epochs are each one holder's alone, and they only grow.
"""

from __future__ import annotations

import pytest
from attrs import define, field
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy.exc import DBAPIError

from llmgw.fleet.timing import Timing
from llmgw.store import leaserow
from llmgw.store.backend import make_backend
from llmgw.store.schema import fence, lease
from llmgw.store.tenure import Tenure, Watch
from tests.store_fixtures import *  # noqa: F403

TIMING = Timing()
STEPS = st.sampled_from([0.3, 1.0, 4.0, 8.0, 16.0])
SERVERS = st.integers(0, 2)


def three(values):
    return st.lists(values, min_size=3, max_size=3)


@define
class Contender:
    """One server: its clock, what it has seen, what it holds. C{instance} counts its restarts."""

    name: str
    rate: float
    origin: float
    watch: Watch = field(factory=lambda: Watch(TIMING.lease))
    tenure: Tenure | None = None
    instance: int = 0

    @property
    def holder(self) -> str:
        return f"{self.name}@{self.instance}"

    def clock(self, now: float) -> float:
        return self.origin + now * self.rate

    def may_act(self, now: float) -> bool:
        return self.tenure is not None and self.tenure.may_act(self.clock(now))


@define
class Parked:
    """A transaction that has run but not committed: its server was stopped just before, or the network is slow."""

    context: object
    contender: Contender
    worked: bool
    apply: object


class LeaseMachine(RuleBasedStateMachine):
    """Rules are what can happen. C{backend} is the database, C{other} a second way to it, where there can be two."""

    backend = other = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.parked: Parked | None = None
        self.epochs: dict[int, str] = {}
        self.highest = 0
        with self.backend.writing() as connection:
            connection.execute(lease.update().values(holder="", epoch=0, renewals=0, released=1))
            connection.execute(fence.update().values(holder="", epoch=0))

    @initialize(
        rates=st.lists(st.floats(0.997, 1.003), min_size=3, max_size=3),
        origins=st.lists(st.floats(0, 1e6), min_size=3, max_size=3),
    )
    def begin(self, rates, origins):
        self.contenders = [Contender(f"cp{n}", rate, origin) for n, (rate, origin) in enumerate(zip(rates, origins))]

    def row(self):
        with self.backend.reading() as connection:
            return leaserow.made(connection.execute(leaserow.reading()).one())

    def change(self, statements) -> bool | None:
        """Whether it worked; None if the database gave up because a parked transaction holds the row."""
        try:
            with self.backend.writing() as connection:
                if self.other is not None:
                    connection.exec_driver_sql("SET LOCAL lock_timeout = 2")
                return leaserow.run(connection, statements)
        except DBAPIError:
            return None

    @rule(seconds=STEPS, states=three(st.sampled_from(["well", "well", "cut off", "stopped"])))
    def time_passes(self, seconds, states):
        """Those that are well tick and take their turns, the cut off only tick, the stopped do neither."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            for one, state in zip(self.contenders, states):
                if state != "stopped" and one.tenure is not None:
                    one.tenure.tick(one.clock(self.now))
                if state == "well":
                    self.turn(one, False, 0.0)
                self.at_most_one_may_act()

    @rule(number=SERVERS, lost=st.booleans(), slow=st.sampled_from([0.0, 0.0, 1.5, 7.0]))
    def renews_or_looks(self, number, lost, slow):
        """A turn of the lease's thread. With C{lost} the answer never comes, with C{slow} it comes late."""
        self.turn(self.contenders[number], lost, slow)

    def turn(self, one: Contender, lost: bool, slow: float) -> None:
        sent = one.clock(self.now)
        if one.tenure is not None and not one.tenure.over:
            tenure = one.tenure
            if not tenure.in_time(sent):
                tenure.over, one.tenure = True, None
                return
            if not tenure.awake(sent):
                return
            worked = self.change(leaserow.renewing(one.holder, tenure.epoch))
            self.now += slow
            if worked and not lost:
                tenure.renewed = sent
            elif worked is False and not lost:
                tenure.over, one.tenure = True, None
            return
        row = self.row()
        one.watch.look(row, one.clock(self.now))
        if one.watch.free(one.clock(self.now), one.holder):
            sent = one.clock(self.now)
            worked = self.change(leaserow.taking(row, one.holder, []))
            self.now += slow
            if worked and not lost:
                self.won(one, row.epoch + 1, sent)

    def won(self, one: Contender, epoch: int, sent: float) -> None:
        one.tenure = Tenure(TIMING, epoch, sent, one.clock(self.now))

    @precondition(lambda self: self.parked is None and self.other is not None)
    @rule(number=SERVERS)
    def is_parked_before_its_commit(self, number):
        """A renewal or a take-over whose transaction ran and is not committed yet."""
        one = self.contenders[number]
        sent, tenure = one.clock(self.now), one.tenure
        if tenure is not None and not tenure.over:
            statements, apply = leaserow.renewing(one.holder, tenure.epoch), lambda: setattr(tenure, "renewed", sent)
        else:
            row = self.row()
            one.watch.look(row, sent)
            if not one.watch.free(sent, one.holder):
                return
            statements, apply = leaserow.taking(row, one.holder, []), lambda: self.won(one, row.epoch + 1, sent)
        context = self.other.writing()
        connection = context.__enter__()
        self.parked = Parked(context, one, leaserow.run(connection, statements), apply)

    @precondition(lambda self: self.parked is not None)
    @rule(lost=st.booleans())
    def the_parked_one_commits(self, lost):
        parked, self.parked = self.parked, None
        if commit(parked) and parked.worked and not lost:
            parked.apply()

    @rule(number=SERVERS, what=st.sampled_from(["release", "restart", "outrank"]))
    def something_rare_happens(self, number, what):
        one = self.contenders[number]
        if what == "outrank" and one.may_act(self.now):
            epoch, statements = leaserow.outranking(one.holder, one.tenure.epoch, one.tenure.epoch + 7)
            if self.change(statements):
                one.tenure.epoch = epoch
        elif self.parked is None or self.parked.contender is not one:
            if what == "release" and one.tenure is not None:
                tenure, one.tenure = one.tenure, None
                tenure.over = True
                self.change(leaserow.releasing(one.holder, tenure.epoch))
            elif what == "restart":  # another holder, who knows nothing
                one.instance, one.tenure, one.watch = one.instance + 1, None, Watch(TIMING.lease)

    @invariant()
    def at_most_one_may_act(self):
        acting = [one for one in getattr(self, "contenders", []) if one.may_act(self.now)]
        assert len(acting) <= 1, acting

    @invariant()
    def an_epoch_is_one_holders(self):
        for one in getattr(self, "contenders", []):
            if one.may_act(self.now):
                assert self.epochs.setdefault(one.tenure.epoch, one.holder) == one.holder

    @invariant()
    def epochs_only_grow_and_the_fence_goes_with_the_lease(self):
        row = self.row()
        assert row.epoch >= self.highest
        self.highest = row.epoch
        with self.backend.reading() as connection:
            fenced = connection.execute(fence.select()).mappings().one()
        assert (fenced["holder"], fenced["epoch"]) == (row.holder, row.epoch)

    def teardown(self):
        if self.parked is not None:
            commit(self.parked)


def commit(parked: Parked) -> bool:
    """Whether it could: the database ends a session that stands idle within a transaction, so that its locks block nobody."""
    try:
        parked.context.__exit__(None, None, None)
    except DBAPIError:
        return False
    return True


def explore(url: str, two: bool, examples: int, steps: int, phases=(Phase.generate,)) -> None:
    """Without the phase that shrinks a failure: on a real database it takes minutes."""
    backend = make_backend(url)
    backend.open()
    other = make_backend(url) if two else None
    machine = type("Machine", (LeaseMachine,), {"backend": backend, "other": other})
    how = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    try:
        run_state_machine_as_test(machine, settings=how)
    finally:
        backend.close()
        if other is not None:
            other.close()


def test_never_two_holders_over_sqlite(tmp_path):
    """Contenders over one file, as if its lock had failed."""
    explore(f"sqlite:///{tmp_path}/a.db", False, 25, 20)


@needs_postgres  # noqa: F405
def test_f09_never_two_holders_over_postgresql(postgres):
    """With transactions parked between their last statement and their commit, while others go on."""
    explore(postgres.database(), True, 12, 15)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_postgres  # noqa: F405
def test_never_two_holders_over_postgresql_for_long(postgres):
    """The same with many more runs; slow because each step is a transaction of a real database."""
    explore(postgres.database(), True, 100, 40, tuple(Phase))
