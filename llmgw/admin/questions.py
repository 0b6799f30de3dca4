"""What the admin API answers without changing anything, at a price: a plan takes seconds of a thread, an estimate asks nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from llmgw.admin.fields import Fields
from llmgw.config.catalog import read_catalog
from llmgw.fleet.model import Catalog
from llmgw.server.estimates import Estimates
from llmgw.server.inspection import Inspection
from llmgw.server.plans import Plans
from llmgw.server.service import Server

Data = dict[str, Any]


class Questions:
    """C{/v1/plan} and C{/v1/estimate}."""

    def __init__(self, server: Server, reactor: Any) -> None:
        self._server = server
        self._reactor = reactor

    def routes(self) -> dict[tuple[str, str], Callable[[Fields], Awaitable[Data]]]:
        """By method and path."""
        return {
            ("POST", "/v1/plan"): self.plan,
            ("GET", "/v1/estimate"): self.estimate,
            ("POST", "/v1/estimate"): self.estimate,
        }

    async def plan(self, fields: Fields) -> Data:
        """What a changed catalog, or the loss of nodes, would lead to."""
        controller = self._server.controller
        plans = Plans(controller, self._server.catalogs, Inspection(controller), self._reactor)
        path = fields.text("path", "catalog")
        removals, outage = fields.flag("allow_removals"), fields.flag("allow_outage")
        return await plans.plan(self._catalog(fields), path, removals, outage, fields.texts("without", []))

    async def estimate(self, fields: Fields) -> Data:
        """What a replica takes of memory; of the catalog in force, or of the one that is sent."""
        controller = self._server.controller
        estimates = Estimates(controller, Inspection(controller), self._reactor)
        catalog = self._catalog(fields) or controller.truth.catalog
        return await estimates.estimate(catalog, fields.text("model"), fields.text("node", None))

    @staticmethod
    def _catalog(fields: Fields) -> Catalog | None:
        text = fields.text("text", None)
        return None if text is None else read_catalog(Path(fields.text("path", "catalog")), text)
