"""The devices this node has had, on disk: so that one that vanished is still missed after the agent or the machine began anew.

STATE/devices.json is one list; without it, or when it is damaged, the node begins to know its devices anew. Surprising: a MIG
instance that vanishes while its parent is well was taken apart by somebody, so it is forgotten instead of missed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from attrs import evolve
from twisted.logger import Logger

from llmgw.fleet.node import Device
from llmgw.fleet.plain import from_plain, to_plain

log = Logger()


class KnownDevices:
    """@param path: None keeps them in memory only.

    @ivar last: as of the last look, by UUID.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._read = False
        self._written: list[object] = []
        self.last: dict[str, Device] = {}

    def load(self) -> None:
        """Read what an earlier agent has seen; the second time nothing happens."""
        if self._read or self._path is None:
            return
        self._read = True
        try:
            self._written = json.loads(self._path.read_text())
            self.last = {device.uuid: device for device in (from_plain(row, Device) for row in self._written)}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            log.error("cannot read {path}, the devices are learned anew: {error}", path=str(self._path), error=str(error))

    def seen(self, found: Iterable[Device], now: float) -> tuple[Device, ...]:
        """What was found, and with it what was there before and is not any more.

        A device that is there but cannot tell its UUID is the one that is missing at its index.
        """
        there = {device.uuid: device for device in found}
        for uuid, before in self.last.items():
            if uuid not in there and not uuid.startswith("index-") and not _taken_apart(before, there):
                nameless = there.pop(f"index-{before.index}", None)
                problem = nameless.problem if nameless else before.problem
                since = before.missing_since or now
                there[uuid] = evolve(before, missing_since=since, processes=(), memory_used=None, problem=problem)
        self.last = there
        self._write()
        return tuple(there.values())

    def _write(self) -> None:
        rows: list[object] = [to_plain(_still(device)) for device in self.last.values() if not device.uuid.startswith("index-")]
        if self._path is None or rows == self._written:
            return
        self._written = rows
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            with open(temporary, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump(rows, file)
            os.rename(temporary, self._path)
        except OSError as error:
            log.error("cannot write {path}: {error}", path=str(self._path), error=error.strerror)


def _taken_apart(before: Device, there: dict[str, Device]) -> bool:
    parent = there.get(before.parent) if before.parent else None
    return parent is not None and parent.missing_since is None


def _still(device: Device) -> Device:
    return evolve(device, memory_used=None, processes=(), peers=None, fabric=None, kernel_log="")
