"""The routing table: all that a router worker must know, as one versioned file.

The server writes it (whole, 0600 since it holds the engines' keys, renamed into place) and then only says "version 41 is there"
over the channel. So a worker can start, and go on, without a server: it reads the last table from disk. A table is never
changed, only replaced by one with a higher version.

A model without endpoints stays in the table with its C{reason}: the difference between 404 (nobody knows this model) and 503
(known, not ready, and why) is what callers ask at night.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from llmgw.config.settings import Timeouts
from llmgw.errors import LlmgwError


class BadTable(LlmgwError):
    """The routing table on disk cannot be read; the text says which file and why."""


class RoutedEndpoint(Struct, frozen=True, omit_defaults=True, gc=False):
    """Where one ready replica, or one static upstream, serves.

    @ivar id: the replica's id (C{llama-70b/2}), or C{static:MODEL/N}. The same id with another address is another endpoint.
    @ivar base: path before C{/v1}, without a slash at its end; mostly empty.
    @ivar key: what goes into C{Authorization} towards it, in place of the caller's; empty sends none.
    @ivar model: the name it serves the model under; requests are rewritten to it where the caller asked for another.
    @ivar row: its row in the scoreboard; C{server/workers.py} assigns it when it publishes.
    @ivar share: its weight in the policy C{weighted}.
    @ivar limit: how many requests it runs at once, None unknown.
    @ivar static: run by somebody else: the routers probe it themselves.
    """

    id: str
    host: str
    port: int
    model: str
    row: int = 0
    base: str = ""
    tls: bool = False
    key: str = ""
    share: int = 1
    limit: int | None = None
    static: bool = False


class RoutedModel(Struct, frozen=True, omit_defaults=True, gc=False):
    """A public name. C{endpoints} are ids; C{reason} says in a sentence why there are none (or fewer than wanted).

    @ivar policy: C{least_cost}, C{least_inflight}, C{round_robin} or C{weighted}.
    @ivar fallbacks: names of models that answer when this one has no endpoint, in order; only those that the key may use.
    @ivar max_in_flight: over all its endpoints, None no bound but theirs.
    @ivar on_demand: it sleeps at zero replicas and is woken by a request, which waits in the queue.
    @ivar served: the name that its engines know it by where that is not the endpoint's own: a LoRA adapter's.
    @ivar retry_after: seconds that a caller is told to wait when it is not ready.
    """

    name: str
    aliases: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    policy: str = "least_cost"
    reason: str = ""
    fallbacks: tuple[str, ...] = ()
    max_in_flight: int | None = None
    max_waiting: int = 100
    on_demand: bool = False
    retry_after: int = 5
    created: int = 0
    served: str = ""


class KeyEntry(Struct, frozen=True, omit_defaults=True, gc=False):
    """A caller's key, by its digest; the key itself is nowhere. None and empty mean no limit.

    @ivar digest: hex SHA-256 of the whole key as the caller sends it.
    @ivar models: names it may use (a name covers its aliases); empty allows all.
    @ivar team: limits are shared by all keys of a team where it is not empty: the largest that any of them has is the team's.
    @ivar priority: above 0 is the high class: served first where requests wait.
    @ivar expires: wall clock, seconds since 1970.
    @ivar old: digests of secrets that were replaced, each with the wall clock until which it is good.
    """

    id: str
    digest: str
    name: str = ""
    team: str = ""
    models: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None
    tpd: int | None = None
    concurrency: int | None = None
    priority: int = 0
    expires: float | None = None
    old: tuple[tuple[str, float], ...] = ()


class Table(Struct, frozen=True, omit_defaults=True):
    """One version of everything. C{version} only grows within a state folder, over restarts and elections.

    C{server/workers.py} fills in what follows from the router's own settings (C{keys_required} and below) when it publishes.

    @ivar stopping: endpoints whose engines are being ended now: what still runs there has no more time.
    @ivar servers: how many servers divide the keys' limits among them.
    """

    version: int = 0
    epoch: int = 0
    models: tuple[RoutedModel, ...] = ()
    endpoints: tuple[RoutedEndpoint, ...] = ()
    keys: tuple[KeyEntry, ...] = ()
    stopping: tuple[str, ...] = ()
    keys_required: bool = True
    timeouts: Timeouts = Timeouts()
    body_limit: int = 64 * 2**20
    trusted_proxies: tuple[str, ...] = ()
    access_log: str = ""
    servers: int = 1


def endpoint(id: str, url: str, *, model: str, row: int = 0, key: str = "", share: int = 1, limit: int | None = None,
             static: bool = False) -> RoutedEndpoint:  # fmt: skip
    """An endpoint from its URL; a C{/v1} at the end of the path is taken off, since not all of an engine's paths lie under it.

    @raise ValueError: the URL has no host, or is neither C{http} nor C{https}.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an engine's address: write http://HOST:PORT/v1")
    tls = parts.scheme == "https"
    return RoutedEndpoint(
        id=id, host=parts.hostname, port=parts.port or (443 if tls else 80), model=model, row=row,
        base=parts.path.rstrip("/").removesuffix("/v1"), tls=tls, key=key, share=share, limit=limit, static=static,
    )  # fmt: skip


def key_digest(key: str | bytes) -> str:
    """How a caller's key is stored and looked up: its hex SHA-256."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Table).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_entries = msgspec.json.Decoder(list[Raw]).decode
_LISTS = {"models": RoutedModel, "endpoints": RoutedEndpoint, "keys": KeyEntry}
_ENTRY = {name: msgspec.json.Decoder(kind).decode for name, kind in _LISTS.items()}
AT_ONCE = 64


def table_text(table: Table) -> str:
    """The table as a leader shares it with other servers."""
    return _encode(table).decode()


def read_text(text: str) -> Table:
    """A table that L{table_text} wrote.

    @raise BadTable: it did not.
    """
    try:
        return _decode(text)
    except msgspec.MsgspecError as error:
        raise BadTable(f"the shared routing table cannot be used: {error}") from None


def write_table(path: Path, table: Table) -> None:
    """Replace the table on disk: readable by its owner only, whole or not at all, on the disk before it has the name.

    @raise OSError: the disk is full or the folder is not writable; the old table is then still there.
    """
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encode(table))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def read_table(path: Path) -> Table | None:
    """The table on disk, None if there is none yet.

    @raise BadTable: it is there and cannot be used.
    """
    steps = table_steps(path)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            table: Table | None = end.value
            return table


def table_steps(path: Path) -> Generator[None, None, Table | None]:
    """What L{read_table} does, a millisecond or two at a time, since a decoder holds a worker's streams until it is done: one of
    1,000 models and 10,000 keys for 20 ms on a good day. Yields between them.
    """
    try:
        members = _members(path.read_bytes())
        yield
        lists: dict[str, tuple[Struct, ...]] = {}
        for name, decode in _ENTRY.items():
            raw = _entries(members.pop(name, b"[]"))
            found: list[Struct] = []
            for start in range(0, len(raw), AT_ONCE):
                yield
                found += map(decode, raw[start : start + AT_ONCE])
            lists[name] = tuple(found)
        return replace(_decode(_encode(members)), **lists)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise BadTable(f"the routing table {path} cannot be used: {error}.") from error
