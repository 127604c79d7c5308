"""Hot routes: what members do all the time, on a way of their own beside FastAPI's.

FastAPI spends three times as long on a request as the operation behind it. So an operation marked
`@hot` is called here without it: same function, same models, same checks, and FastAPI still
documents it. What is left out is generality: a hot route knows one name in the path, one JSON
body, one header and the services, and refuses at start to carry anything else. A request that does
not fit is FastAPI's, which says why.

`tests/integration/coordinator/test_hot_routes.py` sends everything both ways and compares.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from aqua_coordinator.access.auth import Caller
from aqua_coordinator.services import KeyText, Services
from aqua_protocol import RequestInvalidError
from aqua_protocol.ids import Name
from aqua_protocol.wire import Wire

Shape: TypeAlias = tuple[str, ...]
HotRoutes: TypeAlias = "Mapping[Shape, HotRoute]"
Operation = Callable[..., Awaitable[BaseModel]]
OperationT = TypeVar("OperationT", bound=Operation)

_NAME: Final = TypeAdapter(Name).validator
_KEY: Final = TypeAdapter(KeyText).validator
_HOT: Final[set[Operation]] = set()
_NAME_AT: Final = 3
"""Fixed by the paths: `/v1/leases/{lease_id}/renew` splits into '', 'v1', 'leases', the name."""
LARGE_BODY_BYTES: Final = 32 << 10
"""From here on a body is parsed first. Doubled, a bad one that is not takes 30 ms instead of 15."""
MAX_MEMBERS: Final = 64
"""Of an object; ours have up to twenty. Doubled, a refusal has to find twice the faults."""


def hot(operation: OperationT) -> OperationT:
    """Give an operation a hot route."""
    _HOT.add(operation)
    return operation


class HotRoute:
    """One hot operation, called with what a request carries.

    Attributes:
        path: Template, for metrics.
        status: Of an answer that is no error.
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
        self.status = route.status_code or 200
        self._operation: Operation = operation
        self._services = services
        self._model = body.__pydantic_validator__
        self._name = names[0] if names else None
        self._wants_key = "idempotency_key" in parameters

    def begin(
        self, caller: Caller, path: str, headers: Mapping[bytes, bytes], body: bytes
    ) -> Awaitable[BaseModel] | None:
        """The operation, called with what a request carries; None for one that does not fit.

        Raises:
            RequestInvalidError: A large body is not JSON, or is nothing of ours.
            RequestValidationError: A large body does not fit.
        """
        arguments: dict[str, Any] = {"services": self._services, "caller": caller}
        try:
            if len(body) < LARGE_BODY_BYTES:
                arguments["body"] = self._model.validate_json(body)
            else:
                arguments["body"] = self._parsed(body)
            if self._name is not None:
                arguments[self._name] = _NAME.validate_python(path.split("/")[_NAME_AT])
            if self._wants_key:
                key = headers.get(b"idempotency-key", b"").decode("latin-1")
                arguments["idempotency_key"] = _KEY.validate_python(key)
        except ValidationError:
            return None
        return self._operation(**arguments)

    def _parsed(self, body: bytes) -> object:
        try:
            document = json.loads(body, object_pairs_hook=_members)
        except (ValueError, RecursionError) as error:
            raise RequestInvalidError("the body is no JSON document of Aqua's") from error
        try:
            return self._model.validate_python(document)
        except ValidationError as error:
            faults = [
                {**fault, "loc": ("body", *fault["loc"])}
                for fault in error.errors(include_url=False, include_input=False)
            ]
            raise RequestValidationError(faults, body=document) from error


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        message = f"an object of {len(pairs)} members"
        raise ValueError(message)
    return dict(pairs)


def rendered(answer: BaseModel) -> bytes:
    """The body of an answer."""
    return answer.__pydantic_serializer__.to_json(answer)


def find_hot_routes(routes: Sequence[APIRoute], services: Services) -> HotRoutes:
    """The routes of hot operations among all routes of the application."""
    found = {
        shape_of(method, route.path): HotRoute(route, services)
        for route in routes
        for method in route.methods or ()
        if route.endpoint in _HOT
    }
    assert len(found) == len(_HOT), f"of {_HOT} only {found} have a route"
    return found


def shape_of(method: str, path: str) -> Shape:
    """What a request shares with all others of its route: all but the name."""
    parts = path.split("/")
    if len(parts) > _NAME_AT:
        parts[_NAME_AT] = "{}"
    return method, *parts
