"""The LoRA adapters of one engine, loaded and unloaded while it runs, one by one, until it has those that its order names.

What was loaded is noted on disk, so that an agent that adopts the engine loads nothing twice; what the engine itself lists is the
last word. An adapter that cannot be loaded is told with the reason and tried again; the base model serves on. One that is no
longer wanted is named by the order for as long as any router may still send requests for it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from twisted.logger import Logger

from llmgw.agent.probe import EngineProbe
from llmgw.agent.shardfolder import AttemptFolder, Given, Intent
from llmgw.engines import lora
from llmgw.fleet.model import Lora
from llmgw.fleet.shard import ShardLora, WeightFiles

DEADLINE = 60.0
AGAIN = 30.0

Look = Callable[[str], Awaitable[WeightFiles]]


class Equipped(Protocol):
    """The attempt whose engine it is."""

    folder: AttemptFolder
    intent: Intent

    def changed(self) -> None:
        """Its adapters are others."""


class Loras:
    """What one engine has, and the way to what it should have.

    @param look: what is found of an adapter's weights.
    """

    log = Logger()

    def __init__(self, reactor: Any, probe: EngineProbe, of: Equipped, look: Look) -> None:
        self._reactor = reactor
        self._probe = probe
        self._of = of
        self._look = look
        self._has = of.folder.loras()
        self._tried: tuple[Lora, ...] | None = None
        self._again = 0.0
        self._busy = False
        self._hopeless: set[Lora] = set()

    @property
    def has(self) -> tuple[ShardLora, ...]:
        """For the report: an engine that takes none later has those that it was started with."""
        intent = self._of.intent
        return self._has if intent.loras.load else tuple(_loaded(intent, one) for one in intent.order.profile.loras)

    async def follow(self, fresh: bool = False) -> None:
        """Do what there is to do: at once if the order has changed, every L{AGAIN} seconds for what has failed.

        What goes wrong here is never the engine's fault.

        @param fresh: it was started for these, so what it does not take no other start would change.
        """
        if self._busy:
            return
        self._busy = True
        try:
            while self._due():
                await self._bring_about(self._of.intent, fresh)
                self._again = self._reactor.seconds() + AGAIN
        except Exception:
            self.log.failure("while loading adapters into {shard}", shard=self._of.folder.shard)
        finally:
            self._busy = False

    def _due(self) -> bool:
        intent = self._of.intent
        wanted = intent.order.profile.loras
        there = {Lora(one.name, one.weights) for one in self._has if not one.problem}
        as_wanted = there == set(wanted) and len(there) == len(self._has)
        return bool(intent.loras.load) and not as_wanted and (wanted != self._tried or self._reactor.seconds() >= self._again)

    async def _bring_about(self, intent: Intent, fresh: bool) -> None:
        wanted, before, began = intent.order.profile.loras, self._has, self._reactor.seconds()
        self._tried = wanted
        self._hopeless |= set(wanted) if fresh else set()
        listed = await self._probe.listed(intent)
        if listed is None:
            return
        known = [one for one in before if not one.problem and one.name in listed]
        self._keep(known)
        for one in known:
            if Lora(one.name, one.weights) not in wanted:
                await self._unload(intent, one)
        for count, adapter in enumerate(wanted):
            late = self._reactor.seconds() - began > DEADLINE
            if not late and adapter.name not in [one.name for one in self._has]:
                stray = adapter.name in listed and adapter.name not in [one.name for one in known]
                self._keep([*self._has, await self._load(intent, adapter, count, stray)])
        if self._has != before:
            self._of.changed()

    def _keep(self, has: list[ShardLora]) -> None:
        self._has = tuple(has)
        try:
            self._of.folder.write("loras.json", Given(tuple(one for one in has if not one.problem)))
        except OSError as error:
            self.log.error("cannot note the adapters of {shard}: {error}", shard=self._of.folder.shard, error=str(error))

    async def _unload(self, intent: Intent, one: ShardLora) -> None:
        problem = await self._post(intent, intent.loras.unload, lora_name=one.name)
        if problem:
            self.log.warn("{shard} keeps the adapter {name}: {problem}", shard=intent.order.shard, name=one.name, problem=problem)
        else:
            self._keep([other for other in self._has if other is not one])

    async def _load(self, intent: Intent, adapter: Lora, count: int, stray: bool) -> ShardLora:
        """What has become of it. C{stray}: the engine has one of this name, nobody knows from where."""
        try:
            files = await self._look(adapter.weights)
        except Exception as error:
            return _failed(adapter, f"adapter {adapter.name}: {error}")
        problem, anew = lora.refused(adapter, files, intent.loras, intent.order.profile, count)
        if problem:
            return _failed(adapter, problem, anew and adapter not in self._hopeless)
        if stray:
            await self._post(intent, intent.loras.unload, lora_name=adapter.name)
        problem = await self._post(intent, intent.loras.load, lora_name=adapter.name, lora_path=files.path)
        if problem:
            return _failed(adapter, f"adapter {adapter.name}: its engine does not load {files.path}: {problem}")
        self.log.info("{shard} has the adapter {name} now", shard=intent.order.shard, name=adapter.name)
        return _loaded(intent, adapter)

    async def _post(self, intent: Intent, path: str, **said: str) -> str:
        return await self._probe.post(intent.url + path, intent.key, DEADLINE, json.dumps(said).encode())


def _loaded(intent: Intent, one: Lora) -> ShardLora:
    return ShardLora(one.name, one.weights, intent.loras.served.replace("{name}", one.name))


def _failed(one: Lora, problem: str, anew: bool = False) -> ShardLora:
    return ShardLora(one.name, one.weights, problem=problem, anew=anew)
