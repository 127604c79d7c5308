"""Calls in the terms of httpx: addresses, trust, requests, answers, errors.

Errors arrive as the types of `aqua_protocol.errors`, rebuilt from the body. No answer, or an answer
that is not Aqua's, is an `UnavailableError` that names the address.

Environment proxies are not used: the coordinator is an address inside the cluster, and a proxy
variable set for downloads must not carry its tokens elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import httpx
from pydantic import ValidationError

from aqua_client.tls import TlsFiles
from aqua_protocol.bearer import bearer_headers
from aqua_protocol.errors import (
    ConfigError,
    ErrorBody,
    UnavailableError,
    UnknownResourceError,
    error_from_body,
)

if TYPE_CHECKING:
    from aqua_client.calls import Call

AnswerT = TypeVar("AnswerT")

TLS_REMEDIES: Final = {
    "CERTIFICATE_VERIFY_FAILED": "Point AQUA_TLS_CA at the authority of the coordinator's "
    "certificate, and call it by a name that is in there; look at its dates.",
    "ALERT": "The coordinator refuses our certificate: point AQUA_TLS_CLIENT_CERT and "
    "AQUA_TLS_CLIENT_KEY at one of the authority that it trusts, and look at its dates.",
    "SSL": "Write http:// for a coordinator without TLS.",
    "": "Start the coordinator or correct AQUA_COORDINATOR_URL (or --url); https:// for TLS.",
}
"""What helps, by the first of these words that a failure of the network contains."""

MAX_CONNECTIONS: Final = 4
"""Connections kept open: a member reports from one thread and allocates from another, and twice
that is room for a listing beside them. Doubled, the others lie idle at the coordinator."""

KEEP_ALIVE_S: Final = 70.0
"""Seconds that an idle one is kept: longer than the longest heartbeat (60 s), shorter than the
coordinator keeps it (75 s). Doubled, reports of many members meet closed connections."""


def options_of(
    addresses: Sequence[str], token: str | None, tls: TlsFiles | None, timeout_s: float
) -> dict[str, Any]:
    """Arguments of `httpx.Client` and `httpx.AsyncClient` for coordinators at these addresses.

    Raises:
        ConfigError: A TLS file or the token is no good.
    """
    trust: TlsFiles | bool = False
    if any(one.startswith("https") for one in addresses):
        trust = tls or TlsFiles.from_environment()
        trust.context()
    return {
        "headers": bearer_headers(token),
        "timeout": timeout_s,
        "limits": httpx.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEEP_ALIVE_S,
        ),
        # Made only for https: loading the system's certificates takes tens of milliseconds.
        "verify": trust,
        "trust_env": False,
    }


def addresses_of(urls: str) -> tuple[str, ...]:
    """The addresses in a text that separates them by commas, without a slash at their end.

    Raises:
        ConfigError: One is none, or more than an address.
    """
    return tuple(dict.fromkeys(_address_of(url.strip()) for url in urls.split(",")))


def _address_of(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(
            f"{url!r} is not an address: {error}", remedy="Write it as http://host:port."
        ) from error
    extra = parsed.path.strip("/") or parsed.query or parsed.fragment or parsed.userinfo
    if parsed.scheme not in {"http", "https"} or not parsed.host or extra:
        raise ConfigError(
            f"{url!r} is not a coordinator's address",
            remedy="Write AQUA_COORDINATOR_URL (or --url) as http://host:port, without a path; "
            "several by commas.",
        )
    return str(parsed).rstrip("/")


def request_of(call: Call[AnswerT], address: str, traced: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `request` of either httpx client; `traced` are the headers of a trace."""
    headers = {**traced}
    if call.body is not None:
        headers["Content-Type"] = "application/json"
    if call.idempotency_key is not None:
        headers["Idempotency-Key"] = call.idempotency_key
    return {
        "method": call.method,
        "url": address + call.path,
        "content": call.body,
        "params": call.params or None,
        "headers": headers,
    }


def answer_of(call: Call[AnswerT], response: httpx.Response) -> AnswerT:
    """What the response says.

    Raises:
        AquaError: What the coordinator refused with.
        UnavailableError: It cannot answer now, or is no coordinator of this version.
    """
    try:
        if response.is_success:
            return call.read(response.content)
        refusal = error_from_body(ErrorBody.model_validate_json(response.content, extra="ignore"))
    except ValidationError as error:
        # A proxy's error page, say. Proxies send `Retry-After` too; a date is left to the rule.
        value = response.headers.get("Retry-After", "")
        raise UnavailableError(
            f"{response.request.method} {response.request.url} was answered with status "
            f"{response.status_code} and a body that is not Aqua's",
            remedy="Check that AQUA_COORDINATOR_URL names an Aqua coordinator of this version.",
            retry_after_s=float(value) if value.isascii() and value.isdecimal() else None,
            status=response.status_code,
        ) from error
    if call.absent_is_done and isinstance(refusal, UnknownResourceError):
        return call.read(b"")
    raise refusal


@contextmanager
def as_no_answer(url: str) -> Iterator[None]:
    """Turn a failure of the network into the error that nothing came back from `url`."""
    try:
        yield
    except httpx.HTTPError as error:
        what = str(error) or type(error).__name__
        raise UnavailableError(
            f"no answer from the coordinator at {url}: {what}",
            remedy=next(remedy for word, remedy in TLS_REMEDIES.items() if word in what),
            url=url,
        ) from error


def was_sent(error: UnavailableError) -> bool:
    """Whether a coordinator may have got the request that failed with this error."""
    return not isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
