"""A download of a model's weights to a node, as its agent tells of it."""

from __future__ import annotations

import re
from enum import StrEnum

from attrs import frozen

from llmgw.fleet.units import show_size

HUB = re.compile(r"hf:(?P<org>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w.-]+))?\Z", re.ASCII)


class FetchState(StrEnum):
    """How far a download is. C{waiting}: others come first, or the next try is due later."""

    WAITING = "waiting"
    CHECKING = "checking"
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def active(self) -> bool:
        """Whether it goes on."""
        return self not in (FetchState.DONE, FetchState.FAILED, FetchState.CANCELLED)


@frozen
class Fetch:
    """One download: there is at most one of the same weights on a node.

    @ivar weights: as the catalog names them, C{hf:ORG/NAME@REVISION}.
    @ivar bytes: how many of C{total} are on the node's disk; C{total} is None before the hub has told.
    @ivar since: when it began, and for one that is over, when it ended.
    @ivar error: a stable word where it failed: C{gated}, C{not_found}, C{disk_full}, C{network}, C{wrong_hash}, ...
    @ivar reason: the sentence for people: why it failed, waits, or what was left behind.
    """

    weights: str
    state: FetchState = FetchState.WAITING
    bytes: int = 0
    total: int | None = None
    since: float = 0.0
    error: str = ""
    reason: str = ""

    @property
    def text(self) -> str:
        """C{downloading 43 % (6.4 of 14.9 GiB)}. It is 100 % only when everything is verified and in its place."""
        said = str(self.state)
        if self.total and self.state.active:
            percent = min(99, 100 * self.bytes // self.total)
            said += f" {percent} % ({show_size(self.bytes)} of {show_size(self.total)})"
        elif self.total and self.state is FetchState.DONE:
            said += f" ({show_size(self.total)})"
        return f"{said}: {self.reason}" if self.reason else said


def same_weights(weights: str) -> str:
    """The one name of weights that the catalog may name with or without the revision C{main}."""
    return weights.removesuffix("@main")
