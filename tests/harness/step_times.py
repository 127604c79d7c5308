"""An engine's step times, in the form that `aqua-profile steps` writes."""

from __future__ import annotations

from typing import Final

from aqua_schedulers.conserve import StepTimeProfile

PROFILE: Final = StepTimeProfile(
    model="m",
    engine="e",
    gpu="g",
    floor_s=0.01,
    token_s=1e-4,
    exponent=1.5,
    context_token_s=4e-7,
    pair_s=3e-9,
    max_tokens=2048,
)
"""Of steps with every term that the form has but those of requests."""
