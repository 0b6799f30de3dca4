"""Where requests come in: who asks, for what, and may they; then on to the relay. And what a worker tells of them afterwards.

Every refusal is made here or in the relay, in words that say what is missing: a model that nobody knows is not a model that is
not ready, and a replica that is full is not one that is broken.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from urllib.parse import unquote

import msgspec

from llmgw.router.account import Accounts
from llmgw.router.body import Body, read_json, skim_json
from llmgw.router.breaker import FAILURES, RetryBudget
from llmgw.router.errors import OPENAI, Refusal
from llmgw.router.form import skim_form
from llmgw.router.http import ServerConnection, Work
from llmgw.router.instead import fallback
from llmgw.router.limits import UNLIMITED, Grant, Limited, estimate
from llmgw.router.prefixes import BLOCK, NO_HINT, Hint
from llmgw.router.reading import Reading, leaving
from llmgw.router.relay import Exchange
from llmgw.router.request import Field, Request, no_space
from llmgw.router.routes import Caller, Routes, Served, Shared
from llmgw.router.surface import LOCAL, MULTIPART, Call, find_call, shape_of
from llmgw.router.table import RoutedModel
from llmgw.router.upstream import Upstream

_encode = msgspec.json.Encoder().encode
_JSON: list[Field] = [(b"content-type", b"application/json")]
_monotonic = time.monotonic


class Door:
    """All requests of one worker pass here (L{llmgw.router.http.App}).

    @ivar routes: what is routed by now; L{use} replaces it.
    @ivar stopping: told to stop; C{/ready} says so at once, while new connections are still accepted for some seconds.
    @ivar leaving: no new connection is accepted any more.
    @ivar unheard: leaving, and no server hears any more what is asked for here: who waits for a model to start waits in vain.
    @ivar on_failure: called with C{(endpoint id, kind, text)} when an endpoint fails a request.
    @ivar on_recovered: called with the id of an endpoint whose breaker has closed.
    @ivar on_demand: called with a model that is asked for and has no endpoint.
    """

    def __init__(self, shared: Shared, routes: Routes, accounts: Accounts) -> None:
        self.board = shared.board
        self.folder = shared.folder
        self.accounts = accounts
        self.budget = RetryBudget(shared.board)
        self.connections: set[ServerConnection] = set()
        self.stopping = self.leaving = self.unheard = False
        self.on_failure: Callable[[str, str, str], None] = lambda endpoint, kind, text: None
        self.on_recovered: Callable[[str], None] = lambda endpoint: None
        self.on_demand: Callable[[Served], None] = lambda served: None
        self._prefix = os.urandom(6).hex().encode() + b"-"
        self._count = 0
        self.use(routes)

    def use(self, routes: Routes) -> None:
        """Route by these from now on."""
        self.routes = routes
        routes.begin()
        self.timeouts = routes.table.timeouts
        self.body_limit = routes.table.body_limit
        self.headers_timeout = self.timeouts.headers
        self.body_timeout = self.timeouts.body
        self.keep_alive = self.timeouts.keep_alive
        for connection in list(self.connections) if routes.table.stopping else ():
            work = connection.work
            if isinstance(work, Exchange) and work.upstream is not None and work.upstream.id in routes.table.stopping:
                work.out_of_time()

    def turn_out(self) -> None:
        """Send those on to newer workers who wait for a model without replicas: only there it can be asked for."""
        self.unheard = True
        for served in set(self.routes.models.values()):
            if not served.upstreams:
                served.line.close("leaving")

    def next_id(self) -> bytes:
        """An id that no other request has, in any worker."""
        self._count += 1
        return b"%b%x" % (self._prefix, self._count)

    def sweep(self, now: float) -> None:
        """See to every deadline. Called a few times a second; nothing else in the data plane has a timer."""
        for connection in list(self.connections):
            if connection.moved != connection.swept:
                connection.swept = connection.moved
                connection.deadline = now + connection.grace
            elif now >= connection.deadline:
                connection.expire(now)
        for upstream in self.routes.upstreams.values():
            if upstream.idle:
                upstream.sweep(now)

    # What the connections call.

    def head(self, connection: ServerConnection, request: Request) -> None:
        """Judge a request by its head alone, so that a large body is not read for nothing."""
        request.call = call = find_call(request.path)
        if call is None:
            raise Refusal(404, "no_such_path", f"There is no {request.path[:200].decode(errors='replace')} here.")
        if request.method != call.method and not (request.method == b"HEAD" and call.method == b"GET"):
            allowed = call.method.decode()
            raise Refusal(405, "method_not_allowed", f"{call.path.decode()} is called with {allowed}.", allow=allowed)
        if call.path not in (b"/health", b"/ready"):
            self._identify(connection, request)

    def _identify(self, connection: ServerConnection, request: Request) -> None:
        authorization, bare = request.ours.get(b"authorization", b""), request.ours.get(b"x-api-key", b"")
        known = connection.known
        if known is not None and known[:3] == (authorization, bare, self.routes):
            caller: Caller | None = known[3]  # a client's next request has the same key, mostly
        else:
            token = authorization[7:].strip() if authorization[:7].lower() == b"bearer " else bare
            caller = self.routes.caller(hashlib.sha256(token).hexdigest()) if token else None
            if caller is not None:
                connection.known = (authorization, bare, self.routes, caller)
        request.context = caller
        if caller is not None:
            if caller.ends is not None and caller.ends < time.time():
                how = "was replaced by a new secret, and this one" if caller.replaced else ""
                name = caller.entry.name or caller.id
                raise Refusal(401, "key_expired", f"The API key {' '.join(filter(None, (name, how)))} has expired.")
        elif self.routes.table.keys_required:
            if not authorization and not bare:
                raise Refusal(401, "key_missing", "An API key is needed: send `Authorization: Bearer KEY`.")
            raise Refusal(401, "invalid_api_key", "This API key is not known here, or it has been revoked.")

    def shape(self, request: Request) -> str:
        """How errors of this request look."""
        return request.call.shape if request.call is not None else shape_of(request.path)

    def refused(self, connection: ServerConnection, request: Request, refusal: Refusal) -> list[Field]:
        """Count it; its answer carries its id."""
        id = self._named(request)
        self.accounts.refused(connection.peer, request, refusal)
        return [id]

    def _named(self, request: Request) -> Field:
        """The id by which the client knows a request that we answer ourselves."""
        request.id = request.id or self.next_id()
        return b"x-request-id", request.ours.get(b"x-request-id") or request.id

    def begin(self, connection: ServerConnection, request: Request) -> Work | None:
        """Serve a request whose head has been found good."""
        call = request.call
        assert call is not None
        if call.model is LOCAL:
            self._answer(connection, request, call)
            return None
        try:
            raw = request.body()
        except OSError as error:
            raise no_space(error) from None
        if call.model is MULTIPART:
            steps = skim_form(raw, _content_type(request))
        elif isinstance(raw, bytes):
            return self._serve(connection, request, call, read_json(raw))
        else:
            steps = skim_json(raw)
        return Reading(connection, request, steps, lambda body: self._serve(connection, request, call, body))

    def _serve(self, connection: ServerConnection, request: Request, call: Call, body: Body) -> Exchange | None:
        caller: Caller | None = request.context
        exchange = Exchange(self, connection, request, call, self._model(request, body.model), caller, body)
        request.id = exchange.answer_id
        connection.work = exchange
        try:
            grant = self._grant(caller, call, body)
            if body.stream and call.usage == OPENAI:
                body.ask_usage()
            exchange.start(grant)
        except Refusal:
            connection.work = None
            raise
        return exchange if connection.work is exchange else None

    def _grant(self, caller: Caller | None, call: Call, body: Body) -> Grant:
        if caller is None or not caller.limited:
            return UNLIMITED
        grant = caller.allowance.admit(time.time(), estimate(call.usage, body.size, body.max_tokens()))
        if isinstance(grant, Limited):
            raise Refusal(429, grant.kind, f"{grant.text}. Try again in {grant.retry_after} s.", retry_after=grant.retry_after)
        return grant

    @staticmethod
    def hint(served: Served, request: Request, body: Body) -> Hint:
        """Who likely holds the beginning of this prompt."""
        if served.hints is None or len(served.upstreams) < 2:
            return NO_HINT
        session = request.ours.get(b"x-session-id") or body.session()
        if body.size < BLOCK and not session:
            return NO_HINT
        text, before = body.prompt()
        return served.hints.look(text, before, session)

    def _model(self, request: Request, name: str) -> Served:
        routes, caller = self.routes, request.context
        served = routes.models.get(name)
        if served is None:
            if not routes.table.version:
                raise Refusal(503, "starting", "The router has no routing table yet.", retry_after=2)
            raise Refusal(404, "model_not_found", f"There is no model {name[:200]!r} here.", param="model")
        request.model = served.name
        allowed = caller.entry.models if caller is not None else ()
        if allowed and served.name not in allowed:
            text = f"The API key {caller.entry.name or caller.id} may not use {name}."
            raise Refusal(403, "model_not_allowed", text, param="model")
        return served

    def asleep(self, asked: Served, answered: bool) -> None:
        """A model is asked for that has no endpoint; C{answered}: another answers. @raise Refusal: it will not have one here."""
        self.on_demand(asked)
        if not answered and self.unheard:
            raise leaving()

    def fallback(self, asked: Served, caller: Caller | None, passed: tuple[str, ...]) -> Served | None:
        """What may answer for a model that cannot (L{llmgw.router.instead.fallback})."""
        return fallback(self.routes, asked, caller, passed)

    def failure(self, served: Served, upstream: Upstream, kind: str, text: str) -> None:
        """An endpoint failed a request."""
        if upstream.breaker.failed(_monotonic()) and upstream.breaker.failures <= FAILURES:
            self.accounts.breaker(served, upstream, "open")
        self.on_failure(upstream.id, kind, text)

    def recovered(self, served: Served, upstream: Upstream) -> None:
        """An endpoint that had failed has answered."""
        if upstream.breaker.succeeded():
            self.accounts.breaker(served, upstream, "closed")
            self.on_recovered(upstream.id)

    def finished(self, exchange: Exchange, grant: Grant) -> None:
        """A request has ended, however."""
        exchange.request.spool = None
        exchange.request.logged = True
        exchange.body.release()
        self.accounts.ended(exchange, grant)

    # What needs no engine.

    def _answer(self, connection: ServerConnection, request: Request, call: Call) -> None:
        if call.name == "health":
            connection.reply(request, 200, _JSON, b'{"status":"ok"}')
        elif call.name == "ready":
            self._ready(connection, request)
        else:
            body = self._models(request) if call.name == "models" else self._one_model(request)
            id = self._named(request)
            self.accounts.log.answered(connection.peer, request, 200, "done")
            connection.reply(request, 200, [*_JSON, id], _encode(body))

    def _ready(self, connection: ServerConnection, request: Request) -> None:
        if not self.routes.table.version:
            raise Refusal(503, "starting", "The router has no routing table yet.", retry_after=2)
        if self.stopping or self.leaving:
            raise Refusal(503, "leaving", "This router is being stopped: send new requests to another one.", retry_after=1)
        connection.reply(request, 200, _JSON, _encode({"status": "ok", "table": self.routes.table.version}))

    def _models(self, request: Request) -> dict[str, object]:
        models = self.routes.names(request.context)
        named = [(name, model) for model in models for name in (model.name, *model.aliases)]
        if dict(request.fields).get(b"anthropic-version") is None:
            return {"object": "list", "data": [_openai_model(name, model) for name, model in named]}
        names = [name for name, _ in named]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return {"data": [_anthropic_model(name, model) for name, model in named], "has_more": False, **ends}

    def _one_model(self, request: Request) -> dict[str, object]:
        name = request.path[len(b"/v1/models/") :].decode(errors="replace")
        name = name if name in self.routes.models else unquote(name)
        served = self.routes.models.get(name)
        if served is None or served.config not in self.routes.names(request.context):
            raise Refusal(404, "model_not_found", f"There is no model {name[:200]!r} here.", param="model")
        anthropic = dict(request.fields).get(b"anthropic-version") is not None
        return (_anthropic_model if anthropic else _openai_model)(name, served.config)


def _content_type(request: Request) -> bytes:
    return next((value for name, value in request.fields if name == b"content-type"), b"")


def _openai_model(name: str, model: RoutedModel) -> dict[str, object]:
    return {"id": name, "object": "model", "created": model.created, "owned_by": "llmgw"}


def _anthropic_model(name: str, model: RoutedModel) -> dict[str, object]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
    return {"type": "model", "id": name, "display_name": name, "created_at": created}
