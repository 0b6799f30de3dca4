"""API keys: C{ID.SECRET}, of which only the SHA-256 is kept. The id is no secret; it is what people call the key by."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve
from twisted.internet.defer import Deferred

from llmgw.errors import LlmgwError
from llmgw.fleet.events import FleetEvent
from llmgw.router.table import KeyEntry, Table, key_digest
from llmgw.server.controller import Controller
from llmgw.server.operations import OPERATOR
from llmgw.store.records import Change, KeyRecord, OldSecret

ID_BYTES, SECRET_BYTES = 4, 24
PREFIX = "llmgw-"


class NoSuchKey(LlmgwError):
    """No key has this id, or name."""


class NotOneKey(LlmgwError):
    """Several keys have this name, or the key is good no more; the text says what to do."""


class Keys:
    """Make, list, rotate and revoke."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def create(self, name: str, by: str = OPERATOR, **limits: Any) -> Deferred[tuple[KeyRecord, str]]:
        """A new key, good when this fires; its text is returned this once and nowhere kept.

        @param by: who makes it, for the event that tells of it; so with the others.
        @param limits: fields of L{KeyRecord}; C{expires} an instant.
        """
        return Deferred.fromCoroutine(self._create(name, by, limits))

    async def _create(self, name: str, by: str, limits: dict[str, Any]) -> tuple[KeyRecord, str]:
        number = PREFIX + secrets.token_hex(ID_BYTES)
        text = _text(number)
        record = KeyRecord(number, name, key_digest(text), self._controller.clocks.wall(), **limits)
        await self._controller.change(lambda: [record, self._event(record, "made", by)])
        await self._controller.when_routed()
        return record, text

    def recover(self, table: Table | None) -> Deferred[int]:
        """Take back the keys that the routers still know, where the store has none: it was lost, and nobody meant them to end."""

        def make() -> Iterable[KeyRecord]:
            if table is None or self._controller.truth.keys:
                return []
            now = self._controller.clocks.wall()
            return [_recovered(entry, now) for entry in table.keys]

        return self._controller.change(make)

    def list(self) -> list[KeyRecord]:
        """All keys, the oldest first."""
        return sorted(self._controller.truth.keys.values(), key=lambda record: (record.created, record.id))

    def rotate(self, name: str, overlap: float, by: str = OPERATOR) -> Deferred[tuple[KeyRecord, str]]:
        """Give a key a new secret, good when this fires; the one before is good for C{overlap} more seconds.

        @param name: the key's id or name.
        @raise NoSuchKey: there is none.
        @raise NotOneKey: there are several, or it has been revoked or has expired.
        """
        return Deferred.fromCoroutine(self._rotate(name, overlap, by))

    async def _rotate(self, name: str, overlap: float, by: str) -> tuple[KeyRecord, str]:
        made: list[tuple[KeyRecord, str]] = []

        def make() -> list[Change]:
            now = self._controller.clocks.wall()
            record = self._good(name, now)
            text = _text(record.id)
            old = [*record.old, OldSecret(record.digest, now + overlap)]
            fresh = evolve(record, digest=key_digest(text), old=tuple(secret for secret in old if secret.until > now))
            made[:] = [(fresh, text)]
            return [fresh, self._event(fresh, "given a new secret", by)]

        await self._controller.change(make)
        await self._controller.when_routed()
        return made[0]

    def _named(self, name: str) -> tuple[KeyRecord, ...]:
        """All keys with this id or name; there is one at least."""
        named = tuple(record for record in self.list() if name in (record.id, record.name))
        if not named:
            raise NoSuchKey(f"no key has the id or name {name}: see llmgw key list")
        return named

    def _good(self, name: str, now: float) -> KeyRecord:
        """The one good key with this id or name."""
        good = [record for record in self._named(name) if state_of(record, now) == "good"]
        if not good:
            raise NotOneKey(f"{name} has been revoked or has expired: make a new key with llmgw key create {name}")
        return _one(name, good)

    def revoke(self, name: str, by: str = OPERATOR) -> Deferred[KeyRecord]:
        """Refuse a key; when this fires, with the key, every router does.

        @param name: the key's id or name.
        @raise NoSuchKey: there is none.
        @raise NotOneKey: there are several that are not revoked.
        """
        return Deferred.fromCoroutine(self._revoke(name, by))

    async def _revoke(self, name: str, by: str) -> KeyRecord:
        found: list[KeyRecord] = []

        def make() -> list[Change]:
            named = self._named(name)
            left = [record for record in named if not record.revoked]
            found[:] = [_one(name, left or named[-1:])]
            changed = [evolve(record, revoked=self._controller.clocks.wall()) for record in left]
            return [*changed, self._event(found[0], "revoked", by)] if changed else []

        await self._controller.change(make)
        await self._controller.when_routed()
        return found[0]

    def _event(self, record: KeyRecord, what: str, by: str) -> FleetEvent:
        controller = self._controller
        text = f"key {record.id} of {record.name} was {what} by {by}"
        return FleetEvent(controller.clocks.wall(), "key", record.id, text, epoch=controller.leadership.epoch)


def state_of(record: KeyRecord, now: float) -> str:
    """C{good}, C{expired} or C{revoked}, by the wall clock."""
    return "revoked" if record.revoked else "expired" if record.expires and record.expires <= now else "good"


def _one(name: str, found: Sequence[KeyRecord]) -> KeyRecord:
    if len(found) > 1:
        ids = ", ".join(record.id for record in found)
        raise NotOneKey(f"{len(found)} keys have the name {name}: say which by its id, one of {ids}")
    return found[0]


def _text(number: str) -> str:
    """A key with this id and a new secret, as its owner sends it."""
    return f"{number}.{secrets.token_urlsafe(SECRET_BYTES)}"


def _recovered(entry: KeyEntry, now: float) -> KeyRecord:
    limits = {
        name: getattr(entry, name) for name in ("team", "models", "rpm", "tpm", "tpd", "concurrency", "priority", "expires")
    }
    old = tuple(OldSecret(digest, until) for digest, until in entry.old)
    return KeyRecord(entry.id, entry.name, entry.digest, now, old=old, **limits)
