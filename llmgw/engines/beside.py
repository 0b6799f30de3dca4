"""What stands in memory beside a base model: adapters, whose room follows from figures, and what nobody has looked at.

An engine keeps room for its adapters from the start, for so many of the highest rank: for each matrix that it may change one of
C{inputs x rank} and one of C{rank x outputs}, of which tensor parallel ranks have a part on the side that they divide (vLLM's
C{create_lora_weights} in C{lora/layers}, SGLang's C{LoRAMemoryPool}). Counted for attention, feed forward, embedding and head,
whatever an adapter really changes. Draft models and projectors of images stand in files of their own, of which only the
engine knows where they are: what they take is unknown, and then so is the sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from attrs import evolve

from llmgw.engines import lora
from llmgw.engines.memory import number, shape, text_config
from llmgw.fleet.estimate import Estimate, RankMemory
from llmgw.fleet.model import Profile
from llmgw.fleet.shard import WeightFiles

# Methods of vLLM's that draft with what the base model brings, or without any model.
_OWN_DRAFT = ("ngram", "suffix", "mtp")


def adapters(profile: Profile, files: WeightFiles | None, kept: int, rank: int | None) -> int | None:
    """Bytes on each rank for C{kept} adapters of this rank; 0 where it takes none, None where a figure is missing.

    Experts have matrices of adapters each, in ways that differ by version: of their models it is unknown.
    """
    if not lora.enabled(profile):
        return 0
    found, config = shape(files), text_config(files)
    hidden, inner, words = (number(config, name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    if not (rank and found.layers and found.heads and found.kv_heads and found.head_size and hidden and inner and words):
        return None
    if found.experts or found.latent:
        return None
    tensor = profile.parallel.tensor
    query, value = found.heads * found.head_size // tensor, max(1, found.kv_heads // tensor) * found.head_size
    layer = 7 * hidden + 2 * query + 2 * value + 3 * -(-inner // tensor)
    layers = -(-found.layers // profile.parallel.pipeline)
    return kept * rank * 2 * (layers * layer + 2 * (words + hidden))


def with_adapters(found: Estimate, held: int | None) -> Estimate:
    """The same with the room for its adapters on every rank."""
    said = "the adapters: their rank is not known (set max-lora-rank), or the model is of a kind whose adapters are not reckoned"
    return _more(found, range(len(found.ranks)), held, said)


def with_unseen(found: Estimate, what: Iterable[str]) -> Estimate:
    """The same where these stand beside it, unknown how large: on the first device, or on the host."""
    say = f"set `resources.{'device' if found.ranks else 'host'}_memory`"
    for one in what:
        found = _more(found, range(1), None, f"{one}: its file is not looked at, so {say}")
    return found


def _more(found: Estimate, ranks: range, held: int | None, said: str) -> Estimate:
    def more(rank: RankMemory) -> RankMemory:
        return evolve(rank, overhead=None if held is None or rank.overhead is None else rank.overhead + held)

    host = more(found.host) if found.host is not None and not found.ranks else found.host
    grown = tuple(more(rank) if at in ranks else rank for at, rank in enumerate(found.ranks))
    return evolve(found, ranks=grown, host=host, unknown=(*found.unknown, said) if held is None else found.unknown)


def drafts(profile: Profile, *paths: str) -> list[str]:
    """The draft models that a profile names by one of these arguments, or in vLLM's C{speculative-config}."""
    found = [f"the draft model {profile.arguments[name]}" for name in paths if profile.arguments.get(name)]
    told = profile.arguments.get("speculative-config")
    try:
        told = json.loads(told) if isinstance(told, str) else told
    except ValueError:
        told = {"model": told}
    if isinstance(told, Mapping) and not str(told.get("method", "")).endswith(_OWN_DRAFT) and (name := told.get("model")):
        found.append(f"the draft model {name}")
    return found


def files_named(profile: Profile, *names: str) -> list[str]:
    """Files that a profile names by one of these options, in C{arguments} or in C{extra_argv}."""
    found = [f"{name} {profile.arguments[name]}" for name in names if profile.arguments.get(name)]
    words = list(profile.extra_argv)
    for at, word in enumerate(words):
        name, has, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in names:
            found.append(f"{name} {value if has else ' '.join(words[at + 1 : at + 2])}")
    return found
