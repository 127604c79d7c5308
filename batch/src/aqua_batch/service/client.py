"""The commands' side of the API: OpenAI's files and batches, over HTTP.

It speaks to this service, and to any other that has OpenAI's Batch API.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from aqua_batch.service.wire import BatchObject, FileObject
from aqua_protocol.bearer import bearer_headers
from aqua_protocol.errors import (
    AquaError,
    ConfigError,
    RequestInvalidError,
    UnauthenticatedError,
    UnavailableError,
    UnknownResourceError,
)
from aqua_protocol.wire import first_fault

TIMEOUT_S: Final = 60.0
"""Seconds that the service may be silent: an upload is on its disk before it answers. Doubled, a
service that hangs is noticed a minute later."""


class _BatchPage(BaseModel):
    data: list[BatchObject]


AnswerT = TypeVar("AnswerT", bound=BaseModel)


class BatchClient:
    """A connection to a batch service; a context manager.

    Args:
        url: Without `/v1`, or with it.
        api_key: None for a service without keys.

    Raises:
        ConfigError: The address or key is none; or, of each call, who answers is no batch service.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = bearer_headers(api_key)
        base = url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.Client(base_url=f"{base}/v1", headers=headers, timeout=TIMEOUT_S)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not an address: {error}", remedy=_ADDRESS) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> FileObject:
        """Upload a batch file; the body streams from the disk."""
        with path.open("rb") as file:
            sent = {"file": (path.name, file, "application/jsonl")}
            return self._call(FileObject, "POST", "/files", data={"purpose": "batch"}, files=sent)

    def create(
        self, file_id: str, endpoint: str, window: str, metadata: dict[str, str]
    ) -> BatchObject:
        """Create a batch of an uploaded file."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        sent = {**body, **({"metadata": metadata} if metadata else {})}
        return self._call(BatchObject, "POST", "/batches", json=sent)

    def retrieve(self, batch_id: str) -> BatchObject:
        """How far a batch is."""
        return self._call(BatchObject, "GET", f"/batches/{batch_id}")

    def cancel(self, batch_id: str) -> BatchObject:
        """Cancel a batch."""
        return self._call(BatchObject, "POST", f"/batches/{batch_id}/cancel")

    def list(self, limit: int) -> list[BatchObject]:
        """The newest batches."""
        return self._call(_BatchPage, "GET", "/batches", params={"limit": limit}).data

    def content(self, file_id: str) -> Iterator[bytes]:
        """The bytes of a file, piece by piece."""
        try:
            with self._http.stream("GET", f"/files/{file_id}/content") as response:
                if response.is_error:
                    response.read()
                    raise _typed(response)
                yield from response.iter_bytes()
        except httpx.TransportError as error:
            raise _unreachable(self._http, error) from error

    def _call(self, kind: type[AnswerT], method: str, path: str, **options: Any) -> AnswerT:  # noqa: ANN401 - httpx's
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise _unreachable(self._http, error) from error
        if response.is_error:
            raise _typed(response)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            fault = first_fault(error, "the answer")
            raise ConfigError(
                f"{self._http.base_url} does not answer as a batch service: {fault}",
                remedy=_ADDRESS,
            ) from error


_ADDRESS: Final = "Give the address of one as --url http://host:port."


def _unreachable(http: httpx.Client, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"the batch service at {http.base_url} does not answer: {type(error).__name__}",
        remedy="Check --url; start one with `aqua batch serve`.",
    )


def _typed(response: httpx.Response) -> AquaError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {response.status_code}"
    match response.status_code:
        case 401:
            remedy = "Add --api-key or AQUA_BATCH_API_KEY; `aqua batch key add` makes one."
            return UnauthenticatedError(message, remedy=remedy)
        case 404:
            is_of_batch = "/batches/" in response.url.path
            remedy = "`aqua batch status` lists batches." if is_of_batch else ""
            return UnknownResourceError(message, remedy=remedy)
        case status if status >= 500:  # noqa: PLR2004 - HTTP's server errors
            return UnavailableError(message, remedy="Try again; read the service's log.")
        case _:
            return RequestInvalidError(message, remedy="")
