"""YAML text to a tree of L{Item}s, each of which knows its file, line and path, so that a problem can name all three.

Scalars are read as YAML 1.2 means them: C{on}, C{no}, C{1:30}, C{010} and dates stay text instead of becoming a truth, a
number or a day behind the operator's back. A key that stands twice is a problem, since the last one would win unseen.
Anchors, aliases and merge keys work, up to a bound on what they expand to. Nothing in a file can name a Python object.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from attrs import define, field, frozen

from llmgw.errors import Invalid, Problem

MAX_BYTES = 4 * 2**20
MAX_ITEMS = 200_000
MAX_DEPTH = 64

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\Z", re.ASCII)
_FLOAT = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,18}([eE][-+]?[0-9]{1,3})?\Z", re.ASCII)
_BARE_SIX = re.compile(r"\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\](:[0-9]+)?", re.ASCII)
_NULL = ("", "~", "null", "Null", "NULL")
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

Value = None | bool | int | float | str | list["Item"] | dict[str, "Item"]


@frozen
class Item:
    """One value of a file.

    @ivar where: C{FILE:LINE} of its key, or of itself in a list.
    @ivar path: the keys that lead to it: C{models.smol.profile.context}; empty for the whole file.
    @ivar text: a scalar as it was written, without quotes.
    """

    value: Value
    where: str
    path: str = ""
    text: str = ""

    @property
    def shown(self) -> str:
        """What was found, for a message; never long, never with control characters."""
        if isinstance(self.value, dict):
            return "a section" if self.value else "an empty section"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "nothing"
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return repr(text) if isinstance(self.value, str) else text

    def get(self, *keys: str) -> Item:
        """The item under these keys, or the deepest one of them that is there: to say where a problem is."""
        here = self
        for key in keys:
            if not isinstance(here.value, dict) or key not in here.value:
                break
            here = here.value[key]
        return here

    def has(self, key: str) -> bool:
        """Whether this is a section with that key."""
        return isinstance(self.value, dict) and key in self.value


def read_file(path: Path) -> str:
    """The text of a configuration file.

    @raise Invalid: it is not there, cannot be read, is too large or not UTF-8; one problem.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return data.decode("utf-8-sig")
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        text = f"is not UTF-8: byte {error.start} is {data[error.start]:#04x}"
    raise Invalid([Problem(text, str(path), "unreadable")])


def parse(path: Path, text: str) -> tuple[Item, list[Problem]]:
    """The tree of a file, and what was wrong with its form. An empty file is an empty section.

    @raise Invalid: it is no YAML at all, holds several documents or is too large; one problem.
    """
    if len(text) > MAX_BYTES:
        raise Invalid([Problem(f"is larger than {MAX_BYTES // 2**20} MiB, which no configuration is", str(path), "too_large")])
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise Invalid([_syntax(path, text, error)]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        reason = getattr(error, "reason", "it cannot be read")
        raise Invalid([Problem(f"is not YAML: {reason}", f"{path}:{line}", "syntax")]) from None
    if node is None:
        return Item({}, f"{path}:1"), []
    grower = _Grower(str(path))
    item = grower.grow(node, f"{path}:{node.start_mark.line + 1}", "", 0)
    return item, grower.problems


def _syntax(path: Path, text: str, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    said = " ".join(part for part in (error.context, error.problem) if part)
    lines = text.splitlines()
    if mark and mark.line < len(lines) and (found := _BARE_SIX.search(lines[mark.line])):
        said += f': put the address in quotes: "{found[0]}"'
    return Problem(f"is not YAML: {said}", f"{path}:{mark.line + 1}" if mark else str(path), "syntax")


def scalar(node: yaml.ScalarNode) -> Value:
    """What a scalar means. Quoted ones, and plain ones that YAML 1.2 does not know, are text."""
    text: str = node.value
    if node.style or node.tag == _TAG + "str":
        return text
    if text in _NULL:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if _INTEGER.match(text):
        return int(text)
    return float(text) if _FLOAT.match(text) else text


@define
class _Grower:
    """Turns composed nodes into items. Aliases share nodes, so what is bounded is the number of items grown from them."""

    file: str
    problems: list[Problem] = field(factory=list)
    grown: int = 0

    def grow(self, node: yaml.Node, where: str, path: str, depth: int) -> Item:
        self.grown += 1
        if self.grown > MAX_ITEMS or depth > MAX_DEPTH:
            text = (
                "is nested too deeply"
                if depth > MAX_DEPTH
                else f"holds more than {MAX_ITEMS} values once its aliases are filled in"
            )
            raise Invalid([*self.problems, Problem(text, where, "too_large")])
        if isinstance(node, yaml.MappingNode):
            return Item(self.mapping(node, path, depth), where, path)
        if isinstance(node, yaml.SequenceNode):
            return Item([self.element(child, path, n, depth) for n, child in enumerate(node.value)], where, path)
        assert isinstance(node, yaml.ScalarNode), "YAML has three kinds of nodes"
        if not node.tag.startswith(_TAG):
            self.problems.append(Problem(f"{path}: found the tag {node.tag}, want a plain value", where, "tag"))
        return Item(scalar(node), where, path, node.value)

    def element(self, node: yaml.Node, path: str, number: int, depth: int) -> Item:
        return self.grow(node, self.line(node), f"{path}.{_name(node) or number}".lstrip("."), depth + 1)

    def mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Item]:
        found: dict[str, Item] = {}
        merged: dict[str, Item] = {}
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merged = {**self.merge(value, path, depth), **merged}
            elif not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem("found a list or a section as a key, want text", self.line(key), "key"))
            elif key.value in found:
                text = f"{_join(path, key.value)} stands twice, first in line {found[key.value].where.rpartition(':')[2]}"
                self.problems.append(Problem(text, self.line(key), "duplicate_key"))
            else:
                found[key.value] = self.grow(value, self.line(key), _join(path, key.value), depth + 1)
        return {**merged, **found}

    def merge(self, node: yaml.Node, path: str, depth: int) -> dict[str, Item]:
        if isinstance(node, yaml.SequenceNode):
            found: dict[str, Item] = {}
            for child in node.value:
                found = {**self.merge(child, path, depth + 1), **found}
            return found
        item = self.grow(node, self.line(node), path, depth + 1)
        if isinstance(item.value, dict):
            return item.value
        self.problems.append(Problem("found a plain value behind <<, want a section", item.where, "merge"))
        return {}

    def line(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _name(node: yaml.Node) -> str:
    """What a section of a list calls itself, so that paths read C{models.smol} and not C{models.0}."""
    if not isinstance(node, yaml.MappingNode):
        return ""
    for key, value in node.value:
        if key.value == "name" and isinstance(value, yaml.ScalarNode):
            return str(value.value)
    return ""
