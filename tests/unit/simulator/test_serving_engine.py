"""The serving engine and its memory: vLLM's rules on a clock one can count on."""

from __future__ import annotations

import math

import pytest

from aqua_protocol.errors import CapacityError, ConfigError
from aqua_schedulers.cfs import FairSettings, PagingTier, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival, Job, summary
from aqua_simulator.timing.iteration import IterationTime, ScheduledBatch


def steady(step_s: float = 1.0) -> IterationTime:
    """Every step takes the same time, so that times are step counts."""
    return IterationTime("steady", lambda _tokens: step_s, lambda _batch: 0.0, lambda _count: 0.0)


def engine(
    *,
    blocks: int = 1000,
    budget: int = 100,
    in_flight: int = 1,
    store: PageStore | None = None,
    time_of: IterationTime | None = None,
    policy: PolicyName = PolicyName.FCFS,
    fcfs_on_host: bool = False,
) -> Engine:
    settings = EngineSettings(
        max_num_batched_tokens=budget, steps_in_flight=in_flight, kv_bytes_per_token=1
    )
    fair = FairSettings(slice_iterations=2, fcfs_on_host=fcfs_on_host)
    memory = PagedMemory(blocks, 16)
    return Engine("e", settings, time_of or steady(), memory, store, policy_named(policy, fair))


def test_one_request_takes_its_chunks_and_then_a_step_per_token() -> None:
    served = engine().run([Arrival("a", 0.0, 250, 5)])
    assert served[0].first_token_s == 3.0
    assert served[0].last_token_s == 7.0
    assert served[0].tpot_s == 1.0


def test_a_prompt_waits_for_the_step_that_is_running() -> None:
    served = engine().run([Arrival("a", 0.0, 50, 10), Arrival("b", 1.5, 50, 1)])
    late = next(row for row in served if row.request_id == "b")
    assert late.scheduled_s == 2.0
    assert late.first_token_s == 3.0


def test_planning_ahead_costs_an_arrival_one_more_step() -> None:
    arrivals = [Arrival("a", 0.0, 50, 10), Arrival("b", 2.5, 50, 1)]
    ahead = engine(in_flight=2).run(arrivals)
    late = next(row for row in ahead if row.request_id == "b")
    # Steps end at 1, 2, 3, ...; at 2.5 the step 3..4 is planned already, at 3 the next one is.
    assert late.first_token_s == 5.0


def test_decoding_requests_come_before_new_prompts_in_the_budget() -> None:
    seen: list[ScheduledBatch] = []

    def attention(batch: ScheduledBatch) -> float:
        seen.append(batch)
        return 0.0

    time_of = IterationTime("spy", lambda _tokens: 1.0, attention, lambda _count: 0.0)
    engine(budget=10, time_of=time_of).run([Arrival("a", 0.0, 10, 6), Arrival("b", 0.5, 25, 1)])
    mixed = next(batch for batch in seen if batch.decoding_count and batch.chunks)
    assert mixed.tokens == 10
    assert mixed.chunks[0].tokens == 9


def test_the_latest_request_is_preempted_and_comes_back_to_what_is_left() -> None:
    run = engine(blocks=8, budget=200)
    served = run.run([Arrival("a", 0.0, 40, 60), Arrival("b", 0.0, 40, 60)])
    first = next(row for row in served if row.request_id == "a")
    second = next(row for row in served if row.request_id == "b")
    assert first.preemption_count == 0
    assert second.preemption_count >= 1
    assert first.last_token_s == 60.0
    assert run.memory.free_count == run.memory.block_count


def test_paging_to_a_store_takes_the_time_of_the_link() -> None:
    def served_by(link_bytes_per_s: float, *, overlapped: bool) -> float:
        store = PageStore("peer", 10_000, link_bytes_per_s, is_overlapped=overlapped)
        run = engine(blocks=8, budget=200, store=store)
        served = run.run([Arrival("a", 0.0, 40, 60), Arrival("b", 0.0, 40, 60)])
        assert store.used_tokens == 0
        assert store.paged_out_tokens == store.paged_in_tokens > 0
        return max(row.last_token_s for row in served)

    fast, slow = served_by(1e9, overlapped=True), served_by(10.0, overlapped=True)
    serial = served_by(10.0, overlapped=False)
    assert fast < slow < serial


def test_a_full_store_falls_back_to_computing_again() -> None:
    store = PageStore("tiny", 1, 1e9)
    run = engine(blocks=8, budget=200, store=store)
    served = run.run([Arrival("a", 0.0, 40, 60), Arrival("b", 0.0, 40, 60)])
    assert len(served) == 2
    assert store.paged_out_tokens == 0


def test_equal_prefixes_are_computed_once() -> None:
    run = engine(budget=64)
    arrivals = [
        Arrival("a", 0.0, 100, 1, prefix=(1, 2, 3), prefix_chunk_tokens=32),
        Arrival("b", 10.0, 100, 1, prefix=(1, 2, 9), prefix_chunk_tokens=32),
    ]
    served = run.run(arrivals)
    assert [row.ttft_s for row in served] == [2.0, 1.0]
    assert run.memory.hit_tokens == 64


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    run = engine(budget=64)
    served = run.run(
        [Arrival(name, at, 64, 1, (1, 2), 32) for name, at in (("a", 0.0), ("b", 9.0))]
    )
    assert len(served) == 2
    assert run.memory.hit_tokens == 32


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="needs 7 blocks"):
        engine(blocks=6).submit(Arrival("a", 0.0, 90, 16))


def test_an_idle_engine_has_no_next_event() -> None:
    assert engine().next_event_s == math.inf


def test_free_blocks_are_reused_oldest_first_and_remember_until_then() -> None:
    memory = PagedMemory(4, 16)
    old = Job(Arrival("old", 0.0, 40, 10))
    assert memory.grow(old, 40)
    old.computed_tokens = 40
    memory.release(old, remember=True)
    assert memory.free_count == 4
    memory.hold_cached(old)
    # Two whole blocks of three are worth keeping.
    assert old.computed_tokens == 32
    old.computed_tokens = 32
    memory.release(old, remember=True)
    other = Job(Arrival("other", 0.0, 60, 1))
    assert memory.grow(other, 60)
    memory.release(other)
    memory.hold_cached(old)
    assert old.computed_tokens == 0


def test_blocks_left_behind_a_prefix_that_others_published_are_not_lost() -> None:
    memory = PagedMemory(8, 16)
    early, other = (Job(Arrival(name, 0.0, 64, 10, (7,), 32)) for name in ("early", "other"))
    assert memory.grow(early, 16)
    early.computed_tokens = 16
    memory.release(early, remember=True)
    for job in (other, early):
        memory.hold_cached(job)
        assert memory.grow(job, 64)
        job.computed_tokens = 64
        memory.publish_prefix(job)
        assert job.shared_chunks == 1
        memory.release(job, remember=True)
    assert memory.free_count == 8
    assert memory.grow(Job(Arrival("all", 0.0, 128, 1)), 128)


def test_a_summary_names_throughput_and_latencies() -> None:
    served = engine().run([Arrival("a", 0.0, 250, 5), Arrival("b", 0.0, 10, 1)])
    result = summary(served)
    assert result["request_count"] == 2
    assert result["makespan_s"] == pytest.approx(max(row.last_token_s for row in served))
    assert result["tokens_per_s"] == pytest.approx(266 / result["makespan_s"])


LONG_AND_SHORT = (Arrival("long", 0.0, 100, 60), Arrival("short", 10.0, 100, 4))


def test_turns_serve_a_late_prompt_before_a_long_answer_ends() -> None:
    fcfs = {row.request_id: row for row in engine(blocks=11).run(LONG_AND_SHORT)}
    for policy in (PolicyName.CFS, PolicyName.FIRST_TOKEN):
        run = engine(blocks=11, policy=policy, store=PageStore("peer", 10_000, 1e9))
        fair = {row.request_id: row for row in run.run(LONG_AND_SHORT)}
        assert fair["short"].ttft_s < 8.0
        assert fcfs["short"].ttft_s > 40.0
        # Each of the few steps that the short one takes is lost to the long one, no more.
        assert fair["long"].last_token_s <= fcfs["long"].last_token_s + 6.0
        assert run.store is not None
        assert run.store.paged_out_tokens > 0


def test_turns_end_where_contexts_would_go_to_host_memory() -> None:
    waits = {}
    for location in (PagingTier.HOST, PagingTier.PEER):
        store = PageStore("s", 10_000, 1e9, location=location)
        run = engine(blocks=11, policy=PolicyName.CFS, store=store, fcfs_on_host=True)
        waits[location] = {row.request_id: row.ttft_s for row in run.run(LONG_AND_SHORT)}["short"]
    assert waits[PagingTier.PEER] < 8.0
    assert waits[PagingTier.HOST] > 40.0


def test_under_turns_a_resumed_decode_runs_before_a_prompt_that_is_still_computed() -> None:
    seen: list[ScheduledBatch] = []

    def attention(batch: ScheduledBatch) -> float:
        seen.append(batch)
        return 0.0

    time_of = IterationTime("spy", lambda _tokens: 1.0, attention, lambda _count: 0.0)
    run = engine(blocks=30, budget=10, policy=PolicyName.CFS, time_of=time_of)
    run.run([Arrival("a", 0.0, 10, 30), Arrival("b", 3.0, 200, 1), Arrival("c", 4.0, 200, 1)])
    # Once a decodes, it decodes in every step that it is in memory: prompts get the other nine.
    computing = [batch for batch in seen if batch.chunks and batch.decoding_count]
    assert computing
    assert all(batch.tokens <= 10 for batch in seen)
    assert {batch.chunks[0].tokens for batch in computing} <= {9, 8, 7, 6, 5, 4, 3, 2, 1}


def test_a_request_id_is_used_once() -> None:
    with pytest.raises(ConfigError, match="'a' twice"):
        engine().run([Arrival("a", 0.0, 10, 1), Arrival("a", 1.0, 10, 1)])
