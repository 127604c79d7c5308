"""Tenants on random workloads: how far apart two of them come, and what idling is worth.

The bound is that of Sheng et al. for tenants that wait all along: twice the greater of the dearest
prompt and a memory full of output, over the smaller weight; here with the lead that a running
request is allowed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqua_schedulers.cfs import FairSettings, PolicyName, TenantSettings, policy_named
from harness.paged_engine import PagedEngine, Request
from harness.slices import examples

BLOCK_TOKENS: Final = 4
INPUT_COST: Final = 1.0
OUTPUT_COST: Final = 2.0
POLICIES: Final = st.sampled_from(list(PolicyName))
SLICED: Final = settings(max_examples=examples(40, whole=100))
SHARES: Final = st.sampled_from([0.5, 1.0, 1.0, 3.0])


@st.composite
def backlogs(draw: st.DrawFn) -> tuple[list[Request], int]:
    """Two or three tenants with work of their own kinds, all of it there from the start."""
    requests: list[Request] = []
    for tenant in "abc"[: draw(st.integers(2, 3))]:
        prompt, output = draw(st.integers(1, 60)), draw(st.integers(1, 30))
        spread = draw(st.integers(1, 20))
        requests += [
            Request(
                f"{tenant}{index}",
                arrival=0,
                prompt_tokens=prompt + index * 7 % spread,
                output_tokens=output + index * 5 % spread,
                tenant=tenant,
            )
            for index in range(draw(st.integers(10, 30)))
        ]
    order = draw(st.permutations(requests))
    largest = max(each.prompt_tokens + each.output_tokens for each in requests)
    return list(order), -(-largest // BLOCK_TOKENS) + draw(st.integers(0, 30))


class MeteredEngine(PagedEngine):
    """Counts what each tenant is served."""

    def begin(self) -> None:
        """Let all requests that are there at the start arrive."""
        self.served: defaultdict[str, float] = defaultdict(float)
        self.begun: set[str] = set()
        for request in sorted(self.requests, key=lambda each: each.arrival):
            self.arrive(request)

    def arrive(self, request: Request) -> None:
        """A request comes to wait."""
        self.outside[request.name] = request
        self.policy.added(self.view(request))

    def turn(self) -> None:
        """One step, and what it served."""
        before = {each.name: each.emitted for each in self.requests}
        self.advance()
        self.step += 1
        for each in self.requests:
            self.served[each.tenant] += OUTPUT_COST * (each.emitted - before[each.name])
            has_begun = each.name in self.inside or each.emitted > 0
            if has_begun and each.name not in self.begun:
                self.begun.add(each.name)
                self.served[each.tenant] += INPUT_COST * each.prompt_tokens

    def waiting(self) -> set[str]:
        """Tenants that wait."""
        return {each.tenant for each in self.outside.values()}


def engine(
    name: PolicyName, requests: list[Request], blocks: int, tenants: TenantSettings | None
) -> MeteredEngine:
    fair = FairSettings(slice_iterations=3, stint_tokens=4, patience_turns=1000, tenants=tenants)
    fresh = [replace(request, served_steps=[]) for request in requests]
    made = MeteredEngine(
        policy_named(name, fair, block_tokens=BLOCK_TOKENS),
        fresh,
        blocks,
        max_running=100,
    )
    made.begin()
    return made


def bound(run: MeteredEngine, tenants: TenantSettings) -> float:
    dearest = INPUT_COST * max(each.prompt_tokens for each in run.requests)
    memory = OUTPUT_COST * run.block_count * BLOCK_TOKENS
    weights = [tenants.weight_of(each.tenant) for each in run.requests]
    return (2 * max(dearest, memory) + tenants.lead_tokens) / min(weights)


@SLICED
@given(POLICIES, backlogs(), st.lists(SHARES, min_size=3, max_size=3), st.sampled_from([0, 100]))
def test_tenants_that_wait_all_along_are_served_by_their_weights(
    name: PolicyName, backlog: tuple[list[Request], int], shares: list[float], lead: int
) -> None:
    weights = dict(zip("abc", shares, strict=True))
    tenants = TenantSettings(weights=weights, lead_tokens=lead)
    run = engine(name, *backlog, tenants)
    most = bound(run, tenants)
    history = []
    while len(run.waiting()) > 1:
        waiting = run.waiting()
        run.turn()
        both = waiting & run.waiting()
        history.append(({name: run.served[name] / weights[name] for name in weights}, both))
        # Over every stretch in which two of them waited, from the first step on.
        first = history[0][0]
        for one in both:
            for other in both - {one}:
                gap = (history[-1][0][one] - first[one]) - (history[-1][0][other] - first[other])
                assert abs(gap) <= most, (name, one, other, gap, most)
        assert run.step < 20_000, "somebody is never served"


@pytest.mark.parametrize("name", list(PolicyName))
def test_without_accounts_a_flood_gets_more_than_the_bound_allows(name: PolicyName) -> None:
    """The negative control of the bound."""
    flood = [Request(f"a{index}", 0, 40, 20, tenant="a") for index in range(200)]
    other = [Request(f"b{index}", 0, 40, 20, tenant="b") for index in range(20)]
    tenants = TenantSettings(lead_tokens=100)
    gaps = []
    for shared in (None, tenants):
        run = engine(name, flood + other, 20, shared)
        while len(run.waiting()) > 1:
            run.turn()
            if len(run.waiting()) > 1:
                gap = abs(run.served["a"] - run.served["b"])
        gaps.append(gap / bound(run, tenants))
    assert gaps[1] <= 1 < gaps[0], gaps


@SLICED
@given(POLICIES, backlogs())
def test_with_one_tenant_decisions_are_those_without_any(
    name: PolicyName, backlog: tuple[list[Request], int]
) -> None:
    requests = [
        replace(each, tenant="a", arrival=index // 2) for index, each in enumerate(backlog[0])
    ]
    runs = [
        PagedEngine(
            policy_named(
                name,
                FairSettings(slice_iterations=3, patience_turns=6, tenants=tenants),
                block_tokens=BLOCK_TOKENS,
            ),
            [replace(each, served_steps=[]) for each in requests],
            backlog[1],
        )
        for tenants in (None, TenantSettings())
    ]
    for run in runs:
        run.run()
    assert runs[0].log == runs[1].log


@SLICED
@given(POLICIES, backlogs(), st.integers(1, 60))
def test_idle_tenants_save_nothing_up_and_owe_nothing(
    name: PolicyName, backlog: tuple[list[Request], int], idle_steps: int
) -> None:
    """One comes after the others have been served for long: from then on it has its share."""
    requests, blocks = backlog
    late = [each for each in requests if each.tenant == "a"]
    tenants = TenantSettings(lead_tokens=0)
    run = engine(name, [each for each in requests if each.tenant != "a"], blocks, tenants)
    for _ in range(idle_steps):
        run.turn()
    for each in late:
        fresh = replace(each, served_steps=[])
        run.requests.append(fresh)
        run.arrive(fresh)
    start = dict(run.served)
    most = bound(run, tenants)
    while {"a", "b"} <= run.waiting():
        run.turn()
        gained = {tenant: run.served[tenant] - start.get(tenant, 0.0) for tenant in "ab"}
        assert abs(gained["a"] - gained["b"]) <= most, gained


@SLICED
@given(POLICIES, backlogs())
def test_every_request_of_every_tenant_is_served_to_its_end(
    name: PolicyName, backlog: tuple[list[Request], int]
) -> None:
    run = engine(name, *backlog, TenantSettings(weights={"a": 100.0}, lead_tokens=50))
    while run.outside or run.inside:
        run.turn()
        assert run.step < 50_000, "somebody is never served"
    assert all(each.emitted == each.output_tokens for each in run.requests)
