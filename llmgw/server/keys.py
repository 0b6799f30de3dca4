"""API keys: C{ID.SECRET}, of which only the SHA-256 is kept. The id is no secret; it is what people call the key by."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from attrs import evolve
from twisted.internet.defer import Deferred

from llmgw.errors import LlmgwError
from llmgw.router.table import KeyEntry, Table, key_digest
from llmgw.server.controller import Controller
from llmgw.store.records import KeyRecord

ID_BYTES, SECRET_BYTES = 4, 24
PREFIX = "llmgw-"


class NoSuchKey(LlmgwError):
    """No key has this id."""


class Keys:
    """Make, list and revoke."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def create(self, name: str, **limits: Any) -> Deferred[tuple[KeyRecord, str]]:
        """A new key, good when this fires; its text is returned this once and nowhere kept.

        @param limits: fields of L{KeyRecord}; C{expires} an instant.
        """
        return Deferred.fromCoroutine(self._create(name, limits))

    async def _create(self, name: str, limits: dict[str, Any]) -> tuple[KeyRecord, str]:
        number = PREFIX + secrets.token_hex(ID_BYTES)
        text = f"{number}.{secrets.token_urlsafe(SECRET_BYTES)}"
        record = KeyRecord(number, name, key_digest(text), self._controller.clocks.wall(), **limits)
        await self._controller.change(lambda: [record])
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

    def revoke(self, number: str) -> Deferred[None]:
        """Refuse this key; when this fires, every router does.

        @raise NoSuchKey: there is none.
        """

        def make() -> list[KeyRecord]:
            record = self._controller.truth.keys.get(number)
            if record is None:
                raise NoSuchKey(f"no key has the id {number}: see llmgw key list")
            return [] if record.revoked else [evolve(record, revoked=self._controller.clocks.wall())]

        return self._controller.change(make).addCallback(lambda _: self._controller.when_routed())


def _recovered(entry: KeyEntry, now: float) -> KeyRecord:
    limits = {
        name: getattr(entry, name) for name in ("team", "models", "rpm", "tpm", "tpd", "concurrency", "priority", "expires")
    }
    return KeyRecord(entry.id, entry.name, entry.digest, now, **limits)
