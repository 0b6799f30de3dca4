"""Readers: small functions from an L{Item} to a value, put together into the shape of a file.

A reader that cannot make a value raises L{Wrong}; the section or list round it writes the problem down and goes on, so that
one reading finds everything that is wrong. A section knows its keys and says which known one an unknown key is nearest to.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from attrs import define, field, frozen

from llmgw.config.text import Item
from llmgw.errors import Invalid, Problem
from llmgw.fleet.units import parse_duration, parse_size

T = TypeVar("T")


class Wrong(Exception):
    """This item is not what was wanted. C{want} says what is; an empty one: the problem has been written down already."""

    def __init__(self, want: str, code: str = "type", text: str = "") -> None:
        super().__init__(want)
        self.want, self.code, self.text = want, code, text


@define
class Reading:
    """One reading of one file: the folder that relative paths start from, and the problems so far."""

    folder: Path
    problems: list[Problem] = field(factory=list)

    def add(self, item: Item, text: str, code: str = "invalid") -> None:
        """Write a problem down, with the item's line and path."""
        self.problems.append(Problem(f"{item.path}: {text}" if item.path else text, item.where, code))

    def read(self, reader: Reader[T], item: Item) -> T | None:
        """What C{reader} makes of the item; None, with the problem written down, if it is wrong."""
        try:
            return reader(item, self)
        except Wrong as wrong:
            if wrong.text:
                self.add(item, wrong.text, wrong.code)
            elif wrong.want:
                self.add(item, f"found {item.shown}, want {wrong.want}", wrong.code)
            return None

    def finish(self) -> None:
        """Raise what has been written down, if anything.

        @raise Invalid: with every problem, in the order of lines.
        """
        if self.problems:
            raise Invalid(in_order(self.problems))


Reader = Callable[[Item, Reading], T]


def in_order(problems: list[Problem]) -> list[Problem]:
    """Without doubles, in the order of lines."""

    def line(problem: Problem) -> int:
        digits = problem.where.rpartition(":")[2]
        return int(digits) if digits.isdigit() else 0

    return sorted(dict.fromkeys(problems), key=line)


@frozen(eq=False)
class Section(Generic[T]):
    """Reads a section with C{keys} into C{build(**found)}; keys that are not there are left to C{build}'s defaults.

    @ivar check: looks at what must hold between keys; with C{check_whole} only where every key could be read, so that it never
        compares with a default that the operator did not mean.
    """

    build: Callable[..., T]
    keys: Mapping[str, Reader[Any]]
    required: tuple[str, ...] = ()
    check: Callable[[Item, T, Reading], None] | None = None
    check_whole: bool = False

    def __call__(self, item: Item, reading: Reading) -> T:
        """Read it; every key's own problem is written down, and the section made if none that is required is missing."""
        if item.value is None:
            item = Item({}, item.where, item.path)
        if not isinstance(item.value, dict):
            raise Wrong(f"a section with {_listed(self.keys)}")
        found, first = {}, len(reading.problems)
        for key, inner in item.value.items():
            if key not in self.keys:
                reading.add(item.get(key), f"unknown key, {self._instead(key)}", "unknown_key")
            elif inner.value is not None or isinstance(self.keys[key], Section):
                before = len(reading.problems)
                value = reading.read(self.keys[key], inner)
                if value is not None or len(reading.problems) == before:
                    found[key] = value
        missing = [key for key in self.required if not item.has(key) or item.get(key).value is None]
        for key in missing:
            reading.add(item, f"{key} is missing", "missing_key")
        if any(key not in found for key in self.required):
            raise Wrong("")
        value = self.build(**found)
        if self.check and not (self.check_whole and len(reading.problems) > first):
            self.check(item, value, reading)
        return value

    def _instead(self, key: str) -> str:
        near = difflib.get_close_matches(key, self.keys, 1)
        if near:
            return f"did you mean {near[0]}?"
        inner = [name for name, reader in self.keys.items() if isinstance(reader, Section) and key in reader.keys]
        return f"it belongs under {inner[0]}" if inner else f"known here: {_listed(self.keys)}"


def section(
    build: Callable[..., T],
    required: tuple[str, ...] = (),
    check: Callable[[Item, T, Reading], None] | None = None,
    **keys: Reader[Any],
) -> Section[T]:
    """A L{Section} with these keys."""
    return Section(build, keys, required, check)


def _listed(keys: Mapping[str, object]) -> str:
    return ", ".join(sorted(keys))


def text(item: Item, reading: Reading) -> str:
    """Text, not empty."""
    if not isinstance(item.value, str) or not item.value:
        raise Wrong("text (in quotes, if it looks like a number)" if item.value else "text")
    if "\0" in item.value:
        raise Wrong("text without NUL")
    return item.value


def word(item: Item, reading: Reading) -> str:
    """Any scalar as it was written: for labels and environments, where C{1} and C{true} mean their text."""
    if isinstance(item.value, list | dict) or item.value is None or "\0" in item.text:
        raise Wrong("text")
    return item.text


def matching(pattern: re.Pattern[str], want: str) -> Reader[str]:
    """Text that matches the whole pattern."""

    def read(item: Item, reading: Reading) -> str:
        if not isinstance(item.value, str) or not pattern.match(item.value):
            raise Wrong(want, "syntax")
        return item.value

    return read


def one_of(*allowed: str) -> Reader[str]:
    """One of these words."""

    def read(item: Item, reading: Reading) -> str:
        if item.text not in allowed:
            near = difflib.get_close_matches(item.text, allowed, 1)
            raise Wrong(" or ".join(allowed) + (f" (did you mean {near[0]}?)" if near else ""), "value")
        return item.text

    return read


def flag(item: Item, reading: Reading) -> bool:
    """true or false, and nothing else."""
    if not isinstance(item.value, bool):
        raise Wrong("true or false")
    return item.value


def integer(low: int = 0, high: int = 2**53) -> Reader[int]:
    """A whole number between C{low} and C{high}, both included. A truth is none."""

    def read(item: Item, reading: Reading) -> int:
        if type(item.value) is not int or not low <= item.value <= high:
            raise Wrong(f"a whole number from {low} to {high}" if high < 2**53 else f"a whole number, at least {low}")
        return item.value

    return read


def duration(low: float = 0.0) -> Reader[float]:
    """Seconds from C{5s}; zero is refused unless C{low} is below zero."""

    def read(item: Item, reading: Reading) -> float:
        if not isinstance(item.value, str):
            raise Wrong("a duration: 500ms, 5s, 10m, 1h or 90d", "duration")
        try:
            seconds = parse_duration(item.value)
        except ValueError:
            raise Wrong("a duration: 500ms, 5s, 10m, 1h or 90d", "duration") from None
        if seconds <= low:
            raise Wrong("a duration longer than zero", "duration")
        return seconds

    return read


def size(item: Item, reading: Reading) -> int:
    """Bytes from C{20GiB}."""
    try:
        if isinstance(item.value, str):
            return parse_size(item.value)
    except ValueError:
        pass
    raise Wrong("a size: 64MiB, 20GiB or 80GB", "size")


def path(item: Item, reading: Reading) -> Path:
    """An absolute path; a relative one starts at the file's folder."""
    return reading.folder / text(item, reading)


def list_of(reader: Reader[T], low: int = 0) -> Reader[tuple[T, ...]]:
    """A list, every element read and the wrong ones left out."""

    def read(item: Item, reading: Reading) -> tuple[T, ...]:
        if not isinstance(item.value, list):
            raise Wrong("a list")
        if len(item.value) < low:
            raise Wrong(f"a list of at least {low}")
        found = (reading.read(reader, element) for element in item.value)
        return tuple(value for value in found if value is not None)

    return read


def map_of(reader: Reader[T], key: re.Pattern[str] | None = None, want: str = "") -> Reader[dict[str, T]]:
    """A section with keys of the operator's own choosing, which must match C{key}."""

    def read(item: Item, reading: Reading) -> dict[str, T]:
        if not isinstance(item.value, dict):
            raise Wrong("a section of names and values")
        found: dict[str, Any] = {}
        for name, inner in item.value.items():
            if not name or (key is not None and not key.match(name)):
                reading.add(inner, f"found {name!r} as a name, want {want or 'text'}", "syntax")
                continue
            before = len(reading.problems)
            value = reading.read(reader, inner)
            if value is not None or len(reading.problems) == before:
                found[name] = value
        return found

    return read
