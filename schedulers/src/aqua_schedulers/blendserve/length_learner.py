"""Running re-estimation: what finished requests say about those still to come.

Requests that rely on one sample form a group (`LengthEstimate.group`). Every finished request of
unknown length is evidence about its group. Evidence is looked at when twice as many have finished
as at the last look, so a run looks a few dozen times however long it is; only a difference that is
both large and certain changes estimates, because a change sorts the rest of the pool anew.

The mean is all generated tokens, running requests included, over finished ones: the estimate for
exponential lengths with censoring. Finished requests alone would say "short" as long as the long
ones still run.

Source: ours; BlendServe samples once (section 3.2) and names wrong lengths as its first loss
(section 5.2).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float64, Int32, Int64

from aqua_schedulers.blendserve.lengths import LengthEstimate

FIRST_LOOK: Final = 64
"""Finished requests before the first look: enough that a few groups have evidence. Doubled, wrong
estimates order a longer part of the run."""

LEAST_EVIDENCE: Final = 16
"""Finished requests of a group before it is believed: below it a standard error is a guess.
Doubled, small groups are corrected later or never."""

LARGE_CHANGE: Final = 1.25
"""A factor; a mean that is off by less is left alone, because sorting anew would change little.
Doubled, estimates stay wrong by up to 2.5."""

CERTAIN_DEVIATIONS: Final = 3.0
"""Standard errors between the old and the new mean; three leave one false alarm in 400 looks.
Doubled, corrections need four times the evidence."""


class LengthLearner:
    """Evidence by group for the estimates to correct."""

    def __init__(self, lengths: LengthEstimate) -> None:
        groups, self.group_of = np.unique(lengths.group, return_inverse=True)
        self._count = np.zeros(len(groups))
        self._sum = np.zeros(len(groups))
        self._squares = np.zeros(len(groups))
        self._exact = lengths.exact
        self._finished = 0
        self._next_look = FIRST_LOOK

    @property
    def until_look(self) -> int:
        """Requests that finish before it is time to look, with the one at which it is."""
        return self._next_look - self._finished

    def observe(
        self,
        requests: Int32[np.ndarray, " finished"],
        output_tokens: Int64[np.ndarray, " finished"],
    ) -> bool:
        """Book what finished requests generated; True when it is time to look."""
        self._finished += len(requests)
        for request, tokens in zip(requests.tolist(), output_tokens.tolist(), strict=True):
            if not self._exact[request]:
                group = self.group_of[request]
                self._count[group] += 1
                self._sum[group] += tokens
                self._squares[group] += float(tokens) ** 2
        if self._finished < self._next_look:
            return False
        self._next_look = 2 * self._finished
        return True

    def corrected(
        self,
        mean: Float64[np.ndarray, " requests"],
        square: Float64[np.ndarray, " requests"],
        running: Int32[np.ndarray, " running"],
        generated: Int64[np.ndarray, " running"],
    ) -> tuple[Float64[np.ndarray, " requests"], Float64[np.ndarray, " requests"]] | None:
        """New moments of all requests, or None while those in use will do; exact lengths stay.

        Long requests that are `running` have `generated` so many tokens so far.
        """
        total = self._sum.copy()
        open_requests = ~self._exact[running]
        np.add.at(total, self.group_of[running[open_requests]], generated[open_requests])
        believed = self._count >= LEAST_EVIDENCE
        if not believed.any():
            return None
        count = np.maximum(1.0, self._count)
        observed = np.maximum(1.0, total / count)
        variance = np.maximum(0.0, self._squares / count - (self._sum / count) ** 2)
        error = np.maximum(np.sqrt(variance / count), 1e-9)
        used = np.zeros(len(count))
        open_all = ~self._exact
        used[self.group_of[open_all]] = mean[open_all]
        ratio = observed / np.maximum(used, 1e-9)
        large = (ratio > LARGE_CHANGE) | (ratio < 1.0 / LARGE_CHANGE)
        certain = np.abs(observed - used) > CERTAIN_DEVIATIONS * error
        changed = believed & large & certain & (used > 0)
        if not changed.any():
            return None
        affected = changed[self.group_of] & open_all
        spread = np.maximum(1.0, self._squares / count / np.maximum(1.0, self._sum / count) ** 2)
        new_mean, new_square = mean.copy(), square.copy()
        new_mean[affected] = observed[self.group_of[affected]]
        new_square[affected] = (spread * observed**2)[self.group_of[affected]]
        return new_mean, new_square
