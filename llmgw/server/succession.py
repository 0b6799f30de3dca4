"""From standing by to leading and back, in one process, as the leadership comes and goes.

There is always one term in force: a L{Tenure} while this server leads, a L{Standby} (over SQLite a bare L{Term}, since nobody
else can lead) while it does not. When leadership is lost the tenure is thrown away at once, before anything else happens, and
the agents' links are closed; router workers notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.router.table import Table
from llmgw.server.fleetport import FleetPort
from llmgw.server.peers import Peers
from llmgw.server.reception import Reception
from llmgw.server.standby import Standby
from llmgw.server.tenure import Proposal, Tenure
from llmgw.server.term import Surroundings, Term
from llmgw.store.errors import StoreError
from llmgw.store.servers import Meeting

PASSING = ("full", "unreachable", "timeout", "busy", "failed")


class Succession:
    """Decides by what the leadership says.

    @param stand: makes the term for a time of standing by; C{lead} that of a leadership.
    @param proposal: the models of our file.
    @param table: the table that our workers route by.
    @param failed: called when a leadership cannot begin for a reason that does not pass by itself.
    @ivar term: the parts in force.
    @ivar tenure: the leadership, None while standing by; it may just be beginning.
    @ivar fresh: the store was made when it was opened.
    """

    log = Logger()

    def __init__(
        self,
        here: Surroundings,
        reception: Reception,
        stand: Callable[[], Term],
        lead: Callable[[], Tenure],
        proposal: Callable[[], Proposal],
        table: Callable[[], Table | None],
        failed: Callable[[Failure], None],
    ) -> None:
        self._here, self._reception = here, reception
        self._stand, self._lead, self._proposal, self._table, self._failed = stand, lead, proposal, table, failed
        self._beginning: Deferred[None] | None = None
        self._waiting: list[Deferred[None]] = []
        self._deposed_at = -1
        self._over = False
        self.fresh = False
        self.port: FleetPort | None = None
        self.peers: Peers | None = None
        self.tenure: Tenure | None = None
        self.term: Term = stand()

    @property
    def leading(self) -> bool:
        """Whether a leadership has begun and may act."""
        return self.tenure is self.term and self.term.controller.leading and self._here.leadership.may_act()

    def moved(self) -> None:
        """The leadership was won, lost, raised or seen to move."""
        leadership = self._here.leadership
        held = leadership.may_act() and leadership.epoch > self._deposed_at and not self._over
        if self.tenure is None:
            if held:
                self._take_over()
        elif held:
            self.tenure.controller.epoch_moved()
        else:
            self.step_down()

    def begun(self) -> Deferred[None]:
        """Fires when it is clear what we are: at once on a standby, else when the leadership has begun."""
        waiting: Deferred[None] = Deferred()
        self._waiting.append(waiting)
        if self._beginning is None:
            self._tell()
        return waiting

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(None)

    def met(self, meeting: Meeting) -> None:
        """The other servers were looked at."""
        if self.tenure is None:
            self.moved()  # a leadership that was in doubt when it was told of has been told of in vain
        if isinstance(self.term, Standby):
            self.term.met(meeting)
        elif self.tenure is self.term and self.tenure is not None and self.peers is not None:
            self.tenure.met(meeting, self.peers)

    # Taking over.

    def _take_over(self) -> None:
        tenure = self.tenure = self._lead()
        if self.peers is not None:
            tenure.controller.commits.deposed = self._deposed
        self._beginning = Deferred.fromCoroutine(self._begin(tenure))
        self._beginning.addCallbacks(self._begun, self._not_begun, (tenure,))

    async def _begin(self, tenure: Tenure) -> None:
        while True:
            try:
                if self.peers is not None:
                    await self.peers.look()  # whatever the last leader shared, our routers get it before we go on from it
                await tenure.begin(self._proposal(), self._table(), self.fresh)
                break
            except StoreError as error:
                if error.code not in PASSING:
                    raise
                self.log.error("the leadership cannot begin yet: {error}", error=str(error))
                self.term.controller.commits.failing = str(error)
            await deferLater(self._here.reactor, self._here.timing.poll)

    def _begun(self, _: None, tenure: Tenure) -> None:
        self._beginning = None
        self.term.end()
        self.term = tenure
        self.fresh = False
        self._reception.open(tenure.controller)
        self.log.info("{name} leads with epoch {epoch}", name=self._here.name, epoch=self._here.leadership.epoch)
        self._tell()

    def _not_begun(self, failure: Failure) -> None:
        self._beginning = None
        if failure.check(CancelledError):
            self._tell()
            return
        if isinstance(failure.value, StoreError) and failure.value.code == "not_leader":
            self._deposed()
            return
        self._failed(failure)

    # Stepping down.

    def _deposed(self) -> None:
        """The store says that another one leads; the lease will say so, too, but later."""
        self._deposed_at = self._here.leadership.epoch
        if self.tenure is not None:
            self.tenure.end()
            self._here.reactor.callLater(0, self.step_down)  # not from within the very change that found it out

    def step_down(self) -> None:
        """Throw the leadership away and stand by."""
        tenure, self.tenure = self.tenure, None
        if tenure is None:
            return
        beginning, self._beginning = self._beginning, None
        if beginning is not None:
            beginning.cancel()
        self._reception.close()
        tenure.end()
        if self.term is tenure:
            self.term = self._stand()
            self.log.warn("{name} leads no more and stands by", name=self._here.name)
        if self.port is not None and self.port.running:
            self.port.close_all(self._reception.goaway())
        if self.peers is not None:
            self.peers.look_soon()

    def end(self) -> None:
        """The process ends: lead no more, whoever asks."""
        self._over = True
        if self._beginning is not None:
            self._beginning.cancel()
        self._reception.close()
        tenure, self.tenure = self.tenure, None
        for term in (self.term, tenure):
            if term is not None:
                term.end()
