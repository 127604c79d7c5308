"""Hot routes: what members do all the time, as ASGI routes of their own beside FastAPI's.

FastAPI spends three times as long on a request as the operation behind it. So an operation marked
`@hot` is called here without it: same function, same models, same checks, same errors, and FastAPI
still documents it. What is left out is generality: a hot route knows one name in the path, one JSON
body, one header and the services, and refuses at start to carry anything else.

`tests/integration/coordinator/test_hot_routes.py` sends everything both ways and compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp, Receive, Scope, Send

from aqua_coordinator.answers import JSON_HEADER, explain_version, invalid
from aqua_coordinator.services import KeyText, Services
from aqua_protocol import AquaError
from aqua_protocol.ids import Name
from aqua_protocol.wire import Wire

Fault: TypeAlias = Mapping[str, Any]
"""As pydantic describes it: where (`loc`) and what (`msg`)."""
Operation = Callable[..., Awaitable[BaseModel]]
OperationT = TypeVar("OperationT", bound=Operation)

_NAME: Final[TypeAdapter[str]] = TypeAdapter(Name)
_KEY: Final[TypeAdapter[str]] = TypeAdapter(KeyText)
_KEY_HEADER: Final = "Idempotency-Key"
_HOT: Final[set[Operation]] = set()
_NAME_AT: Final = 3
"""Fixed by the paths: `/v1/leases/{lease_id}/renew` splits into '', 'v1', 'leases', the name."""


def hot(operation: OperationT) -> OperationT:
    """Give an operation a hot route."""
    _HOT.add(operation)
    return operation


class HotRoute:
    """One hot operation as an ASGI application.

    Args:
        route: FastAPI's route of the same operation.
        services: What the operation works with.

    Attributes:
        path: Template, for metrics.
    """

    def __init__(self, route: APIRoute, services: Services) -> None:
        operation = route.endpoint
        parameters = inspect.signature(operation).parameters.keys()
        names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        strange = parameters - {"services", "caller", "idempotency_key", "body", *names}
        assert not strange, f"a hot route cannot carry {strange} of {route.path}"
        assert len(names) <= 1, f"a hot route carries one name, {route.path} has {names}"
        body = get_type_hints(operation)["body"]
        assert issubclass(body, Wire), f"the body of {route.path} is {body}"
        self.path = route.path
        self._operation: Operation = operation
        self._services = services
        self._status = route.status_code or 200
        self._body = body
        self._name = names[0] if names else None
        self._wants_key = "idempotency_key" in parameters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check what was sent, run the operation and answer.

        Raises:
            AquaError: Whatever is wrong, before anything has been sent.
        """
        arguments: dict[str, Any] = {"services": self._services, "caller": scope["user"]}
        faults: list[Fault] = []
        if self._name is not None:
            name = scope["path"].split("/")[_NAME_AT]
            arguments[self._name] = _checked(_NAME, name, self._name, faults)
        if self._wants_key:
            key = next((v for k, v in scope["headers"] if k == b"idempotency-key"), None)
            text = None if key is None else key.decode("latin-1")
            arguments["idempotency_key"] = _checked(_KEY, text, _KEY_HEADER, faults)
        sent = (await receive())["body"]
        try:
            arguments["body"] = self._body.model_validate_json(sent)
        except ValidationError as error:
            faults += error.errors(include_url=False, include_input=False)
            raise _why_invalid(sent, faults) from error
        if faults:
            raise invalid(faults)
        answer = await self._operation(**arguments)
        body = answer.__pydantic_serializer__.to_json(answer)
        headers = [JSON_HEADER, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class HotRoutes:
    """Sends requests of hot operations to their route, and all others on.

    Args:
        app: FastAPI, for the others.
        routes: All routes of the application; those of hot operations are taken.
        services: What operations work with.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute], services: Services) -> None:
        self._app = app
        self._routes = {
            _shape(method, route.path): HotRoute(route, services)
            for route in routes
            for method in route.methods or ()
            if route.endpoint in _HOT
        }
        assert len(self._routes) == len(_HOT), f"of {_HOT} only {self.paths} have a route"

    @property
    def paths(self) -> list[str]:
        """Templates of all hot routes."""
        return [route.path for route in self._routes.values()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = self._routes.get(_shape(scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
        else:
            scope["route"] = route
            await route(scope, receive, send)


def _shape(method: str, path: str) -> tuple[str, ...]:
    """What a request shares with all others of its route: all but the name."""
    parts = path.split("/")
    parts[_NAME_AT : _NAME_AT + 1] = ["{}"] * (len(parts) > _NAME_AT)
    return method, *parts


def _checked(
    adapter: TypeAdapter[str], value: str | None, where: str, faults: list[Fault]
) -> str | None:
    """The value if it fits; otherwise what is wrong with it joins `faults`."""
    if value is None:
        faults.append({"loc": (where,), "msg": "Field required"})
        return None
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        faults += [{**fault, "loc": (where,)} for fault in found]
        return None


def _why_invalid(body: bytes, faults: list[Fault]) -> AquaError:
    reason = invalid(faults)
    try:
        # pydantic's own parser: the standard library's recurses into nested garbage.
        return explain_version(from_json(body), reason)
    except ValueError:
        return reason
