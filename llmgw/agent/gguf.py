"""Reads the header of a GGUF file: its key-values, as far as an operator's plan needs them, and where its tensors are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Arrays (vocabularies, mostly) are skipped unless short; every
length is checked before it is believed, since the file may be anything.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

from attrs import frozen

MAGIC = b"GGUF"
SHORT = 128
MOST_KEYS, MOST_TEXT, MOST_ELEMENTS = 10_000, 2**20, 2**24
MOST_TENSORS, MOST_DIMENSIONS, ALIGNMENT = 2**17, 8, 32
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def _unpack(file: BinaryIO, code: str) -> Any:
    size = struct.calcsize(code)
    data = file.read(size)
    if len(data) < size:
        raise ValueError("the file ends inside its header")
    return struct.unpack(code, data)[0]


def _length(file: BinaryIO, most: int) -> int:
    count: int = _unpack(file, "<Q")
    if count > most:
        raise ValueError(f"a length of {count} stands in its header")
    return count


def _text(file: BinaryIO) -> str:
    return file.read(_length(file, MOST_TEXT)).decode(errors="replace")


def _array(file: BinaryIO) -> list[Any] | None:
    kind, count = _unpack(file, "<I"), _length(file, MOST_ELEMENTS)
    if kind in SCALARS:
        size = struct.calcsize(SCALARS[kind])
        if count > SHORT:
            file.seek(size * count, 1)
            return None
        return [_unpack(file, SCALARS[kind]) for _ in range(count)]
    if kind != STRING:
        raise ValueError(f"an array of type {kind} stands in its header")
    for _ in range(count):
        file.seek(_length(file, MOST_TEXT), 1)
    return None


def _value(file: BinaryIO) -> Any:
    kind = _unpack(file, "<I")
    if kind in SCALARS:
        return _unpack(file, SCALARS[kind])
    if kind == STRING:
        return _text(file)
    if kind == ARRAY:
        return _array(file)
    raise ValueError(f"a value of type {kind} stands in its header")


@frozen
class Header:
    """@ivar pairs: the key-values; C{tensors} each tensor's name and offset in the data, which begins at C{data}."""

    pairs: dict[str, Any]
    tensors: list[tuple[str, int]]
    data: int


def read_header(file: BinaryIO) -> Header:
    """The key-values and where the tensors are; long arrays and long texts are left out.

    @raise ValueError: it is no GGUF file, or a damaged one; the text says what was found.
    """
    magic = file.read(4)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r} and not with {MAGIC!r}")
    version = _unpack(file, "<I")
    if version not in (2, 3):
        raise ValueError(f"its GGUF version is {version}, 2 and 3 are known")
    tensors = _length(file, MOST_TENSORS)
    pairs = {}
    for _ in range(_length(file, MOST_KEYS)):
        key = _text(file)
        value = _value(file)
        if value is not None and not (isinstance(value, str) and len(value) > SHORT):
            pairs[key] = value
    found = [_tensor(file) for _ in range(tensors)]
    alignment = pairs.get("general.alignment")
    unit = alignment if isinstance(alignment, int) and 0 < alignment <= MOST_TEXT else ALIGNMENT
    return Header(pairs, found, -(-file.tell() // unit) * unit)


def _tensor(file: BinaryIO) -> tuple[str, int]:
    """One tensor's name and offset; its dimensions and type are read past."""
    name = _text(file)
    dimensions = _unpack(file, "<I")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {dimensions} dimensions stands in its header")
    _unpack(file, f"<{dimensions}QI")
    return name, int(_unpack(file, "<Q"))
