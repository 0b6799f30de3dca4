"""Asks an engine over HTTP whether it serves, and how loaded it is.

Surprising: a refused connection and a 503 are both normal for minutes while an engine loads; 200 alone proves nothing, since
another process may have the port, or another model, or the engine may fail every request. So serving means 200, the served name
listed, the port held by one of our own processes, and an answer to the smallest question. Every answer is bounded in time
and size.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.error import ConnectError, ConnectingCancelledError, ConnectionDone, ConnectionLost, DNSLookupError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Protocol
from twisted.internet.task import Cooperator
from twisted.python.failure import Failure
from twisted.web.client import (
    URI,
    Agent,
    FileBodyProducer,
    HTTPConnectionPool,
    ResponseDone,
    ResponseFailed,
    _HTTP11ClientFactory,
)
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from llmgw.agent.ports import owned_by
from llmgw.agent.shardfolder import Intent
from llmgw.holders import holder

DEADLINE = 5.0
DEEP = 6  # times that long a token may take, the first one twice of that
QUESTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "completion": ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "embedding": ("/v1/embeddings", {"input": "a"}),
}
NOT_IMPLEMENTED = 501  # llama.cpp, asked for what its model is not for
BIGGEST = 4 * 2**20
EXPECTED = (ConnectError, ConnectionDone, ConnectionLost, ResponseFailed, DNSLookupError)
# What connecting and Agent make of being cancelled, which is how a deadline ends them.
LATE = (TimeoutError, CancelledError, ConnectingCancelledError)


@frozen
class Answer:
    """What came back. C{status} 0: nothing did, and C{body} says why."""

    status: int
    body: bytes = b""


@frozen
class Verdict:
    """Whether an engine serves.

    @ivar text: what is missing, for people; empty when it serves.
    @ivar answered: something on the port speaks HTTP.
    @ivar stolen: the port belongs to somebody else: it never will serve.
    @ivar unverified: it serves, but whose port it is could not be seen.
    @ivar refuses: it says that it serves, and fails the smallest request.
    """

    serves: bool
    text: str = ""
    answered: bool = False
    stolen: bool = False
    unverified: bool = False
    refuses: bool = False


class _Body(Protocol):
    """Gathers a body, no more than is sensible; ending early closes the connection, since all that we send is long written."""

    def __init__(self) -> None:
        self.done: Deferred[bytes] = Deferred(lambda _: self._leave())
        self._pieces: list[bytes] = []
        self._size = 0

    def dataReceived(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._size > BIGGEST:
            self._leave()

    def _leave(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008
        if self.done.called:
            return
        if reason.check(ResponseDone, PotentialDataLoss) and self._size <= BIGGEST:
            self.done.callback(b"".join(self._pieces))
        else:
            self.done.errback(reason)


class _Quiet(_HTTP11ClientFactory):
    noisy = False


@implementer(IAgentEndpointFactory)
class _Direct:
    """Connects to an address as it stands; a host's name, which agent.yaml may give, is looked up."""

    def __init__(self, reactor: Any, deadline: float) -> None:
        self._reactor = reactor
        self._deadline = deadline

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  (Twisted calls it)
        host = uri.host.decode("ascii").strip("[]")
        kinds = ((isIPAddress, TCP4ClientEndpoint), (isIPv6Address, TCP6ClientEndpoint))
        kind = next((kind for is_such, kind in kinds if is_such(host)), HostnameEndpoint)
        return kind(self._reactor, host, uri.port, timeout=self._deadline)


class EngineProbe:
    """HTTP questions to the engines of one node; connections are not kept, so that each question sees the engine as it is."""

    def __init__(self, reactor: Any, deadline: float = DEADLINE) -> None:
        self._reactor = reactor
        self._deadline = deadline
        self._cooperator = Cooperator(scheduler=lambda step: reactor.callLater(0, step))
        pool = HTTPConnectionPool(reactor, persistent=False)
        pool._factory = _Quiet  # Two log lines for each question, every few seconds, are too many.
        self._agent = Agent.usingEndpointFactory(reactor, _Direct(reactor, deadline), pool)

    async def get(self, url: str, key: str) -> Answer:
        """GET C{url}; whatever goes wrong, being cancelled too, is an answer of status 0."""
        return await self._bounded(self._request(b"GET", url, key), self._deadline)

    async def post(self, url: str, key: str, deadline: float, said: bytes = b"{}") -> str:
        """POST JSON to C{url} and wait for it; why that failed, empty if it did not."""
        answer = await self._bounded(self._request(b"POST", url, key, said), deadline)
        return "" if answer.status == 200 else _said(answer)

    async def works(self, intent: Intent) -> Verdict:
        """Whether it still infers."""
        answer = await self._asked(intent, self._deadline * DEEP)
        text = f"it makes no token, and asked for one: {_said(answer)}" if answer else ""
        return Verdict(answer is None, text, answered=True, refuses=answer is not None and answer.status not in (0, 503))

    async def _asked(self, intent: Intent, patience: float) -> Answer | None:
        """What it makes of the smallest question, None if it infers: a refusal of one token shows that it thinks.

        Of an engine that an agent without these questions has started nobody knows what it can be asked: any answer will do.
        """
        if intent.probe == "none":
            return None
        path, question = QUESTIONS.get(intent.probe, QUESTIONS["completion"])
        sent = json.dumps({"model": (*intent.order.served, intent.order.model)[0], **question}).encode()
        answer = await self._bounded(self._request(b"POST", intent.url + path, intent.key, sent), patience)
        refusal = 0 < answer.status < 500 or answer.status == NOT_IMPLEMENTED
        return None if refusal or (answer.status and not intent.probe) else answer

    async def _bounded(self, request: Coroutine[Any, Any, Answer], deadline: float) -> Answer:
        began = self._reactor.seconds()
        try:
            return await Deferred.fromCoroutine(request).addTimeout(deadline, self._reactor)
        except (*LATE, *EXPECTED) as error:
            if isinstance(error, LATE) or self._reactor.seconds() - began >= deadline:
                return Answer(0, f"no answer in {deadline:g} s".encode())
            return Answer(0, str(error).encode() or type(error).__name__.encode())

    async def _request(self, method: bytes, url: str, key: str, sent: bytes | None = None) -> Answer:
        headers = Headers({"user-agent": ["llmgw-agent"], **({"authorization": [f"Bearer {key}"]} if key else {})})
        if sent is not None:
            headers.addRawHeader(b"content-type", b"application/json")
        bytes_sent = FileBodyProducer(io.BytesIO(sent), cooperator=self._cooperator) if sent is not None else None
        response = await self._agent.request(method, url.encode("ascii"), headers, bytes_sent)
        body = _Body()
        response.deliverBody(body)
        return Answer(response.code, await body.done)

    async def serving(self, intent: Intent, pids: Callable[[], Iterable[int]]) -> Verdict:
        """Whether the engine of C{intent} serves its model.

        @param pids: the processes of this engine; asked only when something answers.
        """
        answer = await self.get(intent.url + (intent.ready or "/"), intent.key)
        if answer.status == 0:
            return Verdict(False, f"{intent.ready}: {answer.body.decode(errors='replace')}")
        if answer.status == 503:
            return Verdict(False, f"{intent.ready} answers 503", answered=True)
        parts = urlsplit(intent.url)
        port = parts.port or 80
        ours = owned_by(list(pids()), parts.hostname or "", port)
        if ours is False:
            return Verdict(False, f"port {port} is owned by {holder(port)}, not by this engine", answered=True, stolen=True)
        if answer.status != 200:
            return Verdict(False, f"{intent.ready} answers {answer.status}, not 200", answered=True)
        if missing := await self._missing_name(intent):
            return Verdict(False, missing, answered=True)
        # The first token may have kernels compiled for it.
        if (failed := await self._asked(intent, self._deadline * DEEP * 2)) is not None:
            text = f"{intent.ready} answers 200, but asked for one token: {_said(failed)}"
            return Verdict(False, text, answered=True, refuses=failed.status not in (0, 503))
        return Verdict(True, answered=True, unverified=ours is None)

    async def listed(self, intent: Intent) -> list[str] | None:
        """The names that the engine says it serves, None if it does not answer."""
        answer = await self.get(intent.url + (intent.models or ""), intent.key)
        return _listed(answer.body) if answer.status == 200 else None

    async def _missing_name(self, intent: Intent) -> str:
        if not intent.models:
            return ""
        answer = await self.get(intent.url + intent.models, intent.key)
        if answer.status != 200:
            return f"{intent.ready} answers 200, but {intent.models} {answer.status or answer.body.decode(errors='replace')}"
        names, wanted = _listed(answer.body), intent.order.served[:1] or (intent.order.model,)
        if set(wanted) <= set(names):
            return ""
        return f"{intent.models} lists {', '.join(names[:5]) or 'nothing'}, not {wanted[0]}"

    async def healthy(self, intent: Intent) -> str:
        """Why the engine is not healthy, empty if it is."""
        answer = await self.get(intent.url + (intent.ready or "/"), intent.key)
        if answer.status == 200:
            return ""
        return f"{intent.ready}: {answer.body.decode(errors='replace')[:200] if answer.status == 0 else answer.status}"


def _said(answer: Answer) -> str:
    if answer.status == 0:
        return answer.body.decode(errors="replace")[:200]
    return f"it answers {answer.status}: {_reason(answer.body)}".removesuffix(": ")


def _reason(body: bytes) -> str:
    """What an error object says: vLLM's has C{error.message}, SGLang's C{error_message} or C{message}."""
    try:
        told = json.loads(body)
        said = told.get("error_message") or told.get("message") or told["error"]["message"]
        return " ".join(str(said).split())[:300]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def _listed(body: bytes) -> list[str]:
    try:
        return [str(model["id"])[:200] for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
