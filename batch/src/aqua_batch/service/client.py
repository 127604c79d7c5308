"""The commands' side of the API: OpenAI's files and batches, over HTTP.

It speaks to this service, and to any other that has OpenAI's Batch API.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import httpx

from aqua_batch.service.wire import BatchObject, FileObject
from aqua_protocol.errors import (
    AquaError,
    RequestInvalidError,
    UnauthenticatedError,
    UnavailableError,
    UnknownResourceError,
)

TIMEOUT_S: Final = 60.0
"""Seconds that the service may be silent: an upload is on its disk before it answers. Doubled, a
service that hangs is noticed a minute later."""


class BatchClient:
    """A connection to a batch service; a context manager.

    Args:
        url: Without `/v1`, or with it.
        api_key: None for a service without keys.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        base = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=f"{base}/v1", headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> FileObject:
        """Upload a batch file; the body streams from the disk."""
        with path.open("rb") as file:
            sent = {"file": (path.name, file, "application/jsonl")}
            answer = self._call("POST", "/files", data={"purpose": "batch"}, files=sent)
        return FileObject.model_validate(answer)

    def create(
        self, file_id: str, endpoint: str, window: str, metadata: dict[str, str]
    ) -> BatchObject:
        """Create a batch of an uploaded file."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        sent = {**body, **({"metadata": metadata} if metadata else {})}
        return BatchObject.model_validate(self._call("POST", "/batches", json=sent))

    def retrieve(self, batch_id: str) -> BatchObject:
        """How far a batch is."""
        return BatchObject.model_validate(self._call("GET", f"/batches/{batch_id}"))

    def cancel(self, batch_id: str) -> BatchObject:
        """Cancel a batch."""
        return BatchObject.model_validate(self._call("POST", f"/batches/{batch_id}/cancel"))

    def list(self, limit: int) -> list[BatchObject]:
        """The newest batches."""
        answer = self._call("GET", "/batches", params={"limit": limit})
        return [BatchObject.model_validate(each) for each in answer["data"]]

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

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - httpx's
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise _unreachable(self._http, error) from error
        if response.is_error:
            raise _typed(response)
        answer: dict[str, Any] = response.json()
        return answer


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
