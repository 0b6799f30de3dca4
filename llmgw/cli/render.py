"""Tables and lines for people. Everything a node or an engine said is escaped before a terminal sees it.

On a terminal a table is coloured and folded to its width; into a pipe it goes plain and unfolded, one row a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from llmgw.fleet.line import escape
from llmgw.fleet.units import show_duration

UNFOLDED = 100_000
_COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "loading": "yellow",
    "placed": "yellow",
    "joining": "yellow",
    "draining": "yellow",
    "pending": "yellow",
    "unreachable": "red",
    "lost": "red",
    "backoff": "red",
    "failed": "red",
    "unknown": "red",
}


def plain(text: str) -> str:
    """Foreign text of several lines, each of them safe to show."""
    return "\n".join(map(escape, text.split("\n")))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns under headers, no frame; the first word of a cell is coloured where it is a state."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        drawn.add_column(header, overflow="fold", no_wrap=header in headers[:2])
    for row in rows:
        drawn.add_row(*(_coloured(Text(plain(str(cell)))) for cell in row))
    width = None if sys.stdout.isatty() else UNFOLDED
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def _coloured(cell: Any) -> Any:
    for state, colour in _COLOURS.items():
        cell.highlight_regex(rf"(^|(?<=\s)){state}(?=$|[\s,:])", colour)
    return cell


def instant(at: float | None) -> str:
    """C{2026-10-01 12:00:03} in local time; empty for None."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def day(at: float | None) -> str:
    """C{2026-10-01}; C{never} for None."""
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def ago(since: float | None, now: float) -> str:
    """How long something has lasted; empty where nobody knows."""
    return show_duration(max(0.0, now - since)) if since else ""


def ranges(numbers: Iterable[int]) -> str:
    """C{0-3,6} from 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def count(number: int, word: str, many: str = "s") -> str:
    """C{1 node}, C{3 nodes}."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{many}"
