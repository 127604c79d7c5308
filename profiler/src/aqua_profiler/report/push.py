"""A profile on its way to the coordinator, where informers and placers find it.

Only the fields that the schema fixes are sent: the measurements behind them stay in the file.
"""

from __future__ import annotations

from typing import Final

import httpx
from pydantic import ValidationError

from aqua_profiler.errors import ProfileInvalidError
from aqua_protocol import ErrorBody, UnavailableError, error_from_body
from aqua_protocol.profile import ModelProfile, ProfileLabel

TIMEOUT_S: Final = 30.0


def push(profile: ModelProfile, url: str, token: str | None) -> None:
    """Send a profile.

    Raises:
        ProfileInvalidError: It is partial or has no label: nothing may act on it.
        AquaError: What the coordinator answered, as its own type.
        UnavailableError: Nobody answers there.
    """
    if profile.partial or profile.label is ProfileLabel.UNKNOWN:
        raise ProfileInvalidError(
            f"the profile of {profile.model!r} is partial or has no label",
            remedy="Finish it: the same `aqua-profile run` goes on from its journal.",
        )
    body = profile.model_dump_json(exclude=set(profile.model_extra or {}))
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        answer = httpx.put(
            f"{url.rstrip('/')}/v1/profiles", content=body, headers=headers, timeout=TIMEOUT_S
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(
            f"no coordinator answers at {url}: {error}",
            remedy="Check --url (AQUA_COORDINATOR_URL) and that the coordinator runs.",
        ) from error
    if answer.is_success:
        return
    try:
        refusal = error_from_body(ErrorBody.model_validate_json(answer.content))
    except ValidationError:
        raise UnavailableError(
            f"{url} answered {answer.status_code} without an Aqua error body",
            remedy="Check that the address is a coordinator's, not a proxy's.",
        ) from None
    raise refusal
