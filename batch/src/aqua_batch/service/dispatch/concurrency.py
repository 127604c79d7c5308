"""How many requests an engine gets at once: by feedback, so that it is filled and never flooded.

Additive increase, multiplicative decrease (AIMD). A limit begins low and doubles until the engine
first says that it is too much; it is halved then, and from then on grows by steps. An engine says
so by refusing (429, 503), or by what vLLM tells in `/metrics`: requests that go on waiting, for
they would wait ahead of the next user's; requests that had to give their memory up; a KV cache that
is all but full; first tokens that come later than is wanted. So online requests on an engine
without any scheduler of ours are protected, too. An engine that co-serves (it tells of
`aqua:offline_requests_waiting`) protects them itself, and is only believed where it refuses.

An engine without metrics is filled as far as it answers: its limit grows with each answer, by one,
and after the first refusal by one for each round of answers.

Source: Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_LIMIT: Final = 16
"""Requests that an engine gets at once at first. Doubled, one that can take a single request is
flooded by twice as many at a start."""
DECREASE: Final = 0.5
"""Factor, as in TCP. Doubled, nothing would ever be taken back."""
STEPS: Final = 64
"""Looks in which a limit grows from nothing to its bound. Doubled, an engine that has room again
is filled half as fast."""
FULL_CACHE: Final = 0.95
"""Share of the KV cache in use from which the next request may cost another its memory. Doubled, it
would never be."""

WAITING: Final = "vllm:num_requests_waiting"
PREEMPTIONS: Final = "vllm:num_preemptions_total"
CACHE: Final = "vllm:kv_cache_usage_perc"
TTFT_SUM: Final = "vllm:time_to_first_token_seconds_sum"
TTFT_COUNT: Final = "vllm:time_to_first_token_seconds_count"
CO_SERVES: Final = "aqua:offline_requests_waiting"
NAMES: Final = frozenset({WAITING, PREEMPTIONS, CACHE, TTFT_SUM, TTFT_COUNT, CO_SERVES})


class AdmissionLimit:
    """The limit of one engine.

    Args:
        most: Its bound.

    Attributes:
        value: Requests that it gets at once; at least one.
    """

    def __init__(self, most: int) -> None:
        self.value = float(min(FIRST_LIMIT, most))
        self._most = most
        self._is_doubling = True

    def answered(self, running: int) -> None:
        """Take note of an answer, where nothing else tells of the engine."""
        self._grow(running, 1.0 if self._is_doubling else 1.0 / self.value)

    def calm(self, running: int) -> None:
        """Take note of a look that shows no congestion."""
        self._grow(running, self.value if self._is_doubling else max(1.0, self._most / STEPS))

    def congested(self, running: int) -> None:
        """Take note of congestion; once, until what is too much has ended."""
        if running > self.value:
            return
        self._is_doubling = False
        self.value = max(1.0, min(self.value, running) * DECREASE)

    def _grow(self, running: int, step: float) -> None:
        if running + 1 >= int(self.value):  # Otherwise more would change nothing.
            self.value = min(self._most, self.value + step)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What an engine's metrics said at one look; sums over its parts."""

    waiting: float
    preemptions: float
    cache_share: float
    ttft_sum_s: float
    ttft_count: float
    co_serves: bool

    @classmethod
    def of(cls, text: str) -> LoadSample | None:
        """Read Prometheus' text; None where it is not vLLM's."""
        found = dict.fromkeys(NAMES, 0.0)
        seen = set()
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in NAMES:
                value = float(line.rpartition(" ")[2])
                found[name] = max(found[name], value) if name == CACHE else found[name] + value
                seen.add(name)
        if WAITING not in seen:
            return None
        return cls(
            found[WAITING],
            found[PREEMPTIONS],
            found[CACHE],
            found[TTFT_SUM],
            found[TTFT_COUNT],
            CO_SERVES in seen,
        )

    def is_congested(self, before: LoadSample, ttft_s: float | None) -> bool:
        """Whether online requests would feel more load.

        Args:
            before: The look before. A request that waits at one look alone has just come.
            ttft_s: Mean time to the first token that is wanted; None for whatever it is.
        """
        if self.co_serves:
            return False
        waits = min(self.waiting, before.waiting) > 0
        is_full = self.preemptions > before.preemptions or self.cache_share >= FULL_CACHE
        began = self.ttft_count - before.ttft_count
        took_s = self.ttft_sum_s - before.ttft_sum_s
        return waits or is_full or (ttft_s is not None and began > 0 and took_s > ttft_s * began)
