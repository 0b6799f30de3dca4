"""Messages to lines and back, with strict types: C{true} is no number here, C{"5"} no integer, and a text is no list.

Unknown keys are ignored and an unknown type is a value, L{Unknown}, so that peers of different versions can talk. A wrong
type anywhere is one L{Malformed} that names the path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_origin

import attrs
import cattrs
from attrs import frozen
from cattrs.gen import make_dict_structure_fn

from llmgw.fleet.model import Argument
from llmgw.wire.framing import Malformed, Unsendable, read_object, write_line
from llmgw.wire.messages import FROM_AGENT, FROM_SERVER, AgentMessage, Done, ServerMessage

_T = TypeVar("_T")
_BIGGEST = 2**63  # what a database takes as an integer
_NAMES = {kind: name for name, kind in (FROM_SERVER | FROM_AGENT).items()}


@frozen
class Unknown:
    """A message of a type that this version does not know; C{operation} is empty where it carried none."""

    type: str
    operation: str = ""


def encode(message: AgentMessage | ServerMessage) -> bytes:
    """The line for C{message}, newline included.

    @raise Unsendable: the peer would have to refuse it.
    """
    line = write_line({"type": _NAMES[type(message)], **_CONVERTER.unstructure(message)})
    if isinstance(message, Done):
        # The only one with free-form data (a model's own config, for one): hold it to the reader's rules before the peer does.
        try:
            read_object(line[:-1], "done")
        except Malformed as error:
            raise Unsendable(f"the result of {message.operation} cannot be sent: it has {error.what}") from None
    return line


def decode_from_server(line: bytes, peer: str) -> ServerMessage | Unknown:
    """What a server said.

    @raise Malformed: it is not a message.
    """
    message: ServerMessage | Unknown = _decode(line, FROM_SERVER, peer)
    return message


def decode_from_agent(line: bytes, peer: str) -> AgentMessage | Unknown:
    """What an agent said.

    @raise Malformed: it is not a message.
    """
    message: AgentMessage | Unknown = _decode(line, FROM_AGENT, peer)
    return message


def _decode(line: bytes, kinds: Mapping[str, type], peer: str) -> Any:
    value = read_object(line, peer)
    name = value.get("type")
    if not isinstance(name, str):
        raise Malformed(peer, "an object without a type")
    kind = kinds.get(name)
    if kind is None:
        operation = value.get("operation")
        return Unknown(name[:40], operation[:80] if isinstance(operation, str) else "")
    return from_plain(value, kind, name, peer)


def to_plain(value: attrs.AttrsInstance) -> dict[str, Any]:
    """A value as C{done.result} carries it, e.g. a L{llmgw.fleet.shard.WeightFiles}."""
    plain: dict[str, Any] = _CONVERTER.unstructure(value)
    return plain


def from_plain(value: object, kind: type[_T], name: str, peer: str) -> _T:
    """The C{kind} in C{value}, which came from C{peer} under C{name} (the first word of the paths in an error).

    @raise Malformed: a part is missing or of another type.
    """
    try:
        return _CONVERTER.structure(value, kind)
    except Exception as error:
        # cattrs raises groups whose leaves may be anything that a hook raised; none of it carries the text.
        problems = cattrs.transform_error(error, path=name)
        raise Malformed(peer, f"a wrong {name}: {'; '.join(problems[:3])[:400]}") from None


def _boolean(value: Any, _: Any) -> bool:
    if type(value) is not bool:
        raise TypeError("not true or false")
    return value


def _text(value: Any, kind: Any) -> Any:
    """C{kind} is C{str} or one of our enumerations of words, which cattrs sends here, too, since they are texts."""
    if type(value) is not str:
        raise TypeError("not a text")
    return value if kind is str else kind(value)


def _integer(value: Any, _: Any) -> int:
    if type(value) is not int or not -_BIGGEST <= value < _BIGGEST:
        raise TypeError("not an integer of 64 bits")
    return value


def _real(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError("not a number")
    return float(value)


def _only_from(kind: type, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def structure(value: Any, wanted: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"not {'an object' if kind is dict else 'a list'}")
        return inner(value, wanted)

    return structure


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _is_argument(kind: Any) -> bool:
    """C{Argument} names itself, so its inner name is resolved or not, depending on who asks: compare the parts."""
    return kind == Argument or (bool in get_args(kind) and any(get_origin(part) is list for part in get_args(kind)))


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True)
    for kind, hook in ((int, _integer), (float, _real), (bool, _boolean), (str, _text)):
        converter.register_structure_hook(kind, hook)
    converter.register_structure_hook_factory(_is_tuple, lambda kind: _only_from(list, _tuple_hook(converter, kind)))
    converter.register_structure_hook_factory(attrs.has, lambda kind: _only_from(dict, make_dict_structure_fn(kind, converter)))
    converter.register_structure_hook_func(lambda kind: kind is object or _is_argument(kind), lambda value, _: value)
    return converter


def _tuple_hook(converter: cattrs.Converter, kind: Any) -> Callable[[Any, Any], Any]:
    first, *rest = get_args(kind)
    if rest == [...]:
        several: Any = list[first]  # type: ignore[valid-type]
        items = converter.get_structure_hook(several)
        return lambda value, _: tuple(items(value, several))

    def structure(value: Any, _: Any) -> Any:
        if len(value) != 1 + len(rest):
            raise ValueError("a list of another length")
        return tuple(converter.structure(item, wanted) for item, wanted in zip(value, (first, *rest), strict=True))

    return structure


_CONVERTER = _make_converter()
