"""The catalog: which models there are and how each is run.

A model has a profile (llmgw runs it), static endpoints (it runs elsewhere), or both. C{Profile.generation} decides
whether a running engine is still the one that is wanted: it covers what makes an engine different and nothing else, so
that an alias, a label or a replica count never costs anybody a reload of the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from attrs import Attribute, asdict, evolve, field, frozen

Argument = str | int | float | bool | list["Argument"] | dict[str, "Argument"] | None


def _given(attribute: Attribute[Any], value: object) -> bool:
    """Whether a value differs from its default: only such ones count, or every new field would restart every engine."""
    factory = getattr(attribute.default, "factory", None)
    return bool(value != (factory() if factory else attribute.default))


@frozen
class Parallel:
    """How one replica is cut up: C{tensor * pipeline * data} ranks over C{nodes} nodes of equal device counts.

    C{balance} of data parallel ranks over several nodes: C{internal}, the head serves for all; C{hybrid}, each node serves for
    its own ranks, so that the replica has as many endpoints as nodes.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    nodes: int = 1
    balance: str = "internal"

    @property
    def world(self) -> int:
        """How many devices a replica needs if its engine puts one rank on each."""
        return self.tensor * self.pipeline * self.data


@frozen
class Resources:
    """What one shard takes on its node; None means "follows from parallel and weights"."""

    devices: int | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    share: bool = False


@frozen
class Place:
    """Where a replica may go: nodes with these labels, inside this fabric; C{spread} prefers empty nodes to full ones."""

    labels: Mapping[str, str] = field(factory=dict)
    fabric: str | None = None
    spread: bool = False


@frozen
class Lora:
    """An adapter loaded beside the base weights and served under its own name."""

    name: str
    weights: str


@frozen
class Profile:
    """How one replica of a model is run. C{engine} is an installation's name on the node, not an adapter's.

    @ivar probe: what its engine is asked before it counts as ready, see L{llmgw.interfaces.ShardLaunch}; empty: by its adapter.
    """

    engine: str
    weights: str | None = None
    context: int | None = None
    parallel: Parallel = Parallel()
    resources: Resources = Resources()
    arguments: Mapping[str, Argument] = field(factory=dict)
    extra_argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)
    place: Place = Place()
    start_timeout: float = 1800.0
    argv: tuple[str, ...] = ()
    health: str = "/health"
    probe: str = ""
    loras: tuple[Lora, ...] = ()

    def generation(self, model: str) -> str:
        """12 hex digits that change exactly when an engine started for C{model} with this profile would differ."""
        same = evolve(
            self, place=Place(), start_timeout=0.0, probe="", loras=(), resources=evolve(self.resources, host_memory=None)
        )
        parts = asdict(same, filter=_given)
        text = json.dumps([model, parts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@frozen
class StaticEndpoint:
    """An upstream that llmgw routes to but does not run. C{url} ends in C{/v1}; C{key_file} is an absolute path."""

    url: str
    model: str | None = None
    key_file: str | None = None
    share: int = 1


@frozen
class Scale:
    """How many replicas: fixed when C{min == max}; C{idle_after} seconds without a request lead to C{min}.

    @ivar target: how many requests one replica should have, running and waiting; None: as many as its engine runs at once.
    @ivar up_after: for how many seconds the load must ask for more before more are started, C{down_after} for fewer before
        one leaves: starting late costs waiting, stopping early costs another start.
    """

    min: int = 1
    max: int = 1
    idle_after: float | None = None
    target: int | None = None
    up_after: float = 10.0
    down_after: float = 300.0


@frozen
class Routing:
    """How requests of one model are spread; see facts in router/choose.py for why least_cost is the default."""

    policy: str = "least_cost"
    max_in_flight: int | None = None
    max_waiting: int = 100
    fallbacks: tuple[str, ...] = ()


@frozen
class Rollout:
    """How a changed profile comes into force.

    @ivar strategy: C{surge} waits for room beside the old replicas, C{replace} lets an old one go first, C{auto} surges where
        there is room.
    @ivar failures: after so many failed attempts with the new profile the model goes back to the old one.
    """

    strategy: str = "auto"
    failures: int = 3


@frozen
class Model:
    """A public name that clients ask for.

    @ivar reconcile: which copy stays when a lost node comes back: C{keep_original}, C{keep_replacement}, C{longest_running}.
    @ivar drain: how many seconds running requests may take when a replica leaves; None: the control plane's C{timing.drain}.
    """

    name: str
    aliases: tuple[str, ...] = ()
    replicas: Scale = Scale()
    profile: Profile | None = None
    endpoints: tuple[StaticEndpoint, ...] = ()
    routing: Routing = Routing()
    rollout: Rollout = Rollout()
    reconcile: str = "keep_original"
    drain: float | None = None

    @property
    def generation(self) -> str:
        """The generation wanted of this model's engines; empty for a model that llmgw does not run."""
        return self.profile.generation(self.name) if self.profile else ""


@frozen
class Catalog:
    """All models. Names and aliases are unique together; config/catalog.py has checked that."""

    models: tuple[Model, ...] = ()

    def get(self, name: str) -> Model | None:
        """The model of exactly this name (aliases are the router's business)."""
        return next((model for model in self.models if model.name == name), None)

    @property
    def runs_engines(self) -> bool:
        """Whether any model has a profile; without one the server needs no fleet listener."""
        return any(model.profile for model in self.models)
