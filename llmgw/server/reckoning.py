"""What a profile needs, asked of the adapter of its engine; and what nodes have of the weights, asked of their agents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.engines.registry import adapters
from llmgw.errors import LlmgwError
from llmgw.fleet.fetch import same_weights
from llmgw.fleet.model import Profile
from llmgw.fleet.plain import from_plain
from llmgw.fleet.records import NodeRecord
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import IEngineAdapter, Needs
from llmgw.wire.messages import Done, Inspect

log = Logger()


class Reckoner:
    """L{Needs} of a profile. An installation's name is its adapter's unless a node says otherwise."""

    def __init__(self, found: Mapping[str, IEngineAdapter] | None = None) -> None:
        self._adapters = adapters() if found is None else found
        self._of: dict[str, str] = {}

    def learn(self, nodes: Iterable[NodeRecord]) -> None:
        """Which adapter stands behind each installation."""
        for node in nodes:
            for installation in node.facts.installations if node.facts else ():
                self._of[installation.name] = installation.adapter

    def adapter(self, engine: str) -> IEngineAdapter | None:
        """The adapter of an installation, None if nobody knows it."""
        return self._adapters.get(self._of.get(engine, engine))

    def needs(self, profile: Profile, files: WeightFiles | None) -> Needs:
        """What one shard takes; what the profile says itself where no adapter is known."""
        adapter = self.adapter(profile.engine)
        if adapter is not None:
            found: Needs = adapter.needs(profile, files)
            return found
        said = profile.resources
        return Needs(said.devices or 0, said.device_memory, said.host_memory or 0)


class Asker(Protocol):
    """The part of the fleet port that is used here."""

    def ask(self, node: str, message: Any, timeout: float) -> Deferred[Done]:
        """Send C{message} and wait for its answer."""


class Weights:
    """What nodes have, by C{(node, weights)}. Asked only when placement wants to know, a few nodes at a time.

    Weights that are missing or damaged are looked for again after a while: somebody may have copied them there.
    """

    log = Logger()
    AT_ONCE = 16
    TIMEOUT = 30.0
    AGAIN = 30.0

    def __init__(self, steady: Callable[[], float], news: Callable[[], None]) -> None:
        self._steady = steady
        self._news = news
        self.found: dict[tuple[str, str], WeightFiles] = {}
        self._missing: dict[tuple[str, str], float] = {}
        self._waiting: deque[tuple[str, str, str]] = deque()
        self._asked: dict[tuple[str, str], str] = {}
        self._serial = 0

    def look(self, node: str, weights: str, engine: str) -> None:
        """Find out whether the node has them, unless that is being found out already."""
        key = node, weights
        looked = self._missing.get(key)
        if key in self._asked or (key in self.found and looked is None):
            return
        if looked is not None and self._steady() - looked < self.AGAIN:
            return
        self._asked[key] = engine
        self._waiting.append((node, weights, engine))

    def forget(self, node: str) -> None:
        """The node has come anew: look again when asked."""
        for key in [key for key in self.found if key[0] == node]:
            del self.found[key]
            self._missing.pop(key, None)

    def renew(self, node: str, weights: str) -> None:
        """They were downloaded: look again at once, under each name that they have."""
        for key in [key for key in self.found if key[0] == node and same_weights(key[1]) == same_weights(weights)]:
            del self.found[key]
            self._missing.pop(key, None)
        self._news()

    def pump(self, port: Asker, epoch: int, leader: str) -> None:
        """Ask the next nodes; to be called again after C{news}."""
        running = len(self._asked) - len(self._waiting)
        for _ in range(min(len(self._waiting), self.AT_ONCE - running)):
            node, weights, engine = self._waiting.popleft()
            self._serial += 1
            message = Inspect(f"inspect:{epoch}:{self._serial}", epoch, leader, weights, engine)
            Deferred.fromCoroutine(self._ask(port, node, message)).addErrback(self._surprised)

    async def ask(self, port: Asker, node: str, weights: str, engine: str, epoch: int, leader: str) -> None:
        """Ask this node now, whatever is known; what it says is kept in C{found}."""
        self._serial += 1
        await self._ask(port, node, Inspect(f"inspect:{epoch}:{self._serial}", epoch, leader, weights, engine))

    async def _ask(self, port: Asker, node: str, message: Inspect) -> None:
        try:
            files = _files(await port.ask(node, message, self.TIMEOUT), message.weights)
        except LlmgwError as error:
            self.log.info("{node}: nothing known of {weights}: {error}", node=node, weights=message.weights, error=str(error))
            files = None
        finally:
            self._asked.pop((node, message.weights), None)
        self._keep(node, message.weights, files)

    def _surprised(self, failure: Failure) -> None:
        self.log.failure("while looking for weights", failure)

    def _keep(self, node: str, weights: str, files: WeightFiles | None) -> None:
        self._missing.pop((node, weights), None)
        if files is not None:
            self.found[node, weights] = files
        if files is None or not files.found or files.problem:
            self._missing[node, weights] = self._steady()
        self._news()


def _files(done: Done, weights: str) -> WeightFiles:
    """What the agent found.

    One that cannot look, or whose answer nobody understands, is believed to have them: it will say so when it is to start.
    """
    if not done.ok:
        log.info("{weights} were not looked at: {error}", weights=weights, error=str(done.result.get("text") or done.error))
        return WeightFiles(weights, found=True)
    try:
        return from_plain(done.result.get("files", done.result), WeightFiles)
    except ValueError as error:
        log.error("what was found of {weights} was not understood: {error}", weights=weights, error=str(error))
        return WeightFiles(weights, found=True)
