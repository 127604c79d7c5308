"""How well balanced a placement is: the two sums per server that the paper's objective compares."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

    from aqua_placer.problem.instance import Instance, Placement


class BalanceMode(StrEnum):
    """How servers are compared in the min-max objectives."""

    ABS = "abs"
    SIGNED = "signed"


def keyed(
    values: Float64[np.ndarray, "*any"] | Int64[np.ndarray, "*any"], mode: BalanceMode
) -> Float64[np.ndarray, "*any"]:
    """What the objective takes the maximum of."""
    numbers: Float64[np.ndarray, "*any"] = values.astype(np.float64)
    return np.abs(numbers) if mode is BalanceMode.ABS else numbers


def worst(instance: Instance, placement: Placement, mode: BalanceMode) -> tuple[int, float]:
    """Largest cnt and mem (GB) over servers, as the mode compares them."""
    mem, cnt = keyed(instance.mem_gb(placement), mode), keyed(instance.cnt(placement), mode)
    return int(cnt.max()), float(mem.max())


def level_gb(instance: Instance, placement: Placement, mode: BalanceMode) -> float:
    """The paper's objective: H x cnt + mem of the worst servers."""
    cnt, mem = worst(instance, placement, mode)
    return instance.hbm_gb * cnt + mem
