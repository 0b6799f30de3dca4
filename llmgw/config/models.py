"""The C{models} section: what each key means and what must hold between them.

What only an adapter knows (does vLLM take this argument, do the heads divide by C{tensor}) is asked of the adapter, later and
with the weights at hand; here is what can be told from the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from attrs import evolve

from llmgw.config.shape import (
    Reading,
    Wrong,
    duration,
    flag,
    integer,
    list_of,
    map_of,
    matching,
    one_of,
    path,
    section,
    size,
    text,
    word,
)
from llmgw.config.text import Item
from llmgw.fleet.model import (
    Argument,
    Catalog,
    Lora,
    Model,
    Parallel,
    Place,
    Profile,
    Resources,
    Rollout,
    Routing,
    Scale,
    StaticEndpoint,
)
from llmgw.fleet.plain import to_text

MODEL_NAME = re.compile(
    r"(?!.*//)(?!.*/\.{1,2}(/|\Z))(?!(.*/)?[0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,126}[A-Za-z0-9_+-]\Z|[A-Za-z]\Z", re.ASCII
)
_MODEL_NAME = "a model name: letters, digits and . _ : / @ + -, at most 128, the part behind the last / not a bare number"
STRATEGIES = ("auto", "surge", "replace")
BALANCES = ("internal", "hybrid")
RECONCILE = ("keep_original", "keep_replacement", "longest_running")
POLICIES = ("least_cost", "least_inflight", "round_robin", "weighted")
INSTALLATION = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z", re.ASCII)
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,126}\Z", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}\Z", re.ASCII)
_OPTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}\Z", re.ASCII)
_HUB = re.compile(r"hf:[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?\Z", re.ASCII)

# Half of what an order on the link may take; the kernel takes no argument or variable of more than 128 KiB.
MAX_ORDERED = 256 * 1024

model_name = matching(MODEL_NAME, _MODEL_NAME)
environment = map_of(word, VARIABLE, "a variable's name: letters, digits and _")
labels = map_of(word, LABEL, "a label: letters, digits and . _ / -")


def weights(item: Item, reading: Reading) -> str:
    """A path on the node, absolute or under a model root, or C{hf:org/name@revision}."""
    found = text(item, reading)
    if found.startswith("hf:") and not _HUB.match(found):
        raise Wrong("hf:ORGANISATION/NAME or hf:ORGANISATION/NAME@REVISION", "weights")
    if found.startswith("-") or ".." in found.split("/"):
        raise Wrong("a path under the node's model roots without .., an absolute path, or hf:ORG/NAME", "weights")
    return found


def argument_word(item: Item, reading: Reading) -> str:
    """One word of an argv. C{{port}} without quotes is a section to YAML, which deserves to be said."""
    if isinstance(item.value, dict) and len(item.value) == 1:
        raise Wrong('text: put it in quotes: "{' + next(iter(item.value)) + '}"')
    return word(item, reading)


def argument(item: Item, reading: Reading) -> Argument:
    """An engine's argument: text, number, truth, list or map."""
    value = item.value
    if isinstance(value, list):
        return [argument(element, reading) for element in value]
    if isinstance(value, dict):
        return {key: argument(element, reading) for key, element in value.items()}
    if isinstance(value, str) and "\0" in value:
        raise Wrong("text without NUL")
    return value


def url(item: Item, reading: Reading) -> str:
    """The base of an OpenAI-compatible server, up to and with C{/v1}."""
    want = "http://HOST:PORT/v1 or https://..., without user, query and fragment"
    try:
        parts = urlsplit(text(item, reading))
        bad = parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.port == 0
    except ValueError:
        raise Wrong(want, "url") from None
    if bad or parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f-\uffff]", item.text):
        raise Wrong(want, "url")
    if not parts.path.rstrip("/").endswith("/v1"):
        raise Wrong(f"an address that ends in /v1: {item.text.rstrip('/')}/v1", "url")
    return item.text.rstrip("/")


def _key_file(item: Item, reading: Reading) -> str:
    return str(path(item, reading))


def _scale(item: Item, reading: Reading) -> Scale:
    if not isinstance(item.value, dict):
        try:
            count = integer(0, 10_000)(item, reading)
        except Wrong:
            raise Wrong("a whole number from 0 to 10000 or {min, max, idle_after, target, up_after, down_after}") from None
        return Scale(count, count)
    return _SCALE(item, reading)


def _check_scale(item: Item, scale: Scale, reading: Reading) -> None:
    if scale.min > scale.max:
        reading.add(item.get("max"), f"max is {scale.max}, min is {scale.min}: max may not be below min", "range")
    elif scale.min == scale.max and isinstance(item.value, dict):
        for key in ("idle_after", "target", "up_after", "down_after"):
            if key in item.value:
                reading.add(item.get(key), "has no effect where min is max", "range")


def _make_scale(min: int = 1, max: int | None = None, **more: Any) -> Scale:
    return Scale(min, _or(max, 1 if min < 1 else min), **more)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _check_parallel(item: Item, parallel: Parallel, reading: Reading) -> None:
    if parallel.world % parallel.nodes:
        what = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {parallel.data} is {parallel.world} ranks"
        reading.add(item.get("nodes"), f"{what}, which cannot be spread evenly over {parallel.nodes} nodes", "parallel")


def _check_profile(item: Item, profile: Profile, reading: Reading) -> None:
    if profile.engine == "command" and not profile.argv:
        reading.add(item, "argv is missing: engine `command` runs what it says", "missing_key")
    if not profile.health.startswith("/"):
        reading.add(item.get("health"), f"found {profile.health!r}, want a path that starts with /", "health")


_SCALE = section(
    _make_scale,
    (),
    _check_scale,
    min=integer(0, 10_000),
    max=integer(0, 10_000),
    idle_after=duration(),
    target=integer(1, 100_000),
    up_after=duration(),
    down_after=duration(),
)
_RANKS = integer(1, 4096)
_PROFILE = section(
    Profile,
    ("engine",),
    _check_profile,
    engine=matching(INSTALLATION, "an installation's name: llamacpp, vllm, vllm-next, sglang, trtllm, command"),
    weights=weights,
    context=integer(1, 2**31),
    parallel=section(
        Parallel,
        (),
        _check_parallel,
        tensor=_RANKS,
        pipeline=_RANKS,
        data=_RANKS,
        expert=flag,
        nodes=integer(1, 1024),
        balance=one_of(*BALANCES),
    ),
    resources=section(Resources, devices=integer(0, 64), device_memory=size, host_memory=size, share=flag),
    arguments=map_of(argument, _OPTION, "an option without its dashes"),
    extra_argv=list_of(argument_word),
    environment=environment,
    place=section(Place, labels=labels, fabric=text, spread=flag),
    start_timeout=duration(),
    argv=list_of(argument_word, 1),
    health=text,
    probe=one_of("completion", "embedding", "none"),
)
_ENDPOINT = section(StaticEndpoint, ("url",), url=url, model=text, key_file=_key_file, share=integer(0, 1_000_000))
_ROUTING = section(
    Routing,
    policy=one_of(*POLICIES),
    max_in_flight=integer(1),
    max_waiting=integer(0, 1_000_000),
    fallbacks=list_of(model_name),
)


def _make_model(name: str, profile: Profile | None = None, loras: tuple[Lora, ...] = (), **rest: object) -> Model:
    if profile and loras:
        profile = evolve(profile, loras=loras)
    return Model(name, profile=profile, **rest)  # type: ignore[arg-type]


def _check_model(item: Item, model: Model, reading: Reading) -> None:
    if model.profile is None and not item.has("profile") and not model.endpoints and not item.has("endpoints"):
        reading.add(item, "has neither a profile (llmgw runs it) nor endpoints (it runs elsewhere)", "missing_key")
    length = len(to_text(evolve(model, endpoints=()))) if model.profile else 0
    if length > MAX_ORDERED:
        what = f"takes {length} bytes of JSON, at most {MAX_ORDERED} go to a node with an order"
        reading.add(item, f"{what}: shorten the profile's arguments, environment or argv", "too_large")
    for key in ("replicas", "loras", "rollout", "reconcile", "drain"):
        if item.has(key) and not item.has("profile"):
            reading.add(item.get(key), f"{key} needs a profile: llmgw does not run what is behind endpoints", "profile")


_MODEL = section(
    _make_model,
    ("name",),
    _check_model,
    name=model_name,
    aliases=list_of(model_name),
    replicas=_scale,
    profile=_PROFILE,
    endpoints=list_of(_ENDPOINT, 1),
    loras=list_of(section(Lora, ("name", "weights"), name=model_name, weights=weights)),
    routing=_ROUTING,
    rollout=section(Rollout, strategy=one_of(*STRATEGIES), failures=integer(1, 1000)),
    reconcile=one_of(*RECONCILE),
    drain=duration(),
)


def models(item: Item, reading: Reading) -> Catalog:
    """The whole section. Names, aliases and names of LoRA adapters are unique together."""
    if item.value is None:
        return Catalog()
    if not isinstance(item.value, list):
        raise Wrong("a list of models: - name: ...")
    taken: dict[str, str] = {}
    read = [(element, reading.read(_MODEL, element)) for element in item.value]
    found = [(element, model) for element, model in read if model is not None]
    for element, model in found:
        for place, name in _names(element, model):
            if name in taken:
                reading.add(place, f"the name {name} is taken by {taken[name]}", "duplicate_name")
            taken.setdefault(name, f"{model.name} (line {place.where.rpartition(':')[2]})")
    for element, model in found:
        _check_fallbacks(element, model, taken, reading)
    return Catalog(tuple(model for _, model in found))


def _names(item: Item, model: Model) -> list[tuple[Item, str]]:
    names = [(item.get("name"), model.name), *((item.get("aliases"), alias) for alias in model.aliases)]
    return names + [(item.get("loras"), lora.name) for lora in (model.profile.loras if model.profile else ())]


def _check_fallbacks(item: Item, model: Model, taken: Mapping[str, str], reading: Reading) -> None:
    for name in model.routing.fallbacks:
        if name not in taken or name == model.name:
            reading.add(
                item.get("routing", "fallbacks"), f"found {name!r}, want the name of another model of this file", "fallback"
            )
