"""Plans made from servers: GPU indices, matches in words, and the numbers that are told.

Solvers decide servers; what comes after is made here, once for all of them. No plan claims a bound
that its own value contradicts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from aqua_placer.bounds.layer_cake import layer_bound_gb
from aqua_placer.budget import relative_gap
from aqua_placer.problem.instance import GRAIN_GB, Instance, Placement
from aqua_placer.problem.request import Request
from aqua_placer.value.balance import BalanceMode, level_gb, worst
from aqua_placer.value.coverage import demand_gb
from aqua_placer.value.matches import (
    ConsumerGroup,
    ProducerShard,
    ServedGroup,
    ServerMatch,
    match_servers,
)
from aqua_protocol.plan import Assignment, Match, MatchingMode, Move, Objective, Plan, Unmatched

CHOICE = {
    MatchingMode.STABLE: "largest need with most spare",
    MatchingMode.EXACT: "part of the matching that covers most",
    MatchingMode.BEST_FIT: "smallest producer that suffices",
    MatchingMode.LINKS: "best of spare times link bandwidth",
}
"""Why a match is as it is, in one line; the long answers are in `explanation`."""


@dataclass(frozen=True, eq=False)
class SolveResult:
    """A placement and the bounds proven on the way; those that say nothing by default."""

    placement: Placement
    balance_bound: float = 0.0
    signed_bound: float = np.inf
    coverage_bound_gb: float = np.inf

    @classmethod
    def of(cls, objective: Objective, placement: Placement, bound: float) -> SolveResult:
        """The placement with the bound of one objective; a signed one bounds no balance."""
        if objective is Objective.COVERAGE:
            return cls(placement, coverage_bound_gb=bound)
        if objective is Objective.SIGNED:
            return cls(placement, signed_bound=bound)
        return cls(placement, max(bound, 0.0))


def assign_gpus(instance: Instance, placement: Placement) -> list[list[int]]:
    """GPU indices of every group's shards, dealt out in the order of groups."""
    free = [0] * instance.servers.count
    gpus: list[list[int]] = []
    for server, shards in zip(placement.tolist(), instance.tp.tolist(), strict=True):
        gpus.append(list(range(free[server], free[server] + shards)))
        free[server] += shards
    return gpus


def plan_of(
    instance: Instance,
    request: Request,
    found: SolveResult,
    slots: Int64[np.ndarray, "servers width"],
    gpus: Sequence[list[int]],
    started: tuple[float, float],
    *,
    moves: Sequence[Move] = (),
    migrations: int = 0,
) -> Plan:
    """The plan in words and numbers, its servers matched.

    Args:
        slots: Groups per server, -1 for none.
        gpus: GPU indices of each group's shards.
        started: What the wall clock and the CPU clock said when solving began.
    """
    matches = match_servers(instance, slots, gpus, request.matching)
    spent_s = time.perf_counter() - started[0], time.process_time() - started[1]
    covered = sum(match.covered_gb for match in matches)
    bound_gb = max(min(found.coverage_bound_gb, layer_bound_gb(instance)), covered)
    cnt, mem, level, signed = 0, 0.0, 0.0, 0.0
    if instance.num_groups:
        cnt, mem = worst(instance, found.placement, BalanceMode.ABS)
        level = level_gb(instance, found.placement, BalanceMode.ABS)
        signed = level_gb(instance, found.placement, BalanceMode.SIGNED)
    value, bound = {
        Objective.COVERAGE: (covered, bound_gb),
        Objective.ABS: (level, min(found.balance_bound, level)),
        Objective.SIGNED: (signed, min(found.signed_bound, signed)),
    }[request.objective]
    gap, names = relative_gap(value, bound), list(map(instance.servers.name, range(len(slots))))
    plan = Plan(
        problem=instance.name,
        problem_hash=instance.digest,
        objective=request.objective,
        value=value,
        bound=bound,
        gap=gap,
        proven=abs(value - bound) <= max(2 * GRAIN_GB, 1e-7 * abs(value)),
        coverage_gb=covered,
        coverage_bound_gb=bound_gb,
        demand_gb=demand_gb(instance),
        max_abs_mem_gb=mem,
        max_abs_cnt=cnt,
        balance=level,
        balance_bound=min(found.balance_bound, level),
        hbm_gb=instance.hbm_gb,
        matching=request.matching,
        solver=request.label,
        seed=request.seed,
        solve_seconds=spent_s[0],
        cpu_seconds=spent_s[1],
        assignments=[
            Assignment(group=name, server=names[server], server_index=server, gpus=own)
            for name, server, own in zip(
                instance.names, found.placement.tolist(), gpus, strict=True
            )
        ],
        matches=[
            Match(
                consumer=instance.names[served.consumer.group],
                consumer_shard=shard,
                producer=instance.names[producer.group],
                producer_shard=producer.shard,
                server=names[match.server],
                covered_gb=served.covered_gb,
                reason=_match_reason(served, producer, request.matching),
            )
            for match in matches
            for served in match.served_groups
            for shard, producer in enumerate(served.producers)
        ],
        unmatched=[
            Unmatched(
                group=instance.names[consumer.group],
                server=names[match.server],
                need_gb=consumer.gb,
                reason=_unmatched_reason(match, consumer),
            )
            for match in matches
            for consumer in match.unserved
        ],
        migrations=migrations,
        moves=list(moves),
    )
    return plan.model_copy(update={"plan_hash": plan.compute_hash()})


def _match_reason(served: ServedGroup, producer: ProducerShard, mode: MatchingMode) -> str:
    """One line for one producer of a consumer group."""
    need, covered = served.consumer.gb, served.covered_gb
    why = CHOICE[mode]
    if served.consumer.shards > 1:
        why = f"one of {served.consumer.shards} producers in lockstep"
    told = f"{why}: lends {covered:g} of the {need:g} GB needed, has {producer.gb:g} GB"
    if covered < min(producer.gb, need) - GRAIN_GB:
        return f"{told}; the weakest of the {served.consumer.shards} has {covered:g} GB"
    return told


def _unmatched_reason(match: ServerMatch, consumer: ConsumerGroup) -> str:
    """One line for a consumer group without producers."""
    producers = sum(len(served.producers) for served in match.served_groups) + len(match.idle)
    if not producers:
        return "no producer on this server"
    if len(match.idle) < consumer.shards <= producers:
        if match.idle:
            return (
                f"needs {consumer.shards} producers at once, {len(match.idle)} are left beside "
                "consumers that cover more"
            )
        return f"all {producers} producer shards here serve consumers that cover more"
    return f"needs {consumer.shards} producers at once, this server has {producers}"
