"""One leadership, from the store's content to the first orders. Stepping down is throwing it away."""

from __future__ import annotations

from attrs import frozen
from twisted.logger import Logger

from llmgw.errors import LlmgwError
from llmgw.fleet.model import Catalog
from llmgw.router.table import Table
from llmgw.server.emission import Port
from llmgw.server.peers import Peers
from llmgw.server.routing import Routers
from llmgw.server.sharedrouters import SharedRouters
from llmgw.server.term import Surroundings, Term
from llmgw.store.errors import StoreError
from llmgw.store.servers import Meeting


@frozen
class Proposal:
    """A file's models, and where they stand.

    @ivar rules: the start of the leadership makes them the catalog, as on SQLite, where there is one server and one file. Where
        there are several, whose file it would be is chance: then only a store without any catalog takes them.
    """

    catalog: Catalog
    path: str
    rules: bool


class Tenure(Term):
    """Leads.

    @param port: the fleet port, None where no agents are listened for.
    """

    log = Logger()

    def __init__(self, here: Surroundings, routers: Routers, port: Port | None) -> None:
        super().__init__(here, routers)
        self._store = here.store
        self._routers = routers
        if port is not None:
            self.controller.attach(port)

    async def begin(self, proposal: Proposal, before: Table | None, fresh: bool) -> None:
        """Take over what the store has and begin to plan.

        Nobody has reported yet, so for a grace period absence means nothing and nothing is stopped or placed for it.

        @param before: the table by which our routers route.
        @param fresh: the store was made just now.
        @raise StoreError: the store cannot be read, or another leads by now.
        """
        snapshot = await self._store.load()
        self.controller.routing.before = before
        self.controller.begin(snapshot, fresh or not snapshot.nodes)
        await self.controller.commits.in_turn(self.controller.follow_clock)
        await self.keys.recover(before)
        if proposal.rules or snapshot.catalog is None:
            await self._propose(proposal)
        self.controller.go()

    async def _propose(self, proposal: Proposal) -> None:
        try:
            done = await self.catalogs.apply(proposal.catalog, f"start with {proposal.path}", lenient=True)
        except StoreError:
            raise
        except LlmgwError as error:
            self.log.error("the catalog in force stays: {error}", error=str(error))
            self.controller.remarks = (*self.controller.remarks, f"{proposal.path} was not taken: {error}")
        else:
            self.log.info("catalog {number}: {what}", number=done.revision, what="; ".join(done.lines))

    def met(self, meeting: Meeting, peers: Peers) -> None:
        """The other servers were looked at: what their routers do, and what is asked of them, counts like our own."""
        if isinstance(self._routers, SharedRouters):
            self._routers.look()
        for model in {model for record in peers.live() for model in record.asked}:
            self.controller.demand.asked(model)
        peers.forget_gone().addErrback(lambda failure: failure.trap(StoreError) and None)

    @property
    def shared(self) -> tuple[int, int]:
        """The version of the table as last shared, and that of our own workers; zeros where nothing is shared."""
        return (self._routers.version, self._routers.local) if isinstance(self._routers, SharedRouters) else (0, 0)

    def end(self) -> None:
        """It is over."""
        super().end()
        if isinstance(self._routers, SharedRouters):
            self._routers.end()
