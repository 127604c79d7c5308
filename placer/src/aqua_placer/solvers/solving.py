"""The one interface to all solvers: an instance and a request in, a plan out.

Promises that the plan is complete (every group has GPUs), that its bound holds for every
placement, and that an interrupt or the time limit still gives both. Solvers decide servers; GPU
indices, matches and words are made here, once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from aqua_placer.budget import Budget, relative_gap
from aqua_placer.coverage.covering import demand_gb, layer_bound_gb
from aqua_placer.coverage.matching import ServerMatch, match_servers
from aqua_placer.plans.wording import match_reason, unmatched_reason
from aqua_placer.problem.columns import Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.programs.milp import Backend, solve_milp
from aqua_placer.programs.thresholds import Mode
from aqua_placer.search.dealing import worst
from aqua_placer.search.exchange import Aim, Effort, Layout, balance
from aqua_placer.search.packing import pack
from aqua_placer.search.pursuit import judge_for, pursue
from aqua_placer.solvers.constrained import constrained_groups, repair
from aqua_placer.solvers.lexicographic import solve_coverage
from aqua_placer.solvers.portfolio import solve_minmax
from aqua_protocol.plan import (
    Assignment,
    Match,
    MatchingMode,
    Move,
    Objective,
    Plan,
    Unmatched,
)


class Solver(StrEnum):
    """How a placement is found."""

    AUTO = "auto"
    MILP = "milp"


@dataclass(frozen=True)
class Request:
    """What to solve for.

    Attributes:
        backend: Who takes the program when `solver` is `milp`.
    """

    objective: Objective = Objective.COVERAGE
    solver: Solver = Solver.AUTO
    backend: Backend = Backend.HIGHS
    matching: MatchingMode = MatchingMode.STABLE
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Found:
    """A placement and the bounds proven on the way; None where the solver has none."""

    placement: Ints
    balance_bound: float
    signed_bound: float | None = None
    coverage_bound_gb: float | None = None


def place(instance: Instance, request: Request, budget: Budget) -> Plan:
    """Solve and match.

    Raises:
        ProblemInfeasibleError: No placement satisfies the problem.
        SolverUnavailableError: The selected solver cannot take it.
    """
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    if not instance.num_groups:
        found = Found(np.zeros(0, dtype=np.int64), 0.0, 0.0, 0.0)
    elif request.solver is Solver.MILP:
        found = _by_milp(instance, request, budget)
    elif instance.is_constrained:
        found = _constrained(instance, request, budget)
    else:
        found = _by_portfolio(instance, request, budget)
    gpus = assign_gpus(instance, found.placement)
    matches = match_servers(instance, slots_of(instance, found.placement), gpus, request.matching)
    spent = (time.perf_counter() - started_s, time.process_time() - cpu_started_s)
    return plan_of(instance, request, found, gpus, matches, spent)


def _by_portfolio(instance: Instance, request: Request, budget: Budget) -> Found:
    if request.objective is Objective.COVERAGE:
        harvest = solve_coverage(instance, budget, request.seed)
        return Found(harvest.placement, harvest.balance.bound, coverage_bound_gb=harvest.bound_gb)
    mode = Mode(request.objective.value)
    best = solve_minmax(instance, mode, budget, request.seed)
    assert best.placement is not None, "the portfolio always places everything"
    if mode is Mode.SIGNED:
        # The balance of a plan is told in absolute values whatever it was solved for.
        return Found(best.placement, 0.0, signed_bound=best.bound)
    return Found(best.placement, best.bound)


def _by_milp(instance: Instance, request: Request, budget: Budget) -> Found:
    result = solve_milp(instance, request.objective, request.backend, budget, request.seed)
    placement = result.placement
    if placement is None:
        # Out of time before the first solution: any placement, with the bound as far as proven.
        placement = pack(instance, budget)
        if instance.is_constrained:
            placement = repair(instance, placement, budget, request.seed)
    elif not instance.is_constrained:
        placement = in_order(instance, placement)
    if request.objective is Objective.COVERAGE:
        bound = min(result.bound, layer_bound_gb(instance))
        return Found(placement, 0.0, coverage_bound_gb=bound)
    if request.objective is Objective.SIGNED:
        return Found(placement, 0.0, signed_bound=result.bound)
    return Found(placement, max(result.bound, 0.0))


def _constrained(instance: Instance, request: Request, budget: Budget) -> Found:
    """The relaxation's bounds; its placement repaired, then exchanges around what is fixed."""
    relaxed = _by_portfolio(instance, request, budget)
    placement = repair(instance, relaxed.placement, budget, request.seed)
    mode = Mode.SIGNED if request.objective is Objective.SIGNED else Mode.ABS
    cnt, mem = worst(instance, relaxed.placement, mode)
    aim = Aim(cnt, mem, mode, instance.hbm_gb)
    rng = np.random.default_rng(request.seed)
    layout = Layout(instance, placement, constrained_groups(instance))
    balance(layout, aim, rng, budget, Effort(100, 1))
    balance(layout, aim, rng, budget, Effort(100, 2, tolerance=2.0))
    if request.objective is Objective.COVERAGE:
        target = relaxed.coverage_bound_gb or np.inf
        judge = judge_for(layout, aim)
        pursue(layout, judge, rng, budget, Effort(60, 1, tolerance=2.0), target_gb=target)
        pursue(layout, judge, rng, budget, Effort(60, 2, tolerance=2.0), target_gb=target)
    return Found(
        layout.placement(), relaxed.balance_bound, relaxed.signed_bound, relaxed.coverage_bound_gb
    )


def in_order(instance: Instance, placement: Ints) -> Ints:
    """The same placement with the servers of a class renamed in the order of their first groups.

    Some solvers (CBC) answer the same question now with one and now with another of the
    placements that differ in server names alone.
    """
    servers, first = np.unique(placement, return_index=True)
    renamed = np.arange(instance.servers.count)
    class_of = instance.servers.class_of
    for kind in range(len(instance.servers.counts)):
        held = servers[class_of[servers] == kind]
        by_first = held[np.argsort(first[np.isin(servers, held)], kind="stable")]
        renamed[by_first] = np.nonzero(class_of == kind)[0][: len(held)]
    result: Ints = renamed[placement]
    return result


def slots_of(instance: Instance, placement: Ints) -> Ints:
    """Groups per server, -1 for none, (num_servers, width)."""
    return Layout(instance, placement).slots


def assign_gpus(
    instance: Instance, placement: Ints, kept: dict[int, list[int]] | None = None
) -> list[list[int]]:
    """GPU indices of every group's shards; groups in `kept` stay on theirs."""
    kept = kept or {}
    taken: dict[int, set[int]] = {}
    for group, own in kept.items():
        taken.setdefault(int(placement[group]), set()).update(own)
    following = [0] * instance.servers.count
    gpus: list[list[int]] = []
    for group, (server, shards) in enumerate(
        zip(placement.tolist(), instance.tp.tolist(), strict=True)
    ):
        if group in kept:
            gpus.append(kept[group])
            continue
        busy = taken.get(server, ())
        dealt: list[int] = []
        at = following[server]
        while len(dealt) < shards:
            if at not in busy:
                dealt.append(at)
            at += 1
        following[server] = at
        gpus.append(dealt)
    return gpus


def plan_of(
    instance: Instance,
    request: Request,
    found: Found,
    gpus: Sequence[list[int]],
    matches: Sequence[ServerMatch],
    spent: tuple[float, float],
    *,
    moves: Sequence[Move] = (),
    migrations: int = 0,
) -> Plan:
    """The plan in words and numbers; `spent` is (wall, CPU) seconds of solving."""
    covered = sum(match.covered_gb for match in matches)
    bound_gb = (
        (layer_bound_gb(instance) if found.coverage_bound_gb is None else found.coverage_bound_gb)
        if instance.num_groups
        else 0.0
    )
    bound_gb = max(bound_gb, covered)
    cnt, mem, signed = 0, 0.0, 0.0
    if instance.num_groups:
        cnt, mem = worst(instance, found.placement, Mode.ABS)
        top_cnt, top_mem = worst(instance, found.placement, Mode.SIGNED)
        signed = instance.hbm_gb * top_cnt + top_mem
    level = instance.hbm_gb * cnt + mem
    value, bound = {
        Objective.COVERAGE: (covered, bound_gb),
        Objective.ABS: (level, min(found.balance_bound, level)),
        Objective.SIGNED: (signed, min(found.signed_bound or signed, signed))
        if found.signed_bound is not None
        else (signed, signed),
    }[request.objective]
    gap = relative_gap(value, bound)
    names = [instance.servers.name(server) for server in range(instance.servers.count)]
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
        demand_gb=demand_gb(instance) if instance.num_groups else 0.0,
        max_abs_mem_gb=mem,
        max_abs_cnt=cnt,
        balance=level,
        balance_bound=min(found.balance_bound, level),
        hbm_gb=instance.hbm_gb,
        matching=request.matching,
        solver=request.solver.value
        + (f":{request.backend.value}" if request.solver is Solver.MILP else ""),
        seed=request.seed,
        solve_seconds=spent[0],
        cpu_seconds=spent[1],
        assignments=[
            Assignment(group=name, server=names[server], server_index=server, gpus=own)
            for name, server, own in zip(
                instance.names, found.placement.tolist(), gpus, strict=True
            )
        ],
        matches=[
            Match(
                consumer=instance.names[service.borrower.group],
                consumer_shard=shard,
                producer=instance.names[lender.group],
                producer_shard=lender.shard,
                server=names[match.server],
                covered_gb=service.covered_gb,
                reason=match_reason(service, lender, request.matching),
            )
            for match in matches
            for service in match.services
            for shard, lender in enumerate(service.lenders)
        ],
        unmatched=[
            Unmatched(
                group=instance.names[borrower.group],
                server=names[match.server],
                need_gb=borrower.gb,
                reason=unmatched_reason(match, borrower),
            )
            for match in matches
            for borrower in match.unserved
        ],
        migrations=migrations,
        moves=list(moves),
    )
    return plan.model_copy(update={"plan_hash": plan.compute_hash()})
