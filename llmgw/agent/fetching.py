"""The downloads of this node: each a child process, at most one of the same weights, two at a time, noted on disk until over.

An order is level-triggered, as all are: the same again finds the download that runs. One that was under way when the agent ended
is taken up again by the next agent, from where it got to. A network that fails is tried again, and only given up when three tries
in a row brought no byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.agent.fetch_process import FetchProcess
from llmgw.fleet.fetch import HUB, Fetch, FetchState, same_weights
from llmgw.fleet.units import show_duration, show_size

AT_ONCE = 2
KEPT = 32
TRIES = 3
AGAIN = (5.0, 20.0)
STALLED = 60.0
CANCEL_WITHIN = 4.0
TELL_WITHIN = 10.0


class Fetching:
    """All downloads.

    @param environment: of the child: where the cache is, the token, the hub's address, proxies.
    @param cache: the node's Hugging Face cache.
    @param path: the file that keeps what is not over.
    @param clock: wall time, for people.
    @ivar changed: called when a download began or is over.
    """

    log = Logger()

    def __init__(self, reactor: Any, environment: Mapping[str, str], cache: Path, path: Path, clock: Callable[[], float]) -> None:
        self._reactor = reactor
        self._environment = environment
        self._cache = cache
        self._path = path
        self._clock = clock
        self._known: dict[str, Fetch] = {}
        self._running: dict[str, FetchProcess] = {}
        self._waiting: dict[str, list[Deferred[Fetch]]] = {}
        self._later: dict[str, Any] = {}
        self._tries: dict[str, tuple[int, int]] = {}
        self._ending = False
        self.changed: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Take up what an earlier agent had not finished."""
        try:
            unfinished = [str(weights) for weights in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            self.log.error("cannot read {path}: {error}", path=str(self._path), error=str(error))
            return
        for weights in unfinished[:KEPT]:
            self.order(weights)

    def stop(self) -> None:
        """The agent ends, and its children with it; what they have got is kept for the next."""
        self._ending = True
        for call in self._later.values():
            call.cancel()
        self._later.clear()
        for process in self._running.values():
            process.leave()
        for key, waiting in self._waiting.items():
            for told in waiting:
                told.callback(self._known[key])
        self._waiting.clear()

    def all(self) -> tuple[Fetch, ...]:
        """Those under way and the last that are over."""
        return tuple(self._known.values())

    def busy(self, weights: str) -> Fetch | None:
        """The download of these weights that goes on, so that what is there of them is not whole."""
        found = self._known.get(same_weights(weights))
        return found if found is not None and found.state.active else None

    def order(self, weights: str) -> Deferred[Fetch]:
        """Download, unless it is being done. Fires once there is something to tell: how much it is, or why not; at the latest
        after 10 s, since somebody waits for the answer."""
        key, told = same_weights(weights), Deferred[Fetch]()
        found = self._known.get(key)
        if found is None or not found.state.active:
            if not HUB.match(weights):
                told.callback(Fetch(weights, FetchState.FAILED, error="no_hub", reason="only hf:ORG/NAME can be downloaded"))
                return told
            self._known.pop(key, None)
            self._known[key] = Fetch(weights, since=self._clock())
            self._tries.pop(key, None)
            self._forget_old()
            self._write()
            self._pump()
        if self._known[key].total is not None or not self._known[key].state.active:
            told.callback(self._known[key])
        else:
            self._waiting.setdefault(key, []).append(told)
            told.addTimeout(TELL_WITHIN, self._reactor, lambda _, seconds: self._known[key])
        return told

    def cancel(self, weights: str) -> Fetch | None:
        """End it and remove what is not whole; None if there is none under way."""
        key = same_weights(weights)
        if self.busy(key) is None:
            return None
        if (call := self._later.pop(key, None)) is not None:
            call.cancel()
        process = self._running.get(key)
        if process is not None:
            process.cancel(CANCEL_WITHIN)
        reason = "partial files are removed" if process else "it was not running; a later fetch resumes what is there"
        return self._set(key, state=FetchState.CANCELLED, since=self._clock(), reason=reason)

    # The children.

    def _pump(self) -> None:
        """Begin what waits, as far as there may be more at once."""
        for key, fetch in list(self._known.items()):
            if len(self._running) >= AT_ONCE or self._ending:
                return
            if fetch.state is FetchState.WAITING and key not in self._running and key not in self._later:
                self._begin(key, fetch)

    def _begin(self, key: str, fetch: Fetch) -> None:
        found = HUB.match(fetch.weights)
        assert found is not None
        order = {"repo": f"{found['org']}/{found['name']}", "revision": found["revision"] or "main", "cache": str(self._cache)}
        self._set(key, state=FetchState.CHECKING, reason="")
        process = FetchProcess(self._reactor, order, lambda said: self._heard(key, process, said), STALLED)
        self._running[key] = process
        ended = process.run(self._environment)
        ended.addCallback(lambda why: self._ended(key, process, why))
        ended.addErrback(lambda failure: self.log.failure("while a download ended", failure))

    def _heard(self, key: str, process: FetchProcess, said: Mapping[str, Any]) -> None:
        """A line of a child; those of one that was cancelled are not news."""
        fetch = self._known.get(key)
        if fetch is None or not fetch.state.active or self._running.get(key) is not process:
            return
        if said.get("error") == "network":
            self._try_again(key, str(said.get("reason")))
            return
        total = said.get("total", fetch.total)
        # What is damaged is removed and fetched anew; to people a download never goes back.
        there = max(fetch.bytes, int(said.get("bytes", 0))) if fetch.total in (None, total) else int(said.get("bytes", 0))
        state = FetchState(str(said["state"]))
        since = fetch.since if state.active else self._clock()
        error, reason = str(said.get("error", "")), str(said.get("reason", ""))
        self._set(key, state=state, bytes=there, total=total, since=since, error=error, reason=reason)

    def _ended(self, key: str, process: FetchProcess, why: str) -> None:
        if self._running.get(key) is process:
            del self._running[key]
        fetch = self._known.get(key)
        if self._ending:
            return
        if fetch is not None and fetch.state.active and key not in self._later:
            self._try_again(key, why or "the download ended without a word")
        self._pump()

    def _try_again(self, key: str, why: str) -> None:
        """Wait a while and go on from what is there, unless the last tries brought nothing."""
        fetch = self._known[key]
        tries, had = self._tries.get(key, (0, -1))
        tries = 1 if fetch.bytes > had else tries + 1
        self._tries[key] = tries, fetch.bytes
        if tries >= TRIES:
            text = f"{why}; {TRIES} tries brought nothing, {show_size(fetch.bytes)} are there and kept"
            self._set(key, state=FetchState.FAILED, error="network", since=self._clock(), reason=text)
            return
        delay = AGAIN[min(tries, len(AGAIN)) - 1]
        self._later[key] = self._reactor.callLater(delay, self._again, key)
        self._set(key, state=FetchState.WAITING, reason=f"{why}; next try in {show_duration(delay)}")

    def _again(self, key: str) -> None:
        del self._later[key]
        self._pump()

    # What is told.

    def _set(self, key: str, **changes: Any) -> Fetch:
        before = self._known[key]
        after = self._known[key] = evolve(before, **changes)
        if after.state is not before.state and after.state is not FetchState.VERIFYING:
            self.log.info("{weights}: {text}", weights=after.weights, text=after.text)
        if not after.state.active and before.state.active:
            self._write()
            self.changed()
        if after.total is not None or not after.state.active or after.reason:
            for waiting in self._waiting.pop(key, ()):
                waiting.callback(after)
        return after

    def _forget_old(self) -> None:
        over = [key for key, fetch in self._known.items() if not fetch.state.active]
        for key in over[: max(0, len(self._known) - KEPT)]:
            del self._known[key]

    def _write(self) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            with open(temporary, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump([fetch.weights for fetch in self._known.values() if fetch.state.active], file)
            os.rename(temporary, self._path)
        except OSError as error:
            self.log.error("cannot write {path}: {error}", path=str(self._path), error=error.strerror)
