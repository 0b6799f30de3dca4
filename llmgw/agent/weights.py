"""Finds a model's weights on this node and reads what can be known of them without loading them.

C{weights} in a profile is an absolute path, C{hf:ORG/NAME@REVISION} in the node's Hugging Face cache, or a path below one of
the model roots, the first hit wins. Whatever it names must lie below its root after all links are followed. All of this reads
files, maybe on a network: it runs in a thread.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attrs import evolve

from llmgw.agent.tensors import gguf_header, gguf_sizes, safetensors_sizes, sort_tensors
from llmgw.fleet.shard import WeightFiles

HF = re.compile(r"hf:(?P<org>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w.-]+))?\Z", re.ASCII)
SPLIT = re.compile(r"(?P<base>.+)-\d{5}-of-(?P<count>\d{5})\.gguf\Z", re.ASCII)
OLD = re.compile(r"(pytorch_)?model[\w.-]*\.bin\Z")
TOKENIZER = re.compile(
    r"tokenizer[\w.-]*\.(json|model)\Z|vocab\.(json|txt)\Z|tekken\.json\Z|.*\.(tiktoken|spm)\Z|spiece\.model\Z"
)
INDEX = "model.safetensors.index.json"
CONFIG_LIMIT = 16 * 2**20
KEEP = 256
LONG_LIST, LONG_TEXT = 1024, 4096


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
        return WeightFiles(weights, found=False, looked=tuple(looked), problem=self._other_revisions(weights))

    def _other_revisions(self, weights: str) -> str:
        """What is in the cache instead of the revision that is not; empty for other weights, or where nothing is."""
        found = HF.match(weights)
        repo = self._repository(found) if found else None
        if found is None or repo is None or not repo.is_dir():
            return ""
        refs, snapshots = (sorted(one.name for one in repo.glob(f"{where}/*")) for where in ("refs", "snapshots"))
        there = ", ".join([*refs, *snapshots][:8]) or "none"
        return f"{repo} has no whole revision {found['revision'] or 'main'}; it has: {there}"

    def _repository(self, found: re.Match[str]) -> Path:
        return self._hub / f"models--{found['org']}--{found['name']}"

    def _candidates(self, weights: str) -> Iterator[tuple[Path | None, Path]]:
        if found := HF.match(weights):
            repo = self._repository(found)
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
            files = sorted(path.iterdir()) if path.is_dir() else _beside(path)
            stamp = tuple((str(file), (s := file.stat()).st_size, s.st_mtime_ns) for file in files)
            if (known := self._known.get(str(path))) and known[0] == stamp:
                return evolve(known[1], weights=weights, looked=looked)
            found = read_folder(path, files) if path.is_dir() else read_file(path)
        except (OSError, ValueError, RecursionError) as error:
            return WeightFiles(weights, found=True, path=str(path), looked=looked, problem=f"{path}: {error}")
        found = evolve(found, revision=path.name if HF.match(weights) else "")
        self._known[str(path)] = (stamp, found)
        while len(self._known) > KEEP:
            del self._known[next(iter(self._known))]
        return evolve(found, weights=weights, looked=looked)


def _beside(path: Path) -> list[Path]:
    """The files that C{path} is read with: itself, and what may be other parts of it."""
    return sorted(path.parent.glob("*-of-*.gguf")) if SPLIT.match(path.name) else [path]


def read_file(path: Path) -> WeightFiles:
    """One file: GGUF, with the other parts of a split one, or a single safetensors file.

    @raise ValueError: it is neither, or damaged.
    """
    if path.suffix == ".safetensors":
        return _of_tensors(path, safetensors_sizes(path))
    return read_gguf(gguf_parts(path))


def gguf_parts(path: Path) -> list[Path]:
    """All files of a split GGUF model, of which C{path} is one; the file alone where it is whole.

    @raise ValueError: parts are missing.
    """
    found = SPLIT.match(path.name)
    if not found:
        return [path]
    count = int(found["count"])
    named = [path.with_name(f"{found['base']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in named if not part.exists()]:
        raise ValueError(f"{len(missing)} of {count} parts are missing, the first is {missing[0]}")
    return named


def read_gguf(parts: list[Path]) -> WeightFiles:
    """The key-values of the first part, the sizes of all.

    @raise ValueError: one is no GGUF file, or damaged.
    """
    headers = [gguf_header(part) for part in parts]
    sizes = [part.stat().st_size for part in parts]
    rows = [row for header, size in zip(headers, sizes, strict=True) for row in gguf_sizes(header, size)]
    tensors = sort_tensors(rows)
    return WeightFiles(
        "", True, str(parts[0]), format="gguf", bytes=sum(sizes), gguf=headers[0].pairs, tensors=tensors if rows else None
    )


def read_folder(path: Path, files: list[Path]) -> WeightFiles:
    """A folder as Hugging Face lays it out; one with nothing but GGUF files is told as its GGUF model.

    @raise ValueError: config.json or a tensor file is damaged, or the folder holds several models.
    """
    config = path / "config.json"
    ggufs = [file for file in files if file.suffix == ".gguf" and not file.name.startswith("mmproj")]
    if ggufs and not config.exists() and not any(file.suffix == ".safetensors" for file in files):
        return read_gguf(one_model(ggufs))
    index = path / INDEX
    named = _named_in(index) if index.exists() else set()
    missing = sorted(named - {file.name for file in files})
    chosen = [] if missing else tensor_files(files, named)
    found = _of_tensors(path, [row for file in chosen for row in safetensors_sizes(file)])
    problem = f"{len(missing)} of {len(named)} tensor files are missing, the first is {missing[0]}" if missing else ""
    if not chosen and not missing and (old := [file for file in files if OLD.match(file.name)]):
        # Without reading pickles their size is all that can be known.
        found = evolve(found, format="pytorch", bytes=sum(file.stat().st_size for file in old))
    return evolve(
        found,
        format=found.format or ("safetensors" if named else ""),
        # A LoRA adapter has its own file in place of a model's.
        config=_configuration(config if config.exists() else path / "adapter_config.json"),
        generation=_configuration(path / "generation_config.json"),
        problem=problem,
        tokenizer=any(TOKENIZER.match(file.name) for file in files) if chosen else None,
    )


def one_model(ggufs: list[Path]) -> list[Path]:
    """The files of the only GGUF model among these.

    @raise ValueError: there are several, so that one must be named.
    """
    models = {found["base"] if (found := SPLIT.match(file.name)) else file.name: file for file in reversed(ggufs)}
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models.values())[:6])
        raise ValueError(f"it holds {len(models)} GGUF models; name the file of one: {names}")
    return gguf_parts(next(iter(models.values())))


def tensor_files(files: list[Path], named: set[str]) -> list[Path]:
    """The safetensors files that an engine loads: those in the index, else all but the copy in Mistral's own layout."""
    found = [file for file in files if file.suffix == ".safetensors"]
    if named:
        return [file for file in found if file.name in named]
    return [file for file in found if not file.name.startswith("consolidated")] or found


def _of_tensors(path: Path, rows: list[tuple[str, int]]) -> WeightFiles:
    if not rows:
        return WeightFiles("", True, str(path))
    total = sum(size for _, size in rows)
    return WeightFiles("", True, str(path), format="safetensors", bytes=total, tensors=sort_tensors(rows))


def told(config: object) -> object:
    """What of a configuration goes to the server: without lists and texts as long as no decision needs, so that a line holds it.

    Quantized models name thousands of modules there.
    """
    if isinstance(config, dict):
        return {name: told(value) for name, value in config.items() if not _long(value)}
    return [told(value) for value in config] if isinstance(config, list) else config


def _long(value: object) -> bool:
    return (isinstance(value, list) and len(value) > LONG_LIST) or (isinstance(value, str) and len(value) > LONG_TEXT)


def _configuration(path: Path) -> dict[str, object]:
    return dict(told(read_config(path))) if path.exists() else {}  # type: ignore[call-overload]


def read_config(path: Path) -> dict[str, object]:
    """A JSON file of a model's as parsed.

    @raise ValueError: it is too large, or no JSON object.
    """
    if path.stat().st_size > CONFIG_LIMIT:
        raise ValueError(f"{path.name} is larger than {CONFIG_LIMIT} bytes")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def _named_in(index: Path) -> set[str]:
    """The files that an index names."""
    rows = read_config(index).get("weight_map")
    return {str(name) for name in rows.values()} if isinstance(rows, dict) else set()
