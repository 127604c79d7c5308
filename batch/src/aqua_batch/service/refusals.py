"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`.

The official client chooses its exception by the status and repeats what is 408, 409, 429 or 5xx; so
a refusal that a repetition cannot mend is 400, 401, 404 or 413 here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from aqua_protocol.errors import AquaError, RequestInvalidError


class BatchApiError(AquaError):
    """A request that is refused; nothing was changed.

    Attributes:
        param: The field that is wrong, if it is one.
    """

    code = "invalid_request"
    http_status = 400
    error_type: ClassVar[str] = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        remedy: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy, retry_after_s=retry_after_s)
        self.param = param


class ApiKeyError(BatchApiError):
    """No API key, or one that is unknown or revoked."""

    code = "invalid_api_key"
    http_status = 401


class NoSuchObjectError(BatchApiError):
    """There is no such file or batch of this tenant."""

    code = "not_found"
    http_status = 404


class NotServedError(BatchApiError):
    """A route or endpoint of OpenAI's that this service does not have."""

    code = "not_served"
    http_status = 404


class UploadTooLargeError(BatchApiError):
    """A body that exceeds its bound; it was not read to its end."""

    code = "too_large"
    http_status = 413


class TenantQuotaError(BatchApiError):
    """The tenant has as much as it may have; only deleting helps."""

    code = "insufficient_quota"
    http_status = 403


class RateLimitError(BatchApiError):
    """Too much at once; the same request may come again, later."""

    code = "rate_limit_exceeded"
    http_status = 429
    error_type = "rate_limit_error"


def error_body(error: AquaError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error"
    if isinstance(error, BatchApiError):
        kind = error.error_type
    elif isinstance(error, RequestInvalidError):
        kind = BatchApiError.error_type
    message = f"{error.message}. {error.remedy}" if error.remedy else error.message
    param = error.param if isinstance(error, BatchApiError) else None
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}
