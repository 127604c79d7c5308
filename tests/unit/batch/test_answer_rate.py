"""How fast engines answer is known soon after they begin to."""

import pytest

from aqua_batch.service.dispatch.answer_rate import LEAST_WINDOW_S, AnswerRate


class Clock:
    """A clock that stands still unless moved."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_the_window_under_way_counts_before_it_ends() -> None:
    clock = Clock()
    rate = AnswerRate(clock)
    for _ in range(20):
        rate.count("a")
    assert rate.per_s("a") == pytest.approx(20 / LEAST_WINDOW_S)  # Not 20 in no time.
    clock.now_s += 0.5
    assert rate.per_s("a") == pytest.approx(40)


def test_the_last_window_counts_until_the_next_has_more() -> None:
    clock = Clock()
    rate = AnswerRate(clock)
    rate.count("a")
    rate.count("b")
    clock.now_s += 0.5
    rate.begin_window()
    assert (rate.per_s("a"), rate.per_s("c"), rate.per_s(None)) == (2.0, 0.0, 4.0)
    clock.now_s += 1.0
    for _ in range(3):
        rate.count("a")
    assert (rate.per_s("a"), rate.per_s(None)) == (3.0, 5.0)
    rate.begin_window()
    assert rate.per_s(None) == pytest.approx(3 / 1.0)
