"""Engines' output as the shim keeps it: read by offset in everything that was ever written, whatever has been cut since.

Three files hold it (see L{llmgw.agent.shim}): the start, the latest that was cut off, and what came after. Between the first
two a flood may have left a gap; a reader that asks for something in it gets what comes next, and sees that by the offset.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from attrs import frozen

TAIL_BYTES = 64 * 1024
TAIL_LINES = 400


@frozen
class Chunk:
    """A piece of output: C{data} begins at C{offset}, the next piece at C{next}; C{size} is all that was ever written."""

    data: bytes
    offset: int
    next: int
    size: int

    def text(self, secret: str = "") -> tuple[str, int]:
        """The text with C{secret} masked, and the offset after it: a character cut in two is left to the next piece."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = self.next >= self.size
        text = decoder.decode(self.data, final=last)
        return mask(text, secret), self.next - (0 if last else len(decoder.getstate()[0]))


def mask(text: str, secret: str) -> str:
    """C{text} without the engine's key, should the engine have printed it."""
    return text.replace(secret, "*" * len(secret)) if secret else text


def _segments(folder: Path) -> list[tuple[int, Path, int]]:
    """(first offset, file, length) of each file, in order, overlaps taken from the earlier one."""
    sizes = {name: _size(folder / name) for name in ("output.0", "output.1", "output.log")}
    base = int((folder / "output.base").read_text()) if (folder / "output.base").exists() else 0
    latest = max(0, base - sizes["output.1"])
    return [
        (0, folder / "output.0", min(sizes["output.0"], latest)),
        (latest, folder / "output.1", base - latest if sizes["output.1"] else 0),
        (base, folder / "output.log", sizes["output.log"]),
    ]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def written(folder: Path) -> int:
    """How many bytes the engine has written so far."""
    start, _, length = _segments(folder)[-1]
    return start + length


def read_output(folder: Path, offset: int, limit: int) -> Chunk:
    """At most C{limit} bytes from C{offset} on; a negative offset counts from the end.

    @raise OSError: a file cannot be read.
    """
    segments = _segments(folder)
    size = segments[-1][0] + segments[-1][2]
    at = max(0, size + offset) if offset < 0 else offset
    begin = at
    pieces: list[bytes] = []
    for start, path, length in segments:
        if length and at < start + length and limit > 0 and (not pieces or at == start):
            at = max(at, start)
            begin = begin if pieces else at
            with open(path, "rb") as file:
                file.seek(at - start)
                pieces.append(file.read(min(limit, start + length - at)))
            at, limit = at + len(pieces[-1]), limit - len(pieces[-1])
    return Chunk(b"".join(pieces), begin, at, max(size, at))


def last_lines(folder: Path, secret: str = "") -> tuple[str, ...]:
    """The end of the output, at most 400 lines of the last 64 KiB, for a diagnosis; empty when it cannot be read."""
    try:
        text = read_output(folder, -TAIL_BYTES, TAIL_BYTES).data.decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return (f"(the output cannot be read: {error})",)
    return tuple(mask(text, secret).splitlines()[-TAIL_LINES:])


def disk_usage(folder: Path) -> int:
    """Bytes that everything in C{folder} takes."""
    return sum(_size(Path(entry.path)) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
