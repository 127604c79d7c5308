"""The objects of OpenAI's API that this service takes and gives.

Source: OpenAI API reference, "Files" and "Batch"; the types of the official Python client.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from aqua_batch.bodies import problem_of
from aqua_batch.service.refusals import BatchApiError, NotServedError

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""What the requests of a batch may ask for."""

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_WINDOW_S: Final = 30 * 86_400
"""Seconds: as long as the files of a batch are kept by default. Doubled, a batch may outlive its
input."""

SHORTEST_TTL_S: Final = 3600
"""Fixed by OpenAI."""
LONGEST_TTL_S: Final = 2_592_000
"""Fixed by OpenAI: 30 days."""

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def window_s(text: str) -> int:
    """Seconds of a completion window: OpenAI's `24h`, and other numbers of s, m, h or d.

    Raises:
        ValueError: Not a window, or too long a one.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    seconds = int(match[1]) * UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= LONGEST_WINDOW_S:
        raise ValueError("must be a number and s, m, h or d, as in 24h, of at most 30 days")
    return seconds


def _window(text: str) -> str:
    window_s(text)
    return text


class ExpiresAfter(BaseModel):
    """When a file expires."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=SHORTEST_TTL_S, le=LONGEST_TTL_S)


class BatchParams(BaseModel):
    """The body of a batch to be created."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(
        max_length=64, pattern=r"^[^\x00]*$", description="A file of purpose `batch`."
    )
    endpoint: str = Field(max_length=64, description="The URL of all its requests.")
    completion_window: Annotated[
        str, Field(max_length=16, description="As in 24h."), AfterValidator(_window)
    ]
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


def batch_params(body: Any) -> BatchParams:  # noqa: ANN401 - JSON, not yet checked
    """Check the body of a batch to be created, as far as that needs no file.

    Raises:
        BatchApiError: It does not fit; names the field.
        NotServedError: Requests of its endpoint are not served.
    """
    try:
        params = BatchParams.model_validate(body)
    except ValidationError as error:
        message, param = problem_of(error)
        raise BatchApiError(message, param=param or None) from error
    if params.endpoint not in ENDPOINTS:
        raise NotServedError(
            f"batches of {params.endpoint} are not served; "
            f"'endpoint' must be one of {', '.join(ENDPOINTS)}",
            param="endpoint",
        )
    return params


class FileObject(BaseModel):
    """OpenAI's `file`."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileDeletion(BaseModel):
    """OpenAI's answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class RequestCounts(BaseModel):
    """How many requests a batch has, and how they ended."""

    total: int
    completed: int
    failed: int


class BatchLineError(BaseModel):
    """What is wrong with a line of the input, or with all of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrorList(BaseModel):
    """OpenAI's list of them."""

    object: Literal["list"] = "list"
    data: list[BatchLineError]


class BatchObject(BaseModel):
    """OpenAI's `batch`."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrorList | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class ObjectPage(BaseModel):
    """A page of files or batches."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
