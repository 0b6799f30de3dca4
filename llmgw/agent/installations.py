"""Which engines are installed on this node, and what their installed versions say of themselves.

An engine that imports half a machine-learning stack takes many seconds to print its version, so it is asked once per
command and file time, in a child with a deadline, one engine after another, and the answers are kept on disk. Nobody waits
for them: until they are there an installation's version is unknown, which only ever warns.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import evolve
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.logger import Logger

from llmgw.agent.child import ChildFailed, run_child
from llmgw.config.agent import EngineSettings
from llmgw.fleet.node import Installation
from llmgw.interfaces import Flags, IEngineAdapter

DEADLINE = 180.0
KEPT = 200
# An adapter's stand-in: the module that must be importable here, and the command that serves from it.
WHEELS = {"llamacpp": ("xllamacpp", (sys.executable, "-m", "llmgw.engines.llamacpp_server"))}


def stamp(command: Sequence[str], path: str | None) -> str:
    """What changes when another version is installed under the same command."""
    parts = []
    for word in command:
        found = shutil.which(word, path=path) or (word if os.path.isabs(word) else None)
        if found and os.path.exists(found):
            parts.append(f"{os.path.realpath(found)}@{os.stat(found).st_mtime_ns}")
    return " ".join([*command, *parts])


class Installations:
    """@param environment: what an engine is asked in; its PATH is where commands are looked for.

    @param cache: the file that keeps answers.
    @param changed: called when something new is known.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        engines: Sequence[EngineSettings],
        adapters: Mapping[str, IEngineAdapter],
        cache: Path,
        environment: Mapping[str, str],
        changed: Callable[[], None] = lambda: None,
        deadline: float = DEADLINE,
    ) -> None:
        self._reactor = reactor
        self._adapters = adapters
        self._cache = cache
        self._environment = environment
        self._changed = changed
        self._deadline = deadline
        self._one_at_a_time = DeferredLock()
        self._answers: dict[str, str] = {}
        self._asking: dict[str, Deferred[None]] = {}
        self._found = {row.name: self._installation(row) for row in [*self._defaults(engines), *engines]}

    def _defaults(self, engines: Sequence[EngineSettings]) -> list[EngineSettings]:
        """An adapter's own command, where it is on PATH and no entry says otherwise."""
        named = {row.name for row in engines}
        rows = [EngineSettings(name, name, self._default(name)) for name in self._adapters]
        return [row for row in rows if row.name not in named and not self._missing(row.command)]

    def _default(self, adapter: str) -> tuple[str, ...]:
        """The adapter's own command; where that is not on PATH, a server in a wheel beside us that can stand in for it."""
        command = tuple(self._adapters[adapter].default_command)
        wheel, instead = WHEELS.get(adapter, ("", ()))
        return instead if wheel and self._missing(command) and find_spec(wheel) else command

    def _missing(self, command: Sequence[str]) -> str:
        path = self._environment.get("PATH")
        if not command or shutil.which(command[0], path=path):
            return ""
        return f"{command[0]} is not there or not executable"

    def _installation(self, row: EngineSettings) -> Installation:
        adapter = self._adapters.get(row.adapter)
        if adapter is None:
            why = f"there is no adapter {row.adapter}; there are {', '.join(sorted(self._adapters))}"
            return Installation(row.name, row.adapter, row.command, problem=why)
        command = row.command or self._default(row.adapter)
        return Installation(row.name, row.adapter, command, problem=self._missing(command))

    def start(self) -> None:
        """Read what was kept, and ask what was not, in the background."""
        try:
            kept = json.loads(self._cache.read_text())
            if not isinstance(kept, dict):
                raise ValueError("it holds no mapping")
            self._answers = {str(key): str(value) for key, value in kept.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            self.log.warn("{cache} is not usable, engines are asked again: {error}", cache=str(self._cache), error=str(error))
        for installation in self.all():
            self._ask_quietly(installation, "version")
            self._ask_quietly(installation, "flags")

    def stop(self) -> None:
        """Ask no more; what is asked now is killed."""
        # The last first: one that ends lets the next one begin.
        for asked in reversed(list(self._asking.values())):
            asked.cancel()
        self._asking.clear()

    def all(self) -> tuple[Installation, ...]:
        """The engines as known now."""
        return tuple(self._found.values())

    def flags(self, installation: Installation) -> Flags:
        """What the installed version prints in its help; empty while or where nobody could ask."""
        adapter = self._adapters.get(installation.adapter)
        output = self._answers.get(self._key(installation, "flags"))
        return adapter.flags(output) if adapter and output else Flags()

    def _key(self, installation: Installation, what: str) -> str:
        return f"{what} {stamp(installation.command, self._environment.get('PATH'))}"

    def _ask_quietly(self, installation: Installation, what: str) -> None:
        key = self._key(installation, what)
        if key in self._answers:
            self._take(installation, what)
        elif not installation.problem and key not in self._asking:
            asked = self._asking[key] = Deferred.fromCoroutine(self._ask(installation, what, key))
            asked.addErrback(lambda failure: failure.trap(CancelledError))
            asked.addErrback(lambda failure: self.log.failure("while asking {name}", failure, name=installation.name))

    async def _ask(self, installation: Installation, what: str, key: str) -> None:
        adapter = self._adapters[installation.adapter]
        ask = adapter.version_argv if what == "version" else adapter.flags_argv
        argv = ask(installation.command)
        if argv is None:
            return
        await self._one_at_a_time.acquire()
        try:
            output = await run_child(self._reactor, argv, self._environment, self._deadline)
        except ChildFailed as error:
            self.log.warn("{name}: its {what} is unknown: {error}", name=installation.name, what=what, error=str(error))
            return
        finally:
            self._asking.pop(key, None)
            self._one_at_a_time.release()
        if output.status:
            last = (output.text.strip().splitlines() or [""])[-1][:200]
            self.log.warn("{name}: its {what} is unknown: {last}", name=installation.name, what=what, last=last)
            return
        self._answers[key] = output.text
        self._keep()
        self._take(installation, what)

    def _take(self, installation: Installation, what: str) -> None:
        if what == "version":
            output = self._answers[self._key(installation, what)]
            version = self._adapters[installation.adapter].version(output)
            self._found[installation.name] = evolve(installation, version=version)
            self._changed()

    def _keep(self) -> None:
        newest = dict(list(self._answers.items())[-KEPT:])
        new = self._cache.with_suffix(".new")
        try:
            new.write_text(json.dumps(newest))
            os.replace(new, self._cache)
        except OSError as error:
            self.log.warn("cannot keep what engines said: {error}", error=str(error))
