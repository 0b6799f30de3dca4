"""This server among the others of its store: what it tells them of itself, and what it knows of them for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twisted.internet.defer import Deferred, succeed

from llmgw.config.catalog import diff_catalogs
from llmgw.config.server import ServerSettings
from llmgw.fleet.model import Catalog
from llmgw.fleet.shard import replica_of
from llmgw.server.follower import Follower
from llmgw.server.peers import LEADER, STANDBY, STOPPED, Peers
from llmgw.server.sharedrouters import SharedRouters
from llmgw.server.standby import Standby
from llmgw.server.succession import Succession
from llmgw.server.term import Surroundings
from llmgw.server.workers import RouterWorkers
from llmgw.store.servers import Meeting, ServerRecord

ASKED_FOR = 5.0


class Company:
    """The servers of one store, this one among them.

    @ivar file: the models of our file, which need not be the catalog in force.
    @ivar follower: what keeps our routers at the shared table while another one leads.
    """

    def __init__(self, here: Surroundings, workers: RouterWorkers, settings: ServerSettings) -> None:
        self._here, self._workers, self._settings = here, workers, settings
        self._succession: Succession | None = None
        self._asked: dict[str, float] = {}
        self._compared: tuple[Catalog, Catalog, bool] | None = None
        self.file = settings.catalog
        self.follower = Follower(workers)
        self.peers = Peers(
            here.store, here.reactor, here.timing, here.clocks.wall, here.clocks.steady, self.record, self._known, self._met
        )

    def start(self, succession: Succession) -> None:
        """Join them."""
        self._succession = succession
        succession.peers = self.peers
        self.peers.start()

    def stop(self) -> Deferred[None]:
        """Leave them."""
        return self.peers.stop() if self._succession is not None else succeed(None)

    def stand_by(self) -> Standby:
        """A time of standing by begins."""
        return Standby(self._here, self._workers, self.follower, self.peers)

    def shared_routers(self) -> SharedRouters:
        """All servers' routers, for a leadership that begins."""
        store, leadership = self._here.store, self._here.leadership
        return SharedRouters(self._workers, store, leadership, self.peers, self._here.reactor, lambda: self.follower.version)

    def asked(self, model: str) -> None:
        """A client of ours waits for this model."""
        self._asked[model] = self._here.clocks.steady()

    def admin_of(self, holder: str) -> str:
        """Where operators reach that process; empty if nobody told."""
        found = self.peers.find(holder)
        return found.admin if found else ""

    def record(self) -> ServerRecord:
        """What we say of ourselves."""
        succession, settings, here = self._succession, self._settings, self._here
        assert succession is not None
        now = here.clocks.steady()
        self._asked = {model: at for model, at in self._asked.items() if now - at < ASKED_FOR}
        truth = succession.term.controller.truth
        return ServerRecord(
            name=here.name,
            holder=here.store.holder,
            role=LEADER if succession.leading else STANDBY,
            since=succession.term.since,
            address=str(settings.fleet.advertise) if settings.fleet else "",
            admin=str(settings.admin.advertise) if settings.admin else "",
            routed=self._routed(),
            in_flight=self.follower.in_flight({replica_of(shard) for shard in truth.shards}),
            waiting={model.name: n for model in truth.catalog.models if (n := self._workers.waiting(model.name))},
            asked=tuple(self._asked),
            differs=self.differs(),
        )

    def _routed(self) -> int:
        tenure = self._succession.tenure if self._succession is not None else None
        if tenure is None or self._succession is None or tenure is not self._succession.term:
            return self.follower.routed()
        version, local = tenure.shared
        return version if self.follower.routes(local) else 0

    def _known(self) -> int:
        succession = self._succession
        assert succession is not None
        leading = succession.tenure is not None and succession.tenure is succession.term
        return succession.tenure.shared[0] if leading and succession.tenure is not None else self.follower.version

    def _met(self, meeting: Meeting) -> None:
        self._workers.share_limits(1 + len(self.peers.live()))
        assert self._succession is not None
        self._succession.met(meeting)

    def differs(self) -> bool:
        """Whether our file is not the catalog in force, as far as we know that."""
        assert self._succession is not None
        truth = self._succession.term.controller.truth
        if not truth.catalog_revision:
            return False
        if self._compared is None or self._compared[0] is not self.file or self._compared[1] is not truth.catalog:
            diff = diff_catalogs(truth.catalog, self.file, allow_removals=True)
            self._compared = (self.file, truth.catalog, not diff.empty)
        return self._compared[2]

    def servers(self) -> list[dict[str, Any]]:
        """All servers of the store for C{status}, this one first."""
        if self._succession is None:
            return []
        silent = self.peers.silent(self._here.leadership.leader)
        own = _shown(self.record(), None)
        return [own, *(_shown(record, silent.get(record.name)) for record in self.peers.all())]

    def warnings(self) -> Iterable[str]:
        """What people should know of files and servers."""
        if self._succession is None:
            return
        truth = self._succession.term.controller.truth
        path = self._settings.path
        for record in (self.record(), *self.peers.all()):
            if record.differs:
                whose = str(path) if record.name == self._here.name else f"the file of {record.name}"
                yield f"{whose} differs from catalog {truth.catalog_revision}, which stays in force until: llmgw apply FILE"


def _shown(record: ServerRecord, silent: float | None) -> dict[str, Any]:
    return {
        "name": record.name,
        "role": "silent" if silent is not None and record.role != STOPPED else record.role,
        "since": record.since,
        "address": record.address,
        "admin": record.admin,
        "routed": record.routed,
        "differs": record.differs,
        "silent_for": silent,
    }
