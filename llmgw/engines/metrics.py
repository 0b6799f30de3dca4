"""Reading an engine's Prometheus text: only the named samples, without building the whole exposition.

A vLLM with a few models prints thousands of histogram lines; an agent reads them every few seconds for every engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from llmgw.fleet.shard import EngineLoad

Samples = Mapping[str, list[float]]


def samples(text: str, names: Collection[str]) -> Samples:
    """The values of each wanted name over all its label sets; absent if there is none. Bad lines and NaN are skipped."""
    found: dict[str, list[float]] = {}
    starts = tuple(names)
    for line in text.splitlines():
        if not line.startswith(starts):
            continue
        name = line.partition("{")[0].split(" ", 1)[0]
        if name in names and (value := _value(line[len(name) :])) is not None:
            found.setdefault(name, []).append(value)
    return found


def _value(rest: str) -> float | None:
    # Labels may hold blanks and braces inside their quotes; the value is what follows the last closing brace.
    fields = (rest.rpartition("}")[2] if rest.startswith("{") else rest).split()
    try:
        value = float(fields[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None


def total(found: Samples, name: str) -> int | None:
    """The sum over label sets, None if nobody said."""
    return round(sum(found[name])) if name in found else None


def highest(found: Samples, name: str) -> float | None:
    """The greatest over label sets: with data parallel ranks the fullest is what hurts."""
    return max(found[name]) if name in found else None


def engine_load(text: str, running: str, waiting: str, cache: str = "", tokens: Sequence[str] = ()) -> EngineLoad:
    """The load by these samples' names: requests summed over data parallel ranks, the cache of the fullest, all tokens."""
    found = samples(text, {name for name in (running, waiting, cache, *tokens) if name})
    counts = [count for name in tokens if (count := total(found, name)) is not None]
    return EngineLoad(total(found, running), total(found, waiting), highest(found, cache), sum(counts) if counts else None)
