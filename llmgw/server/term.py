"""The control plane's parts as they go together. They last as long as one leadership, or one time of standing by, and no longer.

So nothing has to be reset when a server steps down: whatever the leadership knew, waited for or meant to send is thrown away
with its parts, and the next one begins from the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from llmgw.fleet.timing import Timing
from llmgw.interfaces import ILeadership
from llmgw.server.catalogs import Catalogs
from llmgw.server.controller import Clocks, Controller, Randomness
from llmgw.server.keys import Keys
from llmgw.server.operations import Operations
from llmgw.server.routing import Routers
from llmgw.store.sql import SqlStore


@frozen
class Surroundings:
    """What stays while leaderships come and go."""

    reactor: Any
    name: str
    timing: Timing
    store: SqlStore
    leadership: ILeadership
    random: Randomness
    clocks: Clocks
    admin_of: Callable[[str], str] = lambda holder: ""


class Term:
    """A controller and what works through it. Of itself it leads nothing and answers what is asked about the fleet.

    @ivar since: wall time at which it began.
    """

    def __init__(self, here: Surroundings, routers: Routers) -> None:
        self.controller = Controller(
            here.reactor, here.name, here.timing, here.store, here.leadership, routers, here.random, here.clocks
        )
        self.controller.commits.admin_of = here.admin_of
        self.catalogs = Catalogs(self.controller)
        self.keys = Keys(self.controller)
        self.operations = Operations(self.controller)
        self.since = here.clocks.wall()

    def end(self) -> None:
        """It is over: whatever of it is still called does nothing."""
        self.controller.end()
        self.controller.emission.port = None
