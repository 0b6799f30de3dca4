"""The node daemon put together: state folder, node, uplink. Nothing is opened before C{startService}.

In this order: the state folder is locked, what runs is adopted, the hardware is looked at, and only then the link is dialled,
since the first thing that goes over it is the whole truth. Ending goes the other way and leaves every engine running.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from random import SystemRandom
from typing import Any

from attrs import evolve, fields
from twisted.application.service import MultiService
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.agent.equipment import NodeEquipment
from llmgw.agent.fetch_process import fetch_environment
from llmgw.agent.fetching import Fetching
from llmgw.agent.installations import Installations
from llmgw.agent.inventory import NodeInventory
from llmgw.agent.known_devices import KnownDevices
from llmgw.agent.node import Node
from llmgw.agent.release import Release
from llmgw.agent.statefolder import StateFolder
from llmgw.agent.uplink import Uplink
from llmgw.agent.weights import WeightFinder, hub_cache
from llmgw.config.agent import AgentSettings
from llmgw.daemon import give_up
from llmgw.engines.launch import child_environment
from llmgw.engines.registry import adapters
from llmgw.errors import LlmgwError
from llmgw.interfaces import ShardLaunch

# What SIGHUP can change: for the next link and its registration.
RELOADABLE = ("servers", "tls", "address", "ports", "labels", "fabrics", "environment")


class Agent(MultiService):
    """The daemon.

    @param uplink: the service that dials; it is started last and stopped first.
    """

    log = Logger()

    def __init__(
        self, reactor: Any, settings: AgentSettings, state: StateFolder, equipment: NodeEquipment, node: Node, uplink: Uplink
    ) -> None:
        super().__init__()
        self.setName("agent")
        self.node = node
        self._reactor = reactor
        self._settings = settings
        self._state = state
        self._equipment = equipment
        self._uplink = uplink
        self._beginning: Deferred[None] | None = None
        self._up: list[Callable[[], None]] = []

    def startService(self) -> None:
        """Begin; what makes that impossible ends the daemon with one sentence."""
        super().startService()
        self._beginning = Deferred.fromCoroutine(self._begin())
        self._beginning.addErrback(self._cannot_begin)

    async def _begin(self) -> None:
        self._state.open()
        await self.node.start()
        await self._equipment.begin()
        self._beginning = None
        self._uplink.setServiceParent(self)
        running = self.node.running
        self.log.info(
            "{node}: {count} engines found running{names}",
            node=self._settings.node,
            count=len(running),
            names=f": {', '.join(sorted(running))}" if running else "",
        )
        for call in self._up:
            call()

    def _cannot_begin(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if not failure.check(LlmgwError):
            self.log.failure("while starting", failure)
        give_up(self._reactor, f"llmgw-agent {self._settings.node} cannot start: {failure.getErrorMessage()}")

    def stopService(self) -> Deferred[None]:
        """Say goodbye to the server; the engines go on."""
        return Deferred.fromCoroutine(self._end(super().stopService()))

    async def _end(self, stopped: Deferred[Any]) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        try:
            await stopped
        finally:
            self._equipment.end()
            self.node.leave()
            self._state.close()

    def reload(self, settings: AgentSettings) -> None:
        """SIGHUP: what can change without a restart, from the next link on.

        @raise LlmgwError: certificates cannot be used, or something changed that only a restart changes; the rest is in force.
        """
        self._uplink.reload(settings)
        before = self._settings
        self._settings = evolve(before, **{name: getattr(settings, name) for name in RELOADABLE})
        self.node.reload(settings)
        names = [each.name for each in fields(AgentSettings) if each.name not in RELOADABLE]
        if changed := [name for name in names if getattr(before, name) != getattr(settings, name)]:
            what = f"{', '.join(changed)} changed: that takes a restart of llmgw-agent, which leaves engines running"
            raise LlmgwError(f"{what}; the rest is in force")

    def when_up(self, call: Callable[[], None]) -> None:
        """Have it called when the truth is known and the link is dialled: that is all that an agent's own being up can mean."""
        self._up.append(call)

    def status(self) -> str:
        """One line for C{systemctl status}."""
        if self._beginning is not None:
            return "looking for engines and at the hardware"
        states = list(self.node.running.values()) if self.running else []
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{self._uplink.status.rstrip('.')}; engines: {counted or 'none'}"


def make_agent(settings: AgentSettings, reactor: Any) -> Agent:
    """The daemon that C{settings} describe; nothing is opened yet."""
    found = adapters()
    state = StateFolder(settings.state, lambda: secrets.token_hex(16))
    environment = child_environment(os.environ, settings.environment, {}, ShardLaunch(()))

    def shard_of(pid: int) -> str | None:
        return node.shard_of(pid)

    known = KnownDevices(settings.state / "devices.json")
    hardware = NodeInventory(reactor, settings.devices, settings.state, shard_of, time.time, known=known)
    cache = settings.state / "installations.json"
    installations = Installations(reactor, settings.engines, found, cache, environment)
    fetching = Fetching(
        reactor,
        fetch_environment(os.environ, environment),
        hub_cache(environment),
        settings.state / "fetches.json",
        time.time,
    )
    equipment = NodeEquipment(reactor, hardware, installations, WeightFinder(settings.models, environment), fetching.busy)
    release = Release(reactor, hardware)
    node = Node(reactor, settings, state, found, equipment, release.wait, lambda: secrets.token_hex(32), fetching)
    return Agent(reactor, settings, state, equipment, node, Uplink(reactor, settings, node, SystemRandom().random))
