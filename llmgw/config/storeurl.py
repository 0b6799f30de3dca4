"""Where the store is: C{sqlite:///FILE} or C{postgresql://USER@HOST:PORT/DATABASE?passfile=FILE}.

A password never stands in the address, which is shown in status and logs: libpq reads it from a passfile.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from attrs import frozen

from llmgw.config.shape import Reading, Wrong, text
from llmgw.config.text import Item

_WANT = "sqlite:///FILE or postgresql://USER@HOST/DATABASE"
_FILES = ("passfile", "sslrootcert", "sslcert", "sslkey", "service_file")


@frozen
class StoreUrl:
    """The address with absolute paths; C{folder} is where a SQLite file lies, None for a database elsewhere."""

    url: str
    folder: Path | None = None


DEFAULT_STORE = StoreUrl("sqlite:////var/lib/llmgw/llmgw.db", Path("/var/lib/llmgw"))


def store(item: Item, reading: Reading) -> StoreUrl:
    """The store's address. C{sqlite:///a.db} is relative to the file, C{sqlite:////a.db} absolute."""
    found = text(item, reading)
    if found.startswith("sqlite:"):
        return _sqlite(found, reading.folder)
    try:
        parts = urlsplit(found)
        port = parts.port
    except ValueError:
        raise Wrong(_WANT, "store") from None
    if parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/") or port == 0 or parts.fragment:
        raise Wrong(_WANT, "store")
    if parts.password is not None or any(key == "password" for key, _ in parse_qsl(parts.query)):
        raise Wrong("", "password", "holds a password, which status and logs would show: put it in a file and add ?passfile=FILE")
    query = [(key, str(reading.folder / value) if key in _FILES else value) for key, value in parse_qsl(parts.query)]
    return StoreUrl(urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(query, safe="/"), "")))


def _sqlite(url: str, folder: Path) -> StoreUrl:
    match = re.match(r"sqlite:///(?P<file>[^?#]+)\Z", url)
    if not match or match["file"].endswith("/") or match["file"].lstrip("/") == ":memory:":
        raise Wrong("sqlite:///FILE, relative to this file, or sqlite:////FILE", "store")
    file = folder / match["file"]
    return StoreUrl(f"sqlite:///{file}", file.parent)
