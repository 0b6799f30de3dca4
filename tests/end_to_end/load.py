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
