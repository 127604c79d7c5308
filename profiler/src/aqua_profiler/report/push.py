"""A profile on its way to the coordinator, where informers and placers find it.

Only the fields that the schema fixes are sent: the measurements behind them stay in the file.
"""

from __future__ import annotations

from typing import Final

from aqua_client import CoordinatorClient
from aqua_profiler.errors import ProfileInvalidError
from aqua_protocol.profile import ModelProfile, ProfileLabel

TIMEOUT_S: Final = 30.0
"""Seconds that a person waits for a coordinator that may be starting; twice as many try
patience."""


def push(profile: ModelProfile, url: str, token: str | None) -> None:
    """Send a profile.

    Raises:
        ProfileInvalidError: It is partial or has no label: nothing may act on it.
        AquaError: What the coordinator answered, as its own type.
        UnavailableError: There is no answer.
    """
    if profile.partial or profile.label is ProfileLabel.UNKNOWN:
        raise ProfileInvalidError(
            f"the profile of {profile.model!r} is partial or has no label",
            remedy="Finish it: the same `aqua-profile run` goes on from its journal.",
        )
    with CoordinatorClient(url, token, timeout_s=TIMEOUT_S) as client:
        client.put_profile(profile)
