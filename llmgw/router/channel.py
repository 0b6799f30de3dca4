"""What a server and its router worker say to each other: JSON objects, one per line, over a socketpair.

Neither side waits for the other. A worker whose channel has closed goes on serving by its last table; a server that hears no
beat for 3 seconds replaces the worker on the worker's own listening socket.

    server -> worker
      table         version                 a table of this version is on disk: read it, answer with `routing`
      certificates  -                       the HTTPS certificate's files have changed: read them again
      stop          at_once                 true: stop accepting now. false: go on accepting until a newer generation of workers
                                            is there or 10 s have passed. Then finish what runs, within timeouts.drain, and exit
      metrics       request                 answer with `metrics` and the same number
    worker -> server
      ready         pid, column             the listening socket is being accepted from
      routing       version                 requests are routed by this table version (sent once at start, and after each `table`)
      refused       version, text           that table could not be read; the one before stays in force
      beat          in_flight, waiting, connections, lag, rss
                                            each second; lag is how late the timer fired (s), rss is in bytes
      demand        model, waiting          requests wait for a model without endpoints; at most once a second for each model
      failure       endpoint, kind, text,   it failed a request: kind: connect, reset, timeout, status, key (401), forbidden (403)
                    open                    and whether it is left alone for that. Of endpoints that others run also probe: none
                                            of the last was answered; still: every few seconds while it is left alone
      recovered     endpoint                one that was left alone has answered
      usage         rows                    what has been used since the last such message (see router/usage.py)
      metrics       request, text           this worker's Prometheus text

A line is at most 1 MiB. Both ends ignore types and keys that they do not know, so either may be the newer one for as long as an
upgrade takes.
"""

from __future__ import annotations

import json
from typing import Any

MAX_LINE = 2**20
BEAT = 1.0
SILENCE = 3.0

Message = dict[str, Any]


def encode(type: str, /, **values: object) -> bytes:
    """One message as its line."""
    return json.dumps({"type": type, **values}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line; one that is not an object with a C{type} comes back as C{{"type": ""}}: to be ignored."""
    try:
        message = json.loads(line)
    except ValueError:
        return {"type": ""}
    return message if isinstance(message, dict) and isinstance(message.get("type"), str) else {"type": ""}
