"""Counters, gauges and histograms as plain lists, and their text for Prometheus.

A series is a list of numbers that the hot path holds on to and adds to in place (C{cell[0] += 1}, L{observe}); no lock, no
object per observation. Each worker has its own L{Metrics}; L{add_up} sums the workers' texts into the one that is scraped.

The names are a contract with dashboards: all of them are declared in L{Metrics}. Labels are models, replicas, keys and words
from fixed lists, never anything that a caller may choose; a family that grows beyond L{MOST} series counts further ones as
C{other}, and L{Metrics.forget} drops those of what is gone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

MOST = 5000
OTHER = "other"

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    320.0, 640.0,
)  # fmt: skip
OVERHEAD = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

# Of these the scraped value is the largest of the workers', not their sum.
LARGEST = frozenset(("llmgw_loop_lag_seconds", "llmgw_breaker_open", "llmgw_prefix_entries", "llmgw_routing_version"))

Cell = list[float]
_REPLICA = re.compile(r'[{,]replica="([^"]*)"')


def observe(cell: Cell, bounds: Sequence[float], value: float) -> None:
    """Add one value to a histogram's series."""
    cell[bisect_left(bounds, value)] += 1
    cell[-1] += value


def quantile(cell: Cell, bounds: Sequence[float], share: float) -> float | None:
    """About below which value C{share} of those observed lie; None if there are none."""
    wanted = sum(cell[:-1]) * share
    if not wanted:
        return None
    below = 0.0
    for index, bound in enumerate(bounds):
        if below + cell[index] >= wanted:
            low = bounds[index - 1] if index else 0.0
            return low + (bound - low) * (wanted - below) / cell[index]
        below += cell[index]
    return bounds[-1]


class Family:
    """All series of one name."""

    def __init__(self, name: str, kind: str, help: str, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = ()) -> None:
        self.name, self.kind, self.help, self.labels, self.bounds = name, kind, help, labels, bounds
        self.series: dict[tuple[str, ...], Cell] = {}

    def cell(self, *values: str) -> Cell:
        """The series with these label values: of one number, or of a histogram's counts and its sum."""
        found = self.series.get(values)
        if found is None:
            if len(self.series) >= MOST:
                values = tuple(OTHER for _ in values)
            found = self.series.setdefault(values, [0.0] * (len(self.bounds) + 2 if self.bounds else 1))
        return found

    def lines(self) -> Iterable[str]:
        """The text of the family, header included; nothing if it has no series."""
        if not self.series:
            return
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for values, cell in self.series.items():
            pairs = [f'{label}="{_escaped(value)}"' for label, value in zip(self.labels, values, strict=True)]
            yield from self._histogram(pairs, cell) if self.bounds else (f"{self.name}{_braced(pairs)} {_number(cell[0])}",)

    def _histogram(self, pairs: list[str], cell: Cell) -> Iterable[str]:
        count = 0.0
        for bound, number in zip((*map(_number, self.bounds), "+Inf"), cell, strict=False):
            count += number
            le = f'le="{bound}"'
            yield f"{self.name}_bucket{_braced([*pairs, le])} {_number(count)}"
        yield f"{self.name}_sum{_braced(pairs)} {_number(cell[-1])}"
        yield f"{self.name}_count{_braced(pairs)} {_number(count)}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _braced(pairs: list[str]) -> str:
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


class Metrics:
    """Everything that a router worker measures."""

    def __init__(self) -> None:
        one, ends, seconds = ("model",), ("model", "replica"), SECONDS
        self.requests = self._new("requests_total", "counter", "Requests ended, by status and why so.",
                                  (*ends, "status", "reason"))  # fmt: skip
        self.ttft = self._new(
            "ttft_seconds", "histogram", "From the whole request to the first byte of a streamed answer.", ends, seconds
        )
        self.between = self._new("inter_token_seconds", "histogram", "Mean time between tokens of an answer.", ends, seconds)
        self.duration = self._new(
            "request_duration_seconds",
            "histogram",
            "From the first byte of a request, its upload included, to the last of its answer.",
            ends,
            seconds,
        )
        self.overhead = self._new(
            "router_overhead_seconds",
            "histogram",
            "From the whole request to its sending, without the wait in line: the router itself, connecting included.",
            (),
            OVERHEAD,
        )
        self.tokens = self._new("tokens_total", "counter", "Tokens, by kind: prompt, cached, completion.", (*one, "kind"))
        self.in_flight = self._new("in_flight", "gauge", "Requests at a replica.", ends)
        self.waiting = self._new("waiting", "gauge", "Requests waiting for a replica with room.", (*one, "class"))
        self.wait = self._new(
            "queue_wait_seconds",
            "histogram",
            "How long requests that were sent had waited in line for a replica with room.",
            one,
            seconds,
        )
        self.retries = self._new("retries_total", "counter", "Requests sent to another replica, by cause.", ("cause",))
        self.fallbacks = self._new("fallbacks_total", "counter", "Requests answered by a model in place of the one asked for.",
                                   ("asked", "model"))  # fmt: skip
        self.cancels = self._new("cancels_total", "counter",
                                 "Clients that left, by phase: queued, before_first_byte, streaming.", ("phase",))  # fmt: skip
        self.streams = self._new("stream_ends_total", "counter",
                                 "Ends: done, engine_error, upstream_error, client_gone, timeout, cut.", ("kind",))  # fmt: skip
        self.breaker = self._new("breaker_open", "gauge", "1 while a replica is left alone after failures.", ends)
        self.breaker_changes = self._new("breaker_changes_total", "counter", "Breakers opened and closed.", (*ends, "to"))
        self.prefix_blocks = self._new("prefix_blocks_total", "counter", "Blocks of prompts routed.", one)
        self.prefix_held = self._new("prefix_blocks_held_total", "counter", "Of these, likely cached where they were sent.", one)
        self.prefix_entries = self._new("prefix_entries", "gauge", "Prefixes known in the table shared by all workers.")
        self.prefix_evictions = self._new("prefix_evictions_total", "counter", "Prefixes given up for newer ones.")
        self.connections = self._new("engine_connections_total", "counter", "Connections used: new, reused, stale.", ("kind",))
        self.limited = self._new("limited_total", "counter",
                                 "Requests refused: rpm, tpm, tpd, concurrency, queue_full, queue_timeout.",
                                 ("kind", "model", "key"))  # fmt: skip
        self.lag = self._new("loop_lag_seconds", "gauge", "How late the event loop's timer last fired, worst worker.")
        self.version = self._new("routing_version", "gauge", "The routing table in force.")

    def _new(self, name: str, kind: str, help: str, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = ()) -> Family:
        family = Family("llmgw_" + name, kind, help, labels, bounds)
        if not labels:
            family.cell()
        return family

    @property
    def families(self) -> list[Family]:
        """All of them, in the order of their declaration."""
        return [value for value in vars(self).values() if isinstance(value, Family)]

    def forget(self, label: str, known: Collection[str]) -> None:
        """Keep only series in which this label is one of C{known}, or empty. Who holds a series that is dropped adds to it in
        vain, which is harmless."""
        for family in self.families:
            if label in family.labels:
                at = family.labels.index(label)
                for values in [values for values in family.series if values[at] not in known and values[at] not in ("", OTHER)]:
                    del family.series[values]

    def text(self) -> str:
        """This worker's metrics in Prometheus' text format."""
        return "\n".join(line for family in self.families for line in family.lines()) + "\n"


def counted(text: str, replicas: Collection[str]) -> str:
    """Of such a text what only grows: counters and histograms, of these replicas and of none."""
    lines: list[str] = []
    keep, held = False, ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            held = line
        elif line.startswith("# TYPE "):
            keep = line.endswith((" counter", " histogram"))
            lines += [held, line] if keep else []
        elif keep and ((found := _REPLICA.search(line)) is None or found[1] in replicas or found[1] in ("", OTHER)):
            lines.append(line)
    return "\n".join(lines) + "\n"


def add_up(texts: Iterable[str]) -> str:
    """One text from those of several workers: numbers of the same series added, or the largest of them (L{LARGEST})."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    for text in texts:
        header: list[str] = []
        series: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                header, series = families.setdefault(name, ([], {}))
                if not header:
                    header.append(line)
            elif line.startswith("#"):
                if len(header) == 1:
                    header.append(line)
            else:
                key, _, number = line.rpartition(" ")
                try:
                    value = float(number)
                except ValueError:
                    continue
                largest = key.partition("{")[0] in LARGEST
                series[key] = max(series.get(key, value), value) if largest else series.get(key, 0.0) + value
    lines = []
    for header, series in families.values():
        lines += header
        lines += [f"{key} {_number(value)}" for key, value in series.items()]
    return "\n".join(lines) + "\n"
