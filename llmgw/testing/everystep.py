"""One fault at one moment of a change: at the Nth message, or before or after the Nth commit.

    python -m llmgw.testing.everystep --change rollout --fault server_dies_before_commit --at 7

Chance (L{llmgw.testing.chaos}) finds what comes of several faults; this leaves out none of the moments between two steps. After
the fault the change has to come to its end by itself, and what it is not about keeps its engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator

from attrs import evolve, frozen
from twisted.internet.defer import Deferred, fail

from llmgw.fleet.model import Model, Scale
from llmgw.fleet.node import Fabric
from llmgw.server.operations import Operations
from llmgw.store.errors import StoreError
from llmgw.testing.invariants import Broken
from llmgw.testing.memorystore import MemoryStore
from llmgw.testing.simulate import Fleet, model

WITHIN = 400.0
AGAIN = 10.0

Reached = Callable[[], bool]
Change = Callable[["Trial"], Iterator[Reached]]


@frozen
class Fault:
    """@ivar moment: C{commit} or C{message}: of which it is counted when it happens.
    @ivar now: what it does there, given the trial and C{go}, which does what would have been done, and that one's node.
    @ivar then: what follows a moment later: what mends it, and what cannot be done in the middle of something.
    """

    moment: str
    now: Callable[[Trial, Callable[[], Deferred[int]], str], Deferred[int]]
    then: Callable[[Trial], None] = lambda trial: None


class _Store(MemoryStore):
    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    def commit(self, epoch: int, changes: Iterable[object]) -> Deferred[int]:
        listed, take = list(changes), super().commit
        return self._trial.passes("commit", lambda: take(epoch, listed))


class _Fleet(Fleet):
    trial: Trial

    def send(self, node: str, line: str, arrive: Callable[[], None]) -> None:
        """See L{Fleet.send}."""
        sent, send = Deferred[int](), super().send

        def go() -> Deferred[int]:
            send(node, line, arrive)
            return sent

        self.trial.passes("message", go, node)


class Trial:
    """A change of a fleet of three nodes, with one fault.

    @param at: at the how manieth moment; 0 is never.
    @ivar ordered: when the catalog was last applied once more.
    @ivar struck: whether it came to that.
    @ivar passed: how many such moments there were.
    """

    MODELS = (model("m", 2), model("n", 1))

    def __init__(self, change: str, fault: str, at: int) -> None:
        self.command = f"python -m llmgw.testing.everystep --change {change} --fault {fault} --at {at}"
        self._change, self._fault, self._at, self.ordered = CHANGES[change], FAULTS[fault], at, 0.0
        self.passed, self.struck, self.node, self._armed, self._mending = 0, False, "", False, False
        fleet = _Fleet({"a": 2, "b": 2, "c": 2}, seed=at)
        fleet.trial, fleet.store = self, _Store(self)
        self.fleet: Fleet = fleet
        for agent in self.fleet.agents.values():
            agent.fabrics = (Fabric("rack"),)
        self.fleet.agents["a"].sleeps = True

    def passes(self, moment: str, go: Callable[[], Deferred[int]], node: str = "") -> Deferred[int]:
        """Do what is to be done now, unless the fault is now."""
        if not self._armed or self.struck or moment != self._fault.moment:
            return go()
        self.passed += 1
        if self.passed != self._at:
            return go()
        self.struck = self._mending = True
        self.node = node
        return self._fault.now(self, go, node)

    def live(self) -> Trial:
        """From a fleet that serves to the end of the change.

        @raise Broken: with the command that repeats it.
        """
        fleet = self.fleet
        try:
            fleet.lead(self.MODELS)
            fleet.until(lambda: all(fleet.ready(one.name) == one.replicas.min for one in self.MODELS), "all models ready")
            kept = next(engine.pid for agent in fleet.agents.values() for engine in agent.running() if engine.order.model == "n")
            self._armed = True
            for reached in self._change(self):
                fleet.until(lambda reached=reached: self._mended() and reached(), "the change is done", WITHIN)  # type: ignore[misc]
            fleet.until(lambda: fleet.ready("n") == 1, "what it is not about serves")
            assert self._fault.then is _reboot or kept in fleet.pids().values(), f"n was started anew: {fleet.describe()}"
        except AssertionError as error:
            raise Broken(f"{error}\nagain: {self.command}") from error
        return self

    def _mended(self) -> bool:
        if self._mending:
            self._mending = False
            self._fault.then(self)
        return True

    def runs(self, **numbers: tuple[Model, int]) -> bool:
        """Whether so many replicas of these models serve, with these profiles, and nothing else of them is there."""
        found = [
            (engine.order.model, engine.order.generation) for agent in self.fleet.agents.values() for engine in agent.running()
        ]
        for name, (one, count) in numbers.items():
            shards = count * (one.profile.parallel.nodes if one.profile else 1)
            mine = [generation for model, generation in found if model == name]
            if mine != [one.generation] * shards or self.fleet.ready(name) < count:
                return False
        return True


# Changes.


def apply(trial: Trial) -> Iterator[Reached]:
    """Another model, over two nodes, and one replica more."""
    more, gang = model("m", 3), model("gang", 1, nodes=2)
    trial.fleet.apply([more, model("n", 1), gang])
    yield lambda: _applied(trial, [more, model("n", 1), gang]) and trial.runs(m=(more, 3), gang=(gang, 1))


def rollout(trial: Trial) -> Iterator[Reached]:
    """Another profile."""
    new = model("m", 2, version=2)
    trial.fleet.apply([new, model("n", 1)])
    yield lambda: _applied(trial, [new, model("n", 1)]) and trial.runs(m=(new, 2))


def remove(trial: Trial) -> Iterator[Reached]:
    """No replicas any more."""
    none = model("m", 0)
    trial.fleet.apply([none, model("n", 1)])
    yield lambda: _applied(trial, [none, model("n", 1)]) and trial.runs(m=(none, 0))


def drain(trial: Trial) -> Iterator[Reached]:
    """A node on which C{m} runs and C{n} does not."""
    fleet = trial.fleet
    homes = {model: {one.partition("@")[2].split()[0] for one in fleet.engines(model)} for model in ("m", "n")}
    (node,) = sorted(homes["m"] - homes["n"])[:1]

    def drained() -> bool:
        if not fleet.controller.truth.nodes[node].draining and fleet.controller.leading:
            Operations(fleet.controller).drain([node], None, False, False).addErrback(lambda _: None)
        return fleet.controller.truth.nodes[node].draining and trial.runs(m=(model("m"), 2)) and not fleet.agents[node].running()

    yield drained


def zero_and_wake(trial: Trial) -> Iterator[Reached]:
    """A model that is asked for, is not used any more, and is asked for again; on one node engines can sleep."""
    fleet = trial.fleet
    idle = evolve(model("z"), replicas=Scale(0, 1, idle_after=5.0))

    def asked() -> bool:
        # A request that waits asks again, whoever leads by then.
        fleet.controller.demand.asked("z")
        return fleet.ready("z") == 1

    def gone() -> bool:
        return not fleet.ready("z") and all("sleeping" in engine for engine in fleet.engines("z"))

    fleet.apply([*trial.MODELS, idle])
    yield lambda: _applied(trial, [*trial.MODELS, idle]) and asked()
    yield gone
    yield asked
    yield lambda: len(fleet.engines("z")) == 1


def failover_in_a_stop(trial: Trial) -> Iterator[Reached]:
    """One replica fewer, and another server while it goes."""
    fewer = [model("m", 1), model("n", 1)]
    trial.fleet.apply(fewer)
    yield lambda: _applied(trial, fewer) and sum("ready" in engine for engine in trial.fleet.engines("m")) < 2
    trial.fleet.usurp()
    yield lambda: trial.runs(m=(fewer[0], 1))


def _applied(trial: Trial, models: list[Model]) -> bool:
    """Whether the catalog is in force; an operator whose order was refused or not answered gives it again after a while."""
    fleet = trial.fleet
    if fleet.controller.truth.catalog.models == tuple(models):
        return True
    if fleet.controller.leading and fleet.clock.seconds() >= trial.ordered + AGAIN:
        trial.ordered = fleet.clock.seconds()
        fleet.apply(models)
    return False


# Faults.


def _die(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    trial.fleet.end()
    return Deferred()


def _die_after(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    go().addErrback(lambda _: None)
    return _die(trial, go, node)


def _next_leads(trial: Trial) -> None:
    trial.fleet.run(3)
    trial.fleet.lead()


def _deposed(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    trial.fleet.store.leads += 1
    return go()


def _stall(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    trial.fleet.store.stalled = True
    return go()


def _resume(trial: Trial) -> None:
    trial.fleet.run(20)
    trial.fleet.store.resume()


def _unanswered(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    go().addErrback(lambda _: None)
    return fail(StoreError("no answer in 2 s", "timeout"))


def _cut(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    trial.fleet.cut.add(node)
    return Deferred()


def _healed(trial: Trial) -> None:
    trial.fleet.run(8)
    trial.fleet.cut.clear()


def _away(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    trial.fleet.agents[node].alive = False
    return go()


def _back(trial: Trial) -> None:
    trial.fleet.run(8)
    trial.fleet.agents[trial.node].alive = True


def _away_after(trial: Trial) -> None:
    """A moment after the message arrived."""
    trial.fleet.agents[trial.node].alive = False
    _back(trial)


def _reboot(trial: Trial) -> None:
    for port in trial.fleet.ports:
        port.unlink(trial.node, "it went down")
    trial.fleet.agents[trial.node].reboot()


def _twice(trial: Trial, go: Callable[[], Deferred[int]], node: str) -> Deferred[int]:
    go()
    return go()


FAULTS = {
    "store_refuses": Fault("commit", lambda trial, go, node: fail(StoreError("the disk is full", "full"))),
    "answer_lost": Fault("commit", _unanswered),
    "store_stalls": Fault("commit", _stall, _resume),
    "server_dies_before_commit": Fault("commit", _die, _next_leads),
    "server_dies_after_commit": Fault("commit", _die_after, _next_leads),
    "deposed_at_commit": Fault("commit", _deposed, lambda trial: trial.fleet.usurp()),
    "message_lost": Fault("message", lambda trial, go, node: Deferred()),
    "message_doubled": Fault("message", _twice),
    "link_breaks": Fault("message", _cut, _healed),
    "server_dies": Fault("message", _die, _next_leads),
    "failover": Fault("message", lambda trial, go, node: go(), lambda trial: trial.fleet.usurp()),
    "agent_dies": Fault("message", _away, _back),
    "agent_dies_after": Fault("message", lambda trial, go, node: go(), _away_after),
    "machine_restarts": Fault("message", lambda trial, go, node: go(), _reboot),
}
CHANGES: dict[str, Change] = {one.__name__: one for one in (apply, rollout, remove, drain, zero_and_wake, failover_in_a_stop)}


def main() -> None:
    """One trial, as the command line has it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--change", choices=CHANGES, required=True)
    options.add_argument("--fault", choices=FAULTS, required=True)
    options.add_argument("--at", type=int, required=True)
    asked = options.parse_args()
    trial = Trial(asked.change, asked.fault, asked.at).live()
    sys.stdout.write(f"{trial.fleet.describe()}\nstruck {trial.struck}, {trial.passed} moments\n")


if __name__ == "__main__":
    main()
