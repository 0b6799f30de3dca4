"""Which endpoint likely holds the beginning of a prompt in its cache: a table of hints that all workers share.

A prompt's text is cut into blocks of 2 KiB, each hashed together with all before it, so that one hash stands for a whole
prefix. The table maps such a hash to the last few endpoints that got a prompt with that prefix. The hash begins with the
model's name (and whatever else stands before the messages in the engine's template, such as tools), so that different
models never share a hint. Session keys are entries of the same table: a hash of model and key.

The table is one file of fixed size, mapped by all workers, and B{nothing in it is locked}: a torn or lost write costs a
wrong or missing hint, which costs some prefill. What is found is checked against the endpoints of today; whatever bits are
there, a hint is an endpoint's place in the caller's own list or nothing.

Entries live in buckets of two; the one not used for longer gives way. Since an entry's hash covers the whole prefix, a
gap does not hide what lies behind it: an endpoint's depth is the deepest block that names it. When an endpoint's engine
forgets a prefix is unknown here, and hardly matters: on traces, tables that mirrored the engines' caches exactly chose no
better, as the endpoint that got a prefix last is also the one that forgets it last.

The file, in cells of 8, 8, 4 and 4 bytes, four arrays of C{entries} each::

    owners  four rows of the scoreboard (divided by its WIDTH, plus 1; 0: none), 16 bits each, the last to get it lowest
    before  four more
    tags    the upper half of the hash
    stamps  when it was last used, in seconds
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from llmgw.router.scoreboard import WIDTH
from llmgw.router.sharedfile import Absent, map_file, new_file

BLOCK = 2048
ENTRIES = 1 << 19
MAX_BLOCKS = 512
"""A megabyte of prompt; what comes after is not looked at."""

ENTRY = 24
_OWNER = 0xFFFF
_FOUR = (1 << 64) - 1


def seed_of(model: str, before: bytes = b"") -> int:
    """Where the hashes of a model's prompts begin.

    @param model: the name the engine serves (an adapter's name is a model of its own).
    @param before: what the engine's template puts before the messages: the raw bytes of tools and system prompt.
    """
    seed = xxh3_64_intdigest(model.encode())
    return xxh3_64_intdigest(before, seed) if before else seed


def block_hashes(text: bytes | memoryview, seed: int) -> list[int]:
    """One hash for each whole block of C{text}, which are the raw bytes of the messages or the prompt.

    The last, partial block is left out: the next turn of a conversation changes it.
    """
    count = min(len(text) // BLOCK, MAX_BLOCKS)
    if not count:
        return []
    view = memoryview(text)
    hashes = []
    for start in range(0, count * BLOCK, BLOCK):
        seed = xxh3_64_intdigest(view[start : start + BLOCK], seed)
        hashes.append(seed)
    return hashes


def session_hash(session: bytes, seed: int) -> int:
    """The entry of a session key."""
    return xxh3_64_intdigest(session, seed ^ 0x5E55_1077)


class Prefixes:
    """The mapped table."""

    def __init__(self, path: Path, entries: int = ENTRIES) -> None:
        """Map the table at C{path}, making it if it is not there or has another size. The server does so before its workers.

        @param entries: a power of 2; each takes L{ENTRY} bytes.
        """
        try:
            self._map: mmap.mmap = map_file(path, entries * ENTRY)
        except Absent:
            new_file(path, entries * ENTRY, b"")
            self._map = map_file(path, entries * ENTRY)
        whole = memoryview(self._map)
        self._owners = whole[: entries * 8].cast("Q")
        self._before = whole[entries * 8 : entries * 16].cast("Q")
        self._tags = whole[entries * 16 : entries * 20].cast("I")
        self._stamps = whole[entries * 20 :].cast("I")
        self._mask = entries - 1
        self.evicted = 0
        whole.release()

    def close(self) -> None:
        """Unmap."""
        for view in (self._owners, self._before, self._tags, self._stamps):
            view.release()
        self._map.close()

    def held(self, hashes: Sequence[int], places: Mapping[int, int]) -> dict[int, int]:
        """By endpoint, how many of the first blocks it likely holds; endpoints that hold none are left out.

        @param places: L{owners_of} the endpoints asked about.
        @return: from the values of C{places} to a number of blocks.
        """
        tags, owners, mask = self._tags, self._owners, self._mask
        found: dict[int, int] = {}
        for depth in range(len(hashes), 0, -1):
            hashed = hashes[depth - 1]
            at, tag = hashed & mask, hashed >> 32
            if tags[at] != tag:
                at ^= 1
                if tags[at] != tag:
                    continue
            rows = owners[at]
            if rows >> 48:
                rows |= self._before[at] << 64
            while rows:
                place = places.get(rows & _OWNER)
                if place is not None and place not in found:
                    found[place] = depth
                    if len(found) == len(places):
                        return found
                rows >>= 16
        return found

    def session(self, hashed: int, places: Mapping[int, int]) -> int | None:
        """The place of the endpoint that got this session last, None if it has none or is not among C{places}."""
        at, tag = hashed & self._mask, hashed >> 32
        if self._tags[at] != tag:
            at ^= 1
            if self._tags[at] != tag:
                return None
        return places.get(self._owners[at] & _OWNER)

    def insert(self, hashes: Iterable[int], row: int, now: float) -> None:
        """An endpoint has been sent a prompt with these hashes (a session's among them).

        @param row: its row in the scoreboard.
        @param now: any clock that all workers share, in seconds; the monotonic one will do.
        """
        tags, owners, stamps, mask = self._tags, self._owners, self._stamps, self._mask
        owner, stamp = row // WIDTH + 1, int(now) + 1
        for hashed in hashes:
            at, tag = hashed & mask, hashed >> 32
            if tags[at] == tag or tags[at ^ 1] == tag:
                at = at if tags[at] == tag else at ^ 1
                if owners[at] & _OWNER != owner:
                    rows = _first(owner, owners[at] | self._before[at] << 64)
                    owners[at] = rows & _FOUR
                    self._before[at] = rows >> 64
            else:
                if stamps[at ^ 1] < stamps[at]:
                    at ^= 1
                if stamps[at]:
                    self.evicted += 1
                owners[at] = owner
                self._before[at] = 0
                tags[at] = tag
            stamps[at] = stamp

    def used(self) -> int:
        """About how many entries are in use, from a sample; for metrics."""
        sample = self._stamps[:4096].tolist()
        return (len(sample) - sample.count(0)) * (self._mask + 1) // len(sample)


class Hint:
    """What the table says of one request; what L{Group.choose} takes.

    @ivar held: by candidate's index, how many of the first blocks it likely holds.
    @ivar blocks: how many blocks the prompt has.
    @ivar session: the index of the candidate that the session was at last, None if there is no such.
    """

    __slots__ = ("blocks", "hashes", "held", "session")

    def __init__(self, hashes: list[int], held: Mapping[int, int], blocks: int, session: int | None) -> None:
        self.hashes, self.held, self.blocks, self.session = hashes, held, blocks, session


NO_HINT = Hint([], {}, 0, None)


class Hints:
    """The table as one model's group of candidates sees it; made anew with the group.

    @ivar blocks: blocks of prompts routed so far; C{found} of them were likely cached where they were sent.
    """

    def __init__(self, table: Prefixes, model: str, rows: Sequence[int]) -> None:
        """
        @param model: the model's public name.
        @param rows: the candidates' rows in the scoreboard, in the group's order.
        """
        self._table, self._rows = table, list(rows)
        self._seed = seed_of(model)
        self._places = owners_of(rows)
        self.blocks = self.found = 0

    def look(self, text: bytes | memoryview, before: bytes = b"", session: bytes = b"") -> Hint:
        """Find out who may hold the beginning of a prompt.

        @param text: the raw messages or prompt.
        @param before: raw tools and system prompt, if any.
        @param session: the caller's session key, if any.
        """
        if len(text) < BLOCK and not session:
            return NO_HINT
        seed = xxh3_64_intdigest(before, self._seed) if before else self._seed
        hashes = block_hashes(text, seed)
        blocks = len(hashes)
        held = self._table.held(hashes, self._places) if hashes else {}
        if not session:
            return Hint(hashes, held, blocks, None)
        hashed = session_hash(session, self._seed)
        hashes.append(hashed)
        return Hint(hashes, held, blocks, self._table.session(hashed, self._places))

    def sent(self, hint: Hint, index: int, now: float) -> None:
        """The request has been dispatched to the candidate with this index."""
        if hint.hashes:
            self.blocks += hint.blocks
            self.found += hint.held.get(index, 0)
            self._table.insert(hint.hashes, self._rows[index], now)


def owners_of(rows: Sequence[int]) -> dict[int, int]:
    """From an endpoint's mark in the table to its index in C{rows} (scoreboard rows, in the order of the candidates)."""
    return {row // WIDTH + 1: index for index, row in enumerate(rows)}


def _first(owner: int, before: int) -> int:
    """C{before} with C{owner} first; the one that got it longest ago falls off."""
    kept, shift = owner, 16
    while before and shift < 128:
        other = before & _OWNER
        if other != owner:
            kept |= other << shift
            shift += 16
        before >>= 16
    return kept
