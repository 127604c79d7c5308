"""When the informer offers and reclaims, and that it does not flap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqua_protocol import ConfigError
from aqua_protocol.members import LoadReport
from aqua_protocol.profile import ModelProfile
from aqualib.producer.offer_rule import Decision, OfferBytes, ReclaimBytes, Watch, decide, observe
from aqualib.producer.profile import Profile

SLAB = 64 << 20
GB = 10**9

LLM = Profile(
    slab_bytes=SLAB, spare_bytes=40 * GB, steady_requests_per_s=2.5, steady_queue_length=1
)
BATCH = Profile(slab_bytes=SLAB, reserve_bytes=4 * GB)


def load(
    *, rate: float | None = None, queue: int = 0, used: int = 20 * GB, total: int = 80 * GB
) -> LoadReport:
    return LoadReport(
        queue_length=queue, memory_used_bytes=used, memory_total_bytes=total, requests_per_s=rate
    )


def settled(profile: Profile, report: LoadReport, *, offered: int = 0) -> Decision | None:
    """The decision after the load has been the same for a long time."""
    watch = observe(profile, report, Watch(offered_bytes=offered), 0.0)
    watch = observe(profile, report, watch, 1000.0)
    return decide(profile, report, watch, 1000.0)


def whole(nbytes: int) -> int:
    return nbytes // SLAB * SLAB


# --- LLM producers -----------------------------------------------------------------------------


def test_at_the_steady_state_the_profiled_memory_is_offered() -> None:
    assert settled(LLM, load(rate=2.5)) == OfferBytes(whole(40 * GB))
    assert settled(LLM, load(rate=0.0)) == OfferBytes(whole(40 * GB))


def test_what_is_offered_already_is_not_offered_again() -> None:
    assert settled(LLM, load(rate=2.5), offered=whole(40 * GB)) is None


def test_twice_the_steady_rate_takes_everything_back_at_once() -> None:
    report, offered = load(rate=5.0), whole(40 * GB)
    watch = observe(LLM, report, Watch(offered_bytes=offered), 7.0)
    assert decide(LLM, report, watch, 7.0) == ReclaimBytes(offered)


def test_a_growing_queue_takes_everything_back_at_any_rate() -> None:
    assert settled(LLM, load(rate=1.0, queue=4), offered=SLAB) == ReclaimBytes(SLAB)


@pytest.mark.parametrize(
    "report", [load(rate=2.6), load(rate=3.0), load(queue=2), load(queue=3)], ids=str
)
def test_between_the_two_thresholds_nothing_happens(report: LoadReport) -> None:
    assert settled(LLM, report) is None
    assert settled(LLM, report, offered=SLAB) is None


def test_calm_must_last_before_memory_is_offered_again() -> None:
    report = load(rate=1.0)
    watch = observe(LLM, report, Watch(), 100.0)
    assert decide(LLM, report, watch, 100.0 + LLM.calm_s / 2) is None
    assert decide(LLM, report, watch, 100.0 + LLM.calm_s) is not None


def test_a_moment_of_load_starts_the_wait_anew() -> None:
    watch = observe(LLM, load(rate=1.0), Watch(), 0.0)
    watch = observe(LLM, load(rate=2.7), watch, 4.0)
    watch = observe(LLM, load(rate=1.0), watch, 5.0)
    assert decide(LLM, load(rate=1.0), watch, 9.0) is None
    assert decide(LLM, load(rate=1.0), watch, 10.0) is not None


def test_nothing_is_offered_while_a_reclaim_is_open() -> None:
    report = load(rate=0.0)
    watch = observe(LLM, report, Watch(returning_bytes=SLAB), 0.0)
    assert decide(LLM, report, watch, 1000.0) is None


def test_a_model_with_too_little_to_spare_is_no_producer() -> None:
    assert settled(replace(LLM, spare_bytes=9 * GB), load(rate=0.0)) is None
    assert settled(replace(LLM, spare_bytes=9 * GB, least_offer_bytes=SLAB), load(rate=0.0))


# --- Batch producers ---------------------------------------------------------------------------


def test_a_batch_engine_offers_what_it_does_not_use_but_the_reserve() -> None:
    assert settled(BATCH, load(queue=1000)) == OfferBytes(whole(56 * GB))


def test_a_batch_engine_offers_once() -> None:
    offered = whole(56 * GB)
    assert settled(BATCH, load(queue=1000, used=20 * GB + offered), offered=offered) is None


def test_a_batch_engines_queue_reclaims_nothing() -> None:
    offered = whole(56 * GB)
    report = load(queue=10**6, rate=10**6, used=20 * GB + offered)
    assert settled(BATCH, report, offered=offered) is None


def test_half_of_the_reserve_may_be_used_before_memory_is_taken_back() -> None:
    offered = 20 * GB
    assert settled(BATCH, load(used=78 * GB), offered=offered) is None
    decision = settled(BATCH, load(used=78 * GB + 1), offered=offered)
    assert isinstance(decision, ReclaimBytes)
    # As much as restores the reserve, in whole slabs.
    assert 2 * GB < decision.nbytes <= 2 * GB + SLAB


def test_memory_that_is_on_its_way_back_is_not_asked_for_twice() -> None:
    report = load(used=79 * GB)
    watch = observe(BATCH, report, Watch(offered_bytes=20 * GB, returning_bytes=3 * GB), 0.0)
    assert decide(BATCH, report, watch, 1000.0) is None


def test_no_more_is_taken_back_than_was_offered() -> None:
    assert settled(BATCH, load(used=80 * GB), offered=SLAB) == ReclaimBytes(SLAB)
    assert settled(BATCH, load(used=80 * GB), offered=0) is None


# --- Any profile, any load ---------------------------------------------------------------------


@given(
    batch=st.booleans(),
    rate=st.none() | st.floats(0, 10),
    queue=st.integers(0, 10),
    used_slabs=st.integers(0, 100),
    offered_slabs=st.integers(0, 50),
    calm_since_s=st.none() | st.floats(0, 100),
    now_s=st.floats(100, 200),
)
def test_decisions_are_whole_slabs_within_what_exists(
    *,
    batch: bool,
    rate: float | None,
    queue: int,
    used_slabs: int,
    offered_slabs: int,
    calm_since_s: float | None,
    now_s: float,
) -> None:
    profile = replace(BATCH if batch else LLM, least_offer_bytes=SLAB, reserve_bytes=3 * SLAB)
    report = load(rate=rate, queue=queue, used=used_slabs * SLAB, total=100 * SLAB)
    offered = offered_slabs * SLAB
    watch = observe(profile, report, Watch(offered, calm_since_s=calm_since_s), now_s)
    match decide(profile, report, watch, now_s):
        case OfferBytes(nbytes):
            assert nbytes > 0
            assert nbytes % SLAB == 0
            if batch:
                assert used_slabs * SLAB + nbytes <= 97 * SLAB
        case ReclaimBytes(nbytes):
            assert 0 < nbytes <= offered
            assert nbytes % SLAB == 0


@given(rates=st.lists(st.sampled_from([2.4, 2.6, 2.9]), max_size=50))
def test_a_load_that_wobbles_around_the_steady_state_never_reclaims(rates: list[float]) -> None:
    watch = Watch(offered_bytes=whole(40 * GB))
    for second, rate in enumerate(rates):
        watch = observe(LLM, load(rate=rate), watch, float(second))
        assert decide(LLM, load(rate=rate), watch, float(second)) is None


def test_a_measured_profile_says_what_an_engine_lends_and_up_to_which_rate() -> None:
    fields = {"model": "m", "label": "producer", "spare_bytes": 38 * GB, "stable_rate_per_s": 2.5}
    llm = Profile.measured(ModelProfile.model_validate(fields | {"kind": "llm"}), SLAB)
    assert (llm.spare_bytes, llm.steady_requests_per_s) == (38 * GB, 2.5)
    batch = Profile.measured(ModelProfile.model_validate(fields | {"kind": "batch"}), SLAB)
    assert (batch.spare_bytes, batch.steady_requests_per_s) == (None, None)


@pytest.mark.parametrize("changes", [{"partial": True}, {"label": "unknown"}])
def test_nothing_is_lent_by_a_profile_that_is_partial_or_no_producers(
    changes: dict[str, object],
) -> None:
    fields = {"model": "m", "label": "producer", "spare_bytes": 38 * GB}
    with pytest.raises(ConfigError, match="nothing is lent"):
        Profile.measured(ModelProfile.model_validate(fields | changes), SLAB)
