"""The HTTP of the admin API: C{twisted.web} with bounds.

Surprising: C{twisted.web} takes a body of any size into a file before anybody is asked. So the size is judged as the body is
declared, and as it comes where it is not declared.
"""

from __future__ import annotations

import json
from typing import Any

from twisted.web.server import Request, Site

from llmgw.admin.errors import body

BODY_LIMIT = 8 * 2**20
IDLE = 60.0


class BoundedRequest(Request):
    """A request whose body may have L{BODY_LIMIT} bytes; a larger one is refused with 413 and its connection ended."""

    _size = 0
    _refused = False

    def gotLength(self, length: int | None) -> None:  # noqa: N802
        """From C{twisted.web}: what the headers say, None for a body in chunks."""
        super().gotLength(length)
        if length is not None and length > BODY_LIMIT:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:  # noqa: N802
        """From C{twisted.web}."""
        self._size += len(data)
        if self._size > BODY_LIMIT:
            self._refuse()
        elif not self._refused:
            super().handleContentChunk(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:  # noqa: N802
        """From C{twisted.web}: all of it is there."""
        if not self._refused:
            super().requestReceived(command, path, version)

    def _refuse(self) -> None:
        if self._refused:
            return
        self._refused = True
        text = json.dumps(body("too_large", f"the body is larger than {BODY_LIMIT} bytes")).encode()
        head = "HTTP/1.1 413 Content Too Large\r\nconnection: close\r\ncontent-type: application/json\r\n"
        connection: Any = self.channel.transport
        connection.write(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
        self.channel.loseConnection()


class QuietSite(Site):
    """What operators ask is no news: twisted.web would log every request. C{name} is what the log calls it."""

    displayTracebacks = False  # noqa: N815  (Twisted's name)
    noisy = False

    def __init__(self, name: str, resource: Any, reactor: Any) -> None:
        super().__init__(resource, BoundedRequest, timeout=IDLE, reactor=reactor, parsePOSTFormSubmission=False)
        self._name = name

    def logPrefix(self) -> str:
        """From Twisted."""
        return self._name

    def log(self, request: Any) -> None:
        """Say nothing."""
