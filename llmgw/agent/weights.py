"""Finds a model's weights on this node and reads what can be known of them without loading them.

C{weights} in a profile is an absolute path, C{hf:ORG/NAME@REVISION} in the node's Hugging Face cache, or a path below one of
the model roots, the first hit wins. Whatever it names must lie below its root after all links are followed. All of this reads
files, maybe on a network: it runs in a thread.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attrs import evolve

from llmgw.agent.gguf import read_header
from llmgw.fleet.shard import WeightFiles

HF = re.compile(r"hf:(?P<org>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w.-]+))?\Z", re.ASCII)
CONFIG_LIMIT = 4 * 2**20
HEADER_LIMIT = 128 * 2**20
LFS = b"version https://git-lfs"


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps its files."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named)
    home = environment.get("HF_HOME") or os.path.join(
        environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(home) / "hub"


class WeightFinder:
    """@param roots: the model roots, in order."""

    def __init__(self, roots: Iterable[Path], environment: Mapping[str, str] = os.environ) -> None:
        self._roots = tuple(roots)
        self._hub = hub_cache(environment)
        self._known: dict[str, tuple[object, WeightFiles]] = {}

    def inspect(self, weights: str) -> WeightFiles:
        """What is there; blocks. Missing or damaged is a value, not an error."""
        looked: list[str] = []
        for root, path in self._candidates(weights):
            looked.append(str(path))
            if path.exists():
                if root is not None and not path.resolve().is_relative_to(root.resolve()):
                    why = f"{path} leads out of the model root {root}"
                    return WeightFiles(weights, found=False, looked=tuple(looked), problem=why)
                return self._look(weights, path, tuple(looked))
        return WeightFiles(weights, found=False, looked=tuple(looked))

    def _candidates(self, weights: str) -> Iterator[tuple[Path | None, Path]]:
        if found := HF.match(weights):
            repo = self._hub / f"models--{found['org']}--{found['name']}"
            revision = found["revision"] or "main"
            reference = repo / "refs" / revision
            snapshot = reference.read_text().strip() if reference.is_file() else revision
            yield repo, repo / "snapshots" / os.path.basename(snapshot)
        elif weights.startswith("/"):
            yield None, Path(weights)
        else:
            yield from ((root, root / weights) for root in self._roots)

    def _look(self, weights: str, path: Path, looked: tuple[str, ...]) -> WeightFiles:
        try:
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            stamp = tuple((str(file), (s := file.stat()).st_size, s.st_mtime_ns) for file in files)
            if (known := self._known.get(str(path))) and known[0] == stamp:
                return evolve(known[1], weights=weights, looked=looked)
            found = read_folder(path, files) if path.is_dir() else read_file(path)
        except (OSError, ValueError, RecursionError) as error:
            return WeightFiles(weights, found=True, path=str(path), looked=looked, problem=f"{path}: {error}")
        self._known[str(path)] = (stamp, found)
        return evolve(found, weights=weights, looked=looked)


def read_file(path: Path) -> WeightFiles:
    """One file: GGUF, or a single safetensors file.

    @raise ValueError: it is neither, or damaged.
    """
    if path.suffix == ".safetensors":
        return WeightFiles("", True, str(path), format="safetensors", bytes=tensor_bytes(path))
    with open(path, "rb") as file:
        header = read_header(file)
    return WeightFiles("", True, str(path), format="gguf", bytes=path.stat().st_size, gguf=header)


def read_folder(path: Path, files: list[Path]) -> WeightFiles:
    """A folder as Hugging Face lays it out; one with nothing but GGUF files is told as GGUF.

    @raise ValueError: config.json or a tensor file is damaged.
    """
    config = path / "config.json"
    tensors = [file for file in files if file.suffix == ".safetensors"]
    ggufs = [file for file in files if file.suffix == ".gguf"]
    if ggufs and not tensors and not config.exists():
        with open(ggufs[0], "rb") as file:
            header = read_header(file)
        return WeightFiles("", True, str(path), format="gguf", bytes=sum(f.stat().st_size for f in ggufs), gguf=header)
    parsed = read_config(config) if config.exists() else {}
    size = sum(map(tensor_bytes, tensors)) if tensors else None
    return WeightFiles(
        "",
        True,
        str(path),
        format="safetensors" if tensors else "",
        bytes=size,
        config=parsed,
        problem=folder_problem(path, {file.name for file in files}),
    )


def read_config(path: Path) -> dict[str, object]:
    """config.json as parsed.

    @raise ValueError: it is too large, or no JSON object.
    """
    if path.stat().st_size > CONFIG_LIMIT:
        raise ValueError(f"{path.name} is larger than {CONFIG_LIMIT} bytes")
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def folder_problem(path: Path, there: set[str]) -> str:
    """Which files an index names that are not there; empty when all are."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return ""
    named = {str(name) for name in dict(read_config(index).get("weight_map") or {}).values()}  # type: ignore[call-overload]
    missing = sorted(named - there)
    return f"{len(missing)} of {len(named)} tensor files are missing, the first is {missing[0]}" if missing else ""


def tensor_bytes(path: Path) -> int:
    """The bytes of a safetensors file's tensors: its size less the 8 bytes of the header's length and the header.

    @raise ValueError: a Git LFS pointer, or a header that cannot be.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(len(LFS))
    if start == LFS:
        raise ValueError(f"{path.name} is a Git LFS pointer, not the file itself: run git lfs pull")
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
    if length > min(size, HEADER_LIMIT):
        raise ValueError(f"{path.name} is cut short or no safetensors file")
    return int(size - 8 - length)
