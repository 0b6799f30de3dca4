"""Waiting for device memory after an engine's end, on a clock."""

from __future__ import annotations

from attrs import evolve
from twisted.internet.defer import succeed
from twisted.internet.task import Clock
from zope.interface import implementer

from llmgw.agent.release import Release
from llmgw.fleet.node import Device, DeviceProcess, Inventory
from llmgw.interfaces import IInventory


@implementer(IInventory)
class Hardware:
    """Two devices; C{holders} are who is on the first."""

    holders = ()

    def take(self):
        busy = evolve(Device("GPU-a", 0, "a"), processes=tuple(DeviceProcess(pid, "vllm") for pid in self.holders))
        return succeed(Inventory(1, 1, devices=(busy, Device("GPU-b", 1, "b"))))


def test_waits_until_the_driver_has_let_go():
    """The memory comes back some seconds after the process is gone; strangers on the device do not matter."""
    clock, hardware = Clock(), Hardware()
    hardware.holders = (11, 99)
    said = []
    Release(clock, hardware).wait(("GPU-a",), frozenset({10, 11})).addCallback(said.append)
    clock.pump([1.0] * 8)
    assert said == []
    hardware.holders = (99,)
    clock.advance(1.0)
    assert said == [""]
    assert clock.getDelayedCalls() == []


def test_memory_that_never_comes_back_is_named():
    """After 30 seconds it says which device is held by whom."""
    clock, hardware = Clock(), Hardware()
    hardware.holders = (11,)
    said = []
    Release(clock, hardware).wait(("GPU-a",), frozenset({11})).addCallback(said.append)
    clock.pump([1.0] * 29)
    assert said == []
    clock.pump([1.0] * 2)
    assert said == ["gpu 0 by pid 11"]


def test_without_devices_nothing_is_asked():
    """An engine on processors is over when it is over."""
    said = []
    Release(Clock(), object()).wait((), frozenset({11})).addCallback(said.append)
    assert said == [""]
