"""Replicas, and endpoints that others run, whose requests fail although nothing else speaks against them, as our routers tell.

A router's breaker that is open says that no request of the last ones got an answer. That is shown, and the agent is asked to see
whether the engine still makes a token; only what it finds ends an engine. A word that nobody repeats is soon forgotten: there may
be no requests any more, or no breaker, since an endpoint that is found unhealthy leaves the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import evolve, frozen

# Three times the pause of a breaker (llmgw.router.breaker.OPEN_FOR), after which a request tries again.
LASTING = 90.0


@frozen
class _Doubt:
    text: str
    heard: float


class Doubts:
    """By endpoint: a replica's id, or that of a further shard that serves.

    @param news: called when an endpoint begins or ceases to be in doubt.
    @ivar news: a sentence on each endpoint of which that is not written down yet (see L{said}).
    """

    def __init__(self, steady: Callable[[], float], news: Callable[[], None]) -> None:
        self._steady = steady
        self._touch = news
        self._of: dict[str, _Doubt] = {}
        self.news: dict[str, str] = {}

    def failed(self, endpoint: str, text: str, again: bool = False) -> None:
        """A request has failed at an endpoint whose breaker is open.

        @param again: it has not, but the breaker is open as before. This makes no new doubt: of several workers one may know
            already that the endpoint answers.
        """
        known = self._of.get(endpoint)
        if again and known is None:
            return
        self._of[endpoint] = evolve(known, heard=self._steady()) if known else _Doubt(text, self._steady())
        if known is None:
            follows = "the routers leave it alone" if endpoint.startswith("static:") else "its engine is asked for a token"
            self._say(endpoint, f"its requests fail: it {text}; {follows}")

    def recovered(self, endpoint: str) -> None:
        """It has answered."""
        if self._of.pop(endpoint, None) is not None:
            self._say(endpoint, "it answers requests again")

    def all(self) -> dict[str, str]:
        """Why, by endpoint."""
        return {endpoint: f"its requests fail: it {doubt.text}" for endpoint, doubt in self._of.items()}

    def look(self) -> None:
        """Forget what has not been heard of for long. About once a second."""
        for endpoint in [one for one, doubt in self._of.items() if self._steady() - doubt.heard >= LASTING]:
            del self._of[endpoint]
            self._say(endpoint, f"no request has failed there for {LASTING:g} s")

    def said(self, news: Mapping[str, str]) -> None:
        """These are written down."""
        self.news = {endpoint: text for endpoint, text in self.news.items() if news.get(endpoint) != text}

    def _say(self, endpoint: str, text: str) -> None:
        self.news[endpoint] = f"{endpoint}: {text}"
        self._touch()
