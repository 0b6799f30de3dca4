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
from llmgw.engines.lora import refused
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
    @ivar ended: set it to do no more; what is under way then counts as never done.
    """

    log = Logger()

    def __init__(self, reactor: Any, probe: EngineProbe, of: Equipped, look: Look) -> None:
        self._reactor = reactor
        self._probe = probe
        self._of = of
        self._look = look
        self._has = {Lora(one.name, one.weights): one for one in of.folder.loras()}
        self._tried: tuple[Lora, ...] | None = None
        self._again = 0.0
        self._busy = False
        self._hopeless: set[Lora] = set()
        self.ended = False

    @property
    def has(self) -> tuple[ShardLora, ...]:
        """For the report: an engine that takes none later has those that it was started with."""
        intent = self._of.intent
        return (
            tuple(self._has.values()) if intent.loras.load else tuple(_loaded(intent, one) for one in intent.order.profile.loras)
        )

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
        as_wanted = set(self._has) == set(wanted) and not any(one.problem for one in self._has.values())
        return bool(intent.loras.load) and not as_wanted and (wanted != self._tried or self._reactor.seconds() >= self._again)

    async def _bring_about(self, intent: Intent, fresh: bool) -> None:
        wanted, began = intent.order.profile.loras, self._reactor.seconds()
        self._tried = wanted
        self._hopeless |= set(wanted) if fresh else set()
        listed = await self._probe.listed(intent)
        if listed is None:
            return
        loaded = [lora for lora, one in self._has.items() if not one.problem and one.name in listed]
        failed = [lora for lora, one in self._has.items() if one.problem and lora in wanted]
        self._keep({lora: self._has[lora] for lora in (*loaded, *failed)})
        strays, tried = set(listed) - {lora.name for lora in loaded}, set[Lora]()
        # What leaves may take as long as what runs with it. What comes does not wait for that, unless it takes its name.
        await self._load_missing(intent, wanted, strays, tried, began)
        for lora in loaded:
            if lora not in wanted and not self.ended:
                await self._unload(intent, lora)
        await self._load_missing(intent, wanted, strays, tried, began)

    async def _load_missing(
        self, intent: Intent, wanted: tuple[Lora, ...], strays: set[str], tried: set[Lora], began: float
    ) -> None:
        for count, lora in enumerate(wanted):
            late = self.ended or self._reactor.seconds() - began > DEADLINE
            if not late and lora not in tried and lora.name not in [one.name for one in self._has.values() if not one.problem]:
                tried.add(lora)
                self._keep({**self._has, lora: await self._load(intent, lora, count, lora.name in strays)})

    def _keep(self, has: dict[Lora, ShardLora]) -> None:
        if self.ended or has == self._has:
            return
        self._has = has
        try:
            self._of.folder.write("loras.json", Given(tuple(one for one in has.values() if not one.problem)))
        except OSError as error:
            self.log.error("cannot note the adapters of {shard}: {error}", shard=self._of.folder.shard, error=str(error))
        self._of.changed()

    async def _unload(self, intent: Intent, lora: Lora) -> None:
        problem = await self._post(intent, intent.loras.unload, lora_name=lora.name)
        if problem:
            self.log.warn(
                "{shard} keeps the adapter {name}: {problem}", shard=intent.order.shard, name=lora.name, problem=problem
            )
        else:
            self._keep({other: one for other, one in self._has.items() if other != lora})

    async def _load(self, intent: Intent, adapter: Lora, count: int, stray: bool) -> ShardLora:
        """What has become of it. C{stray}: the engine has one of this name, nobody knows from where."""
        try:
            files = await self._look(adapter.weights)
        except Exception as error:
            return _failed(adapter, f"adapter {adapter.name}: {error}")
        problem, anew = refused(adapter, files, intent.loras, intent.order.profile, count)
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
