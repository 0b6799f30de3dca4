"""All that must hold before an engine is started, asked in milliseconds and before anything is touched.

A refusal is not a failure: nothing was started, so the leader may try again elsewhere at once. What the node itself holds is
checked here whatever the leader believes: devices and ports are never given twice, not even to an orphan's rival.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import evolve, frozen
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.agent.launching import CannotStart, other_user, own_cgroup
from llmgw.agent.ports import port_is_free
from llmgw.agent.shardfolder import Intent
from llmgw.config.agent import AgentSettings
from llmgw.engines.launch import child_environment
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, ShardOrder, WeightFiles
from llmgw.fleet.units import show_size
from llmgw.holders import holder
from llmgw.interfaces import Flags, IEngineAdapter, IServedNames, ShardLaunch

DISK_NEEDED = 32 * 2**20
AMD = "amd"


class Equipment(Protocol):
    """What is on this node: hardware, engines, weights."""

    inventory: Inventory | None

    def look(self) -> Deferred[None]:
        """Take the inventory anew."""

    def installations(self) -> tuple[Installation, ...]:
        """The engines, with what is known of their versions."""

    async def flags(self, installation: Installation) -> Flags:
        """What the installed version prints in its help; empty where nobody could ask."""

    async def weights(self, weights: str) -> WeightFiles:
        """What is found of these weights."""


@frozen
class Prepared:
    """Everything that a start needs."""

    intent: Intent
    adapter: IEngineAdapter
    launch: ShardLaunch
    environment: Mapping[str, str]
    user: Mapping[str, Any] | None


class Checks:
    """The checks of one node.

    @param held: the orders of all attempts that hold devices and ports now, whoever wants them.
    @param facts: the node as it was registered.
    @param new_key: a new random secret for an engine.
    """

    log = Logger()

    def __init__(
        self,
        settings: AgentSettings,
        adapters: Mapping[str, IEngineAdapter],
        equipment: Equipment,
        held: Callable[[], Iterable[ShardOrder]],
        facts: Callable[[], NodeFacts | None],
        new_key: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.adapters = adapters
        self._equipment = equipment
        self._held = held
        self._facts = facts
        self._new_key = new_key
        self._clock = clock

    async def prepare(self, order: ShardOrder) -> Prepared:
        """What starts this attempt.

        @raise CannotStart: why it cannot be started here and now.
        """
        installation, adapter = self.engine(order.profile.engine)
        self._check_disk(self.settings.state)
        if order.allocation.devices and _of_amd(self._equipment.inventory):
            # ROCm's numbers move when a device comes or goes, unlike the UUIDs by which others are given.
            await self._equipment.look()
        self._check_devices(order)
        self._check_ports(order)
        weights = order.profile.weights
        files = await self._equipment.weights(weights) if weights else None
        if files is not None and order.profile.loras:
            files = evolve(files, loras=tuple([await self._equipment.weights(lora.weights) for lora in order.profile.loras]))
        flags = await self._equipment.flags(installation)
        self._check_profile(order, adapter, installation, files, flags)
        key = self._new_key()
        allocation = as_seen(order.allocation, self._equipment.inventory)
        launch = adapter.launch(order.profile, allocation, installation, files, order.served, key)
        engine = next((one for one in self.settings.engines if one.name == installation.name), None)
        user = other_user(engine.user if engine else None)
        mine, theirs = self.settings.environment, engine.environment if engine else {}
        environment = child_environment(os.environ, mine, theirs, launch)
        intent = Intent(
            order=order,
            adapter=adapter.name,
            installation=installation.name,
            version=installation.version,
            key=key,
            url=launch.url,
            ready=launch.ready,
            models=launch.models,
            metrics=launch.metrics,
            limit=launch.limit,
            probe=order.profile.probe or launch.probe,
            sleep=launch.sleep,
            wake=launch.wake,
            loras=launch.loras,
            cgroup=own_cgroup(f"llmgw-{order.shard}.{order.attempt}".replace("/", "_")[-200:]),
            at=self._clock(),
        )
        return Prepared(intent, adapter, launch, environment, user)

    def engine(self, name: str) -> tuple[Installation, IEngineAdapter]:
        """The installation of this name and its adapter.

        @raise CannotStart: there is none.
        """
        there = self._equipment.installations()
        installation = next((one for one in there if one.name == name), None)
        if installation is None:
            names = ", ".join(sorted(one.name for one in there)) or "none"
            raise CannotStart("no_installation", f"engine {name} is not installed on {self.settings.node} (there: {names})")
        adapter = self.adapters.get(installation.adapter)
        if adapter is None:
            raise CannotStart("no_adapter", f"engine {name}: llmgw {self.settings.node} has no adapter {installation.adapter}")
        return installation, adapter

    def _check_profile(
        self, order: ShardOrder, adapter: IEngineAdapter, installation: Installation, files: WeightFiles | None, flags: Flags
    ) -> None:
        asked = (order.profile, files, self._facts(), installation, flags)
        for warning in adapter.warnings(*asked):
            self.log.warn("{shard}: {warning}", shard=order.shard, warning=str(warning))
        problems = list(adapter.problems(*asked))
        if IServedNames.providedBy(adapter):
            problems += IServedNames(adapter).name_problems(order.served)
        if problems:
            missing = all(problem.code == "weights_missing" for problem in problems)
            raise CannotStart("weights_missing" if missing else "invalid", "; ".join(map(str, problems)))

    def _check_disk(self, state: Path) -> None:
        there = shutil.disk_usage(state)
        needed = min(DISK_NEEDED, there.total // 8)
        if there.free < needed:
            text = f"{show_size(there.free)} are free under {state}, {show_size(needed)} are needed for an engine's output"
            raise CannotStart("disk_full", f"{text}: free some space on {self.settings.node}")

    def _check_devices(self, order: ShardOrder) -> None:
        wanted, there = set(order.allocation.devices), self._equipment.inventory
        for device in there.devices if there else ():
            if device.uuid in wanted and (why := device.problem or "missing" * (device.missing_since is not None)):
                raise CannotStart("device_sick", f"device {device.uuid} (gpu {device.index}): {why}")
        known = {device.uuid for device in there.devices} if there and there.devices else wanted
        if missing := wanted - known:
            raise CannotStart("device_missing", f"{self.settings.node} has no device {', '.join(sorted(missing))}")
        for other in self._others(order):
            shared = wanted.intersection(other.allocation.devices)
            if shared and not (order.profile.resources.share and other.profile.resources.share):
                raise CannotStart("device_in_use", f"device {', '.join(sorted(shared))} is held by {other.shard}")

    def _check_ports(self, order: ShardOrder) -> None:
        host, wanted = order.allocation.address, set(order.allocation.ports)
        for other in self._others(order):
            if shared := wanted.intersection(other.allocation.ports):
                raise CannotStart("port_in_use", f"port {min(shared)} is held by {other.shard}")
        for port in sorted(wanted):
            try:
                free = port_is_free(host, port)
            except OSError as error:
                raise CannotStart("port_unusable", f"port {port} of {host} cannot be bound: {error.strerror}") from None
            if not free:
                raise CannotStart("port_in_use", f"port {port} is in use by {holder(port)}")

    def _others(self, order: ShardOrder) -> list[ShardOrder]:
        return [other for other in self._held() if (other.shard, other.attempt) != (order.shard, order.attempt)]


def as_seen(allocation: Allocation, inventory: Inventory | None) -> Allocation:
    """The allocation with the figures of its smallest device, so that an engine takes no more than it was given.

    On a node with devices of AMD also with the numbers of those that are its own, in their order.

    Free is what strangers leave: what our own engines hold is their claims' business, or was held by one that has ended.
    """
    there = {device.uuid: device for device in inventory.devices} if inventory else {}
    ours = [there[uuid] for uuid in allocation.devices if uuid in there]
    if _of_amd(inventory):
        amd = (device for device in ours if device.kind == AMD)
        allocation = evolve(allocation, hip=tuple(device.index if device.hip is None else device.hip for device in amd))
    totals = [device.memory_total for device in ours if device.memory_total]
    if len(totals) != len(allocation.devices) or not totals:
        return allocation
    return evolve(allocation, device_total=min(totals), device_free=min(map(_left_by_strangers, ours)))


def _of_amd(inventory: Inventory | None) -> bool:
    return inventory is not None and any(device.kind == AMD for device in inventory.devices)


def _left_by_strangers(device: Device) -> int:
    strangers = sum(process.memory or 0 for process in device.processes if process.shard is None)
    return max(0, (device.memory_total or 0) - device.memory_reserved - strangers)
