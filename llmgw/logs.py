"""Log observers for C{twistd --logger=}, which calls them without an argument.

C{llmgw.logs.text} writes one line an event, with control characters escaped, so that no peer can forge a line or colour a
terminal through an error text. C{llmgw.logs.json} writes one JSON object a line. Both write to standard error, which
systemd takes; a traceback is indented behind its line.
"""

from __future__ import annotations

import json as json_module
import sys
from typing import Any, TextIO

from twisted.logger import ILogObserver, LogEvent, formatEvent, formatTime
from zope.interface import implementer

from llmgw.fleet.line import escape

_OURS = frozenset({"log_level", "log_namespace", "log_time", "log_format", "log_logger", "log_source", "log_failure"})


# twistd says it at each start where its packages are read-only, as our unit has them; nothing follows from it.
_IDLE = "Unable to write to plugin cache"


def _idle(event: LogEvent) -> bool:
    return str(event.get("format", "")).startswith(_IDLE)


def _level(event: LogEvent) -> str:
    return event["log_level"].name if "log_level" in event else "info"


@implementer(ILogObserver)
class TextLines:
    """C{time namespace level: sentence}."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, event: LogEvent) -> None:
        """Write one event."""
        if _idle(event):
            return
        when = formatTime(event.get("log_time"))
        name = str(event.get("log_namespace", "-")).removeprefix("llmgw.")
        lines = [f"{when} {_level(event):8} {name}: {escape(formatEvent(event))}"]
        if (failure := event.get("log_failure")) is not None:
            lines += [f"    {escape(line)}" for line in failure.getTraceback().splitlines()]
        self._out.write("\n".join(lines) + "\n")
        self._out.flush()


@implementer(ILogObserver)
class JsonLines:
    """One object a line: time, level, logger, text, and the event's own values where they are plain."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, event: LogEvent) -> None:
        """Write one event."""
        if _idle(event):
            return
        row: dict[str, Any] = {
            "time": formatTime(event.get("log_time")),
            "level": _level(event),
            "logger": event.get("log_namespace", ""),
            "text": escape(formatEvent(event)),
        }
        row |= {
            name: escape(value) if isinstance(value, str) else value
            for name, value in event.items()
            if name not in _OURS and name not in row and isinstance(value, str | int | float | bool)
        }
        if (failure := event.get("log_failure")) is not None:
            row["traceback"] = failure.getTraceback()
        self._out.write(json_module.dumps(row) + "\n")
        self._out.flush()


def text() -> TextLines:
    """For C{--logger=llmgw.logs.text}."""
    return TextLines(sys.stderr)


def json() -> JsonLines:
    """For C{--logger=llmgw.logs.json}."""
    return JsonLines(sys.stderr)
