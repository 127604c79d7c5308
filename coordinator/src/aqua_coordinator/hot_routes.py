"""The fast lane: operations that members call all the time, served without a framework.

FastAPI spends three times as long on a request as the operation behind it. So operations marked
`@hot` are also reachable by this lane: same function, same models, same checks, same errors, and
FastAPI still documents them. What the lane leaves out is generality: it knows path names, one JSON
body, one header and the two services that operations take, and refuses at start to carry anything
else.

`tests/integration/coordinator/test_hot_routes.py` sends everything through both and compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from aqua_coordinator.answers import explain_version, invalid
from aqua_coordinator.auth import Caller
from aqua_coordinator.services import KeyText, Services
from aqua_protocol import AquaError
from aqua_protocol.ids import Name
from aqua_protocol.wire import Wire

Fault: TypeAlias = Mapping[str, Any]
"""As pydantic describes it: where (`loc`) and what (`msg`)."""
Operation = Callable[..., Awaitable[BaseModel]]
OperationT = TypeVar("OperationT", bound=Operation)

KIB: Final = 1024
MIB: Final = 1024 * KIB
SMALL_BODY_BYTES: Final = 64 * KIB
REPORT_BODY_BYTES: Final = 4 * MIB
"""A report of 4096 leases takes about 1 MiB."""

_NAME: Final[TypeAdapter[str]] = TypeAdapter(Name)
_KEY: Final[TypeAdapter[str]] = TypeAdapter(KeyText)
_HOT: Final[dict[Operation, int]] = {}


def hot(max_body_bytes: int = SMALL_BODY_BYTES) -> Callable[[OperationT], OperationT]:
    """Mark an operation for the fast lane."""

    def mark(operation: OperationT) -> OperationT:
        _HOT[operation] = max_body_bytes
        return operation

    return mark


@dataclass(frozen=True, slots=True)
class HotRoute:
    """One operation as the lane calls it.

    Attributes:
        method: Of HTTP.
        path: Template, for metrics.
        max_body_bytes: Larger bodies are refused.
        status: Of a success.
        operation: What is called.
        name: Parameter that takes the path's third segment, if there is one.
        body: Model of the body.
        wants_caller, wants_key: Whether it takes these.
    """

    method: str
    path: str
    max_body_bytes: int
    status: int
    operation: Operation
    name: str | None
    body: type[Wire]
    wants_caller: bool
    wants_key: bool

    async def call(
        self,
        services: Services,
        caller: Caller,
        name: str,
        key: str | None,
        body: bytes,
    ) -> bytes:
        """Check what was sent, run the operation, and give back the body of the answer.

        Raises:
            AquaError: Whatever is wrong.
        """
        arguments: dict[str, Any] = {"services": services}
        if self.wants_caller:
            arguments["caller"] = caller
        faults: list[Fault] = []
        if self.name is not None:
            arguments[self.name] = _checked(_NAME, name, self.name, faults)
        if self.wants_key:
            arguments["idempotency_key"] = _checked(_KEY, key, "Idempotency-Key", faults)
        try:
            arguments["body"] = self.body.model_validate_json(body)
        except ValidationError as error:
            faults += error.errors(include_url=False, include_input=False)
            raise _why_invalid(body, faults) from error
        if faults:
            raise invalid(faults)
        answer = await self.operation(**arguments)
        return answer.__pydantic_serializer__.to_json(answer)


class HotRoutes:
    """Finds the hot route of a request.

    Args:
        routes: All routes of the application; those of hot operations are taken.
    """

    def __init__(self, routes: list[APIRoute]) -> None:
        self._routes: dict[tuple[str, str, int, str], HotRoute] = {}
        for route in routes:
            if route.endpoint in _HOT:
                hot_route = _compile(route)
                segments = route.path.split("/")
                self._routes[_shape(hot_route.method, segments)] = hot_route
        missing = _HOT.keys() - {route.operation for route in self._routes.values()}
        assert not missing, f"hot operations without a route: {missing}"

    @property
    def routes(self) -> list[HotRoute]:
        """Every hot route."""
        return list(self._routes.values())

    def find(self, method: str, path: str) -> tuple[HotRoute, str] | None:
        """The route and the name in the path, or None: FastAPI's business."""
        segments = path.split("/")
        if not _SHORTEST <= len(segments) <= _LONGEST:
            return None
        route = self._routes.get(_shape(method, segments))
        if route is None:
            return None
        return route, segments[_NAME_AT] if len(segments) > _NAME_AT else ""


_NAME_AT: Final = 3
"""`/v1/leases/{lease_id}/renew` splits into '', 'v1', 'leases', the name, 'renew'."""
_SHORTEST: Final = 3
_LONGEST: Final = 5


def _shape(method: str, segments: list[str]) -> tuple[str, str, int, str]:
    verb = segments[4] if len(segments) == _LONGEST else ""
    return method, f"{segments[1]}/{segments[2]}", len(segments), verb


def _compile(route: APIRoute) -> HotRoute:
    hints = get_type_hints(route.endpoint)
    parameters = set(inspect.signature(route.endpoint).parameters)
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    strange = parameters - {"services", "caller", "idempotency_key", "body", *names}
    assert not strange, f"the fast lane cannot carry {strange} of {route.path}"
    assert len(names) <= 1, f"the fast lane carries one name, {route.path} has {names}"
    body = hints["body"]
    assert issubclass(body, Wire), f"the body of {route.path} is {body}"
    (method,) = route.methods or {""}
    return HotRoute(
        method=method,
        path=route.path,
        max_body_bytes=_HOT[route.endpoint],
        status=route.status_code or 200,
        operation=route.endpoint,
        name=names[0] if names else None,
        body=body,
        wants_caller="caller" in parameters,
        wants_key="idempotency_key" in parameters,
    )


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
