"""Foreign text made fit for one line of a log or a terminal: names, errors and output come from nodes and engines."""

from __future__ import annotations

import re

# C0 and C1 controls, line and paragraph separators, and the marks that turn text around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST = 8192


def escape(text: str) -> str:
    """C{text} on one line, bounded, with nothing in it that a terminal would act on."""
    if len(text) > _MOST:
        text = f"{text[:_MOST]} ... ({len(text) - _MOST} more)"
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
