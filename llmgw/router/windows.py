"""What a key has used in the last minute and today, in six cells of a scoreboard's row.

Each process counts in its own column; the sum over all is what a limit is held against. The last minute is a sliding one:
the count of this minute of the clock, plus that of the minute before weighed by how much of it still lies within 60 s.
Minutes and days are those of the wall clock (UTC); a clock that is set back begins a new minute.
"""

from __future__ import annotations

from collections.abc import Iterable

STAMP, REQUESTS, REQUESTS_BEFORE, TOKENS, TOKENS_BEFORE, TOKENS_TODAY = 1, 2, 3, 4, 5, 6
DAY = 1440


def roll(cells: memoryview[int], row: int, minute: int) -> None:
    """Make the row's counts those of C{minute}."""
    stamp = cells[row + STAMP]
    if stamp == minute:
        return
    next_one = stamp == minute - 1
    cells[row + REQUESTS_BEFORE] = cells[row + REQUESTS] if next_one else 0
    cells[row + TOKENS_BEFORE] = cells[row + TOKENS] if next_one else 0
    cells[row + REQUESTS] = cells[row + TOKENS] = 0
    if stamp // DAY != minute // DAY:
        cells[row + TOKENS_TODAY] = 0
    cells[row + STAMP] = minute


def sums(columns: Iterable[memoryview[int]], row: int, minute: int) -> tuple[int, int, int, int, int]:
    """Over all columns: requests this minute and the one before, tokens this minute and the one before, tokens today."""
    requests = requests_before = tokens = tokens_before = today = 0
    for cells in columns:
        stamp = cells[row + STAMP]
        if stamp == minute:
            requests += cells[row + REQUESTS]
            requests_before += cells[row + REQUESTS_BEFORE]
            tokens += cells[row + TOKENS]
            tokens_before += cells[row + TOKENS_BEFORE]
            today += cells[row + TOKENS_TODAY]
        elif stamp:
            if stamp == minute - 1:
                requests_before += cells[row + REQUESTS]
                tokens_before += cells[row + TOKENS]
            if stamp // DAY == minute // DAY:
                today += cells[row + TOKENS_TODAY]
    return requests, requests_before, tokens, tokens_before, today


def add_tokens(cells: memoryview[int], row: int, minute: int, tokens: int) -> None:
    """Count tokens (negative: give back) in the minute in which they were reserved, if it still matters, and today."""
    stamp = cells[row + STAMP]
    if minute == stamp:
        cells[row + TOKENS] += tokens
    elif minute == stamp - 1:
        cells[row + TOKENS_BEFORE] += tokens
    elif tokens > 0:
        cells[row + TOKENS] += tokens
    if minute // DAY == stamp // DAY:
        cells[row + TOKENS_TODAY] += tokens


def recall(columns: Iterable[memoryview[int]], own: memoryview[int], row: int, minute: int, tokens: int) -> None:
    """Make what all columns together have used today at least C{tokens}, in the own one."""
    missing = tokens - sums(columns, row, minute)[4]
    if missing > 0:
        roll(own, row, minute)
        own[row + TOKENS_TODAY] += missing


def inherit(heir: memoryview[int], dead: memoryview[int], row: int) -> None:
    """Add what one column counted in a row to another column."""
    minute = max(heir[row + STAMP], dead[row + STAMP])
    counts = sums((heir, dead), row, minute)
    heir[row + STAMP] = minute
    for cell, count in zip((REQUESTS, REQUESTS_BEFORE, TOKENS, TOKENS_BEFORE, TOKENS_TODAY), counts, strict=True):
        heir[row + cell] = count
