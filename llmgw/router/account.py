"""What is known of requests afterwards: metrics, usage for the server, the access log. One call for each that has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmgw.router.access import AccessLog
from llmgw.router.histogram import OVERHEAD, SECONDS, Cell, Metrics, observe
from llmgw.router.limits import Grant
from llmgw.router.usage import Tally, guessed

if TYPE_CHECKING:
    from llmgw.router.errors import Refusal
    from llmgw.router.relay import Exchange
    from llmgw.router.request import Request
    from llmgw.router.routes import Routes, Served, Shared
    from llmgw.router.upstream import Upstream

_PHASES = {"queued": "queued", "connect": "before_first_byte", "first_token": "before_first_byte", "flowing": "streaming"}
_LIMITS = frozenset(("rpm", "tpm", "tpd", "concurrency", "queue_full", "queue_timeout"))


class _Cells:
    """The series of one model at one replica, found once."""

    __slots__ = ("between", "duration", "ended", "ttft")

    def __init__(self, metrics: Metrics, model: str, replica: str) -> None:
        self.ttft = metrics.ttft.cell(model, replica)
        self.between = metrics.between.cell(model, replica)
        self.duration = metrics.duration.cell(model, replica)
        self.ended: dict[tuple[int, str], Cell] = {}


class _Tokens:
    __slots__ = ("cached", "completion", "prompt", "wait")

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.prompt = metrics.tokens.cell(model, "prompt")
        self.cached = metrics.tokens.cell(model, "cached")
        self.completion = metrics.tokens.cell(model, "completion")
        self.wait = metrics.wait.cell(model)


class Accounts:
    """One worker's."""

    def __init__(self, log: AccessLog) -> None:
        self.log = log
        self.metrics = Metrics()
        self.tally = Tally()
        self._cells: dict[tuple[str, str], _Cells] = {}
        self._tokens: dict[str, _Tokens] = {}
        self._overhead = self.metrics.overhead.cell()
        self._done = self.metrics.streams.cell("done")
        self._stale = self.metrics.connections.cell("stale")
        self._new = self.metrics.connections.cell("new")
        self._reused = self.metrics.connections.cell("reused")

    # While it runs.

    def stale(self) -> None:
        """A kept connection turned out to be closed."""
        self._stale[0] += 1

    def breaker(self, served: Served, upstream: Upstream, to: str) -> None:
        """An endpoint is left alone from now on (C{open}), or no longer (C{closed})."""
        self.metrics.breaker_changes.cell(served.name, upstream.id, to)[0] += 1

    def refused(self, peer: str, request: Request, refusal: Refusal) -> None:
        """A request was refused by the router itself."""
        if refusal.code in _LIMITS:
            key = request.context.id if request.context is not None else ""
            self.metrics.limited.cell(refusal.code, request.model, key)[0] += 1
        if not request.logged:
            self.metrics.requests.cell(request.model, "", str(refusal.status), refusal.code)[0] += 1
            self.log.answered(peer, request, refusal.status, "refused", refusal.code)

    # When it has ended.

    def ended(self, exchange: Exchange, grant: Grant) -> None:
        """Count a request; C{grant} is settled with what it used."""
        model, upstream, usage = exchange.served.name, exchange.upstream, exchange.usage
        if usage is None and exchange.sent and not exchange.first and exchange.outcome == "client_gone":
            usage = exchange.usage = guessed(exchange.call.usage, exchange.body.size)  # an engine was at work on it
        replica = upstream.id if upstream is not None else ""
        cells = self._cells.get((model, replica))
        if cells is None:
            cells = self._cells[model, replica] = _Cells(self.metrics, model, replica)
        how = (exchange.status, exchange.reason or exchange.outcome)
        ended = cells.ended.get(how)
        if ended is None:
            ended = cells.ended[how] = self.metrics.requests.cell(model, replica, str(how[0]), how[1])
        ended[0] += 1
        began = exchange.request.began
        observe(cells.duration, SECONDS, exchange.ended - began)
        tokens = self._tokens.get(model)
        if tokens is None:
            tokens = self._tokens[model] = _Tokens(self.metrics, model)
        if exchange.first and exchange.body.stream:
            observe(cells.ttft, SECONDS, exchange.first - exchange.request.whole)
        if exchange.sent:
            observe(tokens.wait, SECONDS, exchange.waited)
            observe(self._overhead, OVERHEAD, max(0.0, exchange.sent - exchange.request.whole - exchange.waited))
        if usage is not None:
            tokens.prompt[0] += usage.prompt
            tokens.cached[0] += usage.cached
            tokens.completion[0] += usage.completion
            if usage.completion > 1 and exchange.body.stream and exchange.first:
                observe(cells.between, SECONDS, (exchange.ended - exchange.first) / (usage.completion - 1))
        if exchange.fell_back:
            self.metrics.fallbacks.cell(exchange.asked.name, model)[0] += 1
        if exchange.body.stream or exchange.outcome != "done" or exchange.retries:
            self._unusual(exchange)
        caller = exchange.caller
        seconds = exchange.ended - began
        self.tally.add(caller.id if caller is not None else "", model, usage, seconds, exchange.status >= 500)
        grant.settle(time.time(), usage.prompt + usage.completion if usage is not None else 0)
        self.log.add(exchange)

    def _unusual(self, exchange: Exchange) -> None:
        if exchange.body.stream and exchange.first:
            if exchange.outcome == "done" and not exchange.reason:
                self._done[0] += 1
            else:
                self.metrics.streams.cell(exchange.outcome if exchange.outcome != "done" else exchange.reason)[0] += 1
        if exchange.outcome == "client_gone":
            self.metrics.cancels.cell(_PHASES[exchange.phase])[0] += 1
        if exchange.retries:
            self.metrics.retries.cell(exchange.cause)[0] += exchange.retries

    # For those who ask.

    def text(self, routes: Routes, shared: Shared, lag: float) -> str:
        """This worker's metrics, gauges brought up to date."""
        metrics = self.metrics
        metrics.in_flight.series.clear()
        metrics.breaker.series.clear()
        metrics.waiting.series.clear()
        replicas = set()
        for name, served in routes.models.items():
            if name != served.name:
                continue
            high, low = served.line.waiting_by_class()
            metrics.waiting.cell(name, "high")[0] = high
            metrics.waiting.cell(name, "low")[0] = low
            if served.hints is not None:
                metrics.prefix_blocks.cell(name)[0] = served.hints.blocks
                metrics.prefix_held.cell(name)[0] = served.hints.found
            for upstream in served.upstreams:
                replicas.add(upstream.id)
                metrics.in_flight.cell(name, upstream.id)[0] = shared.board.own[upstream.row]
                metrics.breaker.cell(name, upstream.id)[0] = bool(upstream.breaker.blocked_until)
        metrics.lag.cell()[0] = lag
        metrics.version.cell()[0] = routes.table.version
        metrics.prefix_entries.cell()[0] = shared.prefixes.used()
        metrics.prefix_evictions.cell()[0] = shared.prefixes.evicted
        self._new[0], self._reused[0] = shared.connections
        return metrics.text()

    def forget(self, replicas: set[str], keys: set[str]) -> None:
        """A new table: drop the series of replicas and keys that are no longer in it."""
        self.metrics.forget("replica", replicas)
        self.metrics.forget("key", keys)
        self._cells = {key: cells for key, cells in self._cells.items() if key[1] in replicas or not key[1]}
