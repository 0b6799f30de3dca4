"""What the agent knows of its shards on disk: one folder per shard, in it one per attempt. Folders 0700, files 0600.

    STATE/shards/SHARD/ATTEMPT/intent.json   what was ordered and how it is reached, before anything is started
                               key           the engine's secret, apart from what people look at
                               launch.json   for the shim, which removes it when it begins
                               run.json      by the shim: who it and the engine are
                               exit.json     by the shim: how the engine ended
                               state.json    what it had come to last, for an agent that adopts it
                               loras.json    which adapters its engine has been given while it ran
                               outcome.json  the agent's verdict, once there is nothing left of the attempt
                               output.*      what the engine wrote
                               secrets/      files that the engine's argv names

An attempt whose launch.json we could take away again has never been started. One with an outcome is over for good.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from attrs import evolve, field, frozen
from twisted.logger import Logger

from llmgw.agent.output import disk_usage
from llmgw.agent.processes import ProcessId
from llmgw.agent.shim import write
from llmgw.fleet.plain import from_plain, to_plain
from llmgw.fleet.shard import Diagnosis, ShardExit, ShardLora, ShardOrder, ShardState
from llmgw.interfaces import LoraDoor

KEEP_ATTEMPTS = 10
KEEP_ENDED = 1000
KEEP_BYTES = 200 * 2**20

T = TypeVar("T")
log = Logger()


@frozen
class Intent:
    """What an attempt was started for, and how its engine is reached: all that an adopting agent needs.

    C{adapter} and C{installation} name how it was started; C{grace} is seconds between SIGTERM and SIGKILL.
    """

    order: ShardOrder
    adapter: str
    installation: str
    version: str | None = None
    key: str = field(default="", repr=False)
    url: str = ""
    ready: str | None = None
    models: str | None = None
    metrics: str | None = None
    limit: int | None = None
    probe: str = ""
    sleep: str = ""
    wake: str = ""
    loras: LoraDoor = LoraDoor()
    grace: float = 20.0
    cgroup: str | None = None
    at: float = 0.0


@frozen
class Run:
    """Who runs for an attempt."""

    shim: ProcessId
    engine: ProcessId
    at: float


@frozen
class Reached:
    """The last state that an attempt had come to while it lived, and since when."""

    state: ShardState
    at: float


@frozen
class Given:
    """The adapters of a running engine."""

    loras: tuple[ShardLora, ...] = ()


@frozen
class Outcome:
    """How an attempt ended, for ever. C{state} is failed or stopped."""

    state: ShardState
    reason: str
    exit: ShardExit = ShardExit()
    diagnosis: Diagnosis | None = None
    at: float = 0.0


class AttemptFolder:
    """One attempt's files. Reading never raises: what is missing or broken is None, and the log tells of the broken."""

    def __init__(self, path: Path, shard: str, attempt: int) -> None:
        self.path = path
        self.shard = shard
        self.attempt = attempt

    def create(self) -> None:
        """Make the folder.

        @raise OSError: it cannot be made, e.g. the disk is full.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            log.error("{path} cannot be read: {error}", path=str(self.path / name), error=str(error))
            return None

    def _value(self, name: str, kind: type[T]) -> T | None:
        plain = self._read(name)
        try:
            return None if plain is None else from_plain(plain, kind)
        except ValueError as error:
            log.error("{path} cannot be understood: {error}", path=str(self.path / name), error=str(error))
            return None

    def write(self, name: str, value: object) -> None:
        """Write a value as JSON, atomically and durably, 0600.

        @raise OSError: it cannot be written; what was there stays.
        """
        write(str(self.path / name), to_plain(value))

    def intent(self) -> Intent | None:
        """What this attempt was started for."""
        found = self._value("intent.json", Intent)
        return found and evolve(found, key=self._key())

    def _key(self) -> str:
        try:
            return (self.path / "key").read_text().strip()
        except OSError:
            return ""

    def write_intent(self, intent: Intent) -> None:
        """Write it, and its key into a file of its own, once: to write that again on a full disk would lose it.

        @raise OSError: it cannot be written; what was there stays.
        """
        if intent.key and intent.key != self._key():
            with open(self.path / "key", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(intent.key + "\n")
        self.write("intent.json", evolve(intent, key=""))

    def outcome(self) -> Outcome | None:
        """How it ended, None while it has not or nobody has judged yet."""
        return self._value("outcome.json", Outcome)

    def reached(self) -> Reached | None:
        """What it had come to, None before it was ready."""
        return self._value("state.json", Reached)

    def loras(self) -> tuple[ShardLora, ...]:
        """What its engine has been given while it ran."""
        return (self._value("loras.json", Given) or Given()).loras

    def run(self) -> Run | None:
        """Who runs, as the shim wrote it."""
        plain = self._read("run.json")
        try:
            shim, engine = (ProcessId(plain["boot"], plain[name]["pid"], plain[name]["start"]) for name in ("shim", "engine"))
            return Run(shim, engine, float(plain["at"]))
        except (TypeError, KeyError, ValueError):
            return None

    def exit(self) -> tuple[ShardExit, str] | None:
        """How the engine ended, as the shim wrote it, and why it could not be executed (empty if it could)."""
        plain = self._read("exit.json")
        try:
            code = int(plain["code"])
            status = ShardExit(code, at=plain["at"]) if code >= 0 else ShardExit(signal=-code, at=plain["at"])
            return status, str(plain["error"])
        except (TypeError, KeyError, ValueError):
            return None

    def complaint(self) -> str:
        """The last line that the shim itself had to say; empty usually."""
        try:
            lines = (self.path / "shim.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:500] if lines else ""

    def abandon(self) -> bool:
        """Take the launch away from its shim; True if it had not begun, and so never will."""
        try:
            os.unlink(self.path / "launch.json")
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        """Delete all of it."""
        shutil.rmtree(self.path, ignore_errors=True)


class ShardFolders:
    """All attempts below one state folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def attempt(self, shard: str, number: int) -> AttemptFolder:
        """The folder of this attempt, whether it is there or not. Made from the id by us: an id never leads elsewhere."""
        return AttemptFolder(self._root / _folder_name(shard) / str(number), shard, number)

    def attempts(self, shard: str) -> list[AttemptFolder]:
        """The attempts that are there, the oldest first."""
        try:
            names = os.listdir(self._root / _folder_name(shard))
        except OSError:
            return []
        return [self.attempt(shard, number) for number in sorted(int(name) for name in names if name.isdecimal())]

    def shards(self) -> Iterator[list[AttemptFolder]]:
        """The attempts of each shard whose latest attempt has a readable intent."""
        for name in sorted(os.listdir(self._root)) if self._root.is_dir() else ():
            folder = self._root / name
            numbers = sorted((int(part) for part in os.listdir(folder) if part.isdecimal()), reverse=True)
            for number in numbers:
                intent = AttemptFolder(folder / str(number), name, number).intent()
                if intent is not None and _folder_name(intent.order.shard) == name:
                    yield self.attempts(intent.order.shard)
                    break

    def prune(self, kept: Iterable[Path]) -> None:
        """Delete old attempts: more than 10 of a shard, more than 1,000 or 200 MiB of ended ones; never those in C{kept}."""
        keep, ended = set(kept), []
        for attempts in self.shards():
            surplus = attempts[:-KEEP_ATTEMPTS]
            for attempt in surplus:
                if attempt.path not in keep:
                    attempt.remove()
            ended += [a for a in attempts[len(surplus) :] if a.path not in keep]
        ended.sort(key=lambda attempt: attempt.path.stat().st_mtime, reverse=True)
        total = 0
        for count, attempt in enumerate(ended):
            total += disk_usage(attempt.path)
            if count >= KEEP_ENDED or (total > KEEP_BYTES and count):
                attempt.remove()


def _folder_name(shard: str) -> str:
    """One path component for any shard id, also for one that nobody should have, like C{..} or none at all."""
    name = quote(shard, safe="")
    if not name.strip("."):
        name = f"~{name.replace('.', '%2E')}"
    return name if len(name) <= 150 else f"{name[:100]}~{hashlib.sha256(shard.encode()).hexdigest()[:24]}"
