"""A day of online requests on all engines, by events: the same question as `online.serve_day`'s.

There every engine plans every step in Python, which takes as long as the day has steps. Here the
kernels of `aqua_simulator.fleet` do nothing while nothing happens, so that a day of a thousand GPUs
takes minutes. Members, matches and step times are those of `online`; what may differ is said in
`fleet.steps` and `fleet.state`, and by how much is measured in `benchmarks/simulator_scale.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Final, cast

import numpy as np
from jaxtyping import Float64, Int64

from aqua_schedulers.compiled import record, records
from aqua_simulator.fleet.clock import DONE, NO_SLOTS, drive
from aqua_simulator.fleet.state import NONE, ClockRecord, EngineRecord, FleetState, SlotRecord
from aqua_simulator.serving.request import summary_of
from aqua_simulator.timing.iteration import Chunk, ScheduledBatch
from aqua_simulator.whatif.cluster import Cluster
from aqua_simulator.whatif.links import SharedLinks
from aqua_simulator.whatif.members import (
    Assumptions,
    Member,
    ServingTerms,
    lenders_of,
    links_of,
    members_of,
)
from aqua_simulator.whatif.online import LendingTotals, OnlineResult, beside_steps
from aqua_simulator.whatif.recorded_day import ModelLoad
from aqua_simulator.whatif.step_times import FITTED_EVERY, StepCoefficients

FIRST_SLOTS: Final = 4096
"""Requests inside at once, to begin with. Doubled, small fleets take more memory."""

RETURNS: Final = 64
"""Reclaims on their way back to a lender at once; what is more joins the last. Doubled, more memory
for long reclaims."""

STRETCH_S: Final = 600.0
"""Simulated seconds between two reports of progress. Doubled, the bar moves half as often."""


@dataclass(frozen=True, eq=False)
class Requests:
    """The requests of all models in order of arrival, and where each model's are.

    Attributes:
        number: Place of each request among those of its model.
    """

    arrival_s: Float64[np.ndarray, " requests"]
    prompt_tokens: Int64[np.ndarray, " requests"]
    output_tokens: Int64[np.ndarray, " requests"]
    model: Int64[np.ndarray, " requests"]
    number: Int64[np.ndarray, " requests"]


def merged(models: Sequence[str], loads: Mapping[str, ModelLoad], assumed: Assumptions) -> Requests:
    """The requests of all models, with so much of the load (by time) and of the outputs."""
    known = [loads[name] for name in models if name in loads]
    empty = np.empty(0)
    arrival_s = np.concatenate([empty, *(each.arrival_s for each in known)]) / assumed.load
    order = np.argsort(arrival_s, kind="stable")
    outputs = np.concatenate([empty, *(each.output_tokens for each in known)])
    prompts = np.concatenate([empty, *(each.prompt_tokens for each in known)])
    owners = [index for index, name in enumerate(models) if name in loads]
    model = np.repeat(owners, [len(each) for each in known]).astype(np.int32)
    number = np.concatenate([empty, *(np.arange(len(each)) for each in known)])
    return Requests(
        arrival_s[order],
        prompts.astype(np.int32)[order],
        np.maximum(1, np.rint(outputs * assumed.outputs)).astype(np.int32)[order],
        model[order],
        number.astype(np.int64)[order],
    )


def serve_fleet(
    cluster: Cluster,
    times: Mapping[str, StepCoefficients],
    loads: Mapping[str, ModelLoad],
    span_s: float,
    terms: ServingTerms,
    *,
    on_progress: Callable[[float], None] = lambda _: None,
) -> OnlineResult:
    """Serve the requests of all models.

    Args:
        on_progress: Told the share of the day that is over.
    """
    span_s /= terms.assumed.load
    members = members_of(cluster, times, terms)
    models = list(members)
    requests = merged(models, loads, terms.assumed)
    links = links_of(cluster, members, terms.assumed)
    fleet = _driven(_fleet(members, times, requests, span_s, terms, links), span_s, on_progress)
    by_model: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(models):
        mine = fleet.is_served & (fleet.model == index)
        engines = [each for each in _plain(fleet.engines) if each["model"] == index]
        if not mine.any():
            by_model[name] = {"request_count": 0, "busy_s": 0.0}
            continue
        others = mine & (requests.number % FITTED_EVERY != 0)
        least = min(each["least_free_blocks"] / each["block_count"] for each in engines)
        found = _summary(fleet, mine)
        found["preemption_count"] = sum(each["preemption_count"] for each in engines)
        by_model[name] = beside_steps(
            found, _summary(fleet, others) if others.any() else {}, times[name].front_s
        ) | {"busy_s": sum(each["busy_s"] for each in engines), "peak_kv_share": 1.0 - least}
    clock = fleet.clock[0]
    used = links.use(float(clock.looked_s))
    lending = LendingTotals(
        float(clock.offered_gb_s),
        float(clock.used_gb_s),
        int(clock.reclaim_count),
        float(clock.reclaim_s),
    )
    unserved = {
        name: int(count) for name, count in zip(models, fleet.unserved_count, strict=True) if count
    }
    return OnlineResult(by_model, lending, unserved, lenders_of(members), used)


def recording_of(
    cluster: Cluster,
    times: Mapping[str, StepCoefficients],
    loads: Mapping[str, ModelLoad],
    span_s: float,
) -> dict[str, ModelLoad]:
    """The same requests with the latencies that simulated engines without Aqua would have shown."""
    terms = ServingTerms()
    members = members_of(cluster, times, terms)
    models = list(members)
    requests = merged(models, loads, terms.assumed)
    links = links_of(cluster, members, terms.assumed)
    fleet = _driven(_fleet(members, times, requests, span_s, terms, links), span_s, lambda _: None)
    made = {}
    for name, load in loads.items():
        mine = np.flatnonzero((fleet.model == models.index(name)) & fleet.is_served)
        number = requests.number[mine]
        first_s, last_s = np.full((2, len(load)), np.nan)
        first_s[number] = load.arrival_s[number] + fleet.ttft_s[mine]
        answering_s = np.nan_to_num(fleet.tpot_s[mine]) * (load.output_tokens[number] - 1)
        last_s[number] = first_s[number] + answering_s
        front_s = times[name].front_s
        made[name] = replace(load, first_s=first_s + front_s, last_s=last_s + front_s)
    return made


def _driven(fleet: FleetState, span_s: float, on_progress: Callable[[float], None]) -> FleetState:
    """The fleet after the day and all of its requests."""
    until_s = STRETCH_S
    while (state := drive(fleet, until_s)) != DONE:
        if state == NO_SLOTS:
            fleet = _with_more_slots(fleet)
            continue
        on_progress(min(1.0, until_s / span_s))
        until_s = until_s + STRETCH_S if until_s < 2.0 * span_s else inf
    return fleet


def _summary(fleet: FleetState, chosen: np.ndarray) -> dict[str, Any]:
    arrival_s, ttft_s = fleet.arrival_s[chosen], fleet.ttft_s[chosen].astype(np.float64)
    tpot_s, output = fleet.tpot_s[chosen].astype(np.float64), fleet.output_tokens[chosen]
    last_s = arrival_s + ttft_s + np.nan_to_num(tpot_s) * (output - 1)
    return summary_of(
        arrival_s,
        last_s,
        ttft_s,
        tpot_s,
        prompt_tokens=int(fleet.prompt_tokens[chosen].sum()),
        output_tokens=int(output.sum()),
    )


def _plain(engines: Sequence[EngineRecord]) -> list[dict[str, Any]]:
    table = cast("Any", engines)
    return [dict(zip(table.dtype.names, row.item(), strict=True)) for row in table]


def _with_more_slots(fleet: FleetState) -> FleetState:
    """Twice as many slots; those there stay where they are."""
    old = cast("Any", fleet.slots)
    new = cast("Any", records(SlotRecord, 2 * len(old)))
    new[: len(old)] = old
    _chain(new, len(old), fleet.clock[0].first_vacant)
    fleet.clock[0].first_vacant = len(old)
    return fleet._replace(slots=new)


def _chain(slots: Any, start: int, then: int) -> None:  # noqa: ANN401 - a structured array
    """Make a list of the vacant slots from `start` on, and `then` what follows."""
    slots["after"][start:] = np.arange(start + 1, len(slots) + 1)
    slots["after"][-1] = then


def _fleet(
    members: Mapping[str, Sequence[Member]],
    times: Mapping[str, StepCoefficients],
    requests: Requests,
    span_s: float,
    terms: ServingTerms,
    links: SharedLinks,
) -> FleetState:
    """All engines before their first request, with who lends to whom."""
    everyone = [each for mine in members.values() for each in mine]
    engines = cast("Any", records(EngineRecord, len(everyone)))
    for index, member in enumerate(everyone):
        model = list(members).index(member.model)
        known = times[member.model]
        law = replace(known, speed=known.speed * terms.assumed.speed).law(member.shape)
        fields = {**_engine_fields(member), **asdict(law), "model": model, "is_fair": terms.is_fair}
        for name, value in fields.items():
            engines[index][name] = value
    widest = int(engines["max_running"].max())
    router = [
        each.place
        for mine in members.values()
        for each in sorted(mine, key=lambda one: one.engine.name)
    ]
    slots = cast("Any", records(SlotRecord, FIRST_SLOTS))
    _chain(slots, 0, NONE)
    count, asked = len(everyone), len(requests.arrival_s)
    clock = record(
        ClockRecord(
            span_s, terms.assumed.reserve_share, int(links.is_on), 0.0, 0, 0, 0, 0.0, 0.0, 0, 0.0
        )
    )
    return FleetState(
        clock=clock,
        engines=engines,
        slots=slots,
        ports=links.ports,
        loans=links.loans,
        running=np.zeros((count, widest + 1), np.int32),
        listed=np.zeros((count, widest + 1), np.int32),
        returning_s=np.zeros((count, RETURNS)),
        returning_blocks=np.zeros((count, RETURNS), np.int64),
        event_s=np.full(count, inf),
        heap=np.arange(count, dtype=np.int64),
        place=np.arange(count, dtype=np.int32),
        request_count=np.zeros(count, np.int32),
        tokens_of=np.zeros(widest + 1, np.int32),
        router=np.array(router, np.int64),
        router_start=np.cumsum([0, *(len(mine) for mine in members.values())]),
        arrival_s=requests.arrival_s,
        prompt_tokens=requests.prompt_tokens,
        output_tokens=requests.output_tokens,
        model=requests.model,
        ttft_s=np.full(asked, np.nan, np.float32),
        tpot_s=np.full(asked, np.nan, np.float32),
        is_served=np.zeros(asked, np.bool_),
        unserved_count=np.zeros(len(members), np.int64),
    )


def _engine_fields(member: Member) -> dict[str, float]:
    """A member's engine in numbers, before its first request."""
    engine, settings = member.engine, member.engine.settings
    blocks, tokens = engine.memory.block_count, settings.max_num_batched_tokens
    spent_s = engine.time_of(ScheduledBatch((Chunk(tokens, 0),), 0, 0, 1))
    none = ("first_prompt", "last_prompt", "first_decode", "last_decode", "first_left")
    store = engine.store
    return {
        **dict.fromkeys((*none, "last_left"), NONE),
        "max_tokens": tokens,
        "max_running": settings.max_num_seqs,
        "block_count": blocks,
        "given_blocks": blocks,
        "least_free_blocks": blocks,
        "kv_bytes": settings.kv_bytes_per_token,
        "prefill_tokens_per_s": tokens / spent_s,
        "has_store": store is not None,
        "store_tokens": 0 if store is None else store.capacity_tokens,
        "store_bytes_per_s": 1.0 if store is None else store.link_bytes_per_s,
        "is_producer": member.is_producer,
        "slowdown": 1.0,
        "peer_share": member.peer_share,
        "lost_peer_s": member.lost_s_per_byte[0],
        "lost_host_s": member.lost_s_per_byte[1],
        "store_lost_s": 0.0 if store is None else store.lost_s_per_byte,
        "has_peers": member.is_consumer,
        "static_bytes": member.static_bytes,
        "rate_peer": member.rates[0],
        "rate_host": member.rates[1],
        "host_tokens": member.host_tokens,
    }
