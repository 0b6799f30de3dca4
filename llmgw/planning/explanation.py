"""Why a replica was not placed, as a value: for people in one line or one line per node, for programs as data.

Every node that was looked at and cannot run the replica has a L{Verdict} with at least one failed L{Check}, and each
check's C{need} exceeds its C{have}. A node is counted once, under its first failed check, so the counts of the one-line
form always add up to the nodes looked at.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from attrs import asdict, frozen

from llmgw.fleet.units import show_size

NOBODY = (
    "No node has registered yet. Add one with `llmgw pki node DIR NAME --server HOST:PORT --bundle FILE`, and start llmgw-agent "
    "there. If one should be there already, see: llmgw refusals"
)


@frozen
class Check:
    """Something a node would need to run the replica, and does not have.

    @ivar name: a stable word: C{state}, C{cordoned}, C{draining}, C{quarantined}, C{excluded}, C{labels}, C{fabric},
        C{installation}, C{weights}, C{devices}, C{device_memory}, C{host_memory}, C{ports}, C{fabric_nodes}, C{versions}.
    @ivar text: how the one-line form calls it, e.g. C{too few devices}.
    @ivar need: at least this much of C{unit} (bytes, devices, ports, nodes); a yes-or-no check needs 1 and has 0.
    @ivar detail: what else there is to know: a device, a duration, the paths looked at.
    @ivar holder: what holds the rest: shards, or processes that are not ours.
    @ivar per: for device memory, on how many devices C{need} must be free at once.
    """

    name: str
    text: str
    need: float = 1
    have: float = 0
    unit: str = ""
    detail: str = ""
    holder: str = ""
    per: int = 0

    @property
    def amounts(self) -> str:
        """C{need 2, most free 1}; empty for a yes-or-no check."""
        if not self.unit:
            return ""
        need, have = show(self.need, self.unit), show(self.have, self.unit)
        if self.per:
            need += f" on {self.per} device" + ("s" if self.per > 1 else "")
        if have.endswith(last := need.split()[1] if self.unit == "bytes" else "") and last:
            have = have.removesuffix(" " + last)
        return f"need {need}, most free {have}"

    def row(self) -> str:
        """What stands behind the check's name in the form with a line per node."""
        inner = "; ".join(filter(None, (self.detail, self.holder)))
        if not self.amounts:
            return inner
        return f"{self.amounts} ({inner})" if inner else self.amounts


def show(amount: float, unit: str) -> str:
    """An amount as people read it: sizes with their unit, counts bare."""
    return show_size(int(amount)) if unit == "bytes" else f"{amount:g}"


@frozen
class Verdict:
    """Everything that speaks against one node; the first check is the one it is counted under."""

    node: str
    checks: tuple[Check, ...]


@frozen
class Hint:
    """One change after which the replica would fit; each was tried by placing it. C{kind} is a stable word."""

    kind: str
    text: str
    node: str = ""


@frozen
class Explanation:
    """Why none of C{looked} nodes can run one replica of C{model} now."""

    model: str
    looked: int
    verdicts: tuple[Verdict, ...]
    hints: tuple[Hint, ...] = ()
    note: str = ""

    def counts(self) -> dict[str, list[Check]]:
        """The first check of each node by its text, the commonest first; the lengths add up to C{looked}."""
        found: dict[str, list[Check]] = defaultdict(list)
        for verdict in self.verdicts:
            found[verdict.checks[0].text].append(verdict.checks[0])
        return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))

    def line(self) -> str:
        """C{0/3 nodes can run this: 2 too few devices (need 2, most free 1), 1 draining}."""
        if self.note:
            return self.note
        if not self.looked:
            return "0/0 nodes can run this: no node has registered yet"
        parts = []
        for text, checks in self.counts().items():
            best = max(checks, key=lambda check: check.have)
            parts.append(f"{len(checks)} {text}" + (f" ({best.amounts})" if best.amounts else ""))
        return f"0/{self.looked} nodes can run this: {', '.join(parts)}"

    @property
    def nearest(self) -> Verdict | None:
        """The node that lacks least: the fewest checks failed, then the smallest part of what they need."""
        return min(self.verdicts, key=_distance, default=None)

    def lines(self) -> list[str]:
        """A line for each failed check of each node, the nearest miss first, and one of hints, to be shown under a heading."""
        if not self.looked and not self.note:
            return [NOBODY]
        nearest = self.nearest
        ordered = sorted(self.verdicts, key=lambda verdict: verdict is not nearest)
        rows = [
            (verdict.node if check is verdict.checks[0] else "", self._title(check), check.row())
            for verdict in ordered
            for check in verdict.checks
        ]
        names = max((len(name) for name, _, _ in rows), default=0)
        titles = max((len(title) for _, title, _ in rows), default=0)
        lines = [f"  {name:{names}}  {title:{titles}}  {text}".rstrip() for name, title, text in rows]
        if self.hints:
            lines.append("It would fit if:  " + "  ·  ".join(hint.text for hint in self.hints))
        return lines

    @staticmethod
    def _title(check: Check) -> str:
        return check.name.replace("_", " ") if check.unit else check.text

    def data(self) -> dict[str, Any]:
        """The same for programs."""
        nodes = [{"node": v.node, "checks": [asdict(check) for check in v.checks]} for v in self.verdicts]
        nearest = self.nearest
        return {
            "text": self.line(),
            "looked": self.looked,
            "counts": {text: len(checks) for text, checks in self.counts().items()},
            "nodes": nodes,
            "nearest": next((one for one in nodes if nearest is not None and one["node"] == nearest.node), None),
            "would_fit_if": [asdict(hint) for hint in self.hints],
        }


def _distance(verdict: Verdict) -> tuple[int, float, str]:
    return len(verdict.checks), sum(1 - check.have / check.need for check in verdict.checks if check.need), verdict.node


def ordinal(number: int) -> str:
    """C{first}, C{second}, ... for small numbers, C{12th} beyond."""
    words = ("first", "second", "third", "fourth", "fifth", "sixth")
    if 1 <= number <= len(words):
        return words[number - 1]
    return f"{number}{'th' if 10 <= number % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def heading(explanation: Explanation, wanted: int, has: int) -> str:
    """C{smol wants 2 replicas and has 1. The second cannot be placed: 0/3 nodes can run this.}"""
    count = f"{wanted} replica" + ("s" if wanted != 1 else "")
    short = explanation.note or explanation.line().partition(":")[0]
    return f"{explanation.model} wants {count} and has {has}. The {ordinal(has + 1)} cannot be placed: {short}."
