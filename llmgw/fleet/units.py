"""Durations and sizes as operators write them, and as we show them.

Inside llmgw a duration is a float of seconds and a size an int of bytes; text exists only at the rims.
The digits are matched first because C{int()} takes C{1_0} and digits of other scripts, too.
"""

from __future__ import annotations

import re

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)\Z", re.ASCII)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB|kB)\Z", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


def parse_duration(text: str) -> float:
    """Seconds from C{500ms}, C{5s}, C{10m}, C{1h}, C{90d}.

    @raise ValueError: saying what is allowed.
    """
    found = _DURATION.match(text)
    if not found:
        raise ValueError(f"{text!r} is not a duration: write 500ms, 5s, 10m, 1h or 90d")
    return float(found[1]) * _SECONDS[found[2]]


def parse_size(text: str) -> int:
    """Bytes from C{64MiB}, C{20GiB}, C{80GB}.

    @raise ValueError: saying what is allowed.
    """
    found = _SIZE.match(text)
    if not found:
        raise ValueError(f"{text!r} is not a size: write 64MiB, 20GiB or 80GB")
    return int(float(found[1]) * _BYTES[found[2]])


def show_size(count: int) -> str:
    """C{20.0 GiB}: one decimal, the largest binary unit that leaves at least 1."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"


def show_duration(seconds: float) -> str:
    """C{2 m 11 s}, C{6 d}, C{0.4 s}: at most two units, the second left out where it is zero or the first is days."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, below in ((86400, "d", "h"), (3600, "h", "m"), (60, "m", "s")):
        if whole >= size:
            rest = whole % size // {"h": 3600, "m": 60, "s": 1}[below]
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
