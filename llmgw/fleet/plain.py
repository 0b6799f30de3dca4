"""Values to plain JSON data and back, for what llmgw itself wrote: the catalog's revisions and the store's records.

Defaults are left out and unknown keys ignored, so that an older and a newer llmgw read each other's text, and a field that a
later version adds changes no text that does not use it. What a stranger sent is read by C{llmgw.wire.codec} instead.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar, get_args

import cattrs
from cattrs import Converter

T = TypeVar("T")


def _is_argument(kind: Any) -> bool:
    """Whether this is C{Argument}: by its members, since resolving its own name within it makes ever new types."""
    return {str, bool, float}.issubset(get_args(kind))


def _same(value: Any, _: Any = None) -> Any:
    return value


def _number(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _converter() -> Converter:
    made = Converter(omit_if_default=True)
    made.register_structure_hook_func(lambda kind: kind is object or _is_argument(kind), _same)
    made.register_unstructure_hook_func(_is_argument, _same)
    made.register_structure_hook(str | tuple[str, ...], lambda value, _: value if isinstance(value, str) else tuple(value))
    made.register_structure_hook(float, _number)
    return made


_CONVERTER = _converter()


def to_plain(value: object) -> Any:
    """Dictionaries, lists, texts, numbers."""
    return _CONVERTER.unstructure(value)


def from_plain(plain: Any, kind: type[T]) -> T:
    """The value of that kind.

    @raise ValueError: it does not fit; the text names each path that does not.
    """
    if not isinstance(plain, dict):
        raise ValueError("not an object")
    try:
        return _CONVERTER.structure(plain, kind)
    except Exception as error:  # cattrs gathers what its hooks raise, of whatever kind, in groups
        raise ValueError("; ".join(cattrs.transform_error(error))) from None


def to_text(value: object) -> str:
    """Canonical JSON: equal values give equal texts."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_text(text: str, kind: type[T]) -> T:
    """The value in that JSON.

    @raise ValueError: it is no JSON or does not fit.
    """
    return from_plain(json.loads(text), kind)
