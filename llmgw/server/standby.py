"""What a server is while another one leads: its routers follow that one's table, and it answers what is asked, from the store."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.server.follower import Follower
from llmgw.server.peers import Peers
from llmgw.server.routing import Routers
from llmgw.server.term import Surroundings, Term
from llmgw.store.errors import StoreError
from llmgw.store.servers import Meeting

REFRESH = 5  # looks at the store between two readings of all it has


class Standby(Term):
    """Follows."""

    log = Logger()

    def __init__(self, here: Surroundings, routers: Routers, follower: Follower, peers: Peers) -> None:
        super().__init__(here, routers)
        self._peers = peers
        self._store = here.store
        self._follower = follower
        self._loading: Deferred[None] | None = None
        self._loaded: int | None = None
        self._looks = 0
        self._over = False
        follower.again()

    def met(self, meeting: Meeting) -> None:
        """The store was looked at. The table waits for the catalog, which says where its upstreams' keys are."""
        self._looks += 1
        if self._loaded is not None and meeting.table is not None:
            self._follower.take(meeting.table, self.controller.truth.catalog)
            self._peers.look_soon()  # the leader may wait for our word that our routers have it
        due = self._loaded is None or self._looks % REFRESH == 0
        if due and meeting.revision != self._loaded and self._loading is None:
            self._loading = Deferred.fromCoroutine(self._load())
            self._loading.addErrback(lambda failure: self.log.failure("while reading what the leader does", failure))

    async def _load(self) -> None:
        truth = self.controller.truth
        try:
            snapshot = await self._store.load()
        except StoreError as error:
            self.log.warn("what the leader does cannot be read: {error}", error=str(error))
            return
        finally:
            self._loading = None
            self._peers.look_soon()
        if self._over:
            return
        before = truth.catalog_revision
        truth.load(snapshot)
        self._loaded = snapshot.revision
        if truth.catalog_revision != before:
            self._follower.again()

    def end(self) -> None:
        """It is over."""
        super().end()
        self._over = True
