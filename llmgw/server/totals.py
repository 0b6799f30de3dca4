"""What all router workers of this server have counted, those that are gone included.

A scraper takes a total that falls for a restart of everything, and its rates go wrong. So what a worker counted stays when it
ends, as of the last scrape. (To ask more often would hold up its streams: of a thousand models the text is long.) A worker that
does not answer in time is there with what it said last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from attrs import define
from twisted.internet.defer import Deferred

from llmgw.router.channel import Message
from llmgw.router.histogram import Family, add_up, counted
from llmgw.server.workerprocess import Place

SCRAPE = 2.0
"""How many seconds workers have for an answer."""


@define
class _Scrape:
    wanted: set[int]
    done: Deferred[None]


class Totals:
    """The workers' metrics. C{restarts} is how many workers ended that should have gone on."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._scrapes = 0
        self._scraping: dict[int, _Scrape] = {}
        self._last: dict[int, str] = {}
        self._gone = ""
        self.restarts = 0

    def ask(self, places: Sequence[Place]) -> Deferred[str]:
        """The Prometheus text of the workers at these places, summed, when all have answered or L{SCRAPE} seconds have passed."""
        self._scrapes += 1
        number, scrape = self._scrapes, _Scrape({place.number for place in places if place.ready}, Deferred())
        self._scraping[number] = scrape
        for place in places:
            place.send("metrics", request=number)
        if not scrape.wanted:
            scrape.done.callback(None)
        scrape.done.addTimeout(SCRAPE, self._reactor, onTimeoutCancel=lambda result, _: None)

        def summed(_: None) -> str:
            del self._scraping[number]
            return self._text()

        return scrape.done.addCallback(summed)

    def stop(self) -> None:
        """Wait for nobody any more."""
        for scrape in list(self._scraping.values()):
            if not scrape.done.called:
                scrape.done.callback(None)

    def said(self, place: Place, message: Message) -> None:
        """A worker has told its metrics."""
        self._last[place.number] = message["text"]
        scrape = self._scraping.get(message["request"])
        if scrape is not None:
            scrape.wanted.discard(place.number)
            if not scrape.wanted and not scrape.done.called:
                scrape.done.callback(None)

    def ended(self, place: int, replicas: Collection[str]) -> None:
        """The worker at this place is no more, and its successor counts from 0.

        @param replicas: those that are still routed to; what was counted of others is dropped, or it would pile up.
        """
        self.restarts += 1
        self._gone = counted(add_up([self._gone, self._last.pop(place, "")]), replicas)

    def _text(self) -> str:
        ended = Family("llmgw_router_worker_restarts_total", "counter", "Router workers replaced: they ended, or were silent.")
        ended.cell()[0] = self.restarts
        return add_up([*self._last.values(), self._gone]) + "".join(f"{line}\n" for line in ended.lines())
