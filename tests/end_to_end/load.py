"""Clients that ask all the time, for tests of what they notice."""

from __future__ import annotations

import http.client
import threading

from tests.end_to_end.fleet import RealFleet, Stream


class Load:
    """Clients that ask again and again, half of them with streams; C{failures} are what they would complain of."""

    def __init__(self, fleet: RealFleet, clients: int = 4) -> None:
        self.asked = 0
        self.failures: list[str] = []
        self._fleet, self._over = fleet, threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n % 2 == 0,), daemon=True) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _client(self, streams: bool) -> None:
        while not self._over.is_set():
            try:
                if streams:
                    Stream(self._fleet.router, "m", 5).whole()
                elif (answer := self._fleet.ask())[0] != 200:
                    raise RuntimeError(answer)
            except (OSError, RuntimeError, AssertionError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            self.asked += 1
            self._over.wait(0.02)

    def end(self) -> None:
        """Stop; fails if anybody was failed, or hardly anybody asked."""
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        assert not self.failures, f"{len(self.failures)} of {self.asked} failed: {self.failures[:3]}"
        assert self.asked > 30


class Endless(threading.Thread):
    """A client that has one stream after the other through one router, each of some seconds.

    @ivar whole: how many it has had; C{broken} is what was wrong with the first that was not whole.
    """

    def __init__(self, port: int, model: str = "m", tokens: int = 60, key: str = "") -> None:
        super().__init__(daemon=True)
        self.whole = 0
        self.broken = ""
        self._ask, self._over = (port, model, tokens, key), threading.Event()
        self._stream: Stream | None = None
        self.start()

    def run(self) -> None:
        while not self._over.is_set() and not self.broken:
            self._stream = stream = Stream(*self._ask)
            stream.join()
            if stream.error is not None:
                self.broken = f"after {self.whole} whole ones {len(stream.pieces)} pieces, then {stream.error!r}"
            else:
                self.whole += 1

    def streams(self) -> bool:
        """Whether it is in the middle of an answer, or something broke."""
        return bool(self.broken or (self._stream and len(self._stream.pieces) > 3))

    def leave(self) -> None:
        """Ask for no more; what runs is read to its end."""
        self._over.set()

    def end(self) -> None:
        """Leave; fails unless every stream was whole."""
        self.leave()
        self.join(40)
        assert not self.broken and self.whole and not self.is_alive(), self.broken or "it still waits for an answer"
