"""One copy limit for all ranks of an engine, or one for each: what copies cost its steps, on paper.

Each rank has a link of its own and a consumer that has always something to copy. Under tensor
parallelism a step takes as long as on the slowest rank, in a pipeline as long as all stages
together; either way every rank sees the same steps. The clock is virtual.
"""

from __future__ import annotations

import random
from statistics import fmean
from typing import TYPE_CHECKING, Final

import pytest

from aqualib.producer.copy_limit import HARM_SHARE, CopyLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LINK: Final = 50e9
"""Bytes per second."""
STEP_S: Final = 0.03
JITTER: Final = 0.01
"""Standard deviation of a step's own duration, over it."""
MISREAD: Final = 0.003
"""The same of what a rank measures of it: ranks begin and end a step at slightly other times."""
BEGIN_S: Final = (0.0, 0.7, 1.9, 4.1)
"""When each rank's consumer comes."""
UNTIL_S: Final = 60.0


def harm_of(
    harm: float, together: Callable[[Iterable[float]], float], *, is_common: bool, seed: int
) -> tuple[float, float]:
    """By how much all steps together took longer, and the rate of the last rank's copies.

    Args:
        harm: Slowdown of a rank's part of a step while its link is busy.
        together: The slowdown of a step from that of each rank's part.
        is_common: Whether the engine has one limit, which ranks hear of with the next step.
        seed: Of all luck.
    """
    luck = random.Random(seed)
    ranks = range(len(BEGIN_S))
    limits = [CopyLimit() for _ in ranks]
    rates = [LINK for _ in ranks]
    common = LINK
    now_s = work_s = copied = 0.0
    while now_s < UNTIL_S:
        began = [rank for rank in ranks if BEGIN_S[rank] <= now_s]
        if is_common:
            rates = [common for _ in ranks]
        busy = [min(1.0, rates[rank] / LINK) if rank in began else 0.0 for rank in ranks]
        own_s = STEP_S * (1 + luck.gauss(0, JITTER))
        step_s = own_s * (1 + together(harm * share for share in busy))
        now_s, work_s = now_s + step_s, work_s + own_s
        copied += busy[-1] * LINK * step_s
        for rank in began:
            told = limits[rank].stepped(step_s * (1 + luck.gauss(0, MISREAD)), now_s)
            if told is not None:
                rates[rank] = told.bytes_per_s
                common = told.bytes_per_s if rank == 0 else common
    return now_s / work_s - 1, copied / now_s


@pytest.mark.parametrize("together", [max, fmean], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("harm", [0.03, 0.1, 0.5])
def test_one_limit_for_all_ranks_keeps_harm_below_its_share(
    harm: float, together: Callable[[Iterable[float]], float]
) -> None:
    for seed in range(3):
        cost, rate = harm_of(harm, together, is_common=True, seed=seed)
        assert cost < HARM_SHARE, cost
        assert rate > 0.4 * LINK * HARM_SHARE / harm, rate


@pytest.mark.parametrize("together", [max, fmean], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("harm", [0.03, 0.1, 0.5])
def test_limits_of_their_own_would_hide_each_others_harm(
    harm: float, together: Callable[[Iterable[float]], float]
) -> None:
    """While one rank measures without copies, the copies of the others go on."""
    for seed in range(3):
        cost, _ = harm_of(harm, together, is_common=False, seed=seed)
        assert cost > HARM_SHARE, cost
