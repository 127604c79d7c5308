"""The coordinator as seen from a member: typed calls over HTTP, typed errors back.

Owns the connection pool, the bearer token and the retry rule; knows nothing of leases' meaning.

- Every call is bounded in time. Nothing on the data plane waits for one.
- Errors arrive as the types of `aqua_protocol.errors`, rebuilt from the body. No answer, or an
  answer that is not Aqua's, is an `UnavailableError` that names the address.
- A call is repeated only when that cannot do harm: `allocate` under the same idempotency key,
  `renew` and `release` because the books ignore a second one. Reports are never repeated here: the
  next report, with a higher revision, says more than a repeated one (see `aqualib.reporter`).

Environment proxies are not used: the coordinator is an address inside the cluster, and a proxy
variable set for downloads must not carry its tokens elsewhere.
"""

from __future__ import annotations

import random
import ssl
import time
from typing import TYPE_CHECKING, Final, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from aqua_protocol import (
    AquaError,
    ConfigError,
    ErrorBody,
    UnavailableError,
    UnknownResourceError,
    error_from_body,
)
from aqua_protocol.ids import new_idempotency_key
from aqua_protocol.leases import LeaseAction, LeaseGrant, LeaseRenewal, LeaseRequest, LeaseView
from aqua_protocol.members import ConsumerAck, ConsumerReport, ProducerAck, ProducerReport
from aqua_protocol.profile import ModelProfile, Profiles

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

from aqualib.settings import Settings

AnswerT = TypeVar("AnswerT", bound=BaseModel)

DEFAULT_TIMEOUT_S: Final = 2.0
MAX_ATTEMPTS: Final = 3
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
MAX_CONNECTIONS: Final = 4
"""A member reports from one thread and allocates from another."""


class CoordinatorLink:
    """Calls to one coordinator (or a service of several); safe to share between threads.

    Args:
        url: `http://host:port` or `https://...`, without a path.
        token: Bearer token; None where the coordinator runs without authentication.
        ca_file: Certificates to trust instead of the system's, for https.
        timeout_s: Bound of a single attempt.
        sleep: Waits between attempts; replaced in tests.
        transport: Replaces the network in tests.

    Raises:
        ConfigError: The address or the certificate file is no good.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        ca_file: Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url: Final = _require_address(url)
        self._sleep = sleep
        self._client = httpx.Client(
            base_url=f"{self.url}/v1/",
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            limits=httpx.Limits(
                max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
            ),
            # Made only for https: loading the system's certificates takes tens of milliseconds.
            verify=_trust(ca_file) if self.url.startswith("https") else False,
            trust_env=False,
            transport=transport,
        )

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The link that the settings describe.

        Raises:
            ConfigError: The address or the certificate file is no good.
        """
        return cls(
            settings.coordinator_url,
            None if settings.token is None else settings.token.get_secret_value(),
            ca_file=settings.ca_file,
            timeout_s=settings.request_timeout_s,
        )

    def __repr__(self) -> str:
        return f"CoordinatorLink({self.url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Harmless when repeated."""
        self._client.close()

    # --- Members --------------------------------------------------------------------------

    def report_producer(self, report: ProducerReport) -> ProducerAck:
        """Tell the books a producer's full state; one attempt."""
        path = f"producers/{report.producer_id}"
        return _parse(self._send("PUT", path, report), ProducerAck)

    def report_consumer(self, report: ConsumerReport) -> ConsumerAck:
        """Tell the books a consumer's full state, which renews its leases; one attempt."""
        path = f"consumers/{report.consumer_id}"
        return _parse(self._send("PUT", path, report), ConsumerAck)

    def leave_producer(self, producer_id: str, incarnation: str) -> None:
        """Take a producer that holds nothing any more out of the books; one attempt."""
        self._leave(f"producers/{producer_id}", incarnation)

    def leave_consumer(self, consumer_id: str, incarnation: str) -> None:
        """Take a consumer that holds nothing any more out of the books; one attempt."""
        self._leave(f"consumers/{consumer_id}", incarnation)

    # --- Leases ---------------------------------------------------------------------------

    def allocate(self, request: LeaseRequest, *, idempotency_key: str | None = None) -> LeaseGrant:
        """Ask for a lease; repeated under one key, so at most one is granted.

        Args:
            request: What is wanted.
            idempotency_key: To go on with a call that ended in `UnavailableError`.

        Raises:
            CapacityError: No producer can lend that much now.
            UnavailableError: No answer. The lease may have been granted: call again with the
                same key, or let it expire unattached.
        """
        key = idempotency_key or new_idempotency_key()
        return _parse(self._repeat("POST", "leases", request, key), LeaseGrant)

    def renew(self, lease_id: str, renewal: LeaseRenewal) -> LeaseView:
        """Start a lease's time to live anew, outside of a report.

        Raises:
            LeaseLostError: It has ended.
            StaleEpochError: It was granted under another epoch.
        """
        return _parse(self._repeat("POST", f"leases/{lease_id}/renew", renewal), LeaseView)

    def release(self, lease_id: str, epoch: int) -> LeaseView:
        """Give up a lease's right; a second release is harmless."""
        action = LeaseAction(epoch=epoch)
        return _parse(self._repeat("POST", f"leases/{lease_id}/release", action), LeaseView)

    # --- Profiles -------------------------------------------------------------------------

    def profile(self, model: str) -> ModelProfile | None:
        """What `aqua-profile` has measured of a model, if it was pushed; one attempt."""
        answer = self._send("GET", "profiles", None, params={"model": model})
        return next(iter(_parse(answer, Profiles).profiles), None)

    # --- Inside ---------------------------------------------------------------------------

    def _leave(self, path: str, incarnation: str) -> None:
        try:
            self._send("DELETE", path, None, params={"incarnation": incarnation})
        except UnknownResourceError:
            return  # Not in the books: that is what was wanted.

    def _repeat(
        self, method: str, path: str, body: BaseModel, idempotency_key: str | None = None
    ) -> httpx.Response:
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        for attempt in range(1, MAX_ATTEMPTS):
            try:
                return self._send(method, path, body, headers=headers)
            except UnavailableError as error:
                pause_s = FIRST_PAUSE_S * 4 ** (attempt - 1) * random.uniform(0.5, 1.5)
                self._sleep(min(max(pause_s, error.retry_after_s or 0.0), MAX_PAUSE_S))
        return self._send(method, path, body, headers=headers)

    def _send(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
    ) -> httpx.Response:
        content = None if body is None else body.model_dump_json().encode()
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            response = self._client.request(
                method, path, content=content, headers=all_headers, params=params
            )
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise UnavailableError(
                f"no answer from the coordinator at {self.url}: {reason}",
                remedy="Start the coordinator or correct AQUA_COORDINATOR_URL.",
                url=self.url,
            ) from error
        if response.is_success:
            return response
        raise _error_of(response)


def _error_of(response: httpx.Response) -> AquaError:
    try:
        return error_from_body(ErrorBody.model_validate_json(response.content))
    except ValidationError:
        return _not_aqua(response)


def _parse(response: httpx.Response, kind: type[AnswerT]) -> AnswerT:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise _not_aqua(response) from error


def _not_aqua(response: httpx.Response) -> UnavailableError:
    """Something answered that is not a coordinator of this version, a proxy's error page say."""
    return UnavailableError(
        f"{response.request.method} {response.request.url} was answered with status "
        f"{response.status_code} and a body that is not Aqua's",
        remedy="Check that AQUA_COORDINATOR_URL names an Aqua coordinator of this version.",
        status=response.status_code,
    )


def _require_address(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(f"{url!r} is not an address: {error}") from error
    extra = parsed.path.strip("/") or parsed.query or parsed.fragment or parsed.userinfo
    if parsed.scheme not in {"http", "https"} or not parsed.host or extra:
        raise ConfigError(
            f"{url!r} is not a coordinator's address",
            remedy="Write AQUA_COORDINATOR_URL as http://host:port, without a path.",
        )
    return str(parsed).rstrip("/")


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"cannot read certificates from {ca_file}: {error}",
            remedy="Point AQUA_CA_FILE at a PEM file with the coordinator's authority.",
        ) from error
