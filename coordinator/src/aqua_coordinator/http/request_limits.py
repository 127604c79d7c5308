"""The outermost layer of the service: what is true of every HTTP request.

Meant for us (`hosts`), bounded (how many at once, how large), authenticated as soon as its head has
come and before its body is read, measured (route, method, code, duration), and answered by an
`ErrorBody` whatever goes wrong. Hot routes are called from here; FastAPI stands behind it for the
rest.

A request under `/v1/` carries its caller in `scope["user"]`; the others are for probes and
browsers, need no token here, and their bodies are never read. A body reaches the application whole.

Requests are counted from the head on for their token and their peer, but take a place in the
coordinator's own limit only with their body: one that stalls (`connections` ends it) stands in the
way of its own token alone. Reports are counted apart and find a part of the limit kept for them;
requests without a token have a small limit of their own, and so have event streams.

What one token has in work is bounded by size as well (`token_queue`): a large body waits for its
turn before it is read.

Connections are counted as well, from their first good token until they are lost, so that no token
uses up the descriptors of the process. Those that have brought a report are counted apart, and a
part of all descriptors is kept for them.
"""

from __future__ import annotations

import math
import resource
import time
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aqua_cli.hosts import AllowedHosts
from aqua_client.tracing import HEADER
from aqua_coordinator.access.audit import AuditLog
from aqua_coordinator.access.auth import Caller
from aqua_coordinator.access.tokens import Role
from aqua_coordinator.http.answers import JSON_HEADER, Answer, error_answer, typed
from aqua_coordinator.http.connections import MAX_STRANGERS, Connection
from aqua_coordinator.http.hot_routes import HotRoutes, Shape, rendered, shape_of
from aqua_coordinator.http.token_queue import FREE_BYTES, READING_BYTES, Place, TokenQueue
from aqua_coordinator.services import Services
from aqua_protocol import RequestInvalidError, UnavailableError
from aqua_protocol.errors import RequestTooLargeError, UnauthenticatedError

SMALL_BODY_BYTES: Final = 64 << 10
"""What any body may have. No request but those below needs more than a few hundred bytes; twice as
much would double what callers can make the coordinator hold at once."""
REPORT_BODY_BYTES: Final = 4 << 20
"""A report of 4096 leases, the most that a member may hold, takes about 1 MiB; the rest is for
longer names. Doubled, what 2048 requests may hold doubles with it."""
PLACEMENTS_BODY_BYTES: Final = 16 << 20
"""A plan of 65,536 pairings with a few producers each. Doubled, Redis works twice as long on it."""
BODY_BYTES: Final = {
    "producers": REPORT_BODY_BYTES,
    "consumers": REPORT_BODY_BYTES,
    "heartbeats": REPORT_BODY_BYTES,
}
"""Resources with larger bodies, by the second segment of their path."""
OPERATORS_BODY_BYTES: Final = BODY_BYTES | {"placements": PLACEMENTS_BODY_BYTES}
"""And of operators, who alone may write plans."""
API: Final = "/v1/"
EVENTS_PATH: Final = "/v1/events"
STREAM: Final = shape_of("GET", EVENTS_PATH)
REPORTS: Final = {
    shape_of("PUT", "/v1/producers/{producer_id}"),
    shape_of("PUT", "/v1/consumers/{consumer_id}"),
    shape_of("POST", "/v1/heartbeats"),
    shape_of("POST", "/v1/leases/{lease_id}/renew"),
}
"""Without them members and leases age, so room is kept for them."""
READS_ONLY: Final = frozenset({Role.READER})
"""Roles of a token whose requests are no reports, whatever they are like."""
REPORTS_SHARE: Final = 0.25
"""Of the requests served at once, kept for reports, chosen by hand. Doubled, other requests are
refused at half of the limit."""
OWN_FILES: Final = 256
"""Descriptors that are not for connections with a token: Redis, logs, listeners. Doubled, a process
that may open 1024 serves 256 members less."""
MAX_OPEN: Final = 64
"""Requests without a token served at once, chosen by hand: scrapes and probes. Doubled, a flood of
them keeps Redis busy for twice as long."""
MAX_OPEN_OF_PEER: Final = 16
"""Of these, from one address: a flood leaves room to others. Doubled, two floods fill it."""
STREAMS_PARTS: Final = 4
"""One token has that part of the event streams at most, chosen by hand. Doubled, more callers have
to collude to keep all others from theirs."""
CLOSE_HEADER: Final = (b"connection", b"close")
LIVENESS_PATH: Final = "/healthz"
"""Waits for nothing, so it has no limit: a supervisor whose probe is refused restarts a coordinator
for being flooded."""
PROBES: Final = {LIVENESS_PATH, "/readyz"}
"""Answered without a client certificate, which a supervisor's probe does not have."""
UNMATCHED: Final = "unmatched"
READING_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})


class RequestLimits:
    """The ASGI application that the server runs; FastAPI, `app`, serves what is not hot."""

    def __init__(self, app: ASGIApp, hot_routes: HotRoutes, services: Services) -> None:
        self._app = app
        self._hot_routes = hot_routes
        self._authenticator = services.authenticator
        names = services.settings.allowed_hosts
        # With tokens a page from elsewhere has none: names count only if some are configured.
        self._hosts: AllowedHosts | None = None
        if names or services.settings.tokens_file is None:
            names |= {services.settings.listen_host}
            self._hosts = AllowedHosts(names, variable="AQUA_ALLOWED_HOSTS")
        self._wants_certificates = services.settings.tls_client_ca is not None
        self._audit = services.audit
        self._metrics = services.metrics
        self._heartbeats = services.heartbeats
        limit = services.settings.max_concurrent_requests
        self._of_token = services.settings.max_requests_per_token
        self._of_peer = services.settings.max_requests_per_peer
        self._served = _Count(limit)
        self._others = _Count(limit - min(math.ceil(limit * REPORTS_SHARE), limit - 1))
        self._open = _Count(min(MAX_OPEN, limit))
        most = max(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - MAX_STRANGERS - OWN_FILES)
        apart = most - math.ceil(most * REPORTS_SHARE)
        self._connected, self._connected_others = _Count(most), _Count(apart)
        self._connected_of_token = min(services.settings.max_connections_per_token, most // 2)
        self._connected_of_peer = min(services.settings.max_connections_per_peer, apart)
        self._streams = _Count(services.settings.max_event_streams)
        self._counts = WeakValueDictionary[tuple[str, str | None], _Count]()
        self._queues = WeakValueDictionary[str, TokenQueue]()
        self._tracer = services.tracer
        self._metrics.requests_in_flight.set_function(self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, in the trace of its caller if it is part of one; none begins here."""
        tracer = self._tracer
        if tracer is None or (traced := self._trace_of(scope)) is None:
            await self._respond(scope, receive, send)
            return
        method = scope["method"]
        told = tracer.context_of(traced)
        named = {"http.request.method": method}
        with tracer.span(method, kind="server", parent=told, attributes=named) as span:
            status = await self._respond(scope, receive, send)
            route = getattr(scope.get("route"), "path", UNMATCHED)
            span.update_name(f"{method} {route}")
            span.set_attributes({"http.route": route, "http.response.status_code": status})

    def _trace_of(self, scope: Scope) -> dict[str, str] | None:
        """What a call says of its trace, if it does; a stream, served for hours, is in none.

        Nor is the call of a stranger, who could fill the queue of spans.
        """
        headers = dict(scope["headers"])
        told = headers.get(b"traceparent")
        if told is None or not scope["path"].startswith(API) or scope["path"] == EVENTS_PATH:
            return None
        try:
            self._authenticator.authenticate(headers.get(b"authorization", b"").decode("latin-1"))
        except UnauthenticatedError:
            return None
        return {HEADER: told.decode("latin-1")}

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Serve one request; returns the status of the answer."""
        started_s = time.perf_counter()
        method = scope["method"]
        connection: Connection = scope["state"]["connection"]
        audit = None if method in READING_METHODS else self._audit
        if audit is not None:
            audit.begin()
        watched: _WatchedSend | None = None
        held: list[_Count | Place] = []
        try:
            try:
                answer, body = await self._serve(scope, receive, connection, held)
                if answer is None:
                    watched = _WatchedSend(send, scope, connection, audit)
                    await self._app(scope, _replay(body, receive), watched)
            except Exception as error:
                if watched is not None and watched.status:
                    raise
                answer = error_answer(typed(error))
            if answer is not None:
                status, headers, body = answer
                headers.append((b"content-length", b"%d" % len(body)))
                if connection.ends:
                    headers.append(CLOSE_HEADER)
                if audit is not None and "user" in scope:
                    audit.write(scope, status)
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})
            else:
                assert watched is not None, "no answer, and the application was not called"
                status = watched.status
        finally:
            for counted in held:
                counted.leave()
        # A stream is served for hours: no duration to speak of.
        if scope["path"] != EVENTS_PATH:
            route = scope.get("route")
            path = UNMATCHED if route is None else route.path
            self._metrics.answered(path, method, status, time.perf_counter() - started_s)
        return status

    async def _serve(
        self, scope: Scope, receive: Receive, connection: Connection, held: list[_Count | Place]
    ) -> tuple[Answer | None, bytes]:
        """The answer of a hot route, or None and the body for FastAPI. `held` gets what counts."""
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        shape = shape_of(method, path)
        is_api = path.startswith(API)
        connection.owing_since_s, connection.ahead_bytes = time.perf_counter(), 0
        self._require_host(headers.get(b"host"))
        self._require_certificate(connection, path)
        _require_one_name(path)
        body = b""
        whole: tuple[_Count, ...] = ()
        if is_api:
            authorization = headers.get(b"authorization")
            caller = scope["user"] = self._authenticator.authenticate(
                None if authorization is None else authorization.decode("latin-1")
            )
            is_report = shape in REPORTS and caller.roles != READS_ONLY
            if connection.caller is not caller or is_report > connection.reports:
                self._place(connection, caller, _peer_of(scope), is_report=is_report)
                connection.prove(caller, self._counts_of(caller.token_id, _peer_of(scope)))
            before, whole, queue = connection.counts[STREAM if shape == STREAM else is_report]
            _count(before, held)
            if shape != STREAM:
                limit = _body_limit(method, shape, caller)
                connection.ahead_bytes -= limit
                body = await _read_body(headers, receive, limit, queue, held)
        elif path != LIVENESS_PATH:
            _count((self._open, self._count_of(("open", _peer_of(scope)), MAX_OPEN_OF_PEER)), held)
        if is_api or method not in _BODY_METHODS:
            connection.owing_since_s = None
        try:
            _count(whole, held)
            route = self._hot_routes.get(shape)
            if route is not None:
                scope["route"] = route
                operation = route.begin(caller, path, headers, body)
                if operation is not None:
                    return (route.status, [JSON_HEADER], rendered(await operation)), body
        except UnavailableError as error:
            # Its kinds say what else is wrong: this is want of room, and not of the token's share.
            if shape in REPORTS and type(error) is UnavailableError:
                self._heartbeats.is_refusing = True
            raise
        return None, body

    def _place(
        self, connection: Connection, caller: Caller, peer: str | None, *, is_report: bool
    ) -> None:
        """Count a connection for its token: once it has brought a report, as one that reports.

        One for which there is no place ends with the answer.

        Raises:
            UnavailableError: Its token, its peer or all together have as many as they may.
        """
        connection.leave()
        connection.reports = is_report
        name, limit = caller.token_id, self._connected_of_token
        own: tuple[_Count, ...]
        if not is_report:
            of_peer = self._count_of(("peer's connections", peer), self._connected_of_peer)
            own = (self._count_of(("connections", name), limit), of_peer)
        elif caller.is_bound:
            own = (self._count_of(("reporting connections", name), limit),)
        else:
            # Of many members that share tokens: all but what is left to tokens of one member.
            most = self._connected_others.limit
            own = (self._count_of(("reporting connections", None), most),)
        of_all = (self._connected,) if is_report else (self._connected_others, self._connected)
        try:
            _count(own, connection.places, "connections")
            try:
                _count(of_all, connection.places, "connections")
            except UnavailableError:
                self._heartbeats.is_refusing |= is_report
                raise
        except UnavailableError:
            connection.leave()
            connection.ends = True
            raise

    def _require_host(self, header: bytes | None) -> None:
        if self._hosts is not None:
            self._hosts.require(header)

    def _require_certificate(self, connection: Connection, path: str) -> None:
        if self._wants_certificates and not connection.certified and path not in PROBES:
            raise UnauthenticatedError(
                "this needs a client certificate",
                remedy="Point AQUA_TLS_CLIENT_CERT and AQUA_TLS_CLIENT_KEY at one.",
            )

    def _in_flight(self) -> int:
        """Requests that are arriving or being served; each counts once for a token or as open."""
        of_tokens = (
            n.count for (kind, _), n in self._counts.items() if kind in ("reports", "token")
        )
        return self._open.count + sum(of_tokens)

    def _counts_of(self, token_id: str, peer: str | None) -> Counts:
        """What counts reports (True), other requests and streams: before a body is read, and after.

        And where bodies wait for their turn.
        """
        of_reports = self._count_of(("reports", token_id), self._of_token)
        of_token = self._count_of(("token", token_id), self._of_token)
        of_peer = self._count_of(("peer", peer), self._of_peer)
        most = self._streams.limit
        streams = self._count_of(("streams", token_id), -(-most // STREAMS_PARTS))
        queue = self._queues.setdefault(token_id, TokenQueue())
        return {
            True: ((of_reports,), (self._served,), queue),
            False: ((of_token, of_peer), (self._others, self._served), queue),
            STREAM: ((streams, self._streams) if token_id else (self._streams,), (), queue),
        }

    def _count_of(self, key: tuple[str, str | None], limit: int) -> _Count:
        """The count of some token or peer; there is one as long as a connection of theirs is."""
        return self._counts.setdefault(key, _Count(limit))


def _peer_of(scope: Scope) -> str | None:
    return scope["client"][0] if scope["client"] else None


class _Count:
    """How many requests of a kind there are, and may be."""

    __slots__ = ("__weakref__", "count", "limit")

    def __init__(self, limit: int) -> None:
        self.count, self.limit = 0, limit

    def leave(self) -> None:
        """One is over; once for each."""
        self.count -= 1


Counts: TypeAlias = dict[bool | Shape, tuple[tuple[_Count, ...], tuple[_Count, ...], TokenQueue]]


def _count(counts: tuple[_Count, ...], held: list[Any], what: str = "requests") -> None:
    """Count a request or a connection in.

    Raises:
        UnavailableError: A limit has been reached.
    """
    for one in counts:
        if one.count >= one.limit:
            raise UnavailableError(
                f"{one.count} {what} of this kind are under way already",
                remedy="Retry later, or run more coordinators.",
                retry_after_s=1.0,
            )
        one.count += 1
        held.append(one)


class _WatchedSend:
    """Sends FastAPI's answer on, and does what belongs to its beginning.

    Attributes:
        status: Of the answer; 0 before it has begun.
    """

    __slots__ = ("_audit", "_connection", "_scope", "_send", "status")

    def __init__(
        self, send: Send, scope: Scope, connection: Connection, audit: AuditLog | None
    ) -> None:
        self._send, self._scope = send, scope
        self._connection, self._audit = connection, audit
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if not self.status:
            self.status = message["status"]
            if self._connection.ends:
                message["headers"] = [*message["headers"], CLOSE_HEADER]
            if self._audit is not None and "user" in self._scope:
                self._audit.write(self._scope, self.status)
        await self._send(message)


def _require_one_name(path: str) -> None:
    """Refuse a line feed at the end, which the `$` of a route's pattern passes over.

    It would be a second name of the route: one that limits of requests by their path do not know.

    Raises:
        HTTPException: There is one.
    """
    if path.endswith("\n"):
        raise HTTPException(HTTPStatus.NOT_FOUND)


def _body_limit(method: str, shape: Shape, caller: Caller) -> int:
    """How long the body of a request may be; 0 for one that is not read."""
    if method not in _BODY_METHODS:
        return 0
    of_role = OPERATORS_BODY_BYTES if Role.OPERATOR in caller.roles else BODY_BYTES
    return of_role.get(shape[3], SMALL_BODY_BYTES)


def _announced(headers: dict[bytes, bytes], limit: int) -> int:
    """The size of the body as its head says; `limit` when it does not say.

    Raises:
        RequestTooLargeError: It is above `limit`, or no size.
    """
    announced = headers.get(b"content-length", b"0")
    # With any number of zeros in front it is a size, and past a limit of digits no `int`.
    size = int(announced.lstrip(b"0") or b"0") if announced.isdigit() else limit + 1
    if size > limit:
        raise _too_large(limit)
    return limit if b"transfer-encoding" in headers else size


async def _read_body(
    headers: dict[bytes, bytes],
    receive: Receive,
    limit: int,
    queue: TokenQueue,
    held: list[_Count | Place],
) -> bytes:
    """The whole body, if it is JSON and fits; once it is its turn.

    Raises:
        RequestTooLargeError: There is more than `limit`.
        RequestInvalidError: As `_require_json`.
        UnavailableError: The connection has ended.
    """
    if not limit:
        held.append(await queue.enter(READING_BYTES))
        return b""
    if (size := _announced(headers, limit)) > FREE_BYTES:
        held.append(await queue.enter(size))
    parts: list[bytes] = []
    more, size = True, 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise UnavailableError("the connection ended before the body did")
        part: bytes = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False) and size <= limit
        parts.append(part)
    if size > limit:
        raise _too_large(limit)
    body = b"".join(parts)  # Of one part, as most are, it is that part.
    _require_json(headers, body)
    return body


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the body of this request may have {limit} bytes", limit_bytes=limit
    )


def _require_json(headers: dict[bytes, bytes], body: bytes) -> None:
    """Refuse a body that is not declared as JSON.

    Browsers send other types across sites without asking, and a coordinator without tokens trusts
    every process on its machine.

    Raises:
        RequestInvalidError: It is not.
    """
    if body and not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
        raise RequestInvalidError(
            "Content-Type: the body is not declared as JSON",
            remedy="Send Content-Type: application/json.",
            faults=[{"field": "Content-Type", "fault": "the body is not declared as JSON"}],
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the body once and then what the client does next."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
