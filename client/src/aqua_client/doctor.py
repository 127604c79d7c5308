"""The coordinator as `aqua doctor` sees it: is it there, of which version, what may our token do?

Reads `AQUA_COORDINATOR_URL`, `AQUA_TOKEN`, `AQUA_REQUEST_TIMEOUT_S` and `AQUA_TLS_*` as members do.
Changes nothing: roles are learned by asking to revoke a lease that cannot exist, which only an
operator may, and whose refusal lists the roles that the token has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

from aqua_client.client import DEFAULT_TIMEOUT_S, CoordinatorClient, RetryRule
from aqua_protocol.errors import (
    AquaError,
    ConfigError,
    ForbiddenError,
    UnauthenticatedError,
    UnavailableError,
)
from aqua_protocol.findings import Finding, FindingLevel

URL_VARIABLE: Final = "AQUA_COORDINATOR_URL"
TIMEOUT_VARIABLE: Final = "AQUA_REQUEST_TIMEOUT_S"
MAX_TIMEOUT_S: Final = 60.0
"""As members take it. Doubled, the doctor waits so much longer for a coordinator that hangs."""
DEFAULT_URL: Final = "http://127.0.0.1:7700"
OK, WARN, FAIL = FindingLevel


def probe_coordinator() -> Iterator[Finding]:
    """Findings on the coordinator and on the token, if one answers."""
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL
    token = os.environ.get("AQUA_TOKEN") or None
    try:
        client = CoordinatorClient(
            url, token, timeout_s=_timeout_s(), retry=RetryRule(max_attempts=1)
        )
    except AquaError as error:
        yield _finding("coordinator", FAIL, error.message, error.remedy)
        return
    with client:
        try:
            health = client.readyz()
        except UnavailableError as error:
            # One that is named and away is a fault; none at the default address is a next step.
            named = URL_VARIABLE in os.environ
            yield _finding(
                "coordinator",
                FAIL if named else WARN,
                error.message,
                f"Start one with `aqua coordinator serve`, or set {URL_VARIABLE}.",
            )
            return
        ours = version("aqua-protocol")
        there = f"{health.version} at {client.url}, {health.status}"
        if health.version == ours:
            yield _finding("coordinator", OK, there)
        else:
            remedy = "Install one version on both sides; upgrade the older one."
            yield _finding("coordinator", WARN, f"{there}; here is {ours}", remedy)
        yield _token(client, token)


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_TIMEOUT_S)
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"{TIMEOUT_VARIABLE} is {text!r}",
            remedy=f"Give seconds, more than 0 and at most {MAX_TIMEOUT_S:g}.",
        )
    return timeout_s


def _token(client: CoordinatorClient, token: str | None) -> Finding:
    try:
        client.revoke_lease("aqua-doctor", epoch=1)  # Leases have generated names: none is this.
    except UnauthenticatedError as error:
        if token is None:
            return _finding("token", WARN, "the coordinator wants one", "Set AQUA_TOKEN.")
        return _finding("token", FAIL, error.message, error.remedy)
    except ForbiddenError as error:
        roles = [str(role) for role in error.details.get("has", [])]
        return _finding("token", OK, f"its roles: {', '.join(roles) or 'none'}")
    except UnavailableError as error:
        return _finding("token", WARN, error.message, error.remedy)
    except AquaError:
        pass  # There is no such lease, as was to be shown: the caller may do everything.
    roles_text = "none, and none is needed" if token is None else "its role: operator"
    return _finding("token", OK, roles_text)


def _finding(check: str, level: FindingLevel, message: str, remedy: str = "") -> Finding:
    return Finding(check=check, level=level, message=message, remedy=remedy)
