"""The catalog as text: from a file of an operator's, to and from the store, and what differs between two of them.

The models are read in one place (L{llmgw.config.models}) whether they stand in a server.yaml or alone in a file for
C{llmgw apply}. A model that is missing from a new file is kept: absence is not an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from llmgw.config.models import models
from llmgw.config.server import read_server
from llmgw.config.shape import Reading, section
from llmgw.config.text import Item, parse
from llmgw.errors import Invalid, Problem
from llmgw.fleet.model import Catalog, Model
from llmgw.fleet.plain import from_text, to_text


def read_catalog(file: Path, content: str) -> Catalog:
    """The models of a whole server.yaml, or of a file that holds a C{models} section and nothing else.

    @raise Invalid: with every problem of the file, also of the sections that apply does not use.
    """
    item, problems = parse(file, content)
    if not only_models(item):
        return read_server(file, content).catalog
    reading = Reading(file.parent, problems)
    found = reading.read(section(dict[str, Any], models=models), item) or {}
    reading.finish()
    catalog: Catalog = found.get("models", Catalog())
    return catalog


def only_models(item: Item) -> bool:
    """Whether a file holds a C{models} section and nothing else."""
    return isinstance(item.value, dict) and set(item.value) == {"models"}


def dump_catalog(catalog: Catalog) -> str:
    """Canonical JSON: equal catalogs give equal texts."""
    return to_text(catalog)


def load_catalog(text: str) -> Catalog:
    """The catalog in a text that L{dump_catalog} made, of this version or another.

    @raise Invalid: it is none.
    """
    try:
        return from_text(text, Catalog)
    except ValueError as error:
        raise Invalid([Problem(f"the store's catalog cannot be read: {error}", code="catalog")]) from None


@frozen
class ModelChange:
    """A model that is in both catalogs and differs.

    @ivar replaced: its generation changed, so that its engines have to be replaced.
    @ivar facts: each differing key with its old and new value; None where it is not there.
    """

    old: Model
    new: Model
    facts: tuple[tuple[str, object, object], ...]

    @property
    def name(self) -> str:
        """The model's name."""
        return self.new.name

    @property
    def replaced(self) -> bool:
        """Whether running engines no longer match."""
        return self.old.generation != self.new.generation


@frozen
class CatalogDiff:
    """What applying a new catalog over an old one does. C{catalog} is the result: the new one and what was kept.

    @ivar kept: models that the new one does not name and that stay as they are.
    @ivar removed: the same, where removals were allowed.
    """

    catalog: Catalog
    added: tuple[Model, ...] = ()
    changed: tuple[ModelChange, ...] = ()
    removed: tuple[Model, ...] = ()
    kept: tuple[Model, ...] = ()
    unchanged: tuple[Model, ...] = field(default=())

    @property
    def empty(self) -> bool:
        """Whether nothing would change."""
        return not (self.added or self.changed or self.removed)


def diff_catalogs(old: Catalog, new: Catalog, allow_removals: bool = False) -> CatalogDiff:
    """What C{new} changes.

    @raise Invalid: a kept model's name is used for something else by the new catalog.
    """
    missing = tuple(model for model in old.models if new.get(model.name) is None)
    kept = () if allow_removals else missing
    _check_kept(kept, new)
    pairs = [(old.get(model.name), model) for model in new.models]
    return CatalogDiff(
        catalog=evolve(new, models=(*new.models, *kept)),
        added=tuple(model for before, model in pairs if before is None),
        changed=tuple(_change(before, model) for before, model in pairs if before is not None and before != model),
        removed=missing if allow_removals else (),
        kept=kept,
        unchanged=tuple(model for before, model in pairs if before == model),
    )


def _check_kept(kept: tuple[Model, ...], new: Catalog) -> None:
    taken = {name: model.name for model in new.models for name in names(model)}
    clashes = [(model.name, name, taken[name]) for model in kept for name in names(model) if name in taken]
    if clashes:
        advice = "Write the model into the file, too, or allow its removal"
        raise Invalid(
            [
                Problem(f"{model} is missing and would be kept, but its name {name} is now {other}'s. {advice}", code="kept_name")
                for model, name, other in clashes
            ]
        )


def names(model: Model) -> tuple[str, ...]:
    """Every name that clients can ask for to get this model: its own first."""
    return (model.name, *model.aliases, *(lora.name for lora in (model.profile.loras if model.profile else ())))


def _change(old: Model, new: Model) -> ModelChange:
    before, after = dict(_leaves(asdict(old))), dict(_leaves(asdict(new)))
    keys = sorted(before.keys() | after.keys())
    return ModelChange(
        old, new, tuple((key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key))
    )


def _leaves(plain: Any, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(plain, dict) and plain:
        for key, value in plain.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path.removeprefix("profile."), plain
