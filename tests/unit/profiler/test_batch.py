"""Batch sizes rise until throughput saturates; contexts grow in proportion to tokens."""

from __future__ import annotations

import pytest

from aqua_profiler.batch import HttpBatchProgram, profile_batch, profile_context
from aqua_profiler.errors import EndpointError, EndpointGoneError
from aqua_profiler.measure.memory import meter_for
from aqua_profiler.spec import BatchSpec
from aqua_protocol import ConfigError
from aqua_protocol.profile import ModelProfile, ProfileLabel

GB = 10**9


class Painter:
    """Fixed cost per batch, cost per item, and memory per item, on its own clock."""

    total_bytes = 80 * GB

    def __init__(self, *, item_bytes: int = GB, saturates_at: int = 8) -> None:
        self.now_s = 0.0
        self.used_bytes = 0
        self._item_bytes = item_bytes
        self._saturates_at = saturates_at
        self.sizes: list[int] = []
        self.fails_at: int | None = None

    def run(self, size: int) -> None:
        self.sizes.append(size)
        if size == self.fails_at:
            raise EndpointGoneError("the painter has left")
        self.used_bytes = 20 * GB + size * self._item_bytes
        if self.used_bytes > self.total_bytes:
            raise MemoryError("CUDA out of memory")
        self.now_s += max(1.0, size / self._saturates_at)

    def clock(self) -> float:
        return self.now_s


def _profile(
    painter: Painter, budget_s: float = 600.0
) -> tuple[ModelProfile, EndpointError | None]:
    plan = BatchSpec("sd", budget_s)
    return profile_batch(plan, painter, meter_for(painter, 0), clock=painter.clock)


def test_free_memory_is_taken_at_the_smallest_batch_of_peak_throughput() -> None:
    profile, error = _profile(Painter())
    assert error is None
    assert profile.label is ProfileLabel.PRODUCER
    assert profile.added("peak_batch") == 8
    assert profile.spare_bytes == (80 - 20 - 8) * GB
    assert profile.stable_rate_per_s == pytest.approx(8.0)
    assert max(step["size"] for step in profile.added("batches")) == 32


def test_running_out_of_memory_ends_the_search_with_what_fitted() -> None:
    profile, _ = _profile(Painter(item_bytes=15 * GB, saturates_at=64))
    assert not profile.partial
    assert profile.added("peak_batch") == 4
    assert profile.label is ProfileLabel.NEUTRAL
    assert any("do not fit" in note for note in profile.notes)


def test_a_spent_budget_makes_a_partial_profile_without_a_label() -> None:
    profile, _ = _profile(Painter(saturates_at=512), budget_s=10.0)
    assert profile.partial
    assert profile.label is ProfileLabel.UNKNOWN
    assert profile.spare_bytes is None


def test_a_program_that_fails_half_way_makes_a_partial_profile() -> None:
    painter = Painter()
    painter.fails_at = 4
    profile, error = _profile(painter)
    assert isinstance(error, EndpointGoneError)
    assert profile.partial
    assert profile.label is ProfileLabel.UNKNOWN
    assert profile.added("error")["code"] == "endpoint_gone"


def test_a_bug_of_the_program_is_not_taken_for_the_end_of_memory() -> None:
    class Broken(Painter):
        def run(self, size: int) -> None:
            if size == 2:
                raise ZeroDivisionError
            super().run(size)

    with pytest.raises(ZeroDivisionError):
        _profile(Broken())


def test_a_token_that_no_header_carries_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="no header carries") as caught:
        HttpBatchProgram("http://127.0.0.1:9", '{"n": "$batch"}', "hunter2\n")
    assert "hunter2" not in str(caught.value)


class Reader:
    """Keys and values of 3 bytes a token, and a fixed part."""

    used_bytes = 0
    total_bytes = 1000

    def read(self, tokens: int) -> int:
        return 100 + 3 * tokens


def test_swap_for_a_long_prompt_follows_from_two_short_ones() -> None:
    profile = profile_context(BatchSpec("llm"), Reader(), tokens=5000, prefix_tokens=10)
    assert profile.label is ProfileLabel.CONSUMER
    assert profile.needed_bytes == 100 + 15_000 - 1000 + 30


def test_a_prompt_that_fits_needs_no_swap() -> None:
    profile = profile_context(BatchSpec("llm"), Reader(), tokens=100)
    assert profile.label is ProfileLabel.NEUTRAL
    assert profile.needed_bytes == 0
