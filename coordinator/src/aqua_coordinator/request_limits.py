"""The outermost layer of the service: what is true of every HTTP request.

Bounded (how many at once, how large), authenticated as soon as its head has come and before its
body is read, measured (route, method, code, duration), and answered by an `ErrorBody` whatever goes
wrong. Hot routes are called from here; FastAPI stands behind it for everything else.

A request under `/v1/` carries its caller in `scope["user"]`; the others are for probes and
browsers, and need no token here. A body reaches the application whole, in one message.
"""

from __future__ import annotations

import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aqua_coordinator.answers import JSON_HEADER, Answer, error_answer, typed
from aqua_coordinator.hot_routes import HotRoutes, shape_of
from aqua_coordinator.services import Services
from aqua_protocol import RequestInvalidError, UnavailableError
from aqua_protocol.errors import RequestTooLargeError

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
    "placements": PLACEMENTS_BODY_BYTES,
}
"""Resources with larger bodies, by the second segment of their path."""
API: Final = "/v1/"
EVENTS_PATH: Final = "/v1/events"
UNMATCHED: Final = "unmatched"
_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})


class RequestLimits:
    """The ASGI application that the server runs; FastAPI, `app`, serves what is not hot."""

    def __init__(self, app: ASGIApp, hot_routes: HotRoutes, services: Services) -> None:
        self._app = app
        self._hot_routes = hot_routes
        self._authenticator = services.authenticator
        self._metrics = services.metrics
        self._limit = services.settings.max_concurrent_requests
        self._in_flight = 0
        self._metrics.requests_in_flight.set_function(lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started_s = time.perf_counter()
        # A stream is served for hours; it has a limit of its own, and no duration to speak of.
        counted = scope["path"] != EVENTS_PATH
        self._in_flight += counted
        watched = _WatchedSend(send)
        answer: Answer | None
        try:
            try:
                answer = await self._serve(scope, receive, watched)
            except Exception as error:
                if watched.status:
                    raise
                answer = error_answer(typed(error))
            if answer is None:
                status = watched.status
            else:
                status, headers, body = answer
                headers.append((b"content-length", b"%d" % len(body)))
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})
        finally:
            self._in_flight -= counted
        if counted:
            route = getattr(scope.get("route"), "path", UNMATCHED)
            seconds = time.perf_counter() - started_s
            self._metrics.answered(route, scope["method"], status, seconds)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> Answer | None:
        """The answer of a hot route; None when FastAPI has sent one."""
        if self._in_flight > self._limit:
            raise UnavailableError(
                f"{self._in_flight - 1} requests are being served already",
                remedy="Retry later, or run more coordinators.",
                retry_after_s=1.0,
            )
        method, path = scope["method"], scope["path"]
        headers = dict(scope["headers"])
        if path.startswith(API):
            authorization = headers.get(b"authorization")
            scope["user"] = self._authenticator.authenticate(
                None if authorization is None else authorization.decode("latin-1")
            )
        body = b""
        if method in _BODY_METHODS:
            resource = path.removeprefix(API).partition("/")[0]
            body = await _read_body(headers, receive, BODY_BYTES.get(resource, SMALL_BODY_BYTES))
            _require_json(headers, body)
        route = self._hot_routes.get(shape_of(method, path))
        if route is not None:
            scope["route"] = route
            content = await route(scope["user"], path, headers, body)
            if content is not None:
                return route.status, [JSON_HEADER], content
        await self._app(scope, _replay(body, receive), send)
        return None


class _WatchedSend:
    """Sends on, and remembers the status."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if not self.status:
            self.status = message["status"]
        await self._send(message)


async def _read_body(headers: dict[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The whole body, if it fits.

    Raises:
        RequestTooLargeError: Announced or actual size above `limit`.
    """
    announced = headers.get(b"content-length", b"0")
    size = int(announced) if announced.isdigit() else limit + 1
    parts: list[bytes] = []
    more = size <= limit
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size = sum(map(len, parts))
        more = message.get("more_body", False) and size <= limit
    if size > limit:
        raise RequestTooLargeError(
            f"the body of this request may have {limit} bytes", limit_bytes=limit
        )
    return b"".join(parts)


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
