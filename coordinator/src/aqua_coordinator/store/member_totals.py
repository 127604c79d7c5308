"""Sums over all members, read a bounded part at a time.

Every sweep reads one part, so Redis and the loop are held up by a constant, however large the
cluster; the sums are those of the last full round, which takes half a second for each
`MEMBERS_A_PART` of the larger role. They are sums of what members last reported, each read at its
own moment within the round. Nothing has to be kept right by the steps that change members, so
nothing drifts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from aqua_coordinator.store import Ledger
from aqua_coordinator.store.rows import BooksSummary

MEMBERS_A_PART: Final = 100
"""Of each role in a sweep, chosen by hand: 0.5 ms of Redis time, which one report in a thousand
waits for. Doubled, that doubles, and a round takes half as long."""
MEMBERS_AT_ONCE: Final = 500
"""Of each role, that a scrape itself adds up, in some ms. Doubled, reports wait twice as long for a
scrape of so many."""


class MemberTotals:
    """The sums of the last full round.

    Attributes:
        sums: By field; empty before the first round is done.
        at_s: Unix time of its end.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._so_far = Counter[str]()
        self._after = ("", "")
        self._few = True
        self.sums: Mapping[str, int] = {}
        self.at_s = 0.0

    async def read_part(self) -> BooksSummary:
        """Go on with the round, and give the part that was read.

        Raises:
            UnavailableError: Redis does not answer; the round goes on when it does.
        """
        part = await self._ledger.summary(*self._after, limit=MEMBERS_A_PART)
        self._so_far.update(part.sums)
        if part.after != self._after and _larger_role(part) > MEMBERS_A_PART:
            self._after = part.after
        else:
            self.sums, self.at_s = self._so_far, time.time()
            self._so_far, self._after = Counter(), ("", "")
        return part

    async def read(self) -> BooksSummary:
        """The books of this moment; the sums too, if members are few.

        Raises:
            UnavailableError: Redis does not answer.
        """
        summary = await self._ledger.summary(limit=MEMBERS_AT_ONCE if self._few else 0)
        few, self._few = self._few, _larger_role(summary) <= MEMBERS_AT_ONCE
        if few and self._few:
            self.sums, self.at_s = summary.sums, time.time()
        return summary


def _larger_role(summary: BooksSummary) -> int:
    """Members of the role that has more."""
    return max(summary.member_counts.values())
