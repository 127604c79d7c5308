"""The outermost layer of the service: what is true of every HTTP request.

Bounded (how many at once, how large), measured (route, method, code, duration), answered by an
`ErrorBody` whatever goes wrong, and sent down the fast lane where one leads. Behind it stands the
FastAPI application for everything else.
"""

from __future__ import annotations

import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aqua_coordinator.answers import JSON_HEADER, Headers, error_answer, typed
from aqua_coordinator.hot_routes import MIB, SMALL_BODY_BYTES, HotRoute, HotRoutes
from aqua_coordinator.services import Services
from aqua_protocol import RequestInvalidError, RequestTooLargeError, UnavailableError

PLACEMENTS_PATH: Final = "/v1/placements"
PLACEMENTS_BODY_BYTES: Final = 16 * MIB
"""A plan of 65,536 pairings with a few producers each."""
EVENTS_PATH: Final = "/v1/events"
MAX_PATH_LENGTH: Final = 1024
UNMATCHED: Final = "unmatched"
_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})


class RequestLimits:
    """The ASGI application that the server runs.

    Args:
        app: FastAPI, for what the lane does not carry.
        lane: The hot routes.
        services: Shared with `app`.
    """

    def __init__(self, app: ASGIApp, lane: HotRoutes, services: Services) -> None:
        self._app = app
        self._lane = lane
        self._services = services
        self._metrics = services.metrics
        self._limit = services.settings.max_concurrent_requests
        self._in_flight = 0
        self._metrics.requests_in_flight.set_function(lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        path: str = scope["path"]
        method: str = scope["method"]
        found = self._lane.find(method, path)
        if found is not None:
            answer = await self.answer(*found, dict(scope["headers"]), receive, started_s=started_s)
            await _send(send, *answer)
            return
        # A stream is served for hours; it has a limit of its own, and no duration to speak of.
        counted = path != EVENTS_PATH
        self._in_flight += counted
        try:
            if self._in_flight > self._limit:
                await _send(send, *error_answer(_overloaded(self._in_flight - 1)))
                code, route = 503, UNMATCHED
            else:
                code, route = await self._serve_cold(scope, receive, send)
        finally:
            self._in_flight -= counted
        if counted:
            self._metrics.answered(route, method, code, time.perf_counter() - started_s)

    def find(self, method: str, path: str) -> tuple[HotRoute, str] | None:
        """As `HotRoutes.find`."""
        return self._lane.find(method, path)

    async def answer(
        self,
        route: HotRoute,
        name: str,
        headers: dict[bytes, bytes],
        body: bytes | Receive,
        *,
        started_s: float,
    ) -> tuple[int, Headers, bytes]:
        """Serve a hot request, whatever goes wrong; counted and measured.

        Args:
            route, name: As found.
            headers: By name in lower case.
            body: All of it, or the channel that it comes from.
            started_s: When the request began, by the performance counter.

        Returns:
            Status, headers (without the length) and body.
        """
        self._in_flight += 1
        try:
            content = await self._call(route, name, headers, body)
        except Exception as error:  # noqa: BLE001 - answered as a typed error, and logged if ours
            answer = error_answer(typed(error))
        else:
            answer = route.status, [JSON_HEADER], content
        finally:
            self._in_flight -= 1
        seconds = time.perf_counter() - started_s
        self._metrics.answered(route.path, route.method, answer[0], seconds)
        return answer

    async def _call(
        self, route: HotRoute, name: str, headers: dict[bytes, bytes], body: bytes | Receive
    ) -> bytes:
        if self._in_flight > self._limit:
            raise _overloaded(self._in_flight - 1)
        authorization = headers.get(b"authorization")
        caller = self._services.authenticator.authenticate(
            None if authorization is None else authorization.decode("latin-1")
        )
        key = headers.get(b"idempotency-key")
        if not isinstance(body, bytes):
            body = await _read_body(headers, body, route.max_body_bytes)
        _require_json(headers, body)
        return await route.call(
            self._services, caller, name, None if key is None else key.decode("latin-1"), body
        )

    async def _serve_cold(self, scope: Scope, receive: Receive, send: Send) -> tuple[int, str]:
        status = 500
        begun = False

        async def watch(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                begun = True
                status = message["status"]
            await send(message)

        try:
            inner = receive
            if scope["method"] in _BODY_METHODS:
                path = scope["path"]
                limit = PLACEMENTS_BODY_BYTES if path == PLACEMENTS_PATH else SMALL_BODY_BYTES
                headers = dict(scope["headers"])
                body = await _read_body(headers, receive, limit)
                _require_json(headers, body)
                inner = _replay(body, receive)
            await self._app(scope, inner, watch)
        except Exception as error:
            if begun:
                raise
            status, head, answer = error_answer(typed(error))
            await _send(send, status, head, answer)
        route = scope.get("route")
        return status, getattr(route, "path", UNMATCHED)


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _overloaded(in_flight: int) -> UnavailableError:
    return UnavailableError(
        f"{in_flight} requests are being served already",
        remedy="Retry later, or run more coordinators.",
        retry_after_s=1.0,
    )


async def _read_body(headers: dict[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The whole body, if it fits.

    Raises:
        RequestTooLargeError: Announced or actual size above `limit`.
    """
    announced = headers.get(b"content-length", b"0")
    if not announced.isdigit() or int(announced) > limit:
        raise _too_large(limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        parts, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
        body = b"".join(parts)
    if len(body) > limit:
        raise _too_large(limit)
    return body


def _require_json(headers: dict[bytes, bytes], body: bytes) -> None:
    """Refuse a body that is not declared as JSON.

    Browsers send other types across sites without asking, and a coordinator without tokens trusts
    everybody on its machine.

    Raises:
        RequestInvalidError: It is not.
    """
    if body and not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
        raise RequestInvalidError(
            "Content-Type: the body is not declared as JSON",
            remedy="Send Content-Type: application/json.",
            faults=[{"field": "Content-Type", "fault": "the body is not declared as JSON"}],
        )


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the body of this request may have {limit} bytes", limit_bytes=limit
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
