"""The one way into the store: changes take turns, and what the store does not take has not happened."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger

from llmgw.errors import LlmgwError
from llmgw.fleet.events import FleetEvent
from llmgw.interfaces import ILeadership, IStore
from llmgw.server.truth import Truth
from llmgw.store.errors import NotLeader, StoreError
from llmgw.store.records import Change, ToldBy


class NotLeading(LlmgwError):
    """This server does not lead now, so it takes no orders. C{leader} is who does, as far as it knows.

    @ivar address: where operators reach that one, empty if nobody told.
    """

    def __init__(self, text: str, leader: str = "", address: str = "") -> None:
        super().__init__(text)
        self.leader = leader
        self.address = address


class Commits:
    """Commits for one leadership.

    @param told_by: the clock by which the records are told.
    @ivar deposed: called when the store says that another one leads.
    @ivar admin_of: where operators reach the server of a holder's name.
    @ivar failing: why the store takes nothing now; empty when it works.
    @ivar watchers: called after each commit.
    """

    log = Logger()

    def __init__(
        self,
        name: str,
        store: IStore,
        leadership: ILeadership,
        truth: Truth,
        deposed: Callable[[], None],
        told_by: Callable[[], ToldBy],
    ) -> None:
        self._name = name
        self._told_by = told_by
        self._store = store
        self._leadership = leadership
        self._truth = truth
        self.deposed = deposed
        self.admin_of: Callable[[str], str] = lambda holder: ""
        self._lock = DeferredLock()
        self.open = False
        self.failing = ""
        self.watchers: list[Callable[[], None]] = []

    def in_turn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Deferred[Any]:
        """Run C{work} when what began before has ended."""
        return self._lock.run(lambda: Deferred.fromCoroutine(work()))

    def change(self, make: Callable[[], Iterable[Change]]) -> Deferred[int]:
        """Commit what C{make} says, made from the truth when its turn has come.

        @return: the state revision.
        @raise NotLeading: this server does not lead.
        @raise StoreError: the store did not take it, and nothing has changed.
        """

        async def work() -> int:
            self.must_lead()
            changes = list(make())
            if changes and not await self.commit(changes):
                self.must_lead()
                raise StoreError(f"the store took nothing, so nothing is changed: {self.failing}")
            return self._truth.revision

        return self.in_turn(work)

    def must_lead(self) -> None:
        """
        @raise NotLeading: this server may not act now.
        """
        if not (self.open and self._leadership.may_act()):
            raise self._not_leading()

    def _not_leading(self) -> NotLeading:
        holder = self._leadership.leader
        leader, address = holder.partition("@")[0], self.admin_of(holder)
        if self._leadership.problem:
            return NotLeading(f"{self._name} does not lead now, and who does cannot be seen: {self._leadership.problem}")
        if not leader or leader == self._name:
            return NotLeading(f"{self._name} does not lead now")
        place = address or ", ".join(self._leadership.addresses)
        return NotLeading(f"not leader, ask {leader}{f' ({place})' if place else ''}", leader, address)

    async def commit(self, changes: list[Change]) -> bool:
        """Whether the store took them, and with it the truth. To be called in turn."""
        if not self._leadership.may_act():
            return False
        try:
            revision = await self._store.commit(self._leadership.epoch, [self._told_by(), *changes])
        except NotLeader as error:
            if error.leader == self._leadership.leader and self._leadership.may_act():
                self.log.info("the epoch was raised meanwhile; the next plan is made under it")
                return False
            self.log.error("{error}", error=str(error))
            self.deposed()
            return False
        except StoreError as error:
            if self.failing != str(error):
                self.log.error("the store took nothing, so nothing is changed: {error}", error=str(error))
            self.failing = str(error)
            return False
        if self.failing:
            self.log.info("the store works again")
        self.failing = ""
        self._truth.take(changes, revision)
        self._tell(changes)
        return True

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, FleetEvent):
                self.log.info("event {text}", text=change.text, kind=change.kind, subject=change.subject, node=change.node)
        for watcher in list(self.watchers):
            watcher()
