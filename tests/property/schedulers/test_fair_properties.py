"""Fair policies on random workloads: nobody starves, nothing is wasted, nothing overflows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aqua_schedulers.cfs import FairSettings, PagingRates, PagingTier, PolicyName, policy_named
from harness.paged_engine import PagedEngine, Request

PATIENCE = 6
SLICE = 3


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Request], int]:
    """Up to 25 requests and a memory that holds the largest of them."""
    sizes = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30), st.integers(1, 80), st.integers(1, 40), st.sampled_from([1, 4])
            ),
            min_size=1,
            max_size=25,
        )
    )
    requests = [
        Request(f"r{index}", arrival, prompt, output, weight)
        for index, (arrival, prompt, output, weight) in enumerate(sizes)
    ]
    largest = max(-(-(prompt + output) // 4) for _, prompt, output, _ in sizes)
    return requests, largest + draw(st.integers(0, 30))


def engine(name: PolicyName, workload: tuple[list[Request], int], **changes: Any) -> PagedEngine:  # noqa: ANN401 - fields of a view or of settings
    requests, blocks = workload
    settings = FairSettings(slice_iterations=SLICE, stint_tokens=4, patience_turns=PATIENCE)
    fresh = [replace(request, served_steps=[]) for request in requests]
    made = PagedEngine(policy_named(name, settings, block_tokens=4), fresh, blocks)
    return replace(made, **changes)


POLICIES = st.sampled_from(list(PolicyName))
FAIR = st.sampled_from(sorted(set(PolicyName) - {PolicyName.FCFS}))


@given(POLICIES, workloads(), st.sampled_from(list(PagingTier)), st.integers(0, 40))
def test_every_request_is_served_to_its_end(
    name: PolicyName, workload: tuple[list[Request], int], location: PagingTier, store: int
) -> None:
    run = engine(name, workload, location=location, store_blocks=store)
    run.run()
    assert all(each.emitted == each.output_tokens for each in run.requests)


@given(FAIR, workloads(), st.integers(0, 60))
def test_nobody_waits_longer_than_patience_and_a_residence_of_each_other(
    name: PolicyName, workload: tuple[list[Request], int], store: int
) -> None:
    run = engine(name, workload, store_blocks=store)
    run.run()
    turn = SLICE * 8
    # An admission under recompute may compute its whole context before it may leave again.
    context = max(each.prompt_tokens + each.output_tokens for each in run.requests)
    bound = turn * (PATIENCE + 2) + len(run.requests) * (turn + -(-context // run.budget) + 2)
    if name is PolicyName.FIRST_TOKEN:
        # Where evictions are computed again it waits for those inside to finish, one by one.
        bound += sum(each.output_tokens for each in run.requests)
    for each in run.requests:
        moments = [each.arrival, *each.served_steps]
        gaps = [after - before for before, after in pairwise(moments)]
        assert max(gaps) <= bound, (each.name, max(gaps), bound)


@given(FAIR, workloads())
def test_no_token_slot_stays_empty_for_a_turn_while_everyone_outside_would_fit(
    name: PolicyName, workload: tuple[list[Request], int]
) -> None:
    run = engine(name, workload)
    run.run()
    assert run.most_idle <= SLICE * 8 + 1


@given(POLICIES, workloads())
def test_the_same_events_give_the_same_decisions(
    name: PolicyName, workload: tuple[list[Request], int]
) -> None:
    first, second = engine(name, workload), engine(name, workload)
    first.run()
    second.run()
    assert first.log == second.log


@given(workloads())
def test_without_contention_nobody_is_put_out_and_everyone_starts_at_once(
    workload: tuple[list[Request], int],
) -> None:
    requests = [replace(each, weight=1.0) for each in workload[0]]
    fcfs = engine(PolicyName.FCFS, (requests, 10_000), max_running=100)
    fcfs.run()
    for name in set(PolicyName) - {PolicyName.FCFS}:
        fair = engine(name, (requests, 10_000), max_running=100)
        fair.run()
        assert [each.outs for each in fair.requests] == [0] * len(requests)
        assert [each.last_step for each in fair.requests] == [
            each.last_step for each in fcfs.requests
        ]


@given(FAIR, workloads(), st.floats(1.0, 1e6))
def test_measured_rates_never_stop_the_work(
    name: PolicyName, workload: tuple[list[Request], int], link: float
) -> None:
    rates = PagingRates(link, block_bytes=100, prefill_tokens_per_s=500.0)
    run = engine(name, workload, rates=rates, store_blocks=20)
    run.run()
    assert all(each.emitted == each.output_tokens for each in run.requests)
