"""Reading a request's query and body: every field by its kind, a wrong one named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmgw.admin.errors import BadRequest
from llmgw.server.operations import OPERATOR

_MISSING = object()


class Fields:
    """The fields of one request; texts of a query are read as what they are asked for.

    @ivar by: who asks, as events name it.
    """

    def __init__(self, values: Mapping[str, Any], by: str = OPERATOR) -> None:
        self.by = by
        self._values = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of_query(cls, query: Mapping[bytes, list[bytes]], by: str = OPERATOR) -> Fields:
        """From C{twisted.web}'s parsed query; of a repeated field the last counts."""
        try:
            return cls({name.decode(): values[-1].decode() for name, values in query.items()}, by)
        except UnicodeDecodeError:
            raise BadRequest("the query is not UTF-8") from None

    @classmethod
    def of_body(cls, text: bytes, by: str = OPERATOR) -> Fields:
        """From a JSON object; an empty body is an empty object."""
        try:
            found = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise BadRequest(f"the body must be a JSON object, not {type(found).__name__}")
        return cls(found, by)

    def _of(self, name: str, default: Any) -> Any:
        if name in self._values:
            return self._values[name]
        if default is _MISSING:
            raise BadRequest(f"{name} is missing")
        return default

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """A text."""
        value = self._of(name, default)
        if value is not default and (not isinstance(value, str) or not value):
            raise BadRequest(f"{name} must be a text, not {value!r}")
        return value

    def texts(self, name: str, default: Any = _MISSING) -> Any:
        """A list of texts."""
        value = self._of(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise BadRequest(f"{name} must be a list of texts")
        return value

    def integer(self, name: str, default: Any = _MISSING, low: int | None = None) -> Any:
        """A whole number, at least C{low}."""
        value = self._of(name, default)
        if value is default:
            return value
        try:
            if isinstance(value, bool | float):
                raise ValueError
            number = int(value)
        except (TypeError, ValueError):
            raise BadRequest(f"{name} must be a whole number, not {value!r}") from None
        if abs(number) >= 2**53 or (low is not None and number < low):
            raise BadRequest(f"{name} must be {'a number' if low is None else f'at least {low}'}, not {number}")
        return number

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A number of seconds, not negative."""
        value = self._of(name, default)
        if value is default:
            return value
        try:
            if isinstance(value, bool):
                raise ValueError
            seconds = float(value)
        except (TypeError, ValueError):
            raise BadRequest(f"{name} must be a number, not {value!r}") from None
        if not 0 <= seconds < 1e10:
            raise BadRequest(f"{name} must be a number of seconds from 0, not {value!r}")
        return seconds

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        value = self._of(name, False)
        if value in (True, "true", "1"):
            return True
        if value in (False, "false", "0"):
            return False
        raise BadRequest(f"{name} must be true or false, not {value!r}")
