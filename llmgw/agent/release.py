"""Waits until the memory of an ended engine's devices is back: the driver frees it after the process is gone, not before."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from llmgw.fleet.node import Inventory
from llmgw.interfaces import IInventory

DEADLINE = 30.0
EVERY = 1.0


class Release:
    """@param hardware: asked who holds memory on which device."""

    def __init__(self, reactor: Any, hardware: IInventory) -> None:
        self._reactor = reactor
        self._hardware = hardware

    def wait(self, devices: tuple[str, ...], pids: frozenset[int]) -> Deferred[str]:
        """Fires when none of C{pids} holds memory on C{devices}, or after 30 s; with what is held, empty if nothing is."""
        return Deferred.fromCoroutine(self._wait(frozenset(devices), pids))

    async def _wait(self, devices: frozenset[str], pids: frozenset[int]) -> str:
        deadline = self._reactor.seconds() + DEADLINE
        while devices and (held := _held(devices, pids, await self._hardware.take())):
            if self._reactor.seconds() >= deadline:
                return held
            await deferLater(self._reactor, EVERY)
        return ""


def _held(devices: frozenset[str], pids: frozenset[int], now: Inventory) -> str:
    return ", ".join(
        f"gpu {device.index} by pid {process.pid}"
        for device in now.devices
        if device.uuid in devices
        for process in device.processes
        if process.pid in pids
    )
