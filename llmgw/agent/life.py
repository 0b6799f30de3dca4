"""The life of one attempt as a state machine: which event leads where, and what that sets going. No I/O, no clock.

    starting -> loading -> ready -> draining          what an engine that does well goes through
                             ready, draining -> sleeping -> ready     it gives its memory back for a while
       any of these  --fail-->  failing  --gone-->  failed     something may be left of it: it is ended first
       any of these  --died-->  failed                         its whole tree is known to be gone
       any of these, failing  --stop-->  stopping  --gone-->  stopped
       failed  --stop-->  stopped                              nothing to do

C{failing} and C{stopping} are both shown as C{stopping}; failed and stopped are the end: another attempt is another life.
"""

from __future__ import annotations

from typing import Protocol

from automat import TypeMachineBuilder

from llmgw.fleet.shard import ShardState


class Effects(Protocol):
    """What the machine sets going."""

    def enter(self, state: ShardState, reason: str) -> None:
        """Show this state from now on."""

    def end_all(self, of_dead_engine: bool) -> None:
        """End whatever there is of the attempt, and say C{gone} afterwards; a second call while that goes on does nothing."""

    def drain_when_ready(self) -> None:
        """A drain was asked of an engine that takes no requests yet."""


class Life(Protocol):
    """What can happen to an attempt."""

    def phase_seen(self) -> None:
        """Its output or its port shows that it has begun to load."""

    def serves(self, reason: str) -> None:
        """It answers for its model."""

    def drain(self, reason: str) -> None:
        """It is to get no new requests."""

    def sleep(self, reason: str) -> None:
        """It has given its memory back."""

    def wake(self, reason: str) -> None:
        """It has taken it again. To serve is not enough: an engine that sleeps may say that it is well."""

    def fail(self, reason: str, of_dead_engine: bool) -> None:
        """It cannot go on, and some of it may be left."""

    def died(self, reason: str) -> None:
        """All of it is gone, uncalled for."""

    def stop(self, reason: str) -> None:
        """It is to end."""

    def gone(self) -> None:
        """Nothing of it is left."""


class Story:
    """The machine's own memory: why it fails."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.reason = ""


_builder = TypeMachineBuilder(Life, Story)

starting = _builder.state("starting")
loading = _builder.state("loading")
ready = _builder.state("ready")
draining = _builder.state("draining")
sleeping = _builder.state("sleeping")
failing = _builder.state("failing")
stopping = _builder.state("stopping")
failed = _builder.state("failed")
stopped = _builder.state("stopped")

_ALIVE = (starting, loading, ready, draining, sleeping)


@starting.upon(Life.phase_seen).to(loading)
def _load(life: Life, story: Story) -> None:
    story.effects.enter(ShardState.LOADING, "the engine has begun to load")


def _serve(life: Life, story: Story, reason: str) -> None:
    story.effects.enter(ShardState.READY, reason)


def _drain(life: Life, story: Story, reason: str) -> None:
    story.effects.enter(ShardState.DRAINING, reason)


def _sleep(life: Life, story: Story, reason: str) -> None:
    story.effects.enter(ShardState.SLEEPING, reason)


def _drain_later(life: Life, story: Story, reason: str) -> None:
    story.effects.drain_when_ready()


def _fail(life: Life, story: Story, reason: str, of_dead_engine: bool) -> None:
    story.reason = reason
    story.effects.enter(ShardState.STOPPING, reason)
    story.effects.end_all(of_dead_engine)


def _die(life: Life, story: Story, reason: str) -> None:
    story.effects.enter(ShardState.FAILED, reason)


def _stop(life: Life, story: Story, reason: str) -> None:
    story.reason = reason
    story.effects.enter(ShardState.STOPPING, reason)
    story.effects.end_all(False)


def _stop_failed(life: Life, story: Story, reason: str) -> None:
    story.effects.enter(ShardState.STOPPED, reason)


def _gone_failed(life: Life, story: Story) -> None:
    story.effects.enter(ShardState.FAILED, story.reason)


def _gone_stopped(life: Life, story: Story) -> None:
    story.effects.enter(ShardState.STOPPED, story.reason)


for _state in (starting, loading):
    _state.upon(Life.serves).to(ready)(_serve)
    _state.upon(Life.drain).loop()(_drain_later)
ready.upon(Life.drain).to(draining)(_drain)
for _state in (ready, draining):
    _state.upon(Life.sleep).to(sleeping)(_sleep)
sleeping.upon(Life.wake).to(ready)(_serve)
for _state in _ALIVE:
    _state.upon(Life.fail).to(failing)(_fail)
    _state.upon(Life.died).to(failed)(_die)
    _state.upon(Life.stop).to(stopping)(_stop)
failing.upon(Life.stop).to(stopping)(_stop)
failing.upon(Life.gone).to(failed)(_gone_failed)
stopping.upon(Life.gone).to(stopped)(_gone_stopped)
failed.upon(Life.stop).to(stopped)(_stop_failed)

# What comes too late, or for the second time, means nothing.
for _state in (loading, ready, draining, sleeping, failing, stopping, failed, stopped):
    _state.upon(Life.phase_seen).loop().returns(None)
for _state in (starting, loading, ready, draining, failing, stopping, failed, stopped):
    _state.upon(Life.wake).loop().returns(None)
for _state in (ready, draining, sleeping, failing, stopping, failed, stopped):
    _state.upon(Life.serves).loop().returns(None)
for _state in (starting, loading, sleeping, failing, stopping, failed, stopped):
    _state.upon(Life.sleep).loop().returns(None)
for _state in (draining, sleeping, failing, stopping, failed, stopped):
    _state.upon(Life.drain).loop().returns(None)
for _state in (failing, stopping, failed, stopped):
    _state.upon(Life.fail).loop().returns(None)
    _state.upon(Life.died).loop().returns(None)
for _state in (stopping, stopped):
    _state.upon(Life.stop).loop().returns(None)
for _state in (*_ALIVE, failed, stopped):
    _state.upon(Life.gone).loop().returns(None)

_make = _builder.build()


def begin_life(effects: Effects) -> Life:
    """A new attempt's machine, in C{starting}."""
    return _make(Story(effects))
