"""The error tree: every expected failure has a type, a stable wire code and a next step.

The code is the contract: it crosses HTTP and the lease channel as an `ErrorBody`, and
`error_from_body` brings the same type back on the other side. Messages may change, codes may not.
Impossible states are not here: they are assertions.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field


class ErrorBody(BaseModel):
    """An error as it crosses the wire: HTTP bodies and `Refused` channel messages carry it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    code: str = Field(description="Stable code, for programs.")
    message: str = Field(description="What happened, for people.")
    remedy: str = Field(default="", description="The next step that is likely to help.")
    details: dict[str, Any] = Field(default_factory=dict, description="Ids, states and limits.")
    retry_after_s: float | None = Field(default=None, description="Retry no sooner, in seconds.")


class AquaError(Exception):
    """Base of every expected failure.

    Attributes:
        code: Stable wire code of the type.
        http_status: Status under which HTTP services report it.
        remedy: The next step, in words; the type's default unless the raiser knows better.
        details: Ids, states and limits that a handler needs; JSON values only.
        retry_after_s: Seconds before a retry can succeed, or None when a retry is pointless.
    """

    code: ClassVar[str] = "aqua_error"
    http_status: ClassVar[int] = 500
    default_remedy: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        retry_after_s: float | None = None,
        **details: Any,  # noqa: ANN401 - JSON values, checked when the body is built
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = self.default_remedy if remedy is None else remedy
        self.retry_after_s = retry_after_s
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]" + (f" {self.remedy}" if self.remedy else "")

    def to_body(self) -> ErrorBody:
        """The wire form of this error."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            remedy=self.remedy,
            details=self.details,
            retry_after_s=self.retry_after_s,
        )


class ConfigError(AquaError):
    """A setting, option or file is wrong; nothing was started."""

    code = "config_invalid"
    http_status = 400


class SocketPathTooLongError(ConfigError):
    """A Unix socket path exceeds the kernel's 107 bytes."""

    code = "socket_path_too_long"
    default_remedy = "Choose a shorter directory, for example under /run/aqua."


class VersionMismatchError(ConfigError):
    """Two sides speak different protocol versions."""

    code = "version_mismatch"
    http_status = 426
    default_remedy = "Install the same minor version of Aqua on both sides; upgrade the older one."


class ProtocolError(AquaError):
    """The other side broke the protocol, or acted on a state that no longer holds."""

    code = "protocol_violation"
    http_status = 409


class RequestInvalidError(ProtocolError):
    """A request does not fit its schema or bounds; nothing was changed."""

    code = "request_invalid"
    http_status = 422
    default_remedy = "Correct the named fields; the OpenAPI document lists every bound."


class RequestTooLargeError(RequestInvalidError):
    """A request body exceeds what the operation takes; it was not read to its end."""

    code = "request_too_large"
    http_status = 413
    default_remedy = "Send less at once, for example fewer members in one heartbeat."


class MisdirectedRequestError(RequestInvalidError):
    """The request names a host that this service does not go by."""

    code = "misdirected_request"
    http_status = 421
    default_remedy = "Call it by an address that it listens on."


class MethodNotAllowedError(RequestInvalidError):
    """The path exists, the HTTP method does not apply to it."""

    code = "method_not_allowed"
    http_status = 405
    default_remedy = "The OpenAPI document lists the methods of every path."


class InvalidTransitionError(ProtocolError):
    """The event is not allowed in the present state."""

    code = "invalid_transition"
    default_remedy = "Read the resource again and act on its present state."


class StaleEpochError(ProtocolError):
    """The caller holds an epoch that has been fenced."""

    code = "stale_epoch"
    default_remedy = "Stop using the lease; ask for a new one."


class StaleRevisionError(ProtocolError):
    """A report is older than one already in the books."""

    code = "stale_revision"
    default_remedy = "Send the present full state with a higher revision."


class IdempotencyConflictError(ProtocolError):
    """An idempotency key was used before with a different request."""

    code = "idempotency_conflict"
    default_remedy = "Use a fresh key for a new request; repeat a request byte for byte."


class UnknownResourceError(ProtocolError):
    """No such producer, consumer, lease, reclaim or placement."""

    code = "unknown_resource"
    http_status = 404
    default_remedy = "Check the id; after a loss of the books, wait one heartbeat."


class ProfileUnusableError(UnknownResourceError):
    """The books have no profile of a model that can be gone by: none, a partial or an old one."""

    code = "profile_unusable"
    default_remedy = (
        "Profile the model to the end and push it (`aqua-profile push`); until then its engine "
        "lends by its own options."
    )


class AuthError(AquaError):
    """A caller could not prove what it claims."""

    code = "auth_failed"
    http_status = 403


class UnauthenticatedError(AuthError):
    """No bearer token, or one that this coordinator never issued or that has expired."""

    code = "unauthenticated"
    http_status = 401
    default_remedy = "Send `Authorization: Bearer <token>`; make one with `aqua-coordinator token`."


class ForbiddenError(AuthError):
    """The token is good, its role is not allowed to do this."""

    code = "forbidden"
    default_remedy = "Use a token with one of the named roles."


class CapabilityError(AuthError):
    """A producer refused a lease token: forged, expired, fenced, or for someone else."""

    code = "capability_rejected"
    default_remedy = "Ask the coordinator for a new lease."


class CapacityError(AquaError):
    """No producer can lend that much now; the caller should spill to host memory."""

    code = "capacity_exhausted"
    http_status = 409
    default_remedy = "Spill to host memory and ask again later, or lower min_bytes."


class QuotaExceededError(CapacityError):
    """The consumer, its tenant or its cohort has as much on lease as it may."""

    code = "quota_exceeded"
    default_remedy = "Release leases, or ask for less; an operator raises quotas in their file."


class LeaseLostError(AquaError):
    """The lease ended under its holder: expired, revoked or reclaimed."""

    code = "lease_lost"
    http_status = 410
    default_remedy = "Data already moved to host memory is intact; ask for a new lease."


class DataLostError(AquaError):
    """Bytes cannot be given back; the engine must recompute them."""

    code = "data_lost"
    http_status = 410
    default_remedy = "Recompute the named blocks."


class ChecksumMismatchError(DataLostError):
    """Bytes came back different from what was stored; they were not handed out."""

    code = "checksum_mismatch"


class TransportError(AquaError):
    """A copy, map or handle exchange failed."""

    code = "transport_failed"
    http_status = 502


class TransportUnavailableError(TransportError):
    """This machine, driver or container cannot run the transport at all."""

    code = "transport_unavailable"
    default_remedy = "Choose another transport; `memfd` works on every Linux host."


class UnavailableError(AquaError):
    """A service cannot answer now; the data plane goes on without it."""

    code = "service_unavailable"
    http_status = 503
    default_remedy = "Retry; copies and reclaims are not affected."


class RateLimitedError(UnavailableError):
    """A token or tenant asks more often than it may; nothing was changed."""

    code = "rate_limited"
    http_status = 429
    default_remedy = "Retry after the time told; an operator raises rates."


class StoreUnavailableError(UnavailableError):
    """Redis or Valkey does not answer."""

    code = "store_unavailable"


class StoreFullError(UnavailableError):
    """Redis or Valkey refuses writes: disk full or memory limit reached."""

    code = "store_full"
    default_remedy = "Free disk space in the data directory or raise maxmemory, then retry."


class BooksRebuildingError(UnavailableError):
    """The books were lost and this member has not confirmed its state yet."""

    code = "books_rebuilding"
    # Not 503: this service is well, and so is its store. The books are not ready to grant.
    http_status = 409
    default_remedy = "Wait for the next heartbeat of the members."


def _tree(root: type[AquaError]) -> dict[str, type[AquaError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


ERRORS_BY_CODE: Final[dict[str, type[AquaError]]] = _tree(AquaError)


def error_from_body(body: ErrorBody) -> AquaError:
    """Rebuild the typed error; an unknown code (a newer peer) becomes a plain `AquaError`."""
    kind = ERRORS_BY_CODE.get(body.code, AquaError)
    error = kind(body.message, remedy=body.remedy, retry_after_s=body.retry_after_s)
    # Assigned, not passed: the names in `details` are a peer's and may collide with arguments.
    error.details = body.details
    return error
