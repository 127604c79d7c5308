"""When members are asked to report: each within its heartbeat, a few at a time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from aqua_coordinator.services import (
    HEARTBEAT_JITTER,
    REPORT_SLOT_S,
    SLOTS_IN_HEARTBEAT,
    HeartbeatRate,
)

MEMBERS = 500


@pytest.mark.parametrize(("shortest_s", "spread_s"), [(0.05, 0.0), (1.0, 3.0), (1.0, 60.0)])
def test_reports_come_in_slots_spread_over_the_heartbeat(
    shortest_s: float, spread_s: float
) -> None:
    now_s = 12345.678
    rate = HeartbeatRate(shortest_s, spread_s, clock=lambda: now_s)
    longest_s = max(shortest_s, spread_s)
    told: Counter[float] = Counter()
    for number in range(MEMBERS):
        wait_s = rate.next_s(f"member-{number}")
        assert wait_s <= longest_s
        assert wait_s >= longest_s * (1 - HEARTBEAT_JITTER) * (1 - 1 / SLOTS_IN_HEARTBEAT)
        told[round(now_s + wait_s, 6)] += 1
    slots = sorted(told)
    if longest_s > 1:
        for before_s, after_s in pairwise(slots):
            slots_between = (after_s - before_s) / REPORT_SLOT_S
            assert slots_between == pytest.approx(round(slots_between), abs=1e-3)
    # A fifth of the heartbeat, none of it crowded.
    assert slots[-1] - slots[0] > 0.8 * HEARTBEAT_JITTER * longest_s
    assert max(told.values()) < MEMBERS * 3 * max(
        REPORT_SLOT_S / (HEARTBEAT_JITTER * longest_s), 0.02
    )
