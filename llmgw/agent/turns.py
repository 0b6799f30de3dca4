"""Starts on one device follow each other.

Two engines that share a device and start at once each measure what is free while the other takes it; then both fail, or one
takes what the other was promised. So a start waits until no other is under way on any of its devices, first come, first served;
it is under way until its engine serves or nothing of it is left. Each is bounded by its own start deadline.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define
from twisted.internet.defer import Deferred


@define(eq=False)
class _Place:
    who: object
    devices: frozenset[str]
    turn: Deferred[None]


class Turns:
    """Who starts on which device. C{who} is any object that stands for one start."""

    def __init__(self) -> None:
        self._under_way: dict[object, frozenset[str]] = {}
        self._line: list[_Place] = []

    def began(self, who: object, devices: Iterable[str]) -> None:
        """A start is under way already, as an agent finds it that begins anew."""
        self._under_way[who] = frozenset(devices)

    def take(self, who: object, devices: Iterable[str]) -> Deferred[None]:
        """Fires when it is the turn of this start; cancel it to leave the line."""
        place = _Place(who, frozenset(devices), Deferred(lambda _: self._leave(place)))
        self._line.append(place)
        self._look()
        return place.turn

    def before(self, who: object) -> list[object]:
        """Those that this one waits for."""
        mine = next((place for place in self._line if place.who is who), None)
        return [] if mine is None else self._ahead(mine)

    def end(self, who: object) -> None:
        """Its engine serves, or nothing of it is left. Of one that is not under way this means nothing."""
        if self._under_way.pop(who, None) is not None:
            self._look()

    def _ahead(self, place: _Place) -> list[object]:
        earlier = self._line[: self._line.index(place)]
        ahead = [other.who for other in earlier if other.devices & place.devices]
        return [who for who, devices in self._under_way.items() if devices & place.devices] + ahead

    def _leave(self, place: _Place) -> None:
        self._line.remove(place)
        self._look()

    def _look(self) -> None:
        for place in list(self._line):
            if place in self._line and not self._ahead(place):
                self._line.remove(place)
                self._under_way[place.who] = place.devices
                place.turn.callback(None)
