"""What is on this node, kept fresh: hardware now and then, engines when their files change, weights when asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.task import LoopingCall
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.agent.installations import Installations
from llmgw.agent.weights import WeightFinder
from llmgw.fleet.fetch import Fetch
from llmgw.fleet.node import Installation, Inventory
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import Flags, IInventory

EVERY = 30.0
Busy = Callable[[str], Fetch | None]
WEIGHTS_DEADLINE = 60.0


class NodeEquipment:
    """@param busy: the download of these weights that goes on here, None if none does.

    @ivar inventory: as last taken; None before the first time.
    """

    log = Logger()

    def __init__(
        self, reactor: Any, taker: IInventory, installations: Installations, finder: WeightFinder, busy: Busy = lambda _: None
    ) -> None:
        self._reactor = reactor
        self._taker = taker
        self._installations = installations
        self._finder = finder
        self._busy = busy
        self._loop = LoopingCall(self.look)
        self._loop.clock = reactor
        self.inventory: Inventory | None = None
        self.changed: Callable[[], None] = lambda: None

    def begin(self) -> Deferred[None]:
        """The first look; fires when there is an inventory, which no sick device or library prevents."""
        self._installations.start()
        return Deferred.fromCoroutine(self._begin())

    async def _begin(self) -> None:
        await self.look()
        self._loop.start(EVERY, now=False)

    def end(self) -> None:
        """Look and ask no more."""
        self._installations.stop()
        if self._loop.running:
            self._loop.stop()

    def look(self) -> Deferred[None]:
        """Take the inventory anew; never errbacks for what a device or library does."""
        taken = self._taker.take().addCallback(self._took)
        return taken.addErrback(self._broke)

    def _broke(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            failure.raiseException()
        self.log.failure("while taking the inventory", failure)

    def _took(self, inventory: Inventory) -> None:
        before, self.inventory = self.inventory, inventory
        if before is not None and [d.uuid for d in before.devices if not d.problem] != [
            d.uuid for d in inventory.devices if not d.problem
        ]:
            self.changed()

    def installations(self) -> tuple[Installation, ...]:
        """The engines, with what is known of their versions."""
        return self._installations.all()

    async def flags(self, installation: Installation) -> Flags:
        """What the installed version prints in its help; empty where nobody could ask."""
        return self._installations.flags(installation)

    async def weights(self, weights: str) -> WeightFiles:
        """What is found of these weights; a file system that hangs is a problem of theirs, not of ours."""
        if (fetch := self._busy(weights)) is not None:
            return WeightFiles(weights, found=False, problem=f"{weights}: {fetch.text}", fetching=True)
        looked = deferToThreadPool(self._reactor, self._reactor.getThreadPool(), self._finder.inspect, weights)
        try:
            found: WeightFiles = await looked.addTimeout(WEIGHTS_DEADLINE, self._reactor)
        except TimeoutError:
            why = f"reading {weights} took longer than {WEIGHTS_DEADLINE:g} s: does its file system hang?"
            return WeightFiles(weights, found=False, problem=why)
        return found
