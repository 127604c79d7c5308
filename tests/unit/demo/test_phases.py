"""The demo's story: no phase ends before what it is about has happened."""

from __future__ import annotations

from aqua_demo.lending.phases import DemoPhase as Phase
from aqua_demo.lending.phases import Goal, Observation, StallTimer, goals, next_phase, served_share
from aqua_demo.messages import ConsumerSample, ProducerSample, ReclaimMeasure
from aqua_demo.scale import QUICK

NOT_YET = Observation()
RECLAIM = ReclaimMeasure(bytes=8, first_slab_ms=1.0, total_ms=2.0)


def _producer(offered: int = QUICK.offer_bytes, *, reclaimed: bool = False) -> ProducerSample:
    return ProducerSample(
        at_s=0,
        arrivals_per_s=1,
        queue_length=0,
        batch=0,
        images=0,
        memory_total_bytes=QUICK.memory_bytes,
        memory_used_bytes=0,
        offered_bytes=offered,
        leased_bytes=0,
        reclaims=[RECLAIM] if reclaimed else [],
    )


def _consumer(tokens: int, peer: int = 100, host: int = 0, returned: int = 0) -> ConsumerSample:
    return ConsumerSample(
        at_s=0,
        tokens=tokens,
        device_bytes=1,
        peer_bytes=peer,
        host_bytes=host,
        paged_out_bytes=1,
        paged_in_bytes=1,
        spilled_bytes_peak=host,
        returned_bytes=returned,
    )


def _next(
    phase: Phase,
    *,
    producer: ProducerSample = NOT_YET.producer,
    consumer: ConsumerSample = NOT_YET.consumer,
    before: ConsumerSample = NOT_YET.before,
) -> Phase:
    return next_phase(phase, Observation(producer, consumer, before), QUICK)


def test_the_llm_starts_when_all_spare_memory_is_on_offer() -> None:
    assert _next(Phase.START) is Phase.START
    assert _next(Phase.START, producer=_producer(QUICK.offer_bytes - 1)) is Phase.START
    assert _next(Phase.START, producer=_producer()) is Phase.PREFILL


def test_prefill_ends_with_the_first_token() -> None:
    assert _next(Phase.PREFILL, consumer=_consumer(0)) is Phase.PREFILL
    assert _next(Phase.PREFILL, consumer=_consumer(1)) is Phase.HARVEST


def test_the_burst_waits_for_tokens_from_borrowed_memory() -> None:
    enough = QUICK.harvest_tokens
    before = _consumer(7)
    assert _next(Phase.HARVEST, consumer=_consumer(6 + enough), before=before) is Phase.HARVEST
    spilled = _consumer(7 + enough, peer=50, host=50)
    assert _next(Phase.HARVEST, consumer=spilled, before=before) is Phase.HARVEST
    assert _next(Phase.HARVEST, consumer=_consumer(7 + enough), before=before) is Phase.BURST


def test_the_burst_lasts_until_pages_are_in_host_memory_and_tokens_came_from_there() -> None:
    enough = QUICK.burst_tokens
    spilled = _consumer(enough, peer=0, host=100)
    assert _next(Phase.BURST, producer=_producer(), consumer=spilled) is Phase.BURST
    reclaimed = _producer(0, reclaimed=True)
    assert _next(Phase.BURST, producer=reclaimed, consumer=_consumer(enough)) is Phase.BURST
    early = _consumer(enough - 1, peer=0, host=100)
    assert _next(Phase.BURST, producer=reclaimed, consumer=early) is Phase.BURST
    assert _next(Phase.BURST, producer=reclaimed, consumer=spilled) is Phase.CALM


def test_the_calm_lasts_until_pages_have_returned() -> None:
    before = _consumer(0, peer=0, host=100, returned=5)
    stayed = _consumer(9, returned=5)
    assert _next(Phase.CALM, consumer=stayed, before=before) is Phase.CALM
    half = _consumer(9, peer=50, host=50, returned=55)
    assert _next(Phase.CALM, consumer=half, before=before) is Phase.CALM
    back = _consumer(9, returned=105)
    assert _next(Phase.CALM, consumer=back, before=before) is Phase.AGAIN


def test_the_story_ends_with_tokens_from_memory_borrowed_again() -> None:
    enough, before = QUICK.again_tokens, _consumer(7)
    assert _next(Phase.AGAIN, consumer=_consumer(6 + enough), before=before) is Phase.AGAIN
    assert _next(Phase.AGAIN, consumer=_consumer(7 + enough), before=before) is Phase.VERIFY


def test_a_reclaim_from_before_the_burst_does_not_end_it() -> None:
    seen = Observation(
        _producer(0, reclaimed=True), _consumer(500, peer=0, host=9), reclaims_before=1
    )
    assert next_phase(Phase.BURST, seen, QUICK) is Phase.BURST


def test_every_phase_says_what_it_waits_for() -> None:
    for phase in Phase:
        assert all(goal.text for goal in goals(phase, NOT_YET, QUICK))


def test_a_service_that_others_slow_down_serves_a_share_of_what_is_asked_for() -> None:
    before = ProducerSample(at_s=10.0, images=100, arrivals_per_s=8.0)
    now = ProducerSample(at_s=20.0, images=110, arrivals_per_s=4.0)
    assert served_share(before, now) == 0.25
    assert served_share(now, now) == 1.0


def test_patience_starts_again_with_every_count_that_is_new() -> None:
    patience = StallTimer(now_s=10.0)
    assert patience.stalled_s([Goal("0/3 tokens", is_met=False)], now_s=12.0) == 0
    assert patience.stalled_s([Goal("0/3 tokens", is_met=False)], now_s=15.0) == 3
    assert patience.stalled_s([Goal("1/3 tokens", is_met=False)], now_s=20.0) == 0


def test_a_goal_that_is_met_now_and_then_is_progress_only_once() -> None:
    patience = StallTimer(now_s=0.0)
    for now_s, is_met in enumerate([False, True, False, True, False]):
        stalled_s = patience.stalled_s([Goal("all pages with the peer", is_met)], float(now_s))
    assert stalled_s == 3
