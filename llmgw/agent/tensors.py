"""Where the bytes of a model's tensors stand, from the headers of its files alone: safetensors and GGUF.

Nothing of a tensor is read. Names decide what a tensor is: C{layers.7.}, C{h.7.}, C{blk.7.} are layer 7, C{experts} or C{_exps}
in it one of its experts, and the embedding and the head have a few names in all families.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from llmgw.agent.gguf import Header, read_header
from llmgw.fleet.tensors import TensorBytes

HEADER_LIMIT = 128 * 2**20
LFS = b"version https://git-lfs"
MOST_LAYERS = 4096
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk|blocks|block|decoder_layers)\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\b|_exps\b|\.block_sparse_moe\.experts")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|token_embd|embed_in|embedding)\.")
_OUTPUT = re.compile(r"(?:^|\.)(?:lm_head|output|embed_out)\.weight$|^(?:lm_head|embed_out)\.")
_TOWER = re.compile(r"(?:^|\.)(?:vision|visual|vision_tower|vision_model|audio_tower|encoder|mm|v)\b")


def sort_tensors(sizes: Iterable[tuple[str, int]]) -> TensorBytes:
    """Add up tensors by their names; layers of a vision or audio tower are not the language model's."""
    layers: dict[int, int] = defaultdict(int)
    experts: dict[int, int] = defaultdict(int)
    parts: dict[str, int] = defaultdict(int)
    largest = 0
    for name, size in sizes:
        largest = max(largest, size)
        found = _LAYER.search(name)
        if found and int(found[1]) < MOST_LAYERS and not _TOWER.search(name[: found.start() + 1]):
            layers[int(found[1])] += size
            experts[int(found[1])] += size if _EXPERT.search(name) else 0
        else:
            parts[_part(name)] += size
    count = max(layers, default=-1) + 1
    return TensorBytes(
        layers=tuple(layers[index] for index in range(count)),
        experts=tuple(experts[index] for index in range(count)) if any(experts.values()) else (),
        embedding=parts["embedding"],
        output=parts["output"],
        other=parts["other"],
        largest=largest,
    )


def _part(name: str) -> str:
    if _TOWER.search(name):
        return "other"
    return "embedding" if _EMBEDDING.search(name) else "output" if _OUTPUT.search(name) else "other"


def safetensors_sizes(path: Path) -> list[tuple[str, int]]:
    """The bytes of each tensor of a safetensors file.

    The file is 8 bytes of the header's length, little-endian, the header as JSON, and the tensors
    (U{https://github.com/huggingface/safetensors#format}).

    @raise ValueError: a Git LFS pointer, a header that cannot be, or a file of another size than its header says.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(len(LFS))
        if start == LFS:
            raise ValueError(f"{path.name} is a Git LFS pointer, not the file itself: run git lfs pull")
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
        if length > min(size, HEADER_LIMIT):
            raise ValueError(f"{path.name} is cut short or no safetensors file")
        file.seek(8)
        header = file.read(length)
    try:
        found = json.loads(header)
        spans = {name: tuple(map(int, row["data_offsets"])) for name, row in found.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path.name} has a damaged header: fetch the file again") from None
    end = 8 + length + max((last for _, last in spans.values()), default=0)
    if size != end:
        raise ValueError(f"{path.name} has {size} bytes and should have {end}: fetch the file again")
    return [(name, last - first) for name, (first, last) in spans.items()]


def gguf_header(path: Path) -> Header:
    """The header of one GGUF file.

    @raise ValueError: it is none, or damaged.
    """
    with open(path, "rb") as file:
        if file.read(len(LFS)) == LFS:
            raise ValueError(f"{path.name} is a Git LFS pointer, not the file itself: run git lfs pull")
        file.seek(0)
        return read_header(file)


def gguf_sizes(header: Header, size: int) -> Iterator[tuple[str, int]]:
    """The bytes of each tensor of a GGUF file of C{size} bytes: from its offset to the next one's, padding and all.

    @raise ValueError: the file ends before its last tensor begins.
    """
    rows = sorted(header.tensors, key=lambda row: row[1])
    data = size - header.data
    if rows and rows[-1][1] >= data:
        raise ValueError(f"it is cut short: its last tensor begins at {header.data + rows[-1][1]}, it has {size} bytes")
    for (name, start), (_, end) in pairwise([*rows, ("", data)]):
        yield name, end - start
