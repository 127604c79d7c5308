"""The memory partition: how much of the KV memory each end of the order gets.

Two equations: the parts fill the memory, and their densities, weighted by memory, give the target.
A target that lies outside both densities has no solution with two positive parts; then the
nearer end gets everything.

Source: BlendServe section 3.4, Figure 5 (19.3 and 40.7 GB of 60 GB for densities 3.73, 0.096 and
target 1.27; the exact solution of its numbers is 19.4 and 40.6).
"""

from __future__ import annotations

from aqua_schedulers.compiled import compiled


@compiled
def left_share(left_density: float, right_density: float, target_density: float) -> float:
    """Share of the memory for the left, compute-bound end: M_L / M, in 0..1."""
    if left_density <= right_density:
        return 0.5
    share = (target_density - right_density) / (left_density - right_density)
    return min(1.0, max(0.0, share))
