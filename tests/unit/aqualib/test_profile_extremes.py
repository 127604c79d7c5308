"""A lender can go by whatever a profile in the books may say; the rest is refused as it is read."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest
from pydantic import ValidationError

from aqua_protocol.profile import MAX_MEASURED, ModelProfile, ProfileLabel, StableQueue
from aqualib.producer.profile import Profile

LEAST: Final = 5e-324


def measured(rate_per_s: float, mean_length: float, waiting_share: float) -> ModelProfile:
    return ModelProfile(
        model="m",
        label=ProfileLabel.PRODUCER,
        spare_bytes=1,
        stable_rate_per_s=rate_per_s,
        queue=StableQueue(mean_length=mean_length, waiting_share=waiting_share),
    )


def test_thresholds_follow_from_the_extremes() -> None:
    for told in product((LEAST, MAX_MEASURED), (0.0, LEAST, MAX_MEASURED), (0.0, LEAST, 1.0)):
        profile = Profile.measured(measured(*told), slab_bytes=1)
        assert profile.steady_requests_per_s == told[0]
        assert profile.queue_margin >= 0


@pytest.mark.parametrize("told", [(2 * MAX_MEASURED, 0.0, 0.0), (1.0, 1e308, 0.5)])
def test_what_nothing_can_be_computed_with_is_refused(told: tuple[float, float, float]) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1000000000"):
        measured(*told)
